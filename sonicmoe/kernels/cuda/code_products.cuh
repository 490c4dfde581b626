// Codes times a factor of up to 16 columns and, from the same reading of the codes, the gradient of
// another factor.
//
// Each CTA takes an even share of all rows, across experts, in tiles of 64 rows. A warpgroup of
// producers copies 64 rows x 128 columns of codes at a time into a ring of stages. Two parts of the CTA
// read each stage:
//
// * One warpgroup multiplies it with the factor, by WGMMA on the codes as they lie. WGMMA takes FP8 on
//   both sides, so each number of the factor becomes two terms: its e4m3 code, and the code of 16 times
//   the rounding error of the first. Both together are as exact as bf16.
// * One warp of the gradient's, the one that has these 128 columns, multiplies the codes with the rows
//   of a narrow operand. It keeps the sums in registers until the expert changes. Then the CTA writes
//   them to `parts`, and `settle_parts` adds those of all CTAs.
//
// Everything is added in a fixed order.
#pragma once

#include <cstdint>

#include "../sm90/ptx.cuh"
#include "../sm90/ring.cuh"
#include "narrow_operands.cuh"
#include "rows_of_experts.cuh"

namespace sonicmoe {
namespace {

constexpr int kTileRows = 64, kStagesOfCodes = 16, kFewColumns = 16;
constexpr int kMostBlocks = 16, kMostOfRow = kMostBlocks * kScaleBlock;  // of 128 columns
constexpr int kStageBytes = kTileRows * kScaleBlock, kFactorBytes = 2 * kFewColumns * kScaleBlock;
constexpr int kNarrowTiles = 3, kGroup = 128;

// out = by * rows * factor^T
struct NarrowWork {
  const int32_t* row_token;
  const int64_t* padded_offsets;
  const uint16_t* factor;  // [E, width, K]
  uint16_t* out;           // [R, width]
  int experts, width;
  float by;
};

// For the kernel of this file, which may compute a gradient too.
struct TileWork : NarrowWork {
  int64_t tiles;
  const uint16_t* narrow;  // [R, width]
  const float* row_prob;   // [R], by which its rows are multiplied, or nullptr: 1
  float* parts;  // [CTAs + E, K, 16]: of CTA i and expert e at i + e
};

// A CTA's shared memory. Behind it lies the factor: for every 128 columns of codes 32 rows of 128
// bytes, the first terms of 16 columns and then the second ones, with the 128-byte swizzle.
struct alignas(1024) TileMemory {
  uint8_t codes[kStagesOfCodes][kStageBytes];  // with the 128-byte swizzle
  float scales[kStagesOfCodes][kTileRows];
  uint16_t narrow[kNarrowTiles][kTileRows * kFewColumns];
  float prob[kNarrowTiles][kTileRows];
  // Multipliers: of narrow rows, for each of the gradient's warps; and of products with the factor.
  float by_row[kMostBlocks][kTileRows], by_column[kMostBlocks][kFewColumns];
  uint64_t full[kStagesOfCodes], empty[kStagesOfCodes];
  uint64_t narrow_full[kNarrowTiles], narrow_empty[kNarrowTiles], factor_full, factor_empty;
  static int bytes(int blocks) {  // and what aligning it takes
    return static_cast<int>(sizeof(TileMemory)) + blocks * kFactorBytes + 1024;
  }
};

// The share of a CTA, in tiles.
__device__ __forceinline__ int64_t first_tile(int64_t tiles, int cta, int ctas) {
  return tiles * cta / ctas;
}

// The expert of a CTA's tiles, one after the other. A whole warp asks.
struct ExpertOfTile {
  const TileWork& work;
  int expert = -1;
  int64_t until = 0;  // the rows of `expert` end
  __device__ __forceinline__ bool ends_before(int64_t tile) const { return tile * kTileRows >= until; }
  // The expert of this tile. Lanes look at one offset each, because a search would wait for one after
  // the other. The rows behind the last expert's count as its own; they have no tokens.
  __device__ __forceinline__ void find(int64_t tile) {
    const int64_t row = tile * kTileRows;
    uint32_t before = 0, next = ~0u;
    for (int e = 1 + threadIdx.x % 32; e < work.experts; e += 32) {
      const int64_t offset = work.padded_offsets[e];
      before += offset <= row;
      next = offset > row ? min(next, static_cast<uint32_t>(offset)) : next;
    }
    expert = static_cast<int>(__reduce_add_sync(kFull, before));
    next = __reduce_min_sync(kFull, next);
    until = next == ~0u ? INT64_MAX : next;
  }
};

// The producers: a stage for every 128 columns of every tile, with the scales of its rows; and once a
// tile, for the gradient, the narrow rows and what they are multiplied by.
template <bool kGradient>
__device__ __forceinline__ void copy_tiles(const CodeRows& rows, const TileWork& work, TileMemory& s,
                                           int64_t from, int64_t to) {
  const int thread = threadIdx.x, unit = thread % 8, own_row = thread / 8;
  const int blocks = rows.blocks();
  const uint32_t units_of_row = rows.width / 16;
  const uint32_t scales_of_row = rows.scales_of_row();
  // Within a stage, of this thread's first row; its others are 16 rows apart.
  const uint32_t place = sm90::chunk_address(0, own_row, unit);
  const auto token_of = [&](int64_t tile, int row) {
    return tile < to ? work.row_token[tile * kTileRows + row] : -1;
  };
  int next[4], next_of_scale;
  const auto load_tokens = [&](int64_t tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) next[i] = token_of(tile, own_row + 16 * i);
    next_of_scale = token_of(tile, thread % kTileRows);
  };
  load_tokens(from);
  sm90::RingOf<kStagesOfCodes> ring;
  sm90::RingOf<kNarrowTiles> of_narrow;
  for (int64_t tile = from; tile < to; ++tile) {
    const int64_t row0 = tile * kTileRows;
    uint32_t source[4], has_token = 0;  // in units of 16 bytes
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t row =
          rows.gathers ? max(next[i], 0) : static_cast<uint32_t>(row0) + own_row + 16 * i;
      source[i] = row * units_of_row + (unit < units_of_row ? unit : 0);
      has_token |= static_cast<uint32_t>(next[i] >= 0) << i;
    }
    const bool scale_wanted = next_of_scale >= 0 && thread < kTileRows;
    const uint32_t row_of_scale = rows.gathers ? max(next_of_scale, 0)
                                               : static_cast<uint32_t>(row0) + thread % kTileRows;
    const float* scale = rows.scales + (row_of_scale >> rows.log2_rows) * scales_of_row;
    if constexpr (kGradient) {
      sm90::barrier_wait(&s.narrow_empty[of_narrow.stage], of_narrow.phase ^ 1);
      const int row = thread / 2, half = thread % 2;
      const bool wanted = work.row_token[row0 + row] >= 0 && 8 * half < work.width;
      sm90::cp_async_16(sm90::smem_address(&s.narrow[of_narrow.stage][8 * thread]),
                        work.narrow + (wanted ? (row0 + row) * work.width + 8 * half : 0), wanted);
      if (work.row_prob != nullptr && thread < kTileRows)
        sm90::cp_async_4(&s.prob[of_narrow.stage][thread], work.row_prob + row0 + thread, scale_wanted);
      sm90::cp_async_arrive(&s.narrow_full[of_narrow.stage]);
      of_narrow.advance();
    }
    load_tokens(tile + 1);
    for (int block = 0; block < blocks; ++block) {
      sm90::barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      const bool inside = 8 * block + unit < units_of_row;
      const uint32_t at = sm90::smem_address(s.codes[ring.stage]) + place;
      const uint8_t* codes = rows.data + (inside ? block * kScaleBlock : 0);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        sm90::cp_async_16(at + i * 16 * kScaleBlock, codes + static_cast<uint64_t>(source[i]) * 16,
                          inside && has_token >> i & 1);
      if (thread < kTileRows)
        sm90::cp_async_4(&s.scales[ring.stage][thread],
                         scale + (block * kScaleBlock >> rows.log2_columns), scale_wanted);
      sm90::cp_async_arrive(&s.full[ring.stage]);
      ring.advance();
    }
  }
}

