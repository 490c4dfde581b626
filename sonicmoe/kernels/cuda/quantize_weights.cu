// The user's expert weights, where they lie, to E4M3 in both memory orders, one scale per 128 x 128
// block.
//
// A matrix is worked on in the order the user has it ("straight") and leaves a second time
// transposed ("flipped"). Which of the two is native depends on the layout; native w1 interleaves
// gate and up, so a tile of a split-half matrix is read from two places. CTAs are persistent: when
// nothing changed, the whole launch ends after one load per CTA.
#include <tvm/ffi/optional.h>

#include <algorithm>

#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"
#include "weight_layout.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kQuads =
    kTile / 4;  // rows of a tile go to threads in fours, which the transposition needs

// One projection: E matrices [rows, columns] of the user in native index order, and where their
// codes go (null: not wanted).
struct Projection {
  const int64_t* addresses;
  uint8_t *straight, *flipped;
  float *straight_scale, *flipped_scale;
  int rows, columns;
  int row_half, column_half;  // I along the axis that holds gate and up as halves; else 0
  uint32_t tile_columns, tiles_per_matrix;
};

struct Work {
  Projection up, down;
  uint32_t up_tiles, tiles;
};

struct WeightTile {
  bool down;
  uint32_t matrix;
  int row, column;  // the first, native
};

__device__ __forceinline__ WeightTile tile_at(const Work& work, uint32_t index) {
  const bool down = index >= work.up_tiles;
  const uint32_t local = down ? index - work.up_tiles : index;
  const uint32_t per_matrix = down ? work.down.tiles_per_matrix : work.up.tiles_per_matrix;
  const uint32_t tile_columns = down ? work.down.tile_columns : work.up.tile_columns;
  const uint32_t matrix = local / per_matrix, in_matrix = local - matrix * per_matrix;
  const uint32_t tile_row = in_matrix / tile_columns;
  return {down, matrix, static_cast<int>(tile_row * kTile),
          static_cast<int>((in_matrix - tile_row * tile_columns) * kTile)};
}

// How a thread holds its part of a tile: rows 4 quad + j, and of each row two vectors of kCount
// columns. Those are 64 columns apart, or, in a matrix of split-half columns, the gate and the up
// values of the same kCount pairs.
template <typename T>
struct Lane {
  static constexpr int kCount = Vector16<T>::kCount, kLanes = kTile / 2 / kCount,
                       kThreads = kQuads * kLanes, kWords = kCount / 4;
  int quad = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
};

__device__ __forceinline__ int64_t address_of(const Projection& m, const WeightTile& tile) {
  return __ldg(m.addresses + tile.matrix);
}

// Zeros outside the matrix: they change no maximum and are not stored.
template <typename T>
__device__ __forceinline__ void load_tile(Vector16<T> (&values)[4][2], const Projection& m,
                                          const WeightTile& tile, int64_t address) {
  const Lane<T> at;
  const bool pairs = m.column_half != 0;
  const int column = (pairs ? tile.column / 2 : tile.column) + at.lane * at.kCount;
  const int step = pairs ? m.column_half : kTile / 2;
  const int rows[2] = {column < (pairs ? m.column_half : m.columns) ? m.rows : 0,
                       column + step < m.columns ? m.rows : 0};
  const T* source = reinterpret_cast<const T*>(address) + column;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = tile.row + at.quad * 4 + j;
    const int user_row = m.row_half != 0 ? (row & 1) * m.row_half + (row >> 1) : row;
    const T* from = source + static_cast<int64_t>(user_row) * m.columns;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      values[j][v].clear();
      if (row < rows[v]) values[j][v].load(from + v * step);
    }
  }
}

// The maximum over the CTA's threads, in all of them. One barrier; the caller puts another before
// the next call.
template <int kThreads>
__device__ __forceinline__ float amax_of_cta(float amax, float (&warps)[kThreads / 32]) {
  amax = amax_of_lanes<32>(amax);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) amax = fmaxf(amax, warps[warp]);
  return amax;
}

__device__ __forceinline__ void store_words(uint8_t* target, const uint32_t (&w)[2]) {
  *reinterpret_cast<uint2*>(target) = {w[0], w[1]};
}
__device__ __forceinline__ void store_words(uint8_t* target, const uint32_t (&w)[1]) {
  *reinterpret_cast<uint32_t*>(target) = w[0];
}
__device__ __forceinline__ void store_pairs(uint8_t* target, const uint32_t (&w)[2][2]) {
  *reinterpret_cast<uint4*>(target) = {w[0][0], w[1][0], w[0][1], w[1][1]};
}
__device__ __forceinline__ void store_pairs(uint8_t* target, const uint32_t (&w)[2][1]) {
  *reinterpret_cast<uint2*>(target) = {w[0][0], w[1][0]};
}

