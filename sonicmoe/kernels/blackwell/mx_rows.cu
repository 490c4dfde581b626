// Rows in expert order to MXFP8 in 32 x 32 blocks: one set of codes [R, C], with scales for both
// contractions, along the columns and along the rows.
//
// Rows are gathered from tokens, or lie in expert order already. Rows without a token become zeros,
// whatever lies there. A CTA has a tile of 128 x 128, so that its scales are one whole atom of each
// orientation. An expert's rows begin at a multiple of 128; its atoms follow those of the expert
// before behind one that nobody reads, as the GEMMs expect of experts whose rows end anywhere.
#include <tvm/ffi/optional.h>

#include <limits>

#include "../host/border.hpp"
#include "mx_scales.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kThreads = 256;
constexpr int kRowsAtOnce = 4;  // of a warp: eight lanes for 64 columns
constexpr int kSteps = kMxBlock / kRowsAtOnce;

struct Rows {
  const int32_t* row_token;
  const int64_t* padded_offsets;  // [experts + 1]
  int experts, tokens;            // tokens: the rows of the matrix that is gathered from
  int64_t width;
  uint32_t column_tiles, atoms;  // atoms: along the rows, of all experts
};

// The expert whose rows these are; `experts` behind the last one. Experts without rows own none.
__device__ __forceinline__ int expert_of(const Rows& n, int64_t row) {
  int low = 0, high = n.experts;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (__ldg(n.padded_offsets + middle + 1) > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

template <bool kGathers>
__global__ void __launch_bounds__(kThreads)
    quantize_squares(const __nv_bfloat16* __restrict__ source, uint8_t* __restrict__ codes,
                     uint8_t* __restrict__ along_columns, uint8_t* __restrict__ along_rows,
                     const Rows n) {
  __shared__ TileScales scales;
  const uint32_t row_tile = blockIdx.x / n.column_tiles,
                 column_tile = blockIdx.x - row_tile * n.column_tiles;
  const int64_t first_row = static_cast<int64_t>(row_tile) * kTile;
  const int expert = expert_of(n, first_row);
  if (expert == n.experts) return;

  // A warp has two blocks beside each other.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int row_block = warp / 2, column_block = warp % 2 * 2 + lane % 8 / 4;
  const int64_t column = static_cast<int64_t>(column_tile) * kTile + warp % 2 * 64 + lane % 8 * 8;
  const int64_t row = first_row + row_block * kMxBlock + lane / 8;
  Vector16<__nv_bfloat16> values[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int token = __ldg(n.row_token + row + i * kRowsAtOnce);
    const int64_t from = kGathers ? token : row + i * kRowsAtOnce;
    values[i].clear();
    // -1 in padding rows. One comparison, because a negative token is a large unsigned one.
    if (column < n.width && static_cast<uint32_t>(token) < static_cast<uint32_t>(n.tokens))
      values[i].load(source + from * n.width + column);
  }
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) amax = values[i].amax(amax);
  // Over the four lanes of a row of the block, then over its rows; lane bit 2 is the other block.
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 8));
  amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, 16));
  const MxScale scale = mx_scale(amax);
  if (lane == 0 || lane == 4) scales.put(row_block, column_block, scale.byte);
  if (column < n.width) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint2 words = {e4m3x4(values[i], 0, scale.multiplier),
                           e4m3x4(values[i], 4, scale.multiplier)};
      *reinterpret_cast<uint2*>(codes + (row + i * kRowsAtOnce) * n.width + column) = words;
    }
  }
  __syncthreads();
  const int64_t atom = row_tile + expert;
  uint8_t* columns_atom = along_columns == nullptr
                              ? nullptr
                              : along_columns + (atom * n.column_tiles + column_tile) * kAtomBytes;
  uint8_t* rows_atom =
      along_rows == nullptr
          ? nullptr
          : along_rows + (static_cast<int64_t>(column_tile) * n.atoms + atom) * kAtomBytes;
  scales.store(columns_atom, rows_atom);
}

uint8_t* scale_data(const Optional<TensorView>& scales, const char* name, DLDevice device,
                    int64_t bytes) {
  if (!scales.has_value()) return nullptr;
  return aligned_16(checked_bytes(scales.value(), name, device, bytes), name);
}

// source bf16 [T, C], gathered through row_token int32 [R], or [R, C] where not `gathers`; C a
// multiple of 16, R of 128; padded_offsets int64 [E + 1] -> codes e4m3 [R, C], and, where they are
// given, the scales of contractions along the columns [R/128 + E - 1, ceil(C/128), 512] and along
// the rows [ceil(C/128), R/128 + E - 1, 512]. Rows from the last offset on are not written.
void quantize_rows_iso32(TensorView source, TensorView row_token, TensorView padded_offsets,
                         TensorView codes, Optional<TensorView> along_columns,
                         Optional<TensorView> along_rows, bool gathers, int64_t stream) {
  TVM_FFI_ICHECK(source.ndim() == 2 && source.size(1) % 16 == 0)
      << "source must be a matrix with a multiple of 16 columns";
  TVM_FFI_ICHECK(is_type(source, kDLBfloat, 16)) << "source must be bfloat16";
  const DLDevice device = source.device();
  const int64_t rows = row_token.numel(), width = source.size(1),
                experts = padded_offsets.numel() - 1, tiles = ceil_div(width, kTile);
  TVM_FFI_ICHECK(rows % kTile == 0) << "there are " << rows << " rows; needed: a multiple of 128";
  TVM_FFI_ICHECK(experts > 0) << "padded_offsets must be [E + 1]";
  TVM_FFI_ICHECK(gathers || source.size(0) == rows)
      << "source has " << source.size(0) << " rows in expert order; needed: " << rows;
  TVM_FFI_ICHECK(source.size(0) < (int64_t(1) << 31) && rows / kTile * tiles < (int64_t(1) << 31))
      << "source has " << source.size(0) << " x " << width << " elements";
  const int64_t atoms = rows / kTile + experts - 1;
  const auto* values = checked<__nv_bfloat16>(source, "source", kDLBfloat, 16, device, 0);
  aligned_16(values, "source");
  uint8_t* code_data = aligned_16(checked_bytes(codes, "codes", device, rows * width), "codes");
  const int64_t bytes = atoms * tiles * kAtomBytes;
  uint8_t* columns_data = scale_data(along_columns, "along_columns", device, bytes);
  uint8_t* rows_data = scale_data(along_rows, "along_rows", device, bytes);
  const Rows n{checked_i32(row_token, "row_token", device, rows),
               checked_i64(padded_offsets, "padded_offsets", device, experts + 1),
               static_cast<int>(experts),
               gathers ? static_cast<int>(source.size(0)) : std::numeric_limits<int>::max(),
               width,
               static_cast<uint32_t>(tiles),
               static_cast<uint32_t>(atoms)};
  if (rows == 0 || width == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const unsigned ctas = static_cast<unsigned>(rows / kTile * tiles);
  if (gathers) {
    quantize_squares<true><<<ctas, kThreads, 0, as_stream(stream)>>>(values, code_data,
                                                                     columns_data, rows_data, n);
  } else {
    quantize_squares<false><<<ctas, kThreads, 0, as_stream(stream)>>>(values, code_data,
                                                                      columns_data, rows_data, n);
  }
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_rows_iso32, sonicmoe::quantize_rows_iso32);
