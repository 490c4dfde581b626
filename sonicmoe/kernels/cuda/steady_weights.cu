// The user's expert weights to E4M3 under a recipe whose scales stay along the contraction
// (`row128`, `row128-dx256`): w1 along H as forward reads it, w2 along H as dgrad reads it. The
// other order of each keeps square blocks, or 256 x 128 of w1 in `row128-dx256`, so codes of the
// two orders differ and are both made from the weights.
//
// A scale depends on a whole line of tiles. So a launch of its own finds the maxima of all tiles,
// which costs a second read of the weights, once an optimizer step. Tiles, layouts and the guard
// are those of quantize_weights.cu.
#include <algorithm>

#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"
#include "weight_layout.cuh"
#include "weight_tiles.cuh"

namespace sonicmoe {
namespace {

// Of 16-bit weights; with three, registers spill.
template <typename T>
constexpr int kSteadyCtasPerSm = sizeof(T) == 2 ? 2 : 1;

struct SteadyWork {
  Work<float> work;
  float* amax;              // of every tile, in the order of `tile_at`; at least kAmaxFloor
  bool up_rows, down_rows;  // the line that keeps one scale is a row of the user's tiles, whose
                            // codes then leave straight; else a column, whose codes leave flipped
  bool wide_dgrad;          // two tiles of w1 along N1 share a scale in dgrad's order
};

// Where a tile is, in tiles.
struct Place {
  uint32_t rows, columns, row, column;
  __device__ __forceinline__ Place(const Projection<float>& m, const WeightTile& tile)
      : rows(m.tiles_per_matrix / m.tile_columns),
        columns(m.tile_columns),
        row(tile.row / kTile),
        column(tile.column / kTile) {}
};

__device__ __forceinline__ bool keeps_along_row(const SteadyWork& steady, const WeightTile& tile) {
  return tile.down ? steady.down_rows : steady.up_rows;
}

// state[0] == 0: nothing changed.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kSteadyCtasPerSm<T>)
    amax_of_tiles(const __grid_constant__ SteadyWork steady, int32_t* state, const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kWarps = Lane<T>::kThreads / 32;
  __shared__ float warps[2][kWarps];
  const Work<float>& work = steady.work;
  int turn = 0;
  for (uint32_t index = blockIdx.x; index < work.tiles; index += gridDim.x, turn ^= 1) {
    const WeightTile tile = tile_at(work, index);
    const Projection<float>& m = tile.down ? work.down : work.up;
    Vector16<T> values[4][2];
    load_tile(values, m, tile, beginning_of<T>(m, tile));
    float amax = kAmaxFloor;
#pragma unroll
    for (int j = 0; j < 4; ++j) amax = values[j][1].amax(values[j][0].amax(amax));
    amax = amax_of_lanes<32>(amax);
    if (threadIdx.x % 32 == 0) warps[turn][threadIdx.x / 32] = amax;
    __syncthreads();
    if (threadIdx.x == 0) {
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp) amax = fmaxf(amax, warps[turn][warp]);
      steady.amax[index] = amax;
    }
  }
}

// The largest amax of the line of a tile, in every thread.
__device__ __forceinline__ float amax_of_line(const float* of_matrix, const Place& at,
                                              bool along_row) {
  const float* first = of_matrix + (along_row ? at.row * at.columns : at.column);
  const uint32_t count = along_row ? at.columns : at.rows, step = along_row ? 1 : at.columns;
  float largest = kAmaxFloor;
  for (uint32_t i = threadIdx.x % 32; i < count; i += 32)
    largest = fmaxf(largest, __ldg(first + i * step));
  return amax_of_lanes<32>(largest);
}

// The amax of a tile and of its neighbour across the line: of 256 rows of w1.
__device__ __forceinline__ float amax_of_two(const float* of_matrix, const Place& at,
                                             bool along_row, float amax) {
  const uint32_t row = along_row ? at.row ^ 1 : at.row,
                 column = along_row ? at.column : at.column ^ 1;
  if (row >= at.rows || column >= at.columns) return amax;
  return fmaxf(amax, __ldg(of_matrix + row * at.columns + column));
}

// Scales of a tile in both orders; `steady` belongs to the order whose codes leave straight where
// the line is a row. `two`: the other order has one for two tiles, which the first of them writes.
__device__ __forceinline__ void store_scales(const Projection<float>& m, const WeightTile& tile,
                                             const Place& at, bool along_row, bool two,
                                             float steady, float other) {
  const uint32_t base = tile.matrix * m.tiles_per_matrix;
  const uint32_t straight_at = at.row * at.columns + at.column,
                 flipped_at = at.column * at.rows + at.row;
  (along_row ? m.straight_scale : m.flipped_scale)[base + (along_row ? straight_at : flipped_at)] =
      steady;
  float* others = along_row ? m.flipped_scale : m.straight_scale;
  if (!two) {
    others[base + (along_row ? flipped_at : straight_at)] = other;
    return;
  }
  // H tiles of N1 tiles: the line runs along H.
  const uint32_t h = along_row ? at.column : at.row, hs = along_row ? at.columns : at.rows,
                 n = along_row ? at.row : at.column, ns = along_row ? at.rows : at.columns;
  if (n % 2 == 0) others[(tile.matrix * hs + h) * ((ns + 1) / 2) + n / 2] = other;
}

// Behind `amax_of_tiles`. state: as in quantize_weights.cu; both are 0 again afterwards.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kSteadyCtasPerSm<T>)
    quantize_steady_tiles(const __grid_constant__ SteadyWork steady, int32_t* state,
                          const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kThreads = Lane<T>::kThreads;
  __shared__ ByteTile flipped;
  const Work<float>& work = steady.work;
  const Lane<T> lane;
  Vector16<T> values[4][2];
  for (uint32_t index = blockIdx.x; index < work.tiles; index += gridDim.x) {
    const WeightTile tile = tile_at(work, index);
    const Projection<float>& m = tile.down ? work.down : work.up;
    load_tile(values, m, tile, beginning_of<T>(m, tile));
    const Place at(m, tile);
    const bool along_row = keeps_along_row(steady, tile), two = steady.wide_dgrad && !tile.down;
    const float* of_matrix =
        steady.amax + (tile.down ? work.up_tiles : 0) + tile.matrix * m.tiles_per_matrix;
    const float own = __ldg(of_matrix + at.row * at.columns + at.column),
                largest = amax_of_line(of_matrix, at, along_row),
                kept = keeps_scale(own, largest) ? largest : own,
                other = two ? amax_of_two(of_matrix, at, along_row, own) : own;
    const BlockScale straight = block_scale(along_row ? kept : other),
                     across = block_scale(along_row ? other : kept);
    if (threadIdx.x == 0)
      store_scales(m, tile, at, along_row, two, along_row ? straight.scale_inv : across.scale_inv,
                   along_row ? across.scale_inv : straight.scale_inv);
    const bool pairs = m.column_half != 0;
    const int64_t matrix = static_cast<int64_t>(tile.matrix) * m.rows * m.columns;
    const int rows = m.rows - tile.row, columns = m.columns - tile.column;
    {
      const float by[2] = {straight.multiplier, straight.multiplier};
      const int64_t row = tile.row + lane.quad * 4;
      Codes<T>(values, by, pairs)
          .store(m.straight + matrix + row * m.columns + tile.column, m.columns,
                 rows - lane.quad * 4, columns);
    }
    const float by[2] = {across.multiplier, across.multiplier};
    __syncthreads();  // the tile before has left shared memory
    Codes<T>(values, by, pairs).put(flipped);
    __syncthreads();
    flipped.store<kThreads>(
        m.flipped + matrix + static_cast<int64_t>(tile.column) * m.rows + tile.row, m.rows,
        columns, rows);
  }
  // The last CTA to come here knows that every other one has read the state.
  if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == static_cast<int32_t>(gridDim.x) - 1)
    state[0] = state[1] = 0;
}