// Codes in native column order: words[j][v][i] is at column_of(v, i). Pairs become gate_0, up_0,
// gate_1, up_1 | gate_2, ...
template <typename T>
struct Codes {
  static constexpr int kCount = Lane<T>::kCount, kWords = Lane<T>::kWords;
  uint32_t words[4][2][kWords];
  bool pairs;

  __device__ __forceinline__ Codes(const Vector16<T> (&values)[4][2], float multiplier, bool pairs)
      : pairs(pairs) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t first = e4m3x4(values[j][0], 4 * i, multiplier),
                       second = e4m3x4(values[j][1], 4 * i, multiplier);
        words[j][0][i] = __byte_perm(first, second, pairs ? 0x5140 : 0x3210);
        words[j][1][i] = __byte_perm(first, second, pairs ? 0x7362 : 0x7654);
      }
    }
  }
  __device__ __forceinline__ int column_of(int v, int i) const {
    const int column = Lane<T>().lane * kCount + 4 * i;
    return pairs ? 2 * column + 4 * v : column + v * (kTile / 2);
  }
  // To target [4 rows of `stride`] from the tile's first column on.
  __device__ __forceinline__ void store(uint8_t* target, int64_t stride, int rows,
                                        int columns) const {
    const int limit[2] = {column_of(0, 0) < columns ? rows : 0,
                          column_of(1, 0) < columns ? rows : 0};
    if (pairs) {
#pragma unroll
      for (int j = 0; j < 4; ++j, target += stride) {
        if (j < limit[0]) store_pairs(target + column_of(0, 0), words[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j, target += stride) {
        if (j < limit[0]) store_words(target + column_of(0, 0), words[j][0]);
        if (j < limit[1]) store_words(target + column_of(1, 0), words[j][1]);
      }
    }
  }
  __device__ __forceinline__ void put(ByteTile& tile) const {
    const Lane<T> at;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        tile.put(column_of(v, i), at.quad, words[0][v][i], words[1][v][i], words[2][v][i],
                 words[3][v][i]);
    }
  }
};

__device__ __forceinline__ void store_scale(const Projection& m, const WeightTile& tile,
                                            float scale_inv) {
  const uint32_t tile_rows = m.tiles_per_matrix / m.tile_columns, row = tile.row / kTile,
                 column = tile.column / kTile;
  const uint32_t base = tile.matrix * m.tiles_per_matrix;
  if (m.straight != nullptr) m.straight_scale[base + row * m.tile_columns + column] = scale_inv;
  if (m.flipped != nullptr) m.flipped_scale[base + column * tile_rows + row] = scale_inv;
}

template <typename T>
constexpr int kCtasPerSm = sizeof(T) == 2 ? 3 : 1;

