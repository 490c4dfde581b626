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
#include "rows_of_experts.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWide = 8;                             // columns of a thread
constexpr int kColumns = 32 * kWide;                 // that a warp reads of a row at a time
constexpr int kRowsOfWarp = kRowAlignment / kWarps;  // of a block of 128
constexpr unsigned kFull = 0xffffffffu;

// Eight neighbouring columns of rows in bf16. `Packed` is what is loaded of them: many loads must
// be under way at a time, and packed they take half the registers.
struct Values {
  using Packed = uint4;
  const __nv_bfloat16* data;
  int width;
  __device__ __forceinline__ Packed load(int64_t row, int column) const {
    return __ldg(reinterpret_cast<const uint4*>(data + row * width + column));
  }
  __device__ __forceinline__ float scale(int64_t, int) const { return 1.f; }
  __device__ __forceinline__ static void unpack(const Packed& packed, float (&to)[kWide]) {
    const uint32_t word[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = __uint_as_float(word[i] << 16);
      to[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  }
};
// The same of e4m3 codes with one scale for `rows` (a power of two) x `columns` of them.
struct Codes {
  using Packed = uint2;
  const uint8_t* data;
  const float* scales;
  int width, log2_rows, columns;
  __device__ __forceinline__ Packed load(int64_t row, int column) const {
    return __ldg(reinterpret_cast<const uint2*>(data + row * width + column));
  }
  __device__ __forceinline__ float scale(int64_t row, int column) const {
    return scales[(row >> log2_rows) * ((width + columns - 1) / columns) + column / columns];
  }
  __device__ __forceinline__ static void unpack(const Packed& packed, float (&to)[kWide]) {
    const uint32_t word[2] = {packed.x, packed.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(halves_of(word[i / 2] >> (16 * (i % 2))));
      to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
  }
};

using Slices = float[kWarps][kColumns];

// The sums that the warps of a CTA have made of kColumns columns, added in their order.
// `of_warp` may be written again after the CTA's next barrier.
__device__ __forceinline__ void add_slices(Slices& of_warp, const float (&sum)[kWide],
                                           int first_column, int width, float* __restrict__ to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = threadIdx.x;
#pragma unroll
  for (int i = 0; i < kWide; ++i) of_warp[warp][lane * kWide + i] = sum[i];
  __syncthreads();
  static_assert(kColumns == kThreads);
  if (first_column + mine >= width) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) total += of_warp[i][mine];
  to[first_column + mine] = total;
}

// One CTA a block of rows, which reads every token once, for both of:
//   sums[row] += <tokens[row_token[row]], bias[expert]>
//   parts[block] = the sum over the block's rows of row_prob[row] * tokens[row_token[row]]
template <typename Tokens, bool kParts>
__global__ void __launch_bounds__(kThreads)
    sum_token_blocks(const Tokens tokens, const float* __restrict__ bias,
                     const float* __restrict__ row_prob, const int32_t* __restrict__ row_token,
                     const int64_t* __restrict__ padded_offsets, const int experts,
                     float* __restrict__ sums, float* __restrict__ parts) {
  // Of two, while the columns before are still being added, the next ones are written.
  __shared__ Slices of_warp[kParts ? 2 : 1];
  __shared__ int token_of[kRowAlignment];
  __shared__ float prob_of[kRowAlignment];
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * kRowsOfWarp;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRowAlignment;
  for (int i = threadIdx.x; i < kRowAlignment; i += kThreads) {
    token_of[i] = row_token[first_row + i];
    prob_of[i] = token_of[i] < 0 ? 0.f : row_prob[first_row + i];
  }
  __syncthreads();
  // A block without a token: the rows of an expert lie before its padding.
  if (token_of[0] < 0 && !kParts) return;
  const float* of_expert =
      bias + static_cast<int64_t>(expert_of(padded_offsets, experts, first_row)) * tokens.width;
  float dot[kRowsOfWarp] = {};
  int chunk = 0;
  for (int first = 0; first < tokens.width; first += kColumns, ++chunk) {
    const int column = first + lane * kWide;
    const bool reads = column < tokens.width;
    float sum[kWide] = {}, weight[kWide] = {};
#pragma unroll
    for (int i = 0; i < kWide; i += 4) {
      if (!reads) break;
      const float4 four = *reinterpret_cast<const float4*>(of_expert + column + i);
      weight[i] = four.x, weight[i + 1] = four.y, weight[i + 2] = four.z, weight[i + 3] = four.w;
    }
    constexpr int kAtOnce = kRowsOfWarp / 2;
#pragma unroll
    for (int begin = 0; begin < kRowsOfWarp; begin += kAtOnce) {
      typename Tokens::Packed packed[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int token = token_of[own + begin + i];
        packed[i] = {}, scale[i] = 0.f;
        if (token < 0 || !reads) continue;
        packed[i] = tokens.load(token, column), scale[i] = tokens.scale(token, column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float value[kWide], product = 0.f;
        Tokens::unpack(packed[i], value);
        const float by = prob_of[own + begin + i] * scale[i];
#pragma unroll
        for (int c = 0; c < kWide; ++c) {
          product += value[c] * weight[c];
          if (kParts) sum[c] += by * value[c];
        }
        dot[begin + i] += scale[i] * product;
      }
    }
    if (kParts)
      add_slices(of_warp[chunk % 2], sum, first, tokens.width,
                 parts + static_cast<int64_t>(blockIdx.x) * tokens.width);
  }
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      dot[i] += __shfl_xor_sync(kFull, dot[i], distance);
    if (lane == i && token_of[own + i] >= 0) sums[first_row + own + i] += dot[i];
  }
}

// parts[block] = the sum of the block's rows of `values`, whose scale they share. CTAs: columns
// fastest.
template <typename Rows>
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const Rows values, const int32_t* __restrict__ row_token, const int column_ctas,
               float* __restrict__ parts) {
  __shared__ Slices of_warp;
  const int64_t block = blockIdx.x / column_ctas;
  const int first = blockIdx.x % column_ctas * kColumns, column = first + threadIdx.x % 32 * kWide;
  const int64_t first_row = block * kRowAlignment + threadIdx.x / 32 * kRowsOfWarp;
  float sum[kWide] = {};
  if (column < values.width) {
    typename Rows::Packed packed[kRowsOfWarp];
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      packed[i] = {};
      if (row_token[first_row + i] >= 0) packed[i] = values.load(first_row + i, column);
    }
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      float value[kWide];
      Rows::unpack(packed[i], value);
#pragma unroll
      for (int c = 0; c < kWide; ++c) sum[c] += value[c];
    }
    // Scales of blocks without a token are not written.
    const float scale = row_token[block * kRowAlignment] < 0 ? 0.f : values.scale(first_row, column);
#pragma unroll
    for (int c = 0; c < kWide; ++c) sum[c] *= scale;
  }
  add_slices(of_warp, sum, first, values.width, parts + block * values.width);
}

