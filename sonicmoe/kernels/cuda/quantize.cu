// Tokens to E4M3 with one scale per row and 128 columns, and the other memory order of codes that
// exist.
//
// A quarter of a warp (half of one for fp32) owns a block: two 16-byte loads a lane, the maximum by
// shuffles, codes from registers. Blocks of a matrix whose rows are whole blocks are one long
// sequence, so no index is divided.
#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"

namespace sonicmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerLane =
    2;  // with two vectors each: four 16-byte loads of a thread are in flight together

struct Rows {
  uint32_t blocks, blocks_per_row;
  int columns;
};

// kWords x 4 codes, naturally aligned.
template <int kWords>
__device__ __forceinline__ void store_words(uint8_t* target, const uint32_t (&words)[kWords]) {
  if constexpr (kWords == 1) {
    *reinterpret_cast<uint32_t*>(target) = words[0];
  } else {
    *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_row_blocks(const T* __restrict__ x, uint8_t* __restrict__ codes,
                        float* __restrict__ scale_inv, const Rows n) {
  constexpr int kCount = Vector16<T>::kCount, kLanes = kScaleBlock / 2 / kCount,
                kGroups = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  Vector16<T> values[kBlocksPerLane][2];
  int64_t offset[kBlocksPerLane];
  int width[kBlocksPerLane];
#pragma unroll
  for (int j = 0; j < kBlocksPerLane; ++j) {
    const uint32_t block = (blockIdx.x * kBlocksPerLane + j) * kGroups + threadIdx.x / kLanes;
    offset[j] = static_cast<int64_t>(block) * kScaleBlock;
    width[j] = kScaleBlock;
    if (n.columns % kScaleBlock != 0) {
      const uint32_t row = block / n.blocks_per_row,
                     column = (block - row * n.blocks_per_row) * kScaleBlock;
      offset[j] = static_cast<int64_t>(row) * n.columns + column;
      width[j] = min(kScaleBlock, n.columns - static_cast<int>(column));
    }
    if (block >= n.blocks) width[j] = 0;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int column = (v * kLanes + lane) * kCount;
      values[j][v].clear();
      if (column < width[j]) values[j][v].load(x + offset[j] + column);
    }
  }
#pragma unroll
  for (int j = 0; j < kBlocksPerLane; ++j) {
    const uint32_t block = (blockIdx.x * kBlocksPerLane + j) * kGroups + threadIdx.x / kLanes;
    const BlockScale scale =
        block_scale(amax_of_lanes<kLanes>(values[j][1].amax(values[j][0].amax())));
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const int column = (v * kLanes + lane) * kCount;
      uint32_t words[kCount / 4];
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) words[i] = e4m3x4(values[j][v], 4 * i, scale.multiplier);
      if (column < width[j]) store_words(codes + offset[j] + column, words);
    }
    if (lane == 0 && width[j] > 0) scale_inv[block] = scale.scale_inv;
  }
}