// 128 columns of the factor of an expert, by one warp: half of its rows at a time, as two e4m3 terms.
// Every row has a unit of its own there, a power of two that brings its largest number into [128, 256).
struct FactorBlock {
  static constexpr int kLeast = 8, kMost = 254;  // biased exponents of units
  static constexpr int kLoads = 4;
  const uint16_t* source;  // of the expert
  int width, columns, block, lane;
  __device__ __forceinline__ FactorBlock(const CodeRows& rows, const TileWork& work, int expert,
                                         int block_, int lane_)
      : source(work.factor + static_cast<int64_t>(expert) * work.width * rows.width),
        width(work.width),
        columns(rows.width),
        block(block_),
        lane(lane_) {}
  // Two rows a load, half a warp each.
  __device__ __forceinline__ int row(int half, int i) const { return 8 * half + 2 * i + lane / 16; }
  __device__ __forceinline__ void load(int half, uint4 (&v)[kLoads]) const {
    const int column = block * kScaleBlock + lane % 16 * 8;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool wanted = row(half, i) < width && column < columns;
      v[i] = load_if(wanted, wanted ? source + row(half, i) * static_cast<int64_t>(columns) + column
                                    : source);
    }
  }
  __device__ __forceinline__ void store(int half, const uint4 (&v)[kLoads], TileMemory& s,
                                        uint8_t* factor) const {
    const int unit = lane % 16;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int n = row(half, i);
      const uint32_t word[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
      uint32_t top = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) top = __vmaxu2(top, word[k] & 0x7fff7fffu);
      top = max(top & 0xffffu, top >> 16);
#pragma unroll
      for (int apart = 8; apart > 0; apart /= 2) top = max(top, __shfl_xor_sync(kFull, top, apart));
      const int exponent = min(max(static_cast<int>(top >> 7), kLeast), kMost);
      const float into = __uint_as_float((261 - exponent) << 23);
      uint32_t first[2], second[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float x[4] = {into * __uint_as_float(word[2 * k] << 16),
                            into * __uint_as_float(word[2 * k] & 0xffff0000u),
                            into * __uint_as_float(word[2 * k + 1] << 16),
                            into * __uint_as_float(word[2 * k + 1] & 0xffff0000u)};
        first[k] = e4m3x4(x[0], x[1], x[2], x[3]);
        uint32_t low, high;
        fp16_of_codes(first[k], low, high);
        const float2 a = __half22float2(reinterpret_cast<const __half2&>(low)),
                     b = __half22float2(reinterpret_cast<const __half2&>(high));
        second[k] = e4m3x4(16.f * (x[0] - a.x), 16.f * (x[1] - a.y), 16.f * (x[2] - b.x),
                           16.f * (x[3] - b.y));
      }
      const uint32_t at =
          sm90::chunk_address(sm90::smem_address(factor) + block * kFactorBytes, n, unit / 2) +
          8 * (unit % 2);
      sm90::store_shared_8(at, first[0], first[1]);
      sm90::store_shared_8(at + kFewColumns * kScaleBlock, second[0], second[1]);
      // A factor that is not finite makes its column NaN: codes have no infinity.
      if (unit == 0)
        s.by_column[block][n] = top >= 0x7f80u ? __uint_as_float(0x7fffffffu)
                                               : __uint_as_float((exponent - 7) << 23);
    }
  }
};

