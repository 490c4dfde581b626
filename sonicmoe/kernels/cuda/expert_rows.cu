// What grouped GEMMs over padded expert rows need beside the products: row offsets and gather
// indices without a -1, row sums, and sums over an expert's rows. Fixed order of additions
// everywhere, so equal calls give equal bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../host/border.hpp"

namespace sonicmoe {
namespace {

constexpr int kRowThreads = 256;
constexpr int kSumLanes = 32, kSumRows = 16,
              kSumWidth = 4;  // a block of column sums: 32 x 4 columns, 16 rows at a time
constexpr unsigned kFull = 0xffffffffu;

__device__ float to_float(float value) { return value; }
__device__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ float to_float(__half value) { return __half2float(value); }

// The expert e with offsets[e] <= row < offsets[e + 1], or `experts` for a row behind the last one.
template <typename Offset>
__device__ int expert_of(const Offset* offsets, int experts, int64_t row) {
  int below = 0,
      above = experts + 1;  // offsets[below] <= row, and offsets[above] > row where it exists
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    (offsets[middle] <= row ? below : above) = middle;
  }
  return below;
}

// A padding row gathers what the last row of its expert gathers. Then it is finite wherever that
// expert's true rows are, and what it holds can only spoil sums that the same token has spoilt
// already; its probability is 0.
__global__ void __launch_bounds__(kRowThreads)
    index_rows(const int32_t* __restrict__ row_token, const int32_t* __restrict__ expert_counts,
               const int64_t* __restrict__ padded_offsets, int32_t* __restrict__ gather_index,
               int32_t* __restrict__ cu_rows, const int64_t rows, const int experts) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (blockIdx.x == 0) {
    // Counts that were too small on the host leave fewer rows than the offsets say: no GEMM may
    // pass them.
    for (int e = threadIdx.x; e <= experts; e += kRowThreads)
      cu_rows[e] = static_cast<int32_t>(padded_offsets[e] < rows ? padded_offsets[e] : rows);
  }
  if (row >= rows) return;
  int32_t token = row_token[row];
  if (token < 0) {
    const int expert = expert_of(padded_offsets, experts, row);
    if (expert < experts) {
      const int64_t last = padded_offsets[expert] + expert_counts[expert] - 1;
      token = row_token[last < 0 ? 0 : (last < rows ? last : rows - 1)];
    }
    if (token < 0) token = 0;
  }
  gather_index[row] = token;
}

// One warp a row: the sum of its partial sums, plus <values[index[row]], bias[expert]> where there
// is a bias.
template <typename Value>
__global__ void __launch_bounds__(kRowThreads)
    sum_rows(const float* __restrict__ partials, const int tiles, const Value* __restrict__ values,
             const int32_t* __restrict__ index, const float* __restrict__ bias, const int width,
             const int32_t* __restrict__ cu_rows, const int experts, float* __restrict__ out,
             const int64_t rows) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  float sum = 0.f;
  if (row < cu_rows[experts]) {
    for (int tile = lane; tile < tiles; tile += 32) sum += partials[row * tiles + tile];
    if (bias != nullptr) {
      const float* weights = bias + static_cast<int64_t>(expert_of(cu_rows, experts, row)) * width;
      const Value* from = values + static_cast<int64_t>(index[row]) * width;
      for (int column = lane; column < width; column += 32)
        sum += to_float(from[column]) * weights[column];
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFull, sum, offset);
  if (lane == 0) out[row] = sum;
}

template <typename Value>
struct alignas(sizeof(Value) * kSumWidth) Columns {
  Value at[kSumWidth];
};