// sums[expert] = the sum of its blocks' parts; zeros where it has none.
__global__ void __launch_bounds__(kThreads)
    sum_experts(const float* __restrict__ parts, const int64_t* __restrict__ padded_offsets,
                const int width, const int column_ctas, const int64_t blocks,
                float* __restrict__ sums) {
  __shared__ Slices of_warp;
  const int64_t expert = blockIdx.x / column_ctas;
  const int first = blockIdx.x % column_ctas * kColumns, column = first + threadIdx.x % 32 * kWide;
  // Offsets beyond the rows are not followed.
  const int64_t end = min(padded_offsets[expert + 1] / kRowAlignment, blocks);
  float sum[kWide] = {};
  if (column < width) {
    for (int64_t block = padded_offsets[expert] / kRowAlignment + threadIdx.x / 32; block < end;
         block += kWarps) {
      const float4* part = reinterpret_cast<const float4*>(parts + block * width + column);
      const float4 low = part[0], high = part[1];
      sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
      sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
  }
  add_slices(of_warp, sum, first, width, sums + expert * width);
}

float* checked_parts(const TensorView& parts, const RowsOfExperts& r, int64_t width) {
  return aligned_16(checked_f32(parts, "parts", r.device, r.blocks() * width), "parts");
}

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

// sums[expert] of the parts of its blocks.
void add_parts(const float* parts, const RowsOfExperts& r, int width, float* sums, int64_t stream) {
  if (r.experts == 0) return;
  const int column_ctas = static_cast<int>(ceil_div(width, kColumns));
  sum_experts<<<static_cast<unsigned>(r.experts * column_ctas), kThreads, 0, as_stream(stream)>>>(
      parts, r.padded_offsets, width, column_ctas, r.blocks(), sums);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

template <bool kParts, typename Tokens>
void launch_tokens(const Tokens& tokens, const float* bias, const float* row_prob,
                   const RowsOfExperts& r, float* sums, float* parts, int64_t stream) {
  if (r.rows == 0 || r.experts == 0) return;
  sum_token_blocks<Tokens, kParts>
      <<<static_cast<unsigned>(r.blocks()), kThreads, 0, as_stream(stream)>>>(
          tokens, bias, row_prob, r.row_token, r.padded_offsets, static_cast<int>(r.experts), sums,
          parts);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Two sums over dout for the biases of the down projection. In the rows that have a token:
//   sums fp32 [R]: sums[row] += <tokens[row_token[row]], b2[expert]>
//   db2 fp32 [E, H], where it is given: the sums over the rows of each expert of
//   row_prob[row] * tokens[row_token[row]]
// tokens as in `with_tokens`, b2 fp32 [E, H], parts fp32 [R / 128, H] scratch of db2.
void sum_tokens(TensorView tokens, Optional<TensorView> scale, TensorView b2, TensorView row_prob,
                TensorView row_token, TensorView padded_offsets, TensorView sums,
                Optional<TensorView> parts, Optional<TensorView> db2, int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  float* to = checked_f32(sums, "sums", r.device, r.rows);
  const float* weight = checked_f32(row_prob, "row_prob", r.device, r.rows);
  with_tokens(tokens, scale, r.device, [&](const auto& from) {
    const int64_t all = r.experts * from.width;
    const float* bias = aligned_16(checked_f32(b2, "b2", r.device, all), "b2");
    tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
    if (!db2.has_value()) return launch_tokens<false>(from, bias, weight, r, to, nullptr, stream);
    float* of_experts = checked_f32(db2.value(), "db2", r.device, all);
    TVM_FFI_ICHECK(parts.has_value()) << "parts is missing; needed: scratch of db2";
    float* of_blocks = checked_parts(parts.value(), r, from.width);
    launch_tokens<true>(from, bias, weight, r, to, of_blocks, stream);
    add_parts(of_blocks, r, from.width, of_experts, stream);
  });
}

// db1 fp32 [E, 2I] = sums over the rows of each expert of dz: e4m3 [R, 2I] with dz_scale [R / 128,
// ceil(I / 128)]; parts fp32 [R / 128, 2I] scratch.
void sum_dz(TensorView dz, TensorView dz_scale, TensorView row_token, TensorView padded_offsets,
            TensorView parts, TensorView db1, int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  const int width = checked_width(dz, "dz");
  const int64_t scales = r.blocks() * ceil_div(width, kGateUpBlock);
  constexpr int kLog2 = 7;
  static_assert(1 << kLog2 == kRowAlignment);
  const Codes codes{aligned_16(checked_bytes(dz, "dz", r.device, r.rows * width), "dz"),
                    checked_f32(dz_scale, "dz_scale", r.device, scales), width, kLog2,
                    kGateUpBlock};
  float *of_blocks = checked_parts(parts, r, width),
        *of_experts = checked_f32(db1, "db1", r.device, r.experts * width);
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  const int column_ctas = static_cast<int>(ceil_div(width, kColumns));
  const unsigned ctas = static_cast<unsigned>(r.blocks() * column_ctas);
  if (ctas > 0) {
    sum_blocks<Codes><<<ctas, kThreads, 0, as_stream(stream)>>>(codes, r.row_token, column_ctas,
                                                                of_blocks);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  }
  add_parts(of_blocks, r, width, of_experts, stream);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_tokens, sonicmoe::sum_tokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_dz, sonicmoe::sum_dz);
