// The gradient of a factor from rows of bf16 or fp16 values: sums over an expert's rows of
// narrow^T rows.
//
// A CTA takes 128 columns of the rows, up to 64 of the narrow operand, and a share of an expert's
// rows. One warpgroup copies 64 rows at a time into a ring of stages; the other multiplies them by
// WGMMA, whose operands lie along columns. Everything is added in the order of the rows.
#pragma once

#include <cstdint>

#include "../sm90/ptx.cuh"
#include "code_products.cuh"
#include "narrow_operands.cuh"

namespace sonicmoe {
namespace {

constexpr int kMostColumns = 64;  // of a narrow operand that one CTA takes; wider ones go to several
constexpr int kColumnsOfCta = 128;

struct GradientWork {
  const int32_t* row_token;
  const int64_t* padded_offsets;
  const uint16_t* narrow;  // [R, width]
  const float* row_prob;   // [R], or nullptr: 1
  float* out;              // of expert e, column c of the wide operand and n of the narrow one:
  int64_t step, wide_step, narrow_step, split_step;  // out[e step + c wide_step + n narrow_step]
  int64_t rows;
  int experts, width, rank, wide, splits;
};

// Which rows, columns and columns of the narrow operand a CTA takes.
struct GradientShare {
  int expert, split, first, column;
  int64_t begin, end;  // in blocks of rows
  // gathers: rows are those of tokens, which many experts read. All experts then take the same columns at
  // a time, and these stay in the cache. Rows in order are read once, and all their columns at a time.
  __device__ __forceinline__ GradientShare(const GradientWork& work, bool gathers)
      : expert(gathers ? blockIdx.x : blockIdx.y),
        split(blockIdx.z % work.splits),
        first(blockIdx.z / work.splits * kMostColumns),
        column((gathers ? blockIdx.y : blockIdx.x) * kColumnsOfCta) {
    const auto clamped = [&](int64_t offset) { return min(offset, work.rows) / kBlock; };
    const int64_t from = clamped(work.padded_offsets[expert]),
                  blocks = max(clamped(work.padded_offsets[expert + 1]) - from, int64_t(0));
    begin = from + blocks * split / work.splits;
    end = from + blocks * (split + 1) / work.splits;
  }
};

constexpr int kStagesOfValues = 4;
constexpr int kColumnsBytes = kTileRows * 128;  // of 64 columns of a tile: rows of 128 bytes

struct alignas(1024) ValueMemory {  // with the 128-byte swizzle
  uint8_t values[kStagesOfValues][kColumnsOfCta / 64][kColumnsBytes];
  uint8_t narrow[kStagesOfValues][kColumnsBytes];  // of which kNarrow columns are filled
  uint64_t full[kStagesOfValues], empty[kStagesOfValues];
  static constexpr int bytes() { return static_cast<int>(sizeof(ValueMemory)) + 1024; }
};

// D[64,kNarrow] += A[16,64]^T B[16,kNarrow]
template <bool kFp16, int kNarrow>
__device__ __forceinline__ void multiply_by_columns(float (&d)[kNarrow / 2], uint64_t a, uint64_t b) {
#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SONICMOE_16(type)                                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 1, 1;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n16k16.f32." type                              \
               " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, 1, 1;\n}"                  \
               : R4(0), R4(4)                                                                  \
               : "l"(a), "l"(b))
#define SONICMOE_64(type)                                                                      \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 1, 1;\n"                                      \
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." type                              \
               " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, " \
               "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "  \
               "%32, %33, p, 1, 1, 1, 1;\n}"                                                   \
               : R4(0), R4(4), R4(8), R4(12), R4(16), R4(20), R4(24), R4(28)                   \
               : "l"(a), "l"(b))
  if constexpr (kNarrow == 16 && kFp16)
    SONICMOE_16("f16.f16");
  else if constexpr (kNarrow == 16)
    SONICMOE_16("bf16.bf16");
  else if constexpr (kFp16)
    SONICMOE_64("f16.f16");
  else
    SONICMOE_64("bf16.bf16");
#undef SONICMOE_64
#undef SONICMOE_16
#undef R4
}

