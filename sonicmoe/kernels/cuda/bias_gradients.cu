// What biases add to a backward in FP8, whose GEMMs know nothing of them: <dout, b2> of every row,
// which is a part of the gradient of its probability, and the sums of db1 and db2 over the rows of
// each expert.
//
// Rows without a token (row_token -1) are read nowhere, so what memory held there reaches no sum.
//
// Everything is added in a fixed order. A block of 128 rows is of one expert: sums are made of
// blocks first, in `parts`, and of experts then, so that one expert with most of the rows is no
// serial tail.
#include <tvm/ffi/optional.h>

#include "../host/border.hpp"
#include "quantize.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kThreads = 256;
constexpr int kWide = 4;                // columns of a thread
constexpr int kColumns = 32 * kWide;    // of a CTA that sums columns
constexpr int kSlices = kThreads / 32;  // of the rows or blocks that it sums
constexpr unsigned kFull = 0xffffffffu;

// Four neighbouring columns of tokens in bf16.
struct Values {
  const __nv_bfloat16* data;
  int width;
  __device__ __forceinline__ void load(int64_t row, int column, float (&to)[kWide]) const {
    const uint2 words = *reinterpret_cast<const uint2*>(data + row * width + column);
    to[0] = __uint_as_float(words.x << 16), to[1] = __uint_as_float(words.x & 0xffff0000u);
    to[2] = __uint_as_float(words.y << 16), to[3] = __uint_as_float(words.y & 0xffff0000u);
  }
};
// The same of e4m3 codes with one scale for `rows` (a power of two) x `columns` of them.
struct Codes {
  const uint8_t* data;
  const float* scale;
  int width, log2_rows, columns;
  __device__ __forceinline__ void load(int64_t row, int column, float (&to)[kWide]) const {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(data + row * width + column);
    const int64_t scales = (width + columns - 1) / columns;
    const float by = scale[(row >> log2_rows) * scales + column / columns];
    const float2 low = __half22float2(halves_of(word)), high = __half22float2(halves_of(word >> 16));
    to[0] = low.x * by, to[1] = low.y * by, to[2] = high.x * by, to[3] = high.y * by;
  }
};

// The expert e with offsets[e] <= row < offsets[e + 1].
__device__ __forceinline__ int expert_of(const int64_t* offsets, int experts, int64_t row) {
  int below = 0, above = experts;
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    (offsets[middle] <= row ? below : above) = middle;
  }
  return below;
}

// One warp a row.
template <typename Tokens>
__global__ void __launch_bounds__(kThreads)
    add_dots(const Tokens tokens, const float* __restrict__ bias,
             const int32_t* __restrict__ row_token, const int64_t* __restrict__ padded_offsets,
             const int experts, float* __restrict__ sums, const int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSlices + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows || row >= padded_offsets[experts] || row_token[row] < 0) return;
  const float* weights =
      bias + static_cast<int64_t>(expert_of(padded_offsets, experts, row)) * tokens.width;
  float sum = 0.f;
  for (int column = lane * kWide; column < tokens.width; column += kColumns) {
    float value[kWide];
    tokens.load(row_token[row], column, value);
#pragma unroll
    for (int i = 0; i < kWide; ++i) sum += value[i] * weights[column + i];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(kFull, sum, distance);
  if (lane == 0) sums[row] += sum;
}

// The sums that the slices of a CTA have made of its columns, added in their order.
__device__ __forceinline__ void add_slices(const float (&sum)[kWide], int first_column, int width,
                                           float* __restrict__ to) {
  __shared__ float of_slice[kSlices][kColumns];
  const int lane = threadIdx.x % 32, slice = threadIdx.x / 32, mine = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWide; ++i) of_slice[slice][lane * kWide + i] = sum[i];
  __syncthreads();
  if (mine >= kColumns || first_column + mine >= width) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kSlices; ++i) total += of_slice[i][mine];
  to[first_column + mine] = total;
}