// A warp's blocks of it, every fourth, each loaded while the one before is converted.
__device__ __forceinline__ void load_factor(const CodeRows& rows, const TileWork& work, TileMemory& s,
                                            uint8_t* factor, int expert, int warp, int lane) {
  const int blocks = rows.blocks();
  FactorBlock now(rows, work, expert, warp, lane);
  uint4 v[2][FactorBlock::kLoads], next[2][FactorBlock::kLoads];
  const auto load = [&](const FactorBlock& of_block, uint4 (&to)[2][FactorBlock::kLoads]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) of_block.load(half, to[half]);
  };
  if (warp < blocks) load(now, v);
  for (; now.block < blocks; now.block += 4) {
    FactorBlock after = now;
    after.block += 4;
    load(after, next);  // zeros behind the last block
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      now.store(half, v[half], s, factor);
#pragma unroll
      for (int i = 0; i < FactorBlock::kLoads; ++i) v[half][i] = next[half][i];
    }
  }
}

// Writes out for a CTA's tiles; one warpgroup.
//
// kGradient: each of the gradient's warps converts a block of the factor. Without a gradient this
// warpgroup converts it.
template <bool kGradient>
__device__ __forceinline__ void multiply_by_factor(const CodeRows& rows, const TileWork& work,
                                                   TileMemory& s, uint8_t* factor, int64_t from,
                                                   int64_t to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, q = lane % 4;
  const int blocks = rows.blocks();
  const uint64_t of_factor = sm90::matrix_descriptor(sm90::smem_address(factor));
  ExpertOfTile current{work};
  sm90::RingOf<kStagesOfCodes> ring;
  uint32_t of_factors = 0;  // the phase of the barriers of factors
  for (int64_t tile = from; tile < to; ++tile) {
    if (current.ends_before(tile)) {
      __syncwarp();  // all lanes have read the last factor's units
      if (kGradient && current.expert >= 0 && lane == 0) sm90::barrier_arrive(&s.factor_empty);
      current.find(tile);
      if constexpr (kGradient) {
        sm90::barrier_wait(&s.factor_full, of_factors);
        of_factors ^= 1;
      } else {
        const auto meet = [] { sm90::named_barrier_sync(1, kGroup); };
        meet();  // nobody reads the last factor any more
        load_factor(rows, work, s, factor, current.expert, warp, lane);
        meet();
      }
    }
    float total[2][4] = {};
    for (int block = 0; block < blocks; ++block, ring.advance()) {
      float product[16];
      sm90::barrier_wait(&s.full[ring.stage], ring.phase);
      sm90::fence_async_proxy();  // ordinary copies and stores wrote the codes and the factor
      const uint64_t a = sm90::matrix_descriptor(sm90::smem_address(s.codes[ring.stage])),
                     b = of_factor + block * (kFactorBytes >> 4);
      sm90::fence_registers(product);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kScaleBlock / 32; ++k)
        sm90::wgmma_m64n32k32(product, a + 2 * k, b + 2 * k, k != 0);
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      sm90::fence_registers(product);
      float scale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) scale[h] = s.scales[ring.stage][16 * warp + g + 8 * h];
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(&s.empty[ring.stage]);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 by = *reinterpret_cast<const float2*>(&s.by_column[block][8 * n + 2 * q]);
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int at = 4 * n + 2 * h + c;
            total[n][2 * h + c] +=
                scale[h] *
                ((c == 0 ? by.x : by.y) * (product[at] + product[8 + at] / 16.f));
          }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = tile * kTileRows + 16 * warp + g + 8 * h;