// The producers copy this CTA's columns of 64 rows at a time, and the narrow operand of these rows. If
// there are probabilities, they multiply the narrow rows with them on the way.
template <bool kFp16, int kNarrow>
__device__ __forceinline__ void copy_values(const HalfRows<kFp16>& rows, const GradientWork& work,
                                            const GradientShare& share, ValueMemory& s) {
  constexpr int kUnits = kNarrow / 8, kNarrowCopies = kTileRows * kUnits / kGroup;
  const int thread = threadIdx.x, unit = thread % 8, own_row = thread / 8;
  const int64_t end = share.end * (kBlock / kTileRows);
  const auto row_of_narrow = [&](int i) { return (thread + i * kGroup) / kUnits; };
  const auto token_of = [&](int64_t tile, int row) {
    return tile < end ? work.row_token[tile * kTileRows + row] : -1;
  };
  int next[4], next_of_narrow[kNarrowCopies];
  const auto load_tokens = [&](int64_t tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) next[i] = token_of(tile, own_row + 16 * i);
#pragma unroll
    for (int i = 0; i < kNarrowCopies; ++i) next_of_narrow[i] = token_of(tile, row_of_narrow(i));
  };
  int64_t tile = share.begin * (kBlock / kTileRows);
  load_tokens(tile);
  sm90::RingOf<kStagesOfValues> ring;
  for (; tile < end; ++tile, ring.advance()) {
    const int64_t row0 = tile * kTileRows;
    sm90::barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = rows.gathers ? max(next[i], 0) : row0 + own_row + 16 * i;
#pragma unroll
      for (int half = 0; half < kColumnsOfCta / 64; ++half) {
        const int column = share.column + 64 * half + 8 * unit;
        const bool inside = column < rows.width;
        sm90::cp_async_16(
            sm90::chunk_address(sm90::smem_address(s.values[ring.stage][half]), own_row + 16 * i, unit),
            rows.data + 2 * (row * rows.width + (inside ? column : 0)), inside && next[i] >= 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kNarrowCopies; ++i) {
      const int row = row_of_narrow(i), at = (thread + i * kGroup) % kUnits,
                column = share.first + 8 * at;
      const bool wanted = column < work.width && next_of_narrow[i] >= 0;
      const uint16_t* from = wanted ? work.narrow + (row0 + row) * work.width + column : work.narrow;
      const uint32_t to = sm90::chunk_address(sm90::smem_address(s.narrow[ring.stage]), row, at);
      if (work.row_prob == nullptr) {
        sm90::cp_async_16(to, from, wanted);
        continue;
      }
      const uint4 v = load_if(wanted, from);
      const float by = wanted ? work.row_prob[row0 + row] : 0.f;
      uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) word[k] = scaled_pair<kFp16>(word[k], by);
      sm90::store_shared_16(to, word[0], word[1], word[2], word[3]);
    }
    load_tokens(tile + 1);
    sm90::cp_async_arrive(&s.full[ring.stage]);
    sm90::barrier_arrive(&s.full[ring.stage]);  // of what was stored
  }
}

// A warpgroup for copies and one for products.
template <bool kFp16, int kNarrow>
__global__ void __launch_bounds__(2 * kGroup, 2)
    sum_values(const HalfRows<kFp16> rows, const GradientWork work) {
  extern __shared__ uint8_t shared[];
  ValueMemory& s = *reinterpret_cast<ValueMemory*>(shared + (-sm90::smem_address(shared) & 1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStagesOfValues; ++i) {
      sm90::barrier_init(&s.full[i], 2 * kGroup);
      sm90::barrier_init(&s.empty[i], 4);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  const GradientShare share(work, rows.gathers);
  if (threadIdx.x < kGroup) {
    copy_values<kFp16, kNarrow>(rows, work, share, s);
    return;
  }
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = threadIdx.x / 32 % 4;
  constexpr int kHalves = kColumnsOfCta / 64;
  float total[kHalves][kNarrow / 2];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int i = 0; i < kNarrow / 2; ++i) total[half][i] = 0.f;
  const int tiles = static_cast<int>(share.end - share.begin) * (kBlock / kTileRows);
  sm90::RingOf<kStagesOfValues> ring, before;
  const auto release = [&] {
    if (lane == 0) sm90::barrier_arrive(&s.empty[before.stage]);
    before.advance();
  };
  for (int tile = 0; tile < tiles; ++tile, ring.advance()) {
    sm90::barrier_wait(&s.full[ring.stage], ring.phase);
    sm90::fence_async_proxy();  // ordinary copies wrote the stage
    const uint64_t b = sm90::columns_descriptor(sm90::smem_address(s.narrow[ring.stage]), kColumnsBytes);
    constexpr uint64_t kStep = 16 * 128 >> 4;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) sm90::fence_registers(total[half]);
    sm90::wgmma_fence();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t a = sm90::columns_descriptor(
          sm90::smem_address(s.values[ring.stage][half]), kColumnsBytes);
#pragma unroll
      for (int k = 0; k < kTileRows / 16; ++k)
        multiply_by_columns<kFp16, kNarrow>(total[half], a + k * kStep, b + k * kStep);
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<1>();
    __syncwarp();
    if (tile > 0) release();
  }
  sm90::wgmma_wait<0>();
  float* out = work.out + share.split * work.split_step + share.expert * work.step;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    sm90::fence_registers(total[half]);
#pragma unroll
    for (int i = 0; i < kNarrow / 2; ++i) {
      const int c = share.column + 64 * half + 16 * warp + g + 8 * (i / 2 % 2),
                n = share.first + 8 * (i / 4) + 2 * q + i % 2;
      if (c < work.wide && n < work.rank)
        out[c * work.wide_step + n * work.narrow_step] = total[half][i];
    }
  }
}

}  // namespace
}  // namespace sonicmoe