// accumulator[e][c] += sum over the rows r of expert e of weight[r] * values[index[r]][c]; no
// index: r itself; no weight: 1.
template <typename Value>
__global__ void __launch_bounds__(kSumLanes* kSumRows)
    sum_columns(const Value* __restrict__ values, const int32_t* __restrict__ index,
                const float* __restrict__ weight, const int32_t* __restrict__ cu_rows,
                float* __restrict__ accumulator, const int width) {
  __shared__ float partial[kSumRows][kSumLanes * kSumWidth];
  const int lane = threadIdx.x % kSumLanes, slice = threadIdx.x / kSumLanes, expert = blockIdx.y;
  const int first = cu_rows[expert], last = cu_rows[expert + 1];
  if (first == last) return;
  const int column = (blockIdx.x * kSumLanes + lane) * kSumWidth;
  float sum[kSumWidth] = {};
  if (column < width) {
    for (int row = first + slice; row < last; row += kSumRows) {
      const Value* from =
          values + static_cast<int64_t>(index != nullptr ? index[row] : row) * width + column;
      const Columns<Value> loaded = *reinterpret_cast<const Columns<Value>*>(from);
      const float scale = weight != nullptr ? weight[row] : 1.f;
#pragma unroll
      for (int i = 0; i < kSumWidth; ++i) sum[i] += scale * to_float(loaded.at[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kSumWidth; ++i) partial[slice][lane * kSumWidth + i] = sum[i];
  __syncthreads();
  const int mine = threadIdx.x, target = blockIdx.x * kSumLanes * kSumWidth + mine;
  if (mine >= kSumLanes * kSumWidth || target >= width) return;
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < kSumRows; ++i) total += partial[i][mine];
  accumulator[static_cast<int64_t>(expert) * width + target] += total;
}

// rows[r] = tokens[row_token[r]], or zeros in padding rows; 16 bytes a thread.
__global__ void __launch_bounds__(kRowThreads)
    copy_rows(const uint4* __restrict__ tokens, const int32_t* __restrict__ row_token,
              uint4* __restrict__ rows, const int width, const int64_t chunks) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowThreads + threadIdx.x;
  if (at >= chunks) return;
  const int token = row_token[at / width];
  rows[at] = token < 0 ? make_uint4(0, 0, 0, 0)
                       : __ldg(tokens + static_cast<int64_t>(token) * width + at % width);
}

unsigned blocks_for(int64_t threads) {
  return static_cast<unsigned>(ceil_div(threads, kRowThreads));
}

// row_token int32 [R], expert_counts int32 [E], padded_offsets int64 [E + 1] -> gather_index int32
// [R], all of it and each a token where the expert has any; cu_rows int32 [E + 1], the offsets, at
// most R.
void index(TensorView row_token, TensorView expert_counts, TensorView padded_offsets,
           TensorView gather_index, TensorView cu_rows, int64_t stream) {
  const DLDevice device = row_token.device();
  const int64_t rows = row_token.numel(), experts = expert_counts.numel();
  TVM_FFI_ICHECK(rows < (int64_t(1) << 31))
      << "row_token has " << rows << " rows; needed: fewer than 2^31";
  const int32_t* tokens = checked_i32(row_token, "row_token", device, rows);
  const int32_t* counts = checked_i32(expert_counts, "expert_counts", device, experts);
  const int64_t* offsets = checked_i64(padded_offsets, "padded_offsets", device, experts + 1);
  int32_t* target = checked_i32(gather_index, "gather_index", device, rows);
  int32_t* cut = checked_i32(cu_rows, "cu_rows", device, experts + 1);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const unsigned blocks = rows == 0 ? 1u : blocks_for(rows);
  index_rows<<<blocks, kRowThreads, 0, as_stream(stream)>>>(tokens, counts, offsets, target, cut,
                                                            rows, static_cast<int>(experts));
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

struct RowSums {
  const float *partials, *bias;
  const int32_t *index, *cu_rows;
  float* out;
  int tiles, width, experts;
  int64_t rows;
  cudaStream_t stream;
};

template <typename Value>
void launch_row_sums(const void* values, const RowSums& call) {
  sum_rows<Value><<<blocks_for(call.rows * 32), kRowThreads, 0, call.stream>>>(
      call.partials, call.tiles, static_cast<const Value*>(values), call.index, call.bias,
      call.width, call.cu_rows, call.experts, call.out, call.rows);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

const void* checked_half(const TensorView& tensor, const char* name, DLDevice device,
                         int64_t elements) {
  const DLDataType dtype = tensor.dtype();
  TVM_FFI_ICHECK(is_type(tensor, kDLBfloat, 16) || is_type(tensor, kDLFloat, 16))
      << name << " must be bfloat16 or float16";
  return checked<const char>(tensor, name, static_cast<DLDataTypeCode>(dtype.code), 16, device,
                             elements);
}

// partials fp32 [R, tiles] -> out fp32 [R]: row sums, plus <values[gather_index[r]], bias[expert of
// r]> when `biased`; 0 in rows that no expert owns. values [T, C] bf16 or fp16, bias fp32 [E, C]:
// read only when `biased`.
void row_sums(TensorView partials, TensorView values, TensorView gather_index, TensorView bias,
              TensorView cu_rows, TensorView out, bool biased, int64_t stream) {
  TVM_FFI_ICHECK(partials.ndim() == 2 && values.ndim() == 2)
      << "partials and values must be matrices";
  const DLDevice device = partials.device();
  const int64_t rows = partials.size(0), experts = cu_rows.numel() - 1, width = values.size(1);
  RowSums call{};
  call.partials = checked_f32(partials, "partials", device, 0);
  call.cu_rows = checked_i32(cu_rows, "cu_rows", device, 1);
  call.out = checked_f32(out, "out", device, rows);
  const void* data = checked_half(values, "values", device, 0);
  if (biased) {
    call.index = checked_i32(gather_index, "gather_index", device, rows);
    call.bias = checked_f32(bias, "bias", device, experts * width);
  }
  call.tiles = static_cast<int>(partials.size(1)), call.width = static_cast<int>(width);
  call.experts = static_cast<int>(experts), call.rows = rows, call.stream = as_stream(stream);
  if (rows == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  is_type(values, kDLBfloat, 16) ? launch_row_sums<__nv_bfloat16>(data, call)
                                 : launch_row_sums<__half>(data, call);
}

// rows [R, C] = tokens [T, C] gathered through row_token int32 [R], zeros where it is -1; bf16 or
// fp16, C a multiple of 8.
void gather_rows(TensorView tokens, TensorView row_token, TensorView rows, int64_t stream) {
  const DLDevice device = tokens.device();
  const int64_t count = row_token.numel(), width = tokens.size(1);
  TVM_FFI_ICHECK(tokens.ndim() == 2 && width % 8 == 0)
      << "tokens have " << width << " columns; needed: a multiple of 8";
  const int32_t* index = checked_i32(row_token, "row_token", device, count);
  const void* from = aligned_16(checked_half(tokens, "tokens", device, 0), "tokens");
  const void* target = checked_half(rows, "rows", device, count * width);
  void* to = const_cast<void*>(aligned_16(target, "rows"));
  if (count == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int64_t chunks = count * (width / 8);
  copy_rows<<<blocks_for(chunks), kRowThreads, 0, as_stream(stream)>>>(
      static_cast<const uint4*>(from), index, static_cast<uint4*>(to),
      static_cast<int>(width / 8), chunks);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// accumulator fp32 [E, C] += sums over each expert's rows of weight[r] * values[gather_index[r]],
// values bf16 or fp16 [T, C]; without `gathered`, values are [R, C] and neither gather_index nor
// weight is read.
void column_sums(TensorView values, TensorView gather_index, TensorView weight, TensorView cu_rows,
                 TensorView accumulator, bool gathered, int64_t stream) {
  TVM_FFI_ICHECK(values.ndim() == 2 && accumulator.ndim() == 2)
      << "values and accumulator must be matrices";
  const DLDevice device = values.device();
  const int64_t experts = accumulator.size(0), width = accumulator.size(1);
  TVM_FFI_ICHECK(values.size(1) == width)
      << "values have " << values.size(1) << " columns, accumulator has " << width;
  TVM_FFI_ICHECK(width % kSumWidth == 0 && experts <= 65535)
      << "accumulator is " << experts << " x " << width
      << "; needed: at most 65535 rows of a multiple of " << kSumWidth;
  const void* data = checked_half(values, "values", device, 0);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % sizeof(Columns<__half>) == 0)
      << "values must start on 8 bytes";
  const int32_t* cut = checked_i32(cu_rows, "cu_rows", device, experts + 1);
  float* target = checked_f32(accumulator, "accumulator", device, experts * width);
  const int32_t* index_data =
      gathered ? checked_i32(gather_index, "gather_index", device, 0) : nullptr;
  const float* weight_data = gathered ? checked_f32(weight, "weight", device, 0) : nullptr;
  if (experts == 0 || width == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const dim3 grid(static_cast<unsigned>(ceil_div(width, kSumLanes * kSumWidth)),
                  static_cast<unsigned>(experts));
  if (is_type(values, kDLBfloat, 16)) {
    sum_columns<<<grid, kSumLanes * kSumRows, 0, as_stream(stream)>>>(
        static_cast<const __nv_bfloat16*>(data), index_data, weight_data, cut, target,
        static_cast<int>(width));
  } else {
    sum_columns<<<grid, kSumLanes * kSumRows, 0, as_stream(stream)>>>(
        static_cast<const __half*>(data), index_data, weight_data, cut, target,
        static_cast<int>(width));
  }
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(index_rows, sonicmoe::index);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_rows, sonicmoe::gather_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(row_sums, sonicmoe::row_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(column_sums, sonicmoe::column_sums);
