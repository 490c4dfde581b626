// The user's expert weights, where they lie, to MXFP8 in 32 x 32 blocks: one set of codes, in native
// order, and scales for both contractions. Forward and dgrad read the same codes.
//
// As quantize_weights.cu, but that a tile of 128 x 128 has 16 scales and leaves in one order only.
#include <algorithm>

#include "../host/border.hpp"
#include "mx_scales.cuh"
#include "../cuda/weight_layout.cuh"
#include "../cuda/weight_tiles.cuh"

namespace sonicmoe {
namespace {

// The largest magnitudes of the blocks of a tile, from every thread's own of its two vectors.
template <typename T>
struct BlockAmax {
  static constexpr int kWarps = Lane<T>::kThreads / 32, kWarpsOfBlock = kWarps / kBlocks;
  float of_warp[kWarps][kBlocks];

  // The block of a thread's vector `v` along the columns of the tile.
  static __device__ __forceinline__ int column_block(int v, bool pairs) {
    const int column = Lane<T>().lane * Lane<T>::kCount;
    return pairs ? 2 * column / kMxBlock : v * (kBlocks / 2) + column / kMxBlock;
  }
  static __device__ __forceinline__ int row_block() { return Lane<T>().quad * 4 / kMxBlock; }

  // Of the warp. The caller puts a barrier behind it, and another one before the next call.
  __device__ __forceinline__ void put(float first, float second, bool pairs) {
    if (pairs) first = second = fmaxf(first, second);
    // Lanes side by side that share a block; the lanes of other rows are kLanes apart.
    const int neighbours = (pairs ? kMxBlock / 2 : kMxBlock) / Lane<T>::kCount;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      if (distance >= neighbours && distance < Lane<T>::kLanes) continue;
      first = fmaxf(first, __shfl_xor_sync(0xffffffffu, first, distance));
      second = fmaxf(second, __shfl_xor_sync(0xffffffffu, second, distance));
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane >= Lane<T>::kLanes || lane % neighbours != 0) return;
    of_warp[warp][column_block(0, pairs)] = first;
    if (!pairs) of_warp[warp][column_block(1, pairs)] = second;
  }
  __device__ __forceinline__ MxScale scale_of(int row_block, int column_block) const {
    float amax = 0.f;
#pragma unroll
    for (int i = 0; i < kWarpsOfBlock; ++i)
      amax = fmaxf(amax, of_warp[row_block * kWarpsOfBlock + i][column_block]);
    return mx_scale(amax);
  }
};

// Scales of the user's order (`straight`: contracted along his columns) and of the other.
__device__ __forceinline__ void store_scales(const TileScales& scales, const Projection<uint8_t>& m,
                                             const WeightTile& tile) {
  const uint32_t tile_rows = m.tiles_per_matrix / m.tile_columns, row = tile.row / kTile,
                 column = tile.column / kTile;
  const int64_t base = static_cast<int64_t>(tile.matrix) * m.tiles_per_matrix;
  scales.store(m.straight_scale + (base + row * m.tile_columns + column) * kAtomBytes,
               m.flipped_scale + (base + column * tile_rows + row) * kAtomBytes);
}

template <typename T>
constexpr int kMxCtasPerSm = sizeof(T) == 2 ? 3 : 1;

// state: as in `quantize_tiles`.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kMxCtasPerSm<T>)
    quantize_weight_squares(const __grid_constant__ Work<uint8_t> work, int32_t* state,
                            const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kThreads = Lane<T>::kThreads;
  __shared__ ByteTile flipped;
  __shared__ BlockAmax<T> amax;
  __shared__ TileScales scales;
  const Lane<T> at;
  Vector16<T> values[4][2];
  WeightTile tile = tile_at(work, blockIdx.x);
  {
    const Projection<uint8_t>& m = tile.down ? work.down : work.up;
    load_tile(values, m, tile, beginning_of<T>(m, tile));
  }
  for (uint32_t index = blockIdx.x; index < work.tiles;) {
    index += gridDim.x;
    const bool more = index < work.tiles;
    const WeightTile next = tile_at(work, more ? index : 0);
    const Projection<uint8_t> &m = tile.down ? work.down : work.up,
                              &next_m = next.down ? work.down : work.up;
    const Beginning next_begin = beginning_of<T>(next_m, next);  // long before it is used
    const bool pairs = m.column_half != 0;

    float first = 0.f, second = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      first = values[j][0].amax(first);
      second = values[j][1].amax(second);
    }
    amax.put(first, second, pairs);
    __syncthreads();
    if (threadIdx.x < kBlocks * kBlocks) {
      const int row = threadIdx.x / kBlocks, column = threadIdx.x % kBlocks;
      scales.put(row, column, amax.scale_of(row, column).byte);
    }
    const int row_block = amax.row_block();
    const float multipliers[2] = {
        amax.scale_of(row_block, amax.column_block(0, pairs)).multiplier,
        amax.scale_of(row_block, amax.column_block(1, pairs)).multiplier};
    const Codes<T> codes(values, multipliers, pairs);

    if (more) load_tile(values, next_m, next, next_begin);  // flies while this tile is stored

    const int64_t matrix = static_cast<int64_t>(tile.matrix) * m.rows * m.columns;
    const int rows = m.rows - tile.row, columns = m.columns - tile.column;
    if (m.straight != nullptr) {
      const int64_t row = tile.row + at.quad * 4;
      codes.store(m.straight + matrix + row * m.columns + tile.column, m.columns,
                  rows - at.quad * 4, columns);
    } else {
      codes.put(flipped);
    }
    __syncthreads();
    store_scales(scales, m, tile);
    if (m.flipped != nullptr) {
      flipped.store<kThreads>(
          m.flipped + matrix + static_cast<int64_t>(tile.column) * m.rows + tile.row, m.rows,
          columns, rows);
    }
    tile = next;
  }
  // The last CTA to come here knows that every other one has read the state.
  if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == static_cast<int32_t>(gridDim.x) - 1)
    state[0] = state[1] = 0;
}

