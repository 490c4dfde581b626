// Tiles of the user's expert weights in the registers of a CTA, from where they lie: which tile, how
// a thread holds its part, and codes on their way out in either memory order.
#pragma once

#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"

namespace sonicmoe {
namespace {

constexpr int kQuads =
    kTile / 4;  // rows of a tile go to threads in fours, which the transposition needs

// One projection: E matrices [rows, columns] of the user in native index order, and where their
// codes go (null: not wanted).
template <typename Scale>
struct Projection {
  const int64_t* addresses;
  uint8_t *straight, *flipped;
  Scale *straight_scale, *flipped_scale;
  int rows, columns;
  int row_half, column_half;  // I along the axis that holds gate and up as halves; else 0
  uint32_t tile_columns, tiles_per_matrix;
  int second;  // where gate and up lie apart: entries of the table from a gate's address to its
               // up's; else 0
};

template <typename Scale>
struct Work {
  Projection<Scale> up, down;
  uint32_t up_tiles, tiles;
};

struct WeightTile {
  bool down;
  uint32_t matrix;
  int row, column;  // the first, native
};

template <typename Scale>
__device__ __forceinline__ WeightTile tile_at(const Work<Scale>& work, uint32_t index) {
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

// Where a user's matrix begins, and, if gate and up rows are halves, where its up rows do.
struct Beginning {
  int64_t matrix, up_rows;
};

template <typename T, typename Scale>
__device__ __forceinline__ Beginning beginning_of(const Projection<Scale>& m,
                                                  const WeightTile& tile) {
  constexpr int64_t kBytes = sizeof(T);
  const int64_t first = __ldg(m.addresses + tile.matrix);
  if (m.second != 0) return {first, __ldg(m.addresses + m.second + tile.matrix)};
  return {first, first + m.row_half * kBytes * m.columns};
}

// Zeros outside the matrix: they change no maximum and are not stored.
template <typename T, typename Scale>
__device__ __forceinline__ void load_tile(Vector16<T> (&values)[4][2], const Projection<Scale>& m,
                                          const WeightTile& tile, const Beginning& beginning) {
  const Lane<T> at;
  const bool pairs = m.column_half != 0;
  const int column = (pairs ? tile.column / 2 : tile.column) + at.lane * at.kCount;
  const int step = pairs ? m.column_half : kTile / 2;
  const int rows[2] = {column < (pairs ? m.column_half : m.columns) ? m.rows : 0,
                       column + step < m.columns ? m.rows : 0};
  const bool halves = m.row_half != 0;  // native row 2 i is gate i then, and 2 i + 1 up i
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int row = tile.row + at.quad * 4 + j, user_row = halves ? row >> 1 : row;
    const int64_t begin = halves && j % 2 == 1 ? beginning.up_rows : beginning.matrix;
    const T* from = reinterpret_cast<const T*>(begin) + column +
                    static_cast<int64_t>(user_row) * m.columns;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      values[j][v].clear();
      if (row < rows[v]) values[j][v].load(from + v * step);
    }
  }
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

// Codes in native column order, with a multiplier for each of the two vectors: words[j][v][i] is at column_of(v, i). Pairs become gate_0, up_0,
// gate_1, up_1 | gate_2, ...
template <typename T>
struct Codes {
  static constexpr int kCount = Lane<T>::kCount, kWords = Lane<T>::kWords;
  uint32_t words[4][2][kWords];
  bool pairs;

  __device__ __forceinline__ Codes(const Vector16<T> (&values)[4][2], const float (&multiplier)[2],
                                   bool pairs)
      : pairs(pairs) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t first = e4m3x4(values[j][0], 4 * i, multiplier[0]),
                       second = e4m3x4(values[j][1], 4 * i, multiplier[1]);
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

// Where the codes of a projection go. Which of the user's orders is native decides the layout.
template <typename Scale>
struct Output {
  uint8_t* codes;
  Scale* scale;
};

template <typename Scale>
Projection<Scale> projection_of(const int64_t* addresses, const Output<Scale>& straight,
                                const Output<Scale>& flipped, bool transposed, int64_t rows,
                                int64_t columns, int64_t half) {
  const int64_t tile_columns = ceil_div(columns, kTile),
                tiles = tile_columns * ceil_div(rows, kTile);
  return {addresses,
          straight.codes,
          flipped.codes,
          straight.scale,
          flipped.scale,
          static_cast<int>(rows),
          static_cast<int>(columns),
          static_cast<int>(transposed ? 0 : half),
          static_cast<int>(transposed ? half : 0),
          static_cast<uint32_t>(tile_columns),
          static_cast<uint32_t>(tiles),
          0};
}

}  // namespace
}  // namespace sonicmoe
