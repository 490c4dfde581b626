// In which order the CTAs of a transposition take its 128 x 128 tiles: all experts of a window of
// tokens together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../numbers.hpp"

namespace sonicmoe {
namespace {

constexpr int kTile = kScaleBlock;

struct Matrix {
  const void* source;
  const float* scale;  // of codes; values have none
  uint8_t* codes_t;
  float* scale_t;
  const float* row_scales;  // [R, 2], of x and of dout; for codes in units of them
  bool of_dout;
};

struct Sizes {
  int64_t rows;                   // R, of the outputs
  unsigned tokens, width, pitch;  // of the source; pitch in bytes
  unsigned row_tiles, column_tiles;
};

struct TransposeWork {
  Matrix matrix[2];  // by blockIdx.y
  const int32_t* row_token;
  const int64_t* padded_offsets;  // [experts + 1]
  unsigned experts, shares_log2;  // the tiles of an expert in a window go to so many groups
  unsigned window_tiles_log2;     // of all experts
  Sizes n;
};

constexpr unsigned kNone = ~0u;

struct TilePlace {
  unsigned row, column;  // in tiles; row is kNone behind the last one
};

// The first row of an expert, or the end of all of them, in tiles.
__device__ __forceinline__ unsigned first_tile(const TransposeWork& launch, unsigned expert) {
  const int64_t row = max(int64_t(0), __ldg(launch.padded_offsets + expert));
  return static_cast<unsigned>(min(static_cast<int64_t>(launch.n.row_tiles), row / kTile));
}

// A CTA takes every gridDim.x-th window of tokens in a column of tiles, its groups the shares of a
// window in turns. Rows of an expert are ordered by token, so that equal parts of all experts hold
// about the same tokens; in another order L1 is of less use.
struct WindowWalk {
  unsigned window, windows_log2, share, turn, row, row_end;

  __device__ WindowWalk(const TransposeWork& launch, unsigned group, unsigned groups)
      : window(blockIdx.x),
        share(group - groups),
        turn(0),
        row(0),
        row_end(0) {  // as after the share before the group's first
    const unsigned tiles_log2 = 31 - __clz(max(1u, first_tile(launch, launch.experts)));
    windows_log2 = tiles_log2 - min(tiles_log2, launch.window_tiles_log2);
  }
  // Experts are staggered: those with fewer tiles than there are windows have theirs in different
  // ones.
  __device__ __forceinline__ void rows_of_share(const TransposeWork& launch) {
    const unsigned expert = share >> launch.shares_log2, windows = 1u << windows_log2;
    const unsigned first = first_tile(launch, expert),
                   end = max(first, first_tile(launch, expert + 1));
    const uint64_t before = static_cast<uint64_t>(window % windows) * (end - first) +
                            __umulhi(expert * 0x9e3779b9u, windows);
    row =
        first + static_cast<unsigned>(before >> windows_log2) + share % (1u << launch.shares_log2);
    row_end = first + static_cast<unsigned>((before + end - first) >> windows_log2);
  }
  __device__ __forceinline__ TilePlace next(const TransposeWork& launch, unsigned group,
                                            unsigned groups) {
    while (row >= row_end) {
      share += groups;
      if (share >= launch.experts << launch.shares_log2) {
        share = (group + ++turn) % groups;
        window += gridDim.x;
      }
      if (window >> windows_log2 >= launch.n.column_tiles) return {kNone, 0};
      rows_of_share(launch);
    }
    const TilePlace tile{row, window >> windows_log2};
    row += 1u << launch.shares_log2;
    return tile;
  }
};

}  // namespace
}  // namespace sonicmoe