#pragma unroll
      for (int n = 0; n < 2; ++n)
        if (8 * n < work.width)
          *reinterpret_cast<uint32_t*>(work.out + row * work.width + 8 * n + 2 * q) =
              sm90::bf16x2(work.by * total[n][2 * h], work.by * total[n][2 * h + 1]);
    }
  }
}

// Numbers are multiplied by a power of two before they become fp16. `unit` names it: the biased fp32
// exponent of the largest of them, which then lies below 2^15. Numbers down to 2^-38 of the largest
// keep some bits.
constexpr int kLeastUnit = 15;
__device__ __forceinline__ float into_unit(int unit) { return __uint_as_float((268 - unit) << 23); }
__device__ __forceinline__ float out_of_unit(int unit) { return __uint_as_float((unit - 14) << 23); }

// The gradient of a CTA's tiles, in 128 columns of one warp.
__device__ __forceinline__ void sum_tiles(const CodeRows& rows, const TileWork& work, TileMemory& s,
                                          uint8_t* factor, int block, int64_t from, int64_t to) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int blocks = rows.blocks();
  float total[8][2][4];
  int unit_of_total = kLeastUnit;  // of the narrow rows that it was summed of
  ExpertOfTile current{work};
  // Writes what was summed of the expert.
  const auto put_parts = [&] {
    float* out = work.parts +
                 (static_cast<int64_t>(blockIdx.x) + current.expert) * rows.width * kFewColumns;
    const float by = out_of_unit(unit_of_total);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = block * kScaleBlock + 64 * (j / 4) + 8 * g + 2 * (j % 4) + h;
#pragma unroll
        for (int n = 0; n < 2; ++n)
          if (column < rows.width)
            *reinterpret_cast<float2*>(out + column * kFewColumns + 8 * n + 2 * q) =
                make_float2(by * total[j][n][2 * h], by * total[j][n][2 * h + 1]);
      }
  };
  // Where a thread's eight codes of row 2 q of sixteen begin, in the left half of the columns. In row
  // 2 q + 1 they are at the next 128 bytes, and 16 bytes further or nearer.
  const int even = 2 * q * kScaleBlock + ((g / 2 ^ 2 * q) << 4) + 8 * (g % 2);
  // Of four matrices of 8 x 8: the left two of 16 rows, then the right two.
  const int of_narrow_row = lane % 16 * kFewColumns + lane / 16 * 8;
  sm90::RingOf<kStagesOfCodes> ring{block};
  sm90::RingOf<kNarrowTiles> of_narrow;
  uint32_t of_factors = 0;
  for (int64_t tile = from; tile < to; ++tile) {
    if (current.ends_before(tile)) {
      if (current.expert >= 0) put_parts();
      current.find(tile);
      const FactorBlock of_block(rows, work, current.expert, block, lane);
      sm90::barrier_wait(&s.factor_empty, of_factors ^ 1);
      of_factors ^= 1;
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        uint4 v[FactorBlock::kLoads];
        of_block.load(half, v);
        of_block.store(half, v, s, factor);
      }
      __syncwarp();
      if (lane == 0) sm90::barrier_arrive(&s.factor_full);
      unit_of_total = kLeastUnit;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][n][i] = 0.f;
    }
    sm90::barrier_wait(&s.narrow_full[of_narrow.stage], of_narrow.phase);
    sm90::barrier_wait(&s.full[ring.stage], ring.phase);
    const uint16_t* narrow = s.narrow[of_narrow.stage];
    uint32_t top = 0;
    float by[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane + 32 * i;
      by[i] = s.scales[ring.stage][row];
      if (work.row_prob != nullptr) by[i] *= s.prob[of_narrow.stage][row];
      s.by_row[block][row] = by[i];
      const uint4* of_row = reinterpret_cast<const uint4*>(narrow + row * kFewColumns);
      const uint4 left = of_row[0], right = of_row[1];
      const uint32_t word[8] = {left.x, left.y, left.z, left.w, right.x, right.y, right.z, right.w};
      uint32_t largest = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) largest = __vmaxu2(largest, word[k] & 0x7fff7fffu);
      largest = max(largest & 0xffffu, largest >> 16);
      if (largest >= 0x7f80u) {  // NaN and infinity need no unit
        largest = 0;
#pragma unroll 1
        for (int k = 0; k < kFewColumns; ++k) {
          const uint32_t bits = narrow[row * kFewColumns + k] & 0x7fffu;
          largest = max(largest, bits < 0x7f80u ? bits : 0);
        }
      }
      const uint32_t size = __float_as_uint(by[i] * __uint_as_float(largest << 16)) & 0x7fffffffu;
      top = max(top, size < 0x7f800000u ? size : 0);
    }
    // Sums are kept in the unit of the largest narrow rows so far.
    const int unit = static_cast<int>(__reduce_max_sync(kFull, top >> 23));
    if (unit > unit_of_total) {
      const float down = __uint_as_float(max(127 + unit_of_total - unit, 0) << 23);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][n][i] *= down;
      unit_of_total = unit;
    }
    const float into = into_unit(unit_of_total);
    __syncwarp();
    const uint32_t codes = sm90::smem_address(s.codes[ring.stage]);