// Codes of native matrices [rows, columns], and their scales along native columns and rows.
struct MxOutput {
  uint8_t *codes, *along_columns, *along_rows;

  MxOutput(const TensorView& codes, const TensorView& along_columns, const TensorView& along_rows,
           const char* name, DLDevice device, int64_t experts, int64_t rows, int64_t columns)
      : codes(aligned_16(checked_bytes(codes, name, device, experts * rows * columns), name)) {
    const int64_t bytes = experts * ceil_div(rows, kTile) * ceil_div(columns, kTile) * kAtomBytes;
    this->along_columns = aligned_16(checked_bytes(along_columns, name, device, bytes), name);
    this->along_rows = aligned_16(checked_bytes(along_rows, name, device, bytes), name);
  }
  Projection<uint8_t> projection(const int64_t* addresses, bool transposed, int64_t rows,
                                 int64_t columns, int64_t half) const {
    // His columns are the native rows where he has the transposed matrix.
    const Output<uint8_t> native{codes, along_columns}, turned{nullptr, along_rows};
    return projection_of(addresses, transposed ? turned : native, transposed ? native : turned,
                         transposed, rows, columns, half);
  }
};

template <typename T>
void launch_squares(const Work<uint8_t>& work, int32_t* state, bool force, int device,
                    cudaStream_t stream) {
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const unsigned ctas = std::min<unsigned>(work.tiles, sms * kMxCtasPerSm<T>);
  quantize_weight_squares<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(work, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Quantise all weights if `force` or state[0] != 0, else do nothing; decided on the device.
// Afterwards state[0] is 0.
//
// w1 e4m3 [E, N1, H] (rows gate_0, up_0, gate_1, ... of split halves), w2 [E, H, I]. Scales of a
// matrix [rows, columns] are [E, ceil(rows/128), ceil(columns/128), 512] where the columns are
// contracted, as in forward, and [E, ceil(columns/128), ceil(rows/128), 512] where the rows are. The
// rest: see `check_weights`.
void quantize_weights_iso32(TensorView addresses, TensorView w1, TensorView w1_along_columns,
                            TensorView w1_along_rows, TensorView w2, TensorView w2_along_columns,
                            TensorView w2_along_rows, bool transposed, bool split_half,
                            bool apart, tvm::ffi::String dtype, TensorView state, bool force,
                            int64_t stream) {
  TVM_FFI_ICHECK(w1.ndim() == 3 && w2.ndim() == 3) << "w1 must be [E, N1, H], w2 [E, H, I]";
  const Layout layout(addresses, w1.size(1), w1.size(2), w2.size(2), transposed, split_half, apart,
                      dtype);
  TVM_FFI_ICHECK(w1.size(0) == layout.experts && w2.size(0) == layout.experts &&
                 w2.size(1) == layout.hidden)
      << "w1, w2 and the addresses are of different experts or sizes";
  const DLDevice device = addresses.device();
  const int64_t experts = layout.experts, n1 = layout.n1, hidden = layout.hidden,
                inner = layout.intermediate;
  const MxOutput up(w1, w1_along_columns, w1_along_rows, "w1", device, experts, n1, hidden);
  const MxOutput down(w2, w2_along_columns, w2_along_rows, "w2", device, experts, hidden, inner);
  Work<uint8_t> work{up.projection(layout.addresses, transposed, layout.up_rows(),
                                   layout.up_columns(), split_half ? inner : 0),
                     down.projection(layout.down_addresses(), transposed, layout.down_rows(),
                                     layout.down_columns(), 0),
                     0, 0};
  const int64_t of_up = experts * work.up.tiles_per_matrix,
                all = of_up + experts * work.down.tiles_per_matrix;
  TVM_FFI_ICHECK(all < (int64_t(1) << 31)) << all << " tiles exceed one launch";
  work.up.second = layout.second();
  work.up_tiles = static_cast<uint32_t>(of_up), work.tiles = static_cast<uint32_t>(all);
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  if (layout.element == ElementType::kBfloat16)
    return launch_squares<__nv_bfloat16>(work, flags, force, device.device_id, as_stream(stream));
  if (layout.element == ElementType::kFloat16)
    return launch_squares<__half>(work, flags, force, device.device_id, as_stream(stream));
  launch_squares<float>(work, flags, force, device.device_id, as_stream(stream));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_weights_iso32, sonicmoe::quantize_weights_iso32);