// state: [0] != 0 if the weights changed, [1] how many CTAs are done; both are 0 again after a
// launch that did the work.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kCtasPerSm<T>)
    quantize_tiles(const __grid_constant__ Work work, int32_t* state, const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kThreads = Lane<T>::kThreads;
  __shared__ ByteTile flipped;
  __shared__ float warps[kThreads / 32];
  const Lane<T> at;
  Vector16<T> values[4][2];
  WeightTile tile = tile_at(work, blockIdx.x);
  {
    const Projection& m = tile.down ? work.down : work.up;
    load_tile(values, m, tile, address_of(m, tile));
  }
  for (uint32_t index = blockIdx.x; index < work.tiles;) {
    index += gridDim.x;
    const bool more = index < work.tiles;
    const WeightTile next = tile_at(work, more ? index : 0);
    const Projection &m = tile.down ? work.down : work.up,
                     &next_m = next.down ? work.down : work.up;
    const int64_t next_address = address_of(next_m, next);  // long before it is used

    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) amax = values[j][1].amax(values[j][0].amax(amax));
    const BlockScale scale = block_scale(amax_of_cta<kThreads>(amax, warps));
    if (threadIdx.x == 0) store_scale(m, tile, scale.scale_inv);
    const Codes<T> codes(values, scale.multiplier, m.column_half != 0);

    if (more) load_tile(values, next_m, next, next_address);  // flies while this tile is stored

    const int64_t matrix = static_cast<int64_t>(tile.matrix) * m.rows * m.columns;
    const int rows = m.rows - tile.row, columns = m.columns - tile.column;
    if (m.straight != nullptr) {
      const int64_t row = tile.row + at.quad * 4;
      codes.store(m.straight + matrix + row * m.columns + tile.column, m.columns,
                  rows - at.quad * 4, columns);
    }
    codes.put(flipped);
    __syncthreads();
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

struct Output {
  uint8_t* codes;
  float* scale;
};

Output output_of(const TensorView& codes, const TensorView& scale, const char* name,
                 DLDevice device, int64_t experts, int64_t rows, int64_t columns) {
  uint8_t* data = checked<uint8_t>(codes, name, static_cast<DLDataTypeCode>(codes.dtype().code), 8,
                                   device, experts * rows * columns);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " must start on a 16-byte boundary";
  return {data, checked_f32(scale, name, device,
                            experts * ceil_div(rows, kTile) * ceil_div(columns, kTile))};
}

Output output_of(const Optional<TensorView>& codes, const Optional<TensorView>& scale,
                 const char* name, DLDevice device, int64_t experts, int64_t rows,
                 int64_t columns) {
  TVM_FFI_ICHECK(codes.has_value() == scale.has_value())
      << name << " needs both codes and scales, or neither";
  if (!codes.has_value()) return {nullptr, nullptr};
  return output_of(codes.value(), scale.value(), name, device, experts, rows, columns);
}

Projection projection_of(const int64_t* addresses, const Output& forward, const Output& dgrad,
                         const Layout& layout, int64_t rows, int64_t columns, int64_t half) {
  const Output& straight = layout.transposed ? dgrad : forward;
  const Output& flipped = layout.transposed ? forward : dgrad;
  const int64_t tile_columns = ceil_div(columns, kTile),
                tiles = tile_columns * ceil_div(rows, kTile);
  return {addresses,
          straight.codes,
          flipped.codes,
          straight.scale,
          flipped.scale,
          static_cast<int>(rows),
          static_cast<int>(columns),
          static_cast<int>(layout.transposed ? 0 : half),
          static_cast<int>(layout.transposed ? half : 0),
          static_cast<uint32_t>(tile_columns),
          static_cast<uint32_t>(tiles)};
}

template <typename T>
void launch_tiles(const Work& work, int32_t* state, bool force, int device, cudaStream_t stream) {
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const unsigned ctas = std::min<unsigned>(work.tiles, sms * kCtasPerSm<T>);
  quantize_tiles<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(work, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Quantise all weights if `force` or state[0] != 0, else do nothing; decided on the device.
// Afterwards state[0] is 0.
//
// w1 e4m3 [E, N1, H] (rows gate_0, up_0, gate_1, ... of split halves), w2 [E, H, I]; w1_dgrad [E,
// H, N1] and w2_dgrad [E, I, H] are their transposes, or None. Scales fp32, one per 128 x 128
// block. The rest: see `check_weights`.
void quantize_weights(TensorView addresses, TensorView w1, TensorView w1_scale, TensorView w2,
                      TensorView w2_scale, Optional<TensorView> w1_dgrad,
                      Optional<TensorView> w1_dgrad_scale, Optional<TensorView> w2_dgrad,
                      Optional<TensorView> w2_dgrad_scale, bool transposed, bool split_half,
                      tvm::ffi::String dtype, TensorView state, bool force, int64_t stream) {
  TVM_FFI_ICHECK(w1.ndim() == 3 && w2.ndim() == 3) << "w1 must be [E, N1, H], w2 [E, H, I]";
  const Layout layout(addresses, w1.size(1), w1.size(2), w2.size(2), transposed, split_half, dtype);
  TVM_FFI_ICHECK(w1.size(0) == layout.experts && w2.size(0) == layout.experts &&
                 w2.size(1) == layout.hidden)
      << "w1, w2 and the addresses are of different experts or sizes";
  const DLDevice device = addresses.device();
  const int64_t experts = layout.experts, n1 = layout.n1, hidden = layout.hidden,
                inner = layout.intermediate;
  const Output forward1 = output_of(w1, w1_scale, "w1", device, experts, n1, hidden);
  const Output forward2 = output_of(w2, w2_scale, "w2", device, experts, hidden, inner);
  const Output dgrad1 =
      output_of(w1_dgrad, w1_dgrad_scale, "w1_dgrad", device, experts, hidden, n1);
  const Output dgrad2 =
      output_of(w2_dgrad, w2_dgrad_scale, "w2_dgrad", device, experts, inner, hidden);
  Work work{projection_of(layout.addresses, forward1, dgrad1, layout, layout.up_rows(),
                          layout.up_columns(), split_half ? inner : 0),
            projection_of(layout.down_addresses(), forward2, dgrad2, layout, layout.down_rows(),
                          layout.down_columns(), 0),
            0, 0};
  const int64_t up = experts * work.up.tiles_per_matrix,
                all = up + experts * work.down.tiles_per_matrix;
  TVM_FFI_ICHECK(all < (int64_t(1) << 31)) << all << " tiles exceed one launch";
  work.up_tiles = static_cast<uint32_t>(up), work.tiles = static_cast<uint32_t>(all);
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  if (layout.element == ElementType::kBfloat16)
    return launch_tiles<__nv_bfloat16>(work, flags, force, device.device_id, as_stream(stream));
  if (layout.element == ElementType::kFloat16)
    return launch_tiles<__half>(work, flags, force, device.device_id, as_stream(stream));
  launch_tiles<float>(work, flags, force, device.device_id, as_stream(stream));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_weights, sonicmoe::quantize_weights);