#pragma unroll 1
    for (int step = 0; step < kTileRows / 16; ++step) {
      uint32_t thin[4], b[4];
      sm90::ldmatrix_x4_trans(
          sm90::smem_address(narrow + step * 16 * kFewColumns + of_narrow_row), thin);
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // rows 2 q and 2 q + 1, and those behind the next eight
        const float2 of_rows =
            *reinterpret_cast<const float2*>(&s.by_row[block][16 * step + 8 * i + 2 * q]);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint32_t pair = thin[2 * n + i];
          b[2 * n + i] = half_pair<true>(into * (of_rows.x * __uint_as_float(pair << 16)),
                                         into * (of_rows.y * __uint_as_float(pair & 0xffff0000u)));
        }
      }
      const uint32_t of_step = codes + step * 16 * kScaleBlock;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int of_half = even ^ 64 * half;
        const uint32_t at = of_step + of_half, odd = of_step + kScaleBlock + (of_half ^ 16);
        const uint2 rows_of[4] = {sm90::load_shared_8(at), sm90::load_shared_8(odd),
                                  sm90::load_shared_8(at + 8 * kScaleBlock),
                                  sm90::load_shared_8(odd + 8 * kScaleBlock)};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // Columns 8 g + 2 j and 8 g + 2 j + 1, each of two rows.
          constexpr uint32_t kSelector[2] = {0x5140, 0x7362};
          const auto pick = [&](int row) {
            const uint32_t one = j < 2 ? rows_of[row].x : rows_of[row].y,
                           other = j < 2 ? rows_of[row + 1].x : rows_of[row + 1].y;
            return __byte_perm(one, other, kSelector[j % 2]);
          };
          uint32_t a[4];
          fp16_of_codes(pick(0), a[0], a[1]);
          fp16_of_codes(pick(2), a[2], a[3]);