Output<float> output_of(const TensorView& codes, const TensorView& scale, const char* name,
                        DLDevice device, int64_t elements, int64_t scales) {
  uint8_t* data = checked<uint8_t>(codes, name, static_cast<DLDataTypeCode>(codes.dtype().code), 8,
                                   device, elements);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " must start on a 16-byte boundary";
  return {data, checked_f32(scale, name, device, scales)};
}

template <typename T>
void launch_tiles(const SteadyWork& steady, int32_t* state, bool force, int device,
                  cudaStream_t stream) {
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const unsigned ctas = std::min<unsigned>(steady.work.tiles, sms * kSteadyCtasPerSm<T>);
  amax_of_tiles<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(steady, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  quantize_steady_tiles<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(steady, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Quantise all weights if `force` or state[0] != 0, else do nothing; decided on the device.
// Afterwards state[0] is 0.
//
// w1 e4m3 [E, N1, H], w2 [E, H, I], w1_dgrad [E, H, N1], w2_dgrad [E, I, H], one fp32 scale per 128
// x 128 block of each; or w1_dgrad_scale [E, ceil(H / 128), ceil(N1 / 256)], one per 256 x 128
// block of w1. tile_amax fp32, one for each 128 x 128 tile of w1 and w2, is overwritten. The rest:
// see `quantize_weights`.
void quantize_steady_weights(TensorView addresses, TensorView w1, TensorView w1_scale,
                             TensorView w2, TensorView w2_scale, TensorView w1_dgrad,
                             TensorView w1_dgrad_scale, TensorView w2_dgrad,
                             TensorView w2_dgrad_scale, TensorView tile_amax, bool transposed,
                             bool split_half, bool apart, tvm::ffi::String dtype,
                             TensorView state, bool force, int64_t stream) {
  TVM_FFI_ICHECK(w1.ndim() == 3 && w2.ndim() == 3) << "w1 must be [E, N1, H], w2 [E, H, I]";
  const Layout layout(addresses, w1.size(1), w1.size(2), w2.size(2), transposed, split_half, apart,
                      dtype);
  TVM_FFI_ICHECK(w1.size(0) == layout.experts && w2.size(0) == layout.experts &&
                 w2.size(1) == layout.hidden)
      << "w1, w2 and the addresses are of different experts or sizes";
  TVM_FFI_ICHECK(w1_dgrad_scale.ndim() == 3)
      << "w1_dgrad_scale must be [E, ceil(H / 128), ceil(N1 / 128 or 256)]";
  const DLDevice device = addresses.device();
  const int64_t experts = layout.experts, h_tiles = ceil_div(layout.hidden, kTile),
                n_tiles = ceil_div(layout.n1, kTile),
                i_tiles = ceil_div(layout.intermediate, kTile);
  const bool wide = w1_dgrad_scale.size(2) < n_tiles;
  const int64_t up_codes = experts * layout.n1 * layout.hidden,
                down_codes = experts * layout.hidden * layout.intermediate,
                up_tiles = experts * n_tiles * h_tiles, down_tiles = experts * h_tiles * i_tiles,
                dgrad_scales = experts * h_tiles * (wide ? ceil_div(n_tiles, 2) : n_tiles);
  const Output<float> forward1 = output_of(w1, w1_scale, "w1", device, up_codes, up_tiles),
                      forward2 = output_of(w2, w2_scale, "w2", device, down_codes, down_tiles),
                      dgrad1 = output_of(w1_dgrad, w1_dgrad_scale, "w1_dgrad", device, up_codes,
                                         dgrad_scales),
                      dgrad2 = output_of(w2_dgrad, w2_dgrad_scale, "w2_dgrad", device, down_codes,
                                         down_tiles);
  TVM_FFI_ICHECK(up_tiles + down_tiles < (int64_t(1) << 31))
      << up_tiles + down_tiles << " tiles exceed one launch";
  SteadyWork steady{};
  Work<float>& work = steady.work;
  work.up = projection_of(layout.addresses, transposed ? dgrad1 : forward1,
                          transposed ? forward1 : dgrad1, transposed, layout.up_rows(),
                          layout.up_columns(), split_half ? layout.intermediate : 0);
  work.down = projection_of(layout.down_addresses(), transposed ? dgrad2 : forward2,
                            transposed ? forward2 : dgrad2, transposed, layout.down_rows(),
                            layout.down_columns(), 0);
  work.up.second = layout.second();
  work.up_tiles = static_cast<uint32_t>(up_tiles);
  work.tiles = static_cast<uint32_t>(up_tiles + down_tiles);
  steady.amax = checked_f32(tile_amax, "tile_amax", device, up_tiles + down_tiles);
  steady.up_rows = !transposed, steady.down_rows = transposed, steady.wide_dgrad = wide;
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  if (layout.element == ElementType::kBfloat16)
    return launch_tiles<__nv_bfloat16>(steady, flags, force, device.device_id, as_stream(stream));
  if (layout.element == ElementType::kFloat16)
    return launch_tiles<__half>(steady, flags, force, device.device_id, as_stream(stream));
  launch_tiles<float>(steady, flags, force, device.device_id, as_stream(stream));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_steady_weights, sonicmoe::quantize_steady_weights);