// parts[block] = the sum over a block's rows of weight[row] * values of row_token[row], or, without
// `weight`, of the row itself. CTAs: columns fastest.
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const Rows values, const float* __restrict__ weight,
               const int32_t* __restrict__ row_token, const int column_ctas,
               float* __restrict__ parts) {
  const int64_t block = blockIdx.x / column_ctas;
  const int first = blockIdx.x % column_ctas * kColumns, column = first + threadIdx.x % 32 * kWide;
  float sum[kWide] = {};
  if (column < values.width) {
    for (int i = threadIdx.x / 32; i < kRowAlignment; i += kSlices) {
      const int64_t row = block * kRowAlignment + i;
      const int token = row_token[row];
      if (token < 0) continue;
      float value[kWide];
      values.load(weight != nullptr ? token : row, column, value);
      const float by = weight != nullptr ? weight[row] : 1.f;
#pragma unroll
      for (int c = 0; c < kWide; ++c) sum[c] += by * value[c];
    }
  }
  add_slices(sum, first, values.width, parts + block * values.width);
}

// sums[expert] = the sum of its blocks' parts; zeros where it has none.
__global__ void __launch_bounds__(kThreads)
    sum_experts(const float* __restrict__ parts, const int64_t* __restrict__ padded_offsets,
                const int width, const int column_ctas, const int64_t blocks,
                float* __restrict__ sums) {
  const int64_t expert = blockIdx.x / column_ctas;
  const int first = blockIdx.x % column_ctas * kColumns, column = first + threadIdx.x % 32 * kWide;
  // Offsets beyond the rows are not followed.
  const int64_t end = min(padded_offsets[expert + 1] / kRowAlignment, blocks);
  float sum[kWide] = {};
  if (column < width) {
    for (int64_t block = padded_offsets[expert] / kRowAlignment + threadIdx.x / 32; block < end;
         block += kSlices) {
      const float4 part = *reinterpret_cast<const float4*>(parts + block * width + column);
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
  }
  add_slices(sum, first, width, sums + expert * width);
}

// Where the rows of each expert lie, at a function's border.
struct RowsOfExperts {
  DLDevice device;
  int64_t rows, experts;
  const int32_t* row_token;
  const int64_t* padded_offsets;

  RowsOfExperts(const TensorView& row_token_, const TensorView& padded_offsets_)
      : device(row_token_.device()),
        rows(row_token_.numel()),
        experts(padded_offsets_.numel() - 1),
        row_token(checked_i32(row_token_, "row_token", device, rows)),
        padded_offsets(checked_i64(padded_offsets_, "padded_offsets", device, 1)) {
    TVM_FFI_ICHECK(rows % kRowAlignment == 0 && rows < (int64_t(1) << 31))
        << "row_token has " << rows << " rows; needed: a multiple of " << kRowAlignment;
  }
};

int checked_width(const TensorView& matrix, const char* name) {
  TVM_FFI_ICHECK(matrix.ndim() == 2 && matrix.size(1) > 0 && matrix.size(1) % 16 == 0 &&
                 matrix.size(1) < (int64_t(1) << 30))
      << name << " must be a matrix whose columns are a multiple of 16";
  return static_cast<int>(matrix.size(1));
}

// `launch` with tokens as they came: bf16 [T, H], or codes [T, H] with scale [T, ceil(H / 128)].
template <class Launch>
void with_tokens(const TensorView& tokens, const Optional<TensorView>& scale, DLDevice device,
                 Launch launch) {
  const int width = checked_width(tokens, "tokens");
  const int64_t count = tokens.size(0);
  if (!scale.has_value()) {
    const auto* data = checked<__nv_bfloat16>(tokens, "tokens", kDLBfloat, 16, device, 0);
    launch(Values{aligned_16(data, "tokens"), width});
    return;
  }
  const int64_t scales = count * ceil_div(width, kScaleBlock);
  launch(Codes{aligned_16(checked_bytes(tokens, "tokens", device, 0), "tokens"),
               checked_f32(scale.value(), "scale", device, scales), width, 0, kScaleBlock});
}

template <typename Tokens>
void launch_dots(const Tokens& tokens, const float* bias, const RowsOfExperts& r, float* sums,
                 int64_t stream) {
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  const unsigned ctas = static_cast<unsigned>(ceil_div(r.rows, kSlices));
  add_dots<Tokens><<<ctas, kThreads, 0, as_stream(stream)>>>(
      tokens, bias, r.row_token, r.padded_offsets, static_cast<int>(r.experts), sums, r.rows);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// sums fp32 [R]: sums[row] += <tokens[row_token[row]], b2[expert]> in the rows that have a token.
// tokens as in `with_tokens`, b2 fp32 [E, H].
void add_bias_dots(TensorView tokens, Optional<TensorView> scale, TensorView b2,
                   TensorView row_token, TensorView padded_offsets, TensorView sums,
                   int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  float* to = checked_f32(sums, "sums", r.device, r.rows);
  with_tokens(tokens, scale, r.device, [&](const auto& from) {
    const float* bias = checked_f32(b2, "b2", r.device, r.experts * from.width);
    if (r.rows > 0 && r.experts > 0) launch_dots(from, bias, r, to, stream);
  });
}

// Both stages of column sums.
template <typename Rows>
void sum_columns(const Rows& values, const float* weight, const RowsOfExperts& r,
                 const TensorView& parts, const TensorView& sums, int64_t stream) {
  const int64_t blocks = r.rows / kRowAlignment, width = values.width;
  float *of_blocks = aligned_16(checked_f32(parts, "parts", r.device, blocks * width), "parts"),
        *of_experts = checked_f32(sums, "sums", r.device, r.experts * width);
  if (r.experts == 0) return;
  const int column_ctas = static_cast<int>(ceil_div(width, kColumns));
  const unsigned first = static_cast<unsigned>(blocks * column_ctas),
                 then = static_cast<unsigned>(r.experts * column_ctas);
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  if (first > 0) {
    sum_blocks<Rows><<<first, kThreads, 0, as_stream(stream)>>>(values, weight, r.row_token,
                                                                column_ctas, of_blocks);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  }
  sum_experts<<<then, kThreads, 0, as_stream(stream)>>>(
      of_blocks, r.padded_offsets, static_cast<int>(width), column_ctas, blocks, of_experts);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// db2 fp32 [E, H] = sums over the rows of each expert of row_prob[row] * tokens[row_token[row]];
// tokens as in `with_tokens`, parts fp32 [R / 128, H] scratch.
void sum_tokens(TensorView tokens, Optional<TensorView> scale, TensorView row_prob,
                TensorView row_token, TensorView padded_offsets, TensorView parts, TensorView db2,
                int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  const float* weight = checked_f32(row_prob, "row_prob", r.device, r.rows);
  with_tokens(tokens, scale, r.device,
              [&](const auto& from) { sum_columns(from, weight, r, parts, db2, stream); });
}

// db1 fp32 [E, 2I] = sums over the rows of each expert of dz: e4m3 [R, 2I] with dz_scale [R / 128,
// ceil(I / 128)]; parts fp32 [R / 128, 2I] scratch.
void sum_dz(TensorView dz, TensorView dz_scale, TensorView row_token, TensorView padded_offsets,
            TensorView parts, TensorView db1, int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  const int width = checked_width(dz, "dz");
  const int64_t scales = r.rows / kRowAlignment * ceil_div(width, kGateUpBlock);
  constexpr int kLog2 = 7;
  static_assert(1 << kLog2 == kRowAlignment);
  const Codes codes{aligned_16(checked_bytes(dz, "dz", r.device, r.rows * width), "dz"),
                    checked_f32(dz_scale, "dz_scale", r.device, scales), width, kLog2,
                    kGateUpBlock};
  sum_columns(codes, nullptr, r, parts, db1, stream);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(add_bias_dots, sonicmoe::add_bias_dots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_tokens, sonicmoe::sum_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_dz, sonicmoe::sum_dz);