#pragma unroll
          for (int n = 0; n < 2; ++n)
            multiply_add<true>(total[4 * half + j][n], a, b[2 * n], b[2 * n + 1]);
        }
      }
    }
    __syncwarp();
    if (lane == 0) {
      sm90::barrier_arrive(&s.empty[ring.stage]);
      sm90::barrier_arrive(&s.narrow_empty[of_narrow.stage]);
    }
    ring.advance(blocks);
    of_narrow.advance();
  }
  if (current.expert >= 0) put_parts();
}

// Threads of a CTA: producers, those of the first product, and a warp for each block of columns of the
// gradient, in whole warpgroups.
template <bool kGradient>
constexpr int kMostTileThreads = 2 * kGroup + (kGradient ? 32 * kMostBlocks : 0);

template <bool kGradient>
__global__ void __launch_bounds__(kMostTileThreads<kGradient>, 1)
    multiply_tiles(const CodeRows rows, const TileWork work) {
  extern __shared__ uint8_t shared[];
  TileMemory& s = *reinterpret_cast<TileMemory*>(shared + (-sm90::smem_address(shared) & 1023));
  uint8_t* factor = reinterpret_cast<uint8_t*>(&s + 1);
  const int blocks = rows.blocks(), group = threadIdx.x / kGroup;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStagesOfCodes; ++i) {
      sm90::barrier_init(&s.full[i], kGroup);
      sm90::barrier_init(&s.empty[i], 4 + kGradient);
    }
    for (int i = 0; i < kNarrowTiles; ++i) {
      sm90::barrier_init(&s.narrow_full[i], kGroup);
      sm90::barrier_init(&s.narrow_empty[i], blocks);
    }
    sm90::barrier_init(&s.factor_full, blocks);
    sm90::barrier_init(&s.factor_empty, 4);
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const int64_t from = first_tile(work.tiles, blockIdx.x, gridDim.x),
                to = first_tile(work.tiles, blockIdx.x + 1, gridDim.x);
  if (group == 0) {
    if constexpr (kGradient) sm90::registers_lower<32>();
    copy_tiles<kGradient>(rows, work, s, from, to);
  } else if (group == 1) {
    if constexpr (kGradient) sm90::registers_lower<64>();
    multiply_by_factor<kGradient>(rows, work, s, factor, from, to);
  } else if constexpr (kGradient) {
    sm90::registers_raise<96>();
    const int block = threadIdx.x / 32 - 8;
    if (block < blocks) sum_tiles(rows, work, s, factor, block, from, to);
  }
}