// One tile of one matrix: 16 bytes of four rows a thread. `scale_tiles`: that share a scale, one
// below the other.
__global__ void __launch_bounds__(kThreads)
    transpose_tiles(const uint8_t* __restrict__ codes, const float* __restrict__ scale_inv,
                    uint8_t* __restrict__ out, float* __restrict__ out_scale, const int rows,
                    const int columns, const uint32_t scale_tiles) {
  __shared__ ByteTile tile;
  const uint32_t tile_columns = (columns + kTile - 1) / kTile,
                 tile_rows = (rows + kTile - 1) / kTile;
  const uint32_t in_matrix = blockIdx.x % (tile_rows * tile_columns),
                 matrix = blockIdx.x / (tile_rows * tile_columns);
  const uint32_t tile_row = in_matrix / tile_columns, tile_column = in_matrix % tile_columns;
  const int first_row = tile_row * kTile, first_column = tile_column * kTile;
  const int quad = threadIdx.x / 8, column = threadIdx.x % 8 * 16;
  const int64_t base = static_cast<int64_t>(matrix) * rows * columns;

  Vector16<float> bytes[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = first_row + quad * 4 + j;
    bytes[j].clear();
    if (row < rows && first_column + column < columns) {
      bytes[j].load(reinterpret_cast<const float*>(
          codes + base + static_cast<int64_t>(row) * columns + first_column + column));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    tile.put(column + 4 * i, quad, bytes[0].word[i], bytes[1].word[i], bytes[2].word[i],
             bytes[3].word[i]);
  if (threadIdx.x == 0 && tile_row % scale_tiles == 0) {
    const uint32_t scale_rows = (tile_rows + scale_tiles - 1) / scale_tiles,
                   scale_row = tile_row / scale_tiles;
    out_scale[(matrix * tile_columns + tile_column) * scale_rows + scale_row] =
        scale_inv[(matrix * scale_rows + scale_row) * tile_columns + tile_column];
  }
  __syncthreads();
  uint8_t* target = out + base + static_cast<int64_t>(first_column) * rows + first_row;
  tile.store<kThreads>(target, rows, columns - first_column, rows - first_row);
}

uint8_t* checked_codes(const TensorView& tensor, const char* name, DLDevice device,
                       int64_t elements) {
  uint8_t* data = checked<uint8_t>(tensor, name, static_cast<DLDataTypeCode>(tensor.dtype().code),
                                   8, device, elements);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " must start on a 16-byte boundary";
  return data;
}

template <typename T>
void launch_rows(const TensorView& x, uint8_t* codes, float* scale_inv, const Rows& n,
                 cudaStream_t stream) {
  constexpr int kPerCta = kBlocksPerLane * kThreads * Vector16<T>::kCount * 2 / kScaleBlock;
  const DLDataType dtype = x.dtype();
  const T* data =
      checked<T>(x, "x", static_cast<DLDataTypeCode>(dtype.code), dtype.bits, x.device(), 0);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << "x must start on a 16-byte boundary";
  quantize_row_blocks<T><<<static_cast<unsigned>(ceil_div(n.blocks, kPerCta)), kThreads, 0, stream>>>(
      data, codes, scale_inv, n);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// x [T, C] bf16, fp16 or fp32, C a multiple of 16 -> codes e4m3 [T, C], scale_inv fp32 [T,
// ceil(C/128)], every element written.
void quantize_rows(TensorView x, TensorView codes, TensorView scale_inv, int64_t stream) {
  TVM_FFI_ICHECK(x.ndim() == 2 && x.size(1) % 16 == 0)
      << "x must be a matrix with a multiple of 16 columns";
  const int64_t tokens = x.size(0), columns = x.size(1),
                blocks = tokens * ceil_div(columns, kScaleBlock);
  TVM_FFI_ICHECK(columns < (int64_t(1) << 30) && blocks < (int64_t(1) << 31))
      << "x has " << tokens << " x " << columns << " elements";
  const DLDevice device = x.device();
  uint8_t* code_data = checked_codes(codes, "codes", device, tokens * columns);
  float* scale_data = checked_f32(scale_inv, "scale_inv", device, blocks);
  if (blocks == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const Rows n{static_cast<uint32_t>(blocks), static_cast<uint32_t>(ceil_div(columns, kScaleBlock)),
               static_cast<int>(columns)};
  if (is_type(x, kDLBfloat, 16))
    return launch_rows<__nv_bfloat16>(x, code_data, scale_data, n, as_stream(stream));
  if (is_type(x, kDLFloat, 16))
    return launch_rows<__half>(x, code_data, scale_data, n, as_stream(stream));
  TVM_FFI_ICHECK(is_type(x, kDLFloat, 32)) << "x must be bfloat16, float16 or float32";
  launch_rows<float>(x, code_data, scale_data, n, as_stream(stream));
}

// codes [E, R, C] and scale_inv [E, ceil(R/128), ceil(C/128)], or [E, ceil(R/256), ceil(C/128)] ->
// out [E, C, R] and out_scale, transposed alike. R, C multiples of 16.
void transpose_bytes(TensorView codes, TensorView scale_inv, TensorView out, TensorView out_scale,
                     int64_t stream) {
  TVM_FFI_ICHECK(codes.ndim() == 3 && codes.size(1) % 16 == 0 && codes.size(2) % 16 == 0)
      << "codes must be [E, R, C] with R and C multiples of 16";
  const int64_t matrices = codes.size(0), rows = codes.size(1), columns = codes.size(2);
  const int64_t tiles = matrices * ceil_div(rows, kTile) * ceil_div(columns, kTile);
  TVM_FFI_ICHECK(rows < (1 << 30) && columns < (1 << 30) && tiles < (int64_t(1) << 31))
      << "codes has " << tiles << " tiles";
  const DLDevice device = codes.device();
  const uint8_t* from = checked_codes(codes, "codes", device, 0);
  TVM_FFI_ICHECK(scale_inv.ndim() == 3) << "scale_inv must be [E, ceil(R/128 or 256), ceil(C/128)]";
  const int64_t tile_rows = ceil_div(rows, kTile), scale_rows = scale_inv.size(1),
                scale_tiles = scale_rows < tile_rows ? kGateUpBlock / kTile : 1,
                scales = matrices * ceil_div(tile_rows, scale_tiles) * ceil_div(columns, kTile);
  const float* from_scale = checked_f32(scale_inv, "scale_inv", device, scales);
  uint8_t* to = checked_codes(out, "out", device, matrices * rows * columns);
  float* to_scale = checked_f32(out_scale, "out_scale", device, scales);
  if (tiles == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  transpose_tiles<<<static_cast<unsigned>(tiles), kThreads, 0, as_stream(stream)>>>(
      from, from_scale, to, to_scale, static_cast<int>(rows), static_cast<int>(columns),
      static_cast<uint32_t>(scale_tiles));
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_rows, sonicmoe::quantize_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose_bytes, sonicmoe::transpose_bytes);