// out[e, c, n] of any strides: the parts of every expert, in the order of the CTAs.
struct SettleWork {
  const int64_t* padded_offsets;
  const float* parts;
  float* out;
  int64_t step, wide_step, narrow_step, tiles;
  int experts, wide, rank, ctas;
};
constexpr int kSettleExperts = 32, kSettlePlaces = 128, kSettleWarps = 8;

__global__ void __launch_bounds__(32 * kSettleWarps) settle_parts(const SettleWork work) {
  __shared__ float tile[kSettleExperts][kSettlePlaces + 1];
  __shared__ int s_first[kSettleExperts], s_last[kSettleExperts];
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32;
  const int place0 = static_cast<int>(blockIdx.x) * kSettlePlaces;  // c and n of the parts
  const int expert0 = static_cast<int>(blockIdx.y) * kSettleExperts;
  if (threadIdx.x < kSettleExperts) {
    const int expert = expert0 + lane;
    int cta = 0, last = -1;
    if (expert < work.experts) {
      const auto tile_of = [&](int e) { return min(work.padded_offsets[e] / kTileRows, work.tiles); };
      const int64_t begin = tile_of(expert), end = tile_of(expert + 1);
      if (begin < end) {
        cta = static_cast<int>(begin * work.ctas / work.tiles);
        while (first_tile(work.tiles, cta + 1, work.ctas) <= begin) ++cta;
        last = cta;
        while (last + 1 < work.ctas && first_tile(work.tiles, last + 1, work.ctas) < end) ++last;
      }
    }
    s_first[lane] = cta, s_last[lane] = last;
  }
  __syncthreads();
  const int64_t step = static_cast<int64_t>(work.wide) * kFewColumns;  // a multiple of 256
  const bool by_experts = work.step == 1;
  const auto put = [&](int expert, int place, float sum) {
    const int c = place / kFewColumns, n = place % kFewColumns;
    if (expert < work.experts && c < work.wide && n < work.rank)
      work.out[expert * work.step + c * work.wide_step + n * work.narrow_step] = sum;
  };
  for (int i = first; i < kSettleExperts; i += kSettleWarps) {
    const int place = place0 + 4 * lane;
    float4 sum = {};
    if (place < step)
      for (int cta = s_first[i]; cta <= s_last[i]; ++cta) {
        const float4 part = *reinterpret_cast<const float4*>(
            work.parts + (static_cast<int64_t>(cta) + expert0 + i) * step + place);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
    const float of_place[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
      by_experts ? void(tile[i][4 * lane + k] = of_place[k])
                 : put(expert0 + i, place + k, of_place[k]);
  }
  if (!by_experts) return;
  __syncthreads();
  for (int i = first; i < kSettlePlaces; i += kSettleWarps)
    put(expert0 + lane, place0 + i, tile[lane][i]);
}

}  // namespace
}  // namespace sonicmoe
