// The narrow products of low-rank adapters on Hopper: rows times a factor of few columns, and the
// gradients of the factors. Wide operands are read once, where they lie: tokens that are gathered,
// rows in expert order, or codes; codes become bf16 exactly, and their scales are multiplied into
// sums or into the narrow operand.
//
// The tensor cores' mma takes its fragments from registers. A contraction may run in any order, if
// both operands have the same one: so a thread loads 16 neighbouring bytes of a row, and what they
// hold is spread over the places of K that are this thread's.
//
// Rows without a token (row_token -1) are read nowhere and come out as zeros. Everything is added in
// a fixed order.
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <type_traits>

#include "../host/border.hpp"
#include "quantize.cuh"
#include "rows_of_experts.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kMostColumns = 64;  // of a narrow operand that one CTA takes; wider ones go to several
constexpr int kBlock = kRowAlignment;
constexpr unsigned kFull = 0xffffffffu;

__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <bool kFp16>
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  if constexpr (kFp16) {
    const __half2 halves = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(halves);
  } else {
    return bf16_pair(low, high);
  }
}
// The two codes that prmt's `selector` spreads over the upper bytes, as bf16; a NaN becomes 480. By
// bits, because conversions run at a quarter of the rate: a code's exponent and mantissa are those of
// the bf16 number 2^120 times smaller, subnormals included.
template <int selector>
__device__ __forceinline__ uint32_t bf16_of_codes(uint32_t word) {
  const uint32_t spread = __byte_perm(word, 0, selector);
  uint32_t pair = (spread & 0x7f007f00u) >> 4 | (spread & 0x80008000u);
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x7b807b80u));  // 2^120
  return pair;
}
// Four codes, and in the highest bit of each byte of `nan` whether one was a NaN.
__device__ __forceinline__ void bf16_of_codes(uint32_t word, uint32_t& low, uint32_t& high,
                                              uint32_t& nan) {
  low = bf16_of_codes<0x1404>(word), high = bf16_of_codes<0x3424>(word);
  nan |= (word & 0x7f7f7f7fu) + 0x01010101u;
}
constexpr uint32_t kNanBits = 0x80808080u;

// D[16,8] += A[16,16] B[8,16]^T. With g = lane / 4 and q = lane % 4, a thread has of A rows g and
// g + 8 at K 2q, 2q + 1 (a[0], a[1]) and 8 further (a[2], a[3]), of B row g at the same places, of D
// rows g and g + 8 at columns 2q, 2q + 1.
template <bool kFp16>
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
#define SONICMOE_MMA(type)                                                                        \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type                                      \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"             \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kFp16)
    SONICMOE_MMA("f16.f16");
  else
    SONICMOE_MMA("bf16.bf16");
#undef SONICMOE_MMA
}

// 16, or 8, bytes that no kernel writes now; zeros where they are not wanted. Without a branch, so that
// a thread has many loads under way.
__device__ __forceinline__ uint4 load_if(bool wanted, const void* address) {
  uint4 v;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(address), "r"(int(wanted)));
  return v;
}
__device__ __forceinline__ uint2 load_8_if(bool wanted, const void* address) {
  uint2 v;
  asm("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\n"
      "@p ld.global.nc.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(v.x), "=&r"(v.y)
      : "l"(address), "r"(int(wanted)));
  return v;
}

// The rows of a wide operand. A thread loads `kChunk` neighbouring columns, 16 bytes, and makes pairs of
// 16-bit values of them; or eight, as `Eight`. `gathers`: a row is that of its token.
template <bool kHalf>
struct HalfRows {
  static constexpr bool kFp16 = kHalf, kScaled = false;
  static constexpr int kChunk = 8;
  const uint8_t* data;
  int width;
  bool gathers;
  using Eight = uint4;
  __device__ __forceinline__ uint4 load(bool wanted, int64_t row, int column) const {
    return load_if(wanted, data + 2 * (row * width + column));
  }
  __device__ __forceinline__ Eight load_8(bool wanted, int64_t row, int column) const {
    return load(wanted, row, column);
  }
  __device__ static __forceinline__ void unpack(const uint4& v, uint32_t (&to)[4], uint32_t&) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  __device__ static __forceinline__ void unpack_8(const Eight& v, uint32_t (&to)[4],
                                                  uint32_t (&nan)[2]) {
    unpack(v, to, nan[0]);
  }
  __device__ __forceinline__ float scale(int64_t, int) const { return 1.f; }
};
struct CodeRows {
  static constexpr bool kFp16 = false, kScaled = true;
  static constexpr int kChunk = 16;
  const uint8_t* data;
  int width;
  bool gathers;
  const float* scales;
  int log2_rows, log2_columns;  // of a block that shares a scale; columns are 128 or 256
  using Eight = uint2;
  __device__ __forceinline__ uint4 load(bool wanted, int64_t row, int column) const {
    return load_if(wanted, data + row * width + column);
  }
  __device__ __forceinline__ Eight load_8(bool wanted, int64_t row, int column) const {
    return load_8_if(wanted, data + row * width + column);
  }
  __device__ static __forceinline__ void unpack(const uint4& v, uint32_t (&to)[8], uint32_t& nan) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) bf16_of_codes(word[i], to[2 * i], to[2 * i + 1], nan);
  }
  __device__ static __forceinline__ void unpack_8(const Eight& v, uint32_t (&to)[4],
                                                  uint32_t (&nan)[2]) {
    bf16_of_codes(v.x, to[0], to[1], nan[0]);
    bf16_of_codes(v.y, to[2], to[3], nan[1]);
  }
  __device__ __forceinline__ float scale(int64_t row, int column) const {
    const int columns = (width + (1 << log2_columns) - 1) >> log2_columns;
    return scales[(row >> log2_rows) * columns + (column >> log2_columns)];
  }
};
// Codes [columns, rows] with a scale for 128 x 128, as operands of wgrad lie.
struct TransposedCodes {
  static constexpr bool kFp16 = false, kScaled = true;
  const uint8_t* data;
  int64_t rows;
  const float* scales;
  __device__ __forceinline__ uint2 load_8(bool wanted, int64_t first_row, int column) const {
    return load_8_if(wanted, data + column * rows + first_row);
  }
  __device__ static __forceinline__ void unpack_8(const uint2& v, uint32_t (&to)[4],
                                                  uint32_t& nan) {
    bf16_of_codes(v.x, to[0], to[1], nan);
    bf16_of_codes(v.y, to[2], to[3], nan);
  }
  __device__ __forceinline__ float scale(int64_t row, int column) const {
    return scales[column / kScaleBlock * (rows / kBlock) + row / kBlock];
  }
};

template <class Wide>
__host__ __device__ __forceinline__ bool gathers_rows(const Wide& wide) {
  if constexpr (std::is_same_v<Wide, TransposedCodes>)
    return false;
  else
    return wide.gathers;
}

struct NarrowWork {
  const int32_t* row_token;
  const int64_t* padded_offsets;
  const uint16_t* factor;  // [E, width, K]
  uint16_t* out;           // [R, width]
  int experts, width;
  float by;
};

constexpr int kRowWarps = 4, kRowsOfWarp = kBlock / kRowWarps;
// Columns of the factor that a CTA takes: partial sums of codes need registers of their own.
template <class Rows>
constexpr int kColumnsOfFactor = Rows::kScaled ? kMostColumns / 2 : kMostColumns;

// out[row] = by * rows[row] * factor[expert]^T. A CTA takes a block of rows, and 8 kTiles columns of
// the factor, the blockIdx.y-th `kColumnsOfFactor`.
template <class Rows, int kTiles>
__global__ void __launch_bounds__(32 * kRowWarps)
    narrow_rows_of(const Rows rows, const NarrowWork work) {
  constexpr int kWords = Rows::kChunk / 2, kPasses = kRowsOfWarp / 16;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kBlock,
                first_row = block + threadIdx.x / 32 * kRowsOfWarp;
  const int first = blockIdx.y * kColumnsOfFactor<Rows>;
  const int expert = expert_of(work.padded_offsets, work.experts, block);
  int64_t source[kPasses][2];
#pragma unroll
  for (int t = 0; t < kPasses; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = first_row + 16 * t + 8 * h + g;
      const int token = work.row_token[row];
      source[t][h] = token < 0 ? -1 : rows.gathers ? token : row;
    }
  const uint16_t* factor = work.factor + (static_cast<int64_t>(expert) * work.width + first + g) *
                                             static_cast<int64_t>(rows.width);
  float total[kPasses][kTiles][4] = {};
  uint32_t nan[kPasses][2] = {};  // of codes, in this thread's part of a row
  for (int begin = 0; begin < rows.width; begin += kScaleBlock) {
    float part[kPasses][kTiles][4];
    if constexpr (Rows::kScaled) {
#pragma unroll
      for (int t = 0; t < kPasses; ++t)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) part[t][n][i] = 0.f;
    }
    // Not unrolled where codes and partial sums take the registers.
#pragma unroll (Rows::kScaled && kTiles > 2 ? 1 : 4)
    for (int step = 0; step < kScaleBlock; step += 4 * Rows::kChunk) {
      const int column = begin + step + q * Rows::kChunk;
      const bool inside = column < rows.width;
      uint4 packed[kPasses][2], of_factor[kTiles][kWords / 4];
#pragma unroll
      for (int t = 0; t < kPasses; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          packed[t][h] = rows.load(inside && source[t][h] >= 0, source[t][h], column);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i)
          of_factor[n][i] =
              load_if(inside && first + 8 * n + g < work.width,
                      factor + 8 * n * static_cast<int64_t>(rows.width) + column + 8 * i);
      uint32_t wide[kPasses][2][kWords], narrow[kTiles][kWords];
#pragma unroll
      for (int t = 0; t < kPasses; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) Rows::unpack(packed[t][h], wide[t][h], nan[t][h]);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int i = 0; i < kWords / 4; ++i) {
          const uint4& v = of_factor[n][i];
          narrow[n][4 * i] = v.x, narrow[n][4 * i + 1] = v.y, narrow[n][4 * i + 2] = v.z;
          narrow[n][4 * i + 3] = v.w;
        }
#pragma unroll
      for (int i = 0; i < kWords; i += 2)
#pragma unroll
        for (int t = 0; t < kPasses; ++t) {
          const uint32_t a[4] = {wide[t][0][i], wide[t][1][i], wide[t][0][i + 1],
                                 wide[t][1][i + 1]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            multiply_add<Rows::kFp16>(Rows::kScaled ? part[t][n] : total[t][n], a, narrow[n][i],
                                      narrow[n][i + 1]);
        }
    }
    if constexpr (Rows::kScaled) {
#pragma unroll
      for (int t = 0; t < kPasses; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float scale = source[t][h] < 0 ? 0.f : rows.scale(source[t][h], begin);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) total[t][n][2 * h + i] += scale * part[t][n][2 * h + i];
        }
    }
  }
#pragma unroll
  for (int t = 0; t < kPasses; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = first_row + 16 * t + 8 * h + g;
      float by = work.by;
      if constexpr (Rows::kScaled) {
        uint32_t any = nan[t][h] & kNanBits;
        any |= __shfl_xor_sync(kFull, any, 1);
        any |= __shfl_xor_sync(kFull, any, 2);
        by = any != 0 ? __uint_as_float(0x7fffffffu) : by;
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int column = first + 8 * n + 2 * q;
        if (column >= work.width) continue;
        const float low = by * total[t][n][2 * h], high = by * total[t][n][2 * h + 1];
        *reinterpret_cast<uint32_t*>(work.out + row * work.width + column) =
            half_pair<Rows::kFp16>(low, high);
      }
    }
}

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

constexpr int kGradientWarps = 8, kColumnsOfCta = 128, kColumnsOfWarp = 64;
constexpr int kRowGroups = kGradientWarps * kColumnsOfWarp / kColumnsOfCta,
              kRowsOfGroup = kBlock / kRowGroups;
constexpr int kPitch = kBlock + 8;  // of the transposed narrow operand: no two lanes share a bank

// out += narrow[rows of an expert]^T * wide[rows of an expert]. A CTA takes 128 columns of the wide
// operand, 8 kTiles of the narrow one, and a share of an expert's blocks of rows; its warps 64 of the
// columns and every fourth of a block's rows.
template <class Wide, int kTiles>
__global__ void __launch_bounds__(32 * kGradientWarps, kTiles <= 2 ? 2 : 1)
    sum_gradients(const Wide wide, const GradientWork work) {
  constexpr int kNarrow = 8 * kTiles;
  constexpr bool kTransposed = std::is_same_v<Wide, TransposedCodes>;
  __shared__ union {
    uint16_t narrow[2][kNarrow][kPitch];
    float sums[kColumnsOfCta][kNarrow + 1];
  } s;
  __shared__ int s_token[2][kBlock];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = threadIdx.x / 32;
  const int half = warp % 2, group = warp / 2;
  // Gathered rows are read by many experts: all of these take the same columns at a time, which stay in
  // the cache. Rows in order are read once, and all their columns at a time.
  const bool gathers = gathers_rows(wide);
  const int expert = gathers ? blockIdx.x : blockIdx.y, split = blockIdx.z % work.splits,
            first = blockIdx.z / work.splits * kMostColumns;
  const int cta_column = (gathers ? blockIdx.y : blockIdx.x) * kColumnsOfCta,
            column = cta_column + half * kColumnsOfWarp;
  const auto clamped = [&](int64_t offset) { return min(offset, work.rows) / kBlock; };
  const int64_t from = clamped(work.padded_offsets[expert]),
                blocks = max(clamped(work.padded_offsets[expert + 1]) - from, int64_t(0)),
                begin = from + blocks * split / work.splits,
                end = from + blocks * (split + 1) / work.splits;
  float total[4][kTiles][4] = {};
  // Of codes, in this thread's rows of its columns: of the eight beside each other, or of each.
  uint32_t nan[2] = {}, nan_of[4][2] = {};
  // A block's narrow rows, transposed, times what belongs to them: a probability, and the scale of
  // the codes, which are the same in all columns of this CTA. This waits for loads, so those of the
  // wide rows of the block before are sent off first.
  const auto stage = [&](int64_t block, int buffer) {
    constexpr int kParts = kNarrow / 8;
    if (threadIdx.x < kBlock) s_token[buffer][threadIdx.x] = work.row_token[block * kBlock + threadIdx.x];
    for (int i = threadIdx.x; i < kBlock * kParts; i += 32 * kGradientWarps) {
      const int r = i / kParts, part = i % kParts;
      const int64_t row = block * kBlock + r;
      // All of a row is on its way before anybody looks at its token.
      const int token = work.row_token[row];
      const uint4 v = load_if(first + 8 * part < work.width,
                              work.narrow + row * work.width + first + 8 * part);
      float by = work.row_prob != nullptr ? work.row_prob[row] : 1.f;
      if constexpr (Wide::kScaled) {
        int64_t of_scale = row;
        if constexpr (!kTransposed) of_scale = wide.gathers ? max(token, 0) : row;
        by *= wide.scale(of_scale, cta_column);
      }
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t pair = word[k];
        if (Wide::kScaled || work.row_prob != nullptr) {
          if constexpr (Wide::kFp16) {
            const __half2 scaled = __floats2half2_rn(
                by * __half2float(__ushort_as_half(static_cast<unsigned short>(pair))),
                by * __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16))));
            pair = reinterpret_cast<const uint32_t&>(scaled);
          } else {
            pair = bf16_pair(by * __uint_as_float(pair << 16),
                             by * __uint_as_float(pair & 0xffff0000u));
          }
        }
        pair = token < 0 ? 0 : pair;
        s.narrow[buffer][8 * part + 2 * k][r] = static_cast<uint16_t>(pair);
        s.narrow[buffer][8 * part + 2 * k + 1][r] = static_cast<uint16_t>(pair >> 16);
      }
    }
  };
  if (begin < end) stage(begin, 0);
  for (int64_t block = begin; block < end; ++block) {
    const int buffer = (block - begin) % 2;
    __syncthreads();
    constexpr int kSteps = kRowsOfGroup / 16;
    if constexpr (kTransposed) {
      // Eight rows of a thread are the places of K of both steps.
      const int row = group * kRowsOfGroup + 8 * q;
      uint2 packed[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int c = column + 16 * j + 8 * h + g;
          packed[j][h] = wide.load_8(c < work.wide, block * kBlock + row, c);
        }
      if (block + 1 < end) stage(block + 1, buffer ^ 1);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t codes[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) Wide::unpack_8(packed[j][h], codes[h], nan_of[j][h]);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const uint32_t a[4] = {codes[0][2 * k], codes[1][2 * k], codes[0][2 * k + 1],
                                 codes[1][2 * k + 1]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint32_t* b =
                reinterpret_cast<const uint32_t*>(&s.narrow[buffer][8 * n + g][row + 4 * k]);
            multiply_add<false>(total[j][n], a, b[0], b[1]);
          }
        }
      }
    } else {
      typename Wide::Eight packed[kSteps][4];
      const bool inside = column + 8 * g < work.wide;
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = group * kRowsOfGroup + 16 * k + 2 * q + i % 2 + 8 * (i / 2);
          const int64_t row = block * kBlock + r;
          const int token = s_token[buffer][r];
          packed[k][i] =
              wide.load_8(inside && token >= 0, wide.gathers ? token : row, column + 8 * g);
        }
      if (block + 1 < end) stage(block + 1, buffer ^ 1);
      uint32_t values[kSteps][4][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) Wide::unpack_8(packed[k][i], values[k][i], nan);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int row = group * kRowsOfGroup + 16 * k + 2 * q;
        const auto& v = values[k];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const uint32_t a[4] = {
              __byte_perm(v[0][j], v[1][j], 0x5410), __byte_perm(v[0][j], v[1][j], 0x7632),
              __byte_perm(v[2][j], v[3][j], 0x5410), __byte_perm(v[2][j], v[3][j], 0x7632)};
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const uint16_t* b = &s.narrow[buffer][8 * n + g][row];
            multiply_add<Wide::kFp16>(total[j][n], a, *reinterpret_cast<const uint32_t*>(b),
                                      *reinterpret_cast<const uint32_t*>(b + 8));
          }
        }
      }
    }
  }
  // The rows' groups in their order.
  for (int turn = 0; turn < kRowGroups; ++turn) {
    __syncthreads();
    if (turn != group) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int c = half * kColumnsOfWarp + (kTransposed ? 16 * j + 8 * h + g : 8 * g + 2 * j + h);
        float spoilt = 0.f;  // or a NaN
        if constexpr (Wide::kScaled) {
          uint32_t any = kTransposed ? nan_of[j][h] & kNanBits
                                     : nan[j / 2] >> (8 * (2 * (j % 2) + h)) & 0x80u;
          any |= __shfl_xor_sync(kFull, any, 1);
          any |= __shfl_xor_sync(kFull, any, 2);
          spoilt = any != 0 ? __uint_as_float(0x7fffffffu) : 0.f;
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& sum = s.sums[c][8 * n + 2 * q + i];
            sum = (turn == 0 ? 0.f : sum) + total[j][n][2 * h + i] + spoilt;
          }
      }
  }
  __syncthreads();
  float* out = work.out + split * work.split_step + expert * work.step;
  const bool by_columns = work.wide_step < work.narrow_step;
  for (int i = threadIdx.x; i < kColumnsOfCta * kNarrow; i += 32 * kGradientWarps) {
    const int c = by_columns ? i % kColumnsOfCta : i / kNarrow,
              n = by_columns ? i / kColumnsOfCta : i % kNarrow;
    if (cta_column + c >= work.wide || first + n >= work.rank) continue;
    out[(cta_column + c) * work.wide_step + (first + n) * work.narrow_step] = s.sums[c][n];
  }
}

// What lies in `parts` as [E, rows, columns], of all splits, to an out of these strides.
struct SplitWork {
  const float* parts;
  float* out;
  int64_t elements, strides[3];
  int splits, rows, columns;
};

__global__ void __launch_bounds__(256) add_splits(const SplitWork work) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= work.elements) return;
  float sum = 0.f;
  for (int split = 0; split < work.splits; ++split) sum += work.parts[split * work.elements + i];
  const int64_t matrix = static_cast<int64_t>(work.rows) * work.columns, expert = i / matrix;
  const int place = static_cast<int>(i - expert * matrix);
  work.out[expert * work.strides[0] + place / work.columns * work.strides[1] +
           place % work.columns * work.strides[2]] = sum;
}

// ---- both products of rows of codes with up to 16 columns, each code read once ----

// A warp has 128 columns, of which sixteen rows at a time come into shared memory, two chunks ahead. It
// multiplies them with its part of the factor, whose sums the last warp of a chunk adds in the order of
// the warps, and sums their products with the rows of another narrow operand in registers until the
// expert changes. A CTA has an even share of all rows; what it sums of an expert waits in `parts` for
// `settle_parts`. Warps meet nowhere: one waits for another only where that is two chunks behind.
constexpr int kChunkRows = 16, kChunks = 3, kMostWarps = 16, kFewColumns = 16, kSumsInTurn = 2;
constexpr int kMostOfRow = kMostWarps * kScaleBlock, kSumsOfWarp = kChunkRows * kFewColumns;

struct ChunkWork {
  const int32_t* row_token;
  const int64_t* padded_offsets;
  const uint16_t* factor;  // [E, width, K]
  uint16_t* out;           // [R, width]: by * rows * factor^T
  const uint16_t* narrow;  // [R, width], and what a row's is multiplied by, or nullptr: 1
  const float* row_prob;
  float* parts;  // [CTAs + E, K, 16]: of CTA i and expert e at i + e
  int64_t chunks;
  int experts, width;
  float by;
};

// A warp's chunk: 128 columns of codes, their scales, and what belongs to the rows.
template <bool kGradient>
struct alignas(128) Chunk {
  uint8_t codes[kChunkRows][kScaleBlock];
  float scales[kChunkRows];
  float prob[kGradient ? kChunkRows : 0];
  uint16_t narrow[kGradient ? kChunkRows * kFewColumns : 0];
};

// A CTA's shared memory, of as many warps as its rows have blocks of 128 columns.
template <bool kGradient>
struct ChunkMemory {
  uint4* factor;            // of each warp [128 / 16, 32]
  Chunk<kGradient>* ring;   // of each warp kChunks
  float* sums;              // [kSumsInTurn, warps, rows, columns]
  __device__ __forceinline__ ChunkMemory(uint8_t* memory, int warps) {
    factor = reinterpret_cast<uint4*>(memory);
    ring = reinterpret_cast<Chunk<kGradient>*>(factor + warps * kScaleBlock / 16 * 32);
    sums = reinterpret_cast<float*>(ring + warps * kChunks);
  }
  static int bytes(int warps) {
    return warps * static_cast<int>(kScaleBlock / 16 * 32 * sizeof(uint4) +
                                    kChunks * sizeof(Chunk<kGradient>) +
                                    kSumsInTurn * kSumsOfWarp * sizeof(float));
  }
};

// Bytes into shared memory, later; zeros where they are not wanted. kShared: other warps read the same.
template <int kBytes, bool kShared = kBytes < 16>
__device__ __forceinline__ void copy_later(void* to, const void* from, bool wanted) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kShared)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(kBytes), "r"(wanted ? kBytes : 0)
                 : "memory");
  else
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from),
                 "n"(kBytes), "r"(wanted ? kBytes : 0)
                 : "memory");
}
__device__ __forceinline__ void end_of_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_for_all_copies_but_the_last() {
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// The place of sixteen bytes (a unit) within a row of codes. It depends on the row, so that lanes which
// load together use different banks: both where they load four units of two rows, and where they load
// two units of four rows.
__device__ __forceinline__ int swizzled(int row, int unit) {
  return unit ^ ((row & 1) << 2 | (row & 2) | (row >> 2 & 1));
}

// Four codes as fp16, which has the value of every code; a NaN stays one.
__device__ __forceinline__ void fp16_of_codes(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// Numbers are multiplied by a power of two before they become fp16. `unit` names it: the biased fp32
// exponent of the largest of them, which then lies below 2^15. Numbers down to 2^-38 of the largest
// keep some bits.
constexpr int kLeastUnit = 15, kMostUnit = 254;
__device__ __forceinline__ float into_unit(int unit) { return __uint_as_float((268 - unit) << 23); }
__device__ __forceinline__ float out_of_unit(int unit) { return __uint_as_float((unit - 14) << 23); }

// Warps write sums into shared memory for one another. They announce them by these counters.
__device__ __forceinline__ int read_after(const int* number) {
  int value;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];"
               : "=r"(value)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(number)))
               : "memory");
  return value;
}
__device__ __forceinline__ int count_up(int* number) {
  int before;
  asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(number)))
               : "memory");
  return before + 1;
}
__device__ __forceinline__ void write_before(int* number, int value) {
  asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(number))),
               "r"(value)
               : "memory");
}

// The share of a CTA, in chunks.
__device__ __forceinline__ int64_t first_chunk(int64_t chunks, int cta, int ctas) {
  return chunks * cta / ctas;
}

template <bool kGradient>
__global__ void __launch_bounds__(32 * kMostWarps, 1)
    multiply_chunks(const CodeRows rows, const ChunkWork work) {
  extern __shared__ __align__(128) uint8_t shared[];
  // For each of the memories of sums: how many times a warp has left its sums there, and how many
  // times the last warp has added up those of all.
  __shared__ int s_left[kSumsInTurn], s_added[kSumsInTurn];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32, own = warp * kScaleBlock;
  const ChunkMemory<kGradient> memory(shared, warps);
  uint4* factor = memory.factor + warp * (kScaleBlock / 16) * 32;
  Chunk<kGradient>* ring = memory.ring + warp * kChunks;
  const int64_t from = first_chunk(work.chunks, blockIdx.x, gridDim.x),
                to = first_chunk(work.chunks, blockIdx.x + 1, gridDim.x);
  if (threadIdx.x < kSumsInTurn) s_left[threadIdx.x] = s_added[threadIdx.x] = 0;
  __syncthreads();

  const uint32_t scales_of_row = (rows.width + (1 << rows.log2_columns) - 1) >> rows.log2_columns,
                 scale_column = own >> rows.log2_columns, units_of_row = rows.width / 16;
  // The token of row `lane` % 16 of a chunk.
  const auto token_of = [&](int64_t chunk) {
    return chunk < to ? work.row_token[chunk * kChunkRows + lane % kChunkRows] : -1;
  };
  const auto load = [&](int64_t chunk, int own_token) {
    Chunk<kGradient>& to_fill = ring[(chunk - from) % kChunks];
    // The row of the wide operand. A row without a token names row 0, from which nothing is copied.
    const uint32_t row = own_token < 0 ? 0
                         : rows.gathers ? own_token
                                        : static_cast<uint32_t>(chunk) * kChunkRows + lane % kChunkRows;
    const uint32_t has_token = __ballot_sync(kFull, own_token >= 0);
    const int unit = lane % 8;
    const bool inside = own + 16 * unit < rows.width;
    const uint32_t first = row * units_of_row;
#pragma unroll
    for (int i = 0; i < kChunkRows / 4; ++i) {
      const int r = 4 * i + lane / 8;
      const uint32_t at = __shfl_sync(kFull, first, r) + (inside ? own / 16 + unit : 0);
      copy_later<16>(&to_fill.codes[r][16 * swizzled(r, unit)],
                     rows.data + static_cast<uint64_t>(at) * 16, inside && has_token >> r & 1);
    }
    if (lane < kChunkRows)
      copy_later<4>(&to_fill.scales[lane],
                    rows.scales + (row >> rows.log2_rows) * scales_of_row + scale_column,
                    own_token >= 0);
    if constexpr (kGradient) {
      const int r = work.width == 8 ? lane : lane / 2;
      if (r < kChunkRows)
        copy_later<16, true>(&to_fill.narrow[8 * lane],
                             work.narrow + chunk * kChunkRows * work.width + 8 * lane,
                             has_token >> r & 1);
      if (work.row_prob != nullptr && lane < kChunkRows)
        copy_later<4>(&to_fill.prob[lane], work.row_prob + chunk * kChunkRows + lane,
                      own_token >= 0);
    }
  };

  float total[8][2][4] = {};
  int unit_of_total = kLeastUnit;  // of the narrow rows that it was summed of
  float by_column[2][2];           // what the first product is to be multiplied by
  int expert = -1;
  int64_t until = 0;  // the rows of `expert` end
  // Writes what was summed of `expert`, and sets the sums to zero.
  const auto put_parts = [&] {
    float* out = work.parts + (static_cast<int64_t>(blockIdx.x) + expert) * rows.width * kFewColumns;
    const float by = out_of_unit(unit_of_total);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = own + 64 * (j / 4) + 8 * g + 2 * (j % 4) + h;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (column < rows.width)
            *reinterpret_cast<float2*>(out + column * kFewColumns + 8 * n + 2 * q) =
                make_float2(by * total[j][n][2 * h], by * total[j][n][2 * h + 1]);
          total[j][n][2 * h] = total[j][n][2 * h + 1] = 0.f;
        }
      }
    unit_of_total = kLeastUnit;
  };
  // This warp's part of the factor of `expert`, as the fragments of the first product lie, for rows g
  // and g + 8: in fp16, every row in a unit of its own. A lane reads what it wrote.
  const auto load_factor = [&] {
    const uint16_t* source = work.factor + static_cast<int64_t>(expert) * work.width * rows.width;
    uint32_t top[2] = {};
#pragma unroll
    for (int k = 0; k < kScaleBlock / 16; ++k) {
      const int column = own + 64 * (k / 4) + 16 * q + 4 * (k % 4);
      uint2 v[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        v[n] = load_8_if(column < rows.width && 8 * n + g < work.width,
                         source + (8 * n + g) * static_cast<int64_t>(rows.width) + column);
        top[n] = __vmaxu2(top[n], __vmaxu2(v[n].x & 0x7fff7fffu, v[n].y & 0x7fff7fffu));
      }
      factor[k * 32 + lane] = make_uint4(v[0].x, v[0].y, v[1].x, v[1].y);
    }
    float into[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t largest = max(top[n] & 0xffffu, top[n] >> 16);
      largest = max(largest, __shfl_xor_sync(kFull, largest, 1));
      largest = max(largest, __shfl_xor_sync(kFull, largest, 2));
      const int unit = min(max(static_cast<int>(largest >> 7), kLeastUnit), kMostUnit);
      into[n] = into_unit(unit);
      // A factor that is not finite makes its column NaN, because fp16 could hide it.
      const float own_by = largest >= 0x7f80u ? __uint_as_float(0x7fffffffu) : out_of_unit(unit);
#pragma unroll
      for (int c = 0; c < 2; ++c) by_column[n][c] = __shfl_sync(kFull, own_by, 4 * (2 * q + c));
    }
    const auto in_unit = [](uint32_t pair, float by) {
      return half_pair<true>(by * __uint_as_float(pair << 16),
                             by * __uint_as_float(pair & 0xffff0000u));
    };
#pragma unroll
    for (int k = 0; k < kScaleBlock / 16; ++k) {
      const uint4 v = factor[k * 32 + lane];
      factor[k * 32 + lane] = make_uint4(in_unit(v.x, into[0]), in_unit(v.y, into[0]),
                                         in_unit(v.z, into[1]), in_unit(v.w, into[1]));
    }
  };
  // Four columns of two rows a lane, over all warps.
  const auto put_sums = [&](int64_t chunk, const float* of_chunk) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 8 * i + lane / 4, column = 4 * (lane % 4);
      const float* of_row = of_chunk + r * kFewColumns + (column ^ (r >> 1 & 1) << 3);
      float4 sum = {};
#pragma unroll 4
      for (int w = 0; w < warps; ++w) {
        const float4 part = *reinterpret_cast<const float4*>(of_row + w * kSumsOfWarp);
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      if (column < work.width)
        *reinterpret_cast<uint2*>(work.out + (chunk * kChunkRows + r) * work.width + column) =
            make_uint2(bf16_pair(work.by * sum.x, work.by * sum.y),
                       bf16_pair(work.by * sum.z, work.by * sum.w));
    }
  };

  load(from, token_of(from));
  end_of_copies();
  if (from + 1 < to) load(from + 1, token_of(from + 1));
  end_of_copies();
  int next_token = token_of(from + 2);
  for (int64_t chunk = from; chunk < to; ++chunk) {
    const int number = static_cast<int>(chunk - from);
    wait_for_all_copies_but_the_last();
    __syncwarp();  // the other lanes' have landed too, and nobody reads the chunk before this one
    if (chunk + 2 < to) load(chunk + 2, next_token);
    end_of_copies();
    next_token = token_of(chunk + 3);
    if (chunk * kChunkRows >= until) {
      const int next = expert_of(work.padded_offsets, work.experts, chunk * kChunkRows);
      if constexpr (kGradient) {
        if (expert >= 0) put_parts();
      }
      expert = next;
      until = next + 1 < work.experts ? work.padded_offsets[next + 1] : work.chunks * kChunkRows;
      load_factor();
    }
    const Chunk<kGradient>& s = ring[number % kChunks];
    float part[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = g + 8 * h;
        const uint4 v =
            *reinterpret_cast<const uint4*>(&s.codes[r][16 * swizzled(r, 4 * half + q)]);
        words[h][0] = v.x, words[h][1] = v.y, words[h][2] = v.z, words[h][3] = v.w;
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        uint32_t a[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) fp16_of_codes(words[h][k], a[h], a[2 + h]);
        const uint4 b = factor[(4 * half + k) * 32 + lane];
        multiply_add<true>(part[0], a, b.x, b.y);
        multiply_add<true>(part[1], a, b.z, b.w);
      }
    }
    const int turn = number % kSumsInTurn, turns = number / kSumsInTurn;
    float* of_chunk = memory.sums + turn * warps * kSumsOfWarp;
    while (read_after(&s_added[turn]) < turns) __nanosleep(20);
    __syncwarp();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = g + 8 * h;
      const float scale = s.scales[r];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *reinterpret_cast<float2*>(of_chunk + warp * kSumsOfWarp + r * kFewColumns +
                                   ((8 * n + 2 * q) ^ (r >> 1 & 1) << 3)) =
            make_float2(scale * (part[n][2 * h] * by_column[n][0]),
                        scale * (part[n][2 * h + 1] * by_column[n][1]));
    }
    __syncwarp();
    const int left = lane == 0 ? count_up(&s_left[turn]) : 0;
    if (__shfl_sync(kFull, left, 0) == warps * (turns + 1)) {
      __syncwarp();
      put_sums(chunk, of_chunk);
      __syncwarp();
      if (lane == 0) write_before(&s_added[turn], turns + 1);
    }
    if constexpr (!kGradient) continue;

    // The second: of rows q, q + 4, q + 8 and q + 12. All of a row without a token is zeros. Columns
    // behind the width are those of other rows, and nobody reads their sums.
    float thin[2][4];
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = q + 4 * i;
      float by = s.scales[r];
      if (work.row_prob != nullptr) by *= s.prob[r];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const bool wanted = n == 0 || work.width > 8;
        const uint32_t bits = wanted ? s.narrow[r * work.width + 8 * n + g] : 0;
        thin[n][i] = by * __uint_as_float(bits << 16);
        const uint32_t size = __float_as_uint(thin[n][i]) & 0x7fffffffu;
        top = max(top, size < 0x7f800000u ? size : 0);  // NaN and infinity need no unit
      }
    }
    // Sums are kept in the unit of the largest narrow rows so far.
    const int unit = static_cast<int>(__reduce_max_sync(kFull, top >> 23));
    if (unit > unit_of_total) {
      const float by = __uint_as_float(max(127 + unit_of_total - unit, 0) << 23);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) total[j][n][i] *= by;
      unit_of_total = unit;
    }
    const float into = into_unit(unit_of_total);
    uint32_t b[2][2];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        b[n][i] = half_pair<true>(into * thin[n][2 * i], into * thin[n][2 * i + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = q + 4 * i;
        const uint2 v = *reinterpret_cast<const uint2*>(
            &s.codes[r][16 * swizzled(r, 4 * half + g / 2) + 8 * (g % 2)]);
        words[i][0] = v.x, words[i][1] = v.y;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Columns 8 g + 2 j and 8 g + 2 j + 1, each of two rows.
        constexpr uint32_t kSelector[2] = {0x5140, 0x7362};
        const uint32_t first = __byte_perm(words[0][j / 2], words[1][j / 2], kSelector[j % 2]),
                       second = __byte_perm(words[2][j / 2], words[3][j / 2], kSelector[j % 2]);
        uint32_t a[4];
        fp16_of_codes(first, a[0], a[1]);
        fp16_of_codes(second, a[2], a[3]);
#pragma unroll
        for (int n = 0; n < 2; ++n) multiply_add<true>(total[4 * half + j][n], a, b[n][0], b[n][1]);
      }
    }
  }
  if constexpr (kGradient) {
    if (expert >= 0) put_parts();
  }
}

// out[e, c, n] of any strides: the parts of every expert, in the order of the CTAs.
struct SettleWork {
  const int64_t* padded_offsets;
  const float* parts;
  float* out;
  int64_t step, wide_step, narrow_step, chunks;
  int experts, wide, rank, ctas;
};
constexpr int kSettleTile = 32, kSettleLanes = 8;

__global__ void __launch_bounds__(kSettleTile* kSettleLanes) settle_parts(const SettleWork work) {
  __shared__ float tile[kSettleTile][kSettleTile + 1];
  __shared__ int s_first[kSettleTile], s_last[kSettleTile];
  const int lane = threadIdx.x % kSettleTile, first = threadIdx.x / kSettleTile;
  const int place = static_cast<int>(blockIdx.x) * kSettleTile + lane;  // c and n of the parts
  const int expert0 = static_cast<int>(blockIdx.y) * kSettleTile;
  if (threadIdx.x < kSettleTile) {
    const int expert = expert0 + lane;
    int cta = 0, last = -1;
    if (expert < work.experts) {
      const auto chunk = [&](int e) { return min(work.padded_offsets[e] / kChunkRows, work.chunks); };
      const int64_t begin = chunk(expert), end = chunk(expert + 1);
      if (begin < end) {
        cta = static_cast<int>(begin * work.ctas / work.chunks);
        while (first_chunk(work.chunks, cta + 1, work.ctas) <= begin) ++cta;
        last = cta;
        while (last + 1 < work.ctas && first_chunk(work.chunks, last + 1, work.ctas) < end) ++last;
      }
    }
    s_first[lane] = cta, s_last[lane] = last;
  }
  __syncthreads();
  const int64_t step = static_cast<int64_t>(work.wide) * kFewColumns;
  const bool by_experts = work.step == 1;
  const auto put = [&](int expert, int at, float sum) {
    const int c = at / kFewColumns, n = at % kFewColumns;
    if (expert < work.experts && c < work.wide && n < work.rank)
      work.out[expert * work.step + c * work.wide_step + n * work.narrow_step] = sum;
  };
  for (int i = first; i < kSettleTile; i += kSettleLanes) {
    float sum = 0.f;
    if (place < step)
      for (int cta = s_first[i]; cta <= s_last[i]; ++cta)
        sum += work.parts[(static_cast<int64_t>(cta) + expert0 + i) * step + place];
    by_experts ? void(tile[i][lane] = sum) : put(expert0 + i, place, sum);
  }
  if (!by_experts) return;
  __syncthreads();
  for (int i = first; i < kSettleTile; i += kSettleLanes)
    put(expert0 + lane, static_cast<int>(blockIdx.x) * kSettleTile + i, tile[lane][i]);
}

// A factor [E, rows, columns] of any strides, as GEMMs read it: contiguous 16-bit values, with zeros in
// further rows and columns; and transposed. Either may be nullptr.
struct FactorWork {
  int64_t strides[3];
  int experts, rows, columns;  // of the source
  int rows_to, columns_to;     // of the result
  uint16_t *straight, *transposed;
};
constexpr int kFactorTile = 32, kFactorLanes = 8;

template <typename From, bool kFp16>
__global__ void __launch_bounds__(kFactorTile* kFactorLanes)
    copy_factor(const From* __restrict__ source, const FactorWork work) {
  __shared__ uint16_t tile[kFactorTile][kFactorTile + 2];
  const int lane = threadIdx.x % kFactorTile, first = threadIdx.x / kFactorTile;
  const int column0 = blockIdx.x * kFactorTile, row0 = blockIdx.y * kFactorTile;
  const int64_t size = static_cast<int64_t>(work.rows_to) * work.columns_to, expert = blockIdx.z;
  for (int i = first; i < kFactorTile; i += kFactorLanes) {
    const int row = row0 + i, column = column0 + lane;
    float value = 0.f;
    if (row < work.rows && column < work.columns)
      value = static_cast<float>(
          source[expert * work.strides[0] + row * work.strides[1] + column * work.strides[2]]);
    const uint16_t bits = static_cast<uint16_t>(half_pair<kFp16>(value, 0.f));
    tile[i][lane] = bits;
    if (work.straight != nullptr && row < work.rows_to && column < work.columns_to)
      work.straight[expert * size + static_cast<int64_t>(row) * work.columns_to + column] = bits;
  }
  if (work.transposed == nullptr) return;
  __syncthreads();
  for (int i = first; i < kFactorTile; i += kFactorLanes) {
    const int column = column0 + i, row = row0 + lane;
    if (row < work.rows_to && column < work.columns_to)
      work.transposed[expert * size + static_cast<int64_t>(column) * work.rows_to + row] =
          tile[lane][i];
  }
}

// The same where columns of a row follow each other, transposed. A thread takes a column.
template <typename From, bool kFp16>
__global__ void __launch_bounds__(256)
    flip_factor(const From* __restrict__ source, const FactorWork work) {
  const int column = static_cast<int>(blockIdx.x) * 256 + threadIdx.x;
  if (column >= work.columns_to) return;
  const int64_t expert = blockIdx.y;
  const From* from = source + expert * work.strides[0] + column;
  uint16_t* to = work.transposed + (expert * work.columns_to + column) * work.rows_to;
  for (int row = 0; row < work.rows_to; row += 8) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = row + i < work.rows && column < work.columns
                 ? static_cast<float>(from[(row + i) * work.strides[1]])
                 : 0.f;
    *reinterpret_cast<uint4*>(to + row) =
        make_uint4(half_pair<kFp16>(v[0], v[1]), half_pair<kFp16>(v[2], v[3]),
                   half_pair<kFp16>(v[4], v[5]), half_pair<kFp16>(v[6], v[7]));
  }
}

// And as it lies. A thread takes four columns, of which there is a multiple of four.
template <typename From, bool kFp16>
__global__ void __launch_bounds__(256)
    cast_factor(const From* __restrict__ source, const FactorWork work) {
  const int column = 4 * (static_cast<int>(blockIdx.x) * 256 + threadIdx.x), row = blockIdx.y;
  if (column >= work.columns_to) return;
  const int64_t expert = blockIdx.z;
  struct alignas(4 * sizeof(From)) Four {
    From value[4];
  } v = {};
  if (row < work.rows)
    v = *reinterpret_cast<const Four*>(source + expert * work.strides[0] + row * work.strides[1] +
                                       column);
  *reinterpret_cast<uint2*>(work.straight + (expert * work.rows_to + row) * work.columns_to + column) =
      make_uint2(
          half_pair<kFp16>(static_cast<float>(v.value[0]), static_cast<float>(v.value[1])),
          half_pair<kFp16>(static_cast<float>(v.value[2]), static_cast<float>(v.value[3])));
}

// Either way, of a source whose experts follow each other, as those of peft do: 32 of them at a time,
// in tiles of 16 x 16.
constexpr int kExpertTile = 32, kSideTile = 16;

template <typename From, bool kFp16, bool kTransposed>
__global__ void __launch_bounds__(256)
    part_factor(const From* __restrict__ source, const FactorWork work) {
  constexpr int kPlaces = kSideTile * kSideTile;
  __shared__ uint16_t tile[kExpertTile][kPlaces + 2];
  const int lane = threadIdx.x % kExpertTile, first = threadIdx.x / kExpertTile;
  const int column0 = blockIdx.x * kSideTile, row0 = blockIdx.y * kSideTile;
  const int expert0 = blockIdx.z * kExpertTile;
  constexpr int kTurns = kPlaces / 8, kAtOnce = 16;
#pragma unroll
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    float value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + 8 * (turn + i), row = row0 + at / kSideTile,
                column = column0 + at % kSideTile;
      const bool inside = row < work.rows && column < work.columns && expert0 + lane < work.experts;
      value[i] = inside ? static_cast<float>(source[expert0 + lane + row * work.strides[1] +
                                                    column * work.strides[2]])
                        : 0.f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + 8 * (turn + i), row = at / kSideTile, column = at % kSideTile;
      tile[lane][kTransposed ? column * kSideTile + row : row * kSideTile + column] =
          static_cast<uint16_t>(half_pair<kFp16>(value[i], 0.f));
    }
  }
  __syncthreads();
  // Two neighbouring values a thread, of an even number.
  const int outer_to = kTransposed ? work.columns_to : work.rows_to,
            inner_to = kTransposed ? work.rows_to : work.columns_to;
  const int outer0 = kTransposed ? column0 : row0, inner0 = kTransposed ? row0 : column0;
  uint16_t* to = kTransposed ? work.transposed : work.straight;
  for (int i = threadIdx.x; i < kExpertTile * kPlaces / 2; i += 256) {
    const int expert = i / (kPlaces / 2), at = 2 * (i % (kPlaces / 2));
    const int outer = outer0 + at / kSideTile, inner = inner0 + at % kSideTile;
    if (expert0 + expert < work.experts && outer < outer_to && inner < inner_to)
      *reinterpret_cast<uint32_t*>(
          to + (static_cast<int64_t>(expert0 + expert) * outer_to + outer) * inner_to + inner) =
          *reinterpret_cast<const uint32_t*>(&tile[expert][at]);
  }
}

bool is_fp16(const TensorView& tensor) { return is_type(tensor, kDLFloat, 16); }

// `launch` with rows as they came: bf16 or fp16 [*, K], or codes [*, K] with a scale for 128 columns
// of a row, or for 256 columns of 128 rows.
template <class Launch>
void with_rows(const TensorView& rows, const Optional<TensorView>& scale, bool gathers,
               DLDevice device, Launch launch) {
  TVM_FFI_ICHECK(rows.ndim() == 2 && rows.size(1) % 16 == 0 && rows.size(1) < (int64_t(1) << 30))
      << "rows must be a matrix whose columns are a multiple of 16";
  const int width = static_cast<int>(rows.size(1));
  if (!scale.has_value()) {
    const auto code = is_fp16(rows) ? kDLFloat : kDLBfloat;
    const auto* data = aligned_16(checked<const uint8_t>(rows, "rows", code, 16, device, 0), "rows");
    is_fp16(rows) ? launch(HalfRows<true>{data, width, gathers})
                  : launch(HalfRows<false>{data, width, gathers});
    return;
  }
  const TensorView& s = scale.value();
  TVM_FFI_ICHECK(s.ndim() == 2) << "scale must be a matrix";
  const bool blocks = s.size(0) != rows.size(0);
  const int log2 = blocks ? 8 : 7;
  static_assert(kGateUpBlock == 1 << 8 && kScaleBlock == 1 << 7 && kBlock == 1 << 7);
  const int64_t scale_rows = blocks ? rows.size(0) / kBlock : rows.size(0);
  TVM_FFI_ICHECK(rows.size(0) * (width / 16) < (int64_t(1) << 32)) << "codes are larger than 64 GiB";
  TVM_FFI_ICHECK(s.size(0) == scale_rows && s.size(1) == ceil_div(width, 1 << log2))
      << "scale is " << s.size(0) << " x " << s.size(1) << "; needed: one for 128 columns of a row, "
      << "or for 256 columns of 128 rows";
  launch(CodeRows{aligned_16(checked_bytes(rows, "rows", device, 0), "rows"), width, gathers,
                  checked_f32(s, "scale", device, s.numel()), blocks ? 7 : 0, log2});
}

const uint16_t* checked_half(const TensorView& tensor, const char* name, DLDevice device,
                             int64_t elements) {
  const auto code = is_fp16(tensor) ? kDLFloat : kDLBfloat;
  return aligned_16(checked<const uint16_t>(tensor, name, code, 16, device, elements), name);
}

int64_t checked_width(const TensorView& narrow, int64_t width) {
  TVM_FFI_ICHECK(width > 0 && width % 8 == 0 && width <= 1024)
      << "width is " << width << "; needed: a multiple of 8";
  TVM_FFI_ICHECK(narrow.ndim() == 2 && narrow.size(1) == width) << "another width than the factor's";
  return width;
}

// As many tiles of eight columns as the narrow operand fills, rounded up to a power of two.
template <class Launch>
void with_tiles(int64_t width, Launch launch) {
  const int64_t tiles = ceil_div(width, 8);
  if (tiles <= 1) return launch(std::integral_constant<int, 1>());
  if (tiles <= 2) return launch(std::integral_constant<int, 2>());
  if (tiles <= 4) return launch(std::integral_constant<int, 4>());
  launch(std::integral_constant<int, kMostColumns / 8>());
}

// An fp32 tensor of any strides.
float* checked_strided(const TensorView& tensor, DLDevice device) {
  TVM_FFI_ICHECK(is_type(tensor, kDLFloat, 32) && tensor.device().device_type == kDLCUDA &&
                 tensor.device().device_id == device.device_id)
      << "out must be fp32, on the device of the rows";
  return reinterpret_cast<float*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

bool fits_chunks(int64_t wide, int64_t width) {
  return wide <= kMostOfRow && width <= kFewColumns;
}

int multiprocessors() {
  int device = 0, sms = 1;
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetDevice(&device));
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms;
}

// With at most `most` CTAs, all of them resident. How many there were.
template <bool kGradient>
int launch_chunks(const CodeRows& rows, const ChunkWork& work, int64_t most, int64_t stream) {
  const int warps = static_cast<int>(ceil_div(rows.width, kScaleBlock)), threads = 32 * warps;
  const int bytes = ChunkMemory<kGradient>::bytes(warps);
  const auto kernel = multiply_chunks<kGradient>;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  int per_sm = 1;
  if (!kGradient)  // else there would be more parts
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, bytes));
  const int ctas = static_cast<int>(std::min<int64_t>(
      {most, work.chunks, int64_t(multiprocessors()) * std::max(per_sm, 1)}));
  multiply_chunks<kGradient><<<ctas, threads, bytes, as_stream(stream)>>>(rows, work);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  return ctas;
}

// out [R, width] = by * rows * factor^T, in the dtype of the factor [E, width, K]: bf16, or fp16 as
// rows then are. rows, scale: see `with_rows`; gathers: rows are those of tokens. width: a multiple of
// 8. Rows without a token come out as zeros.
void narrow_rows(TensorView rows, Optional<TensorView> scale, bool gathers, TensorView factor,
                 TensorView row_token, TensorView padded_offsets, TensorView out, double by,
                 int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  TVM_FFI_ICHECK(factor.ndim() == 3 && factor.size(0) == r.experts &&
                 factor.size(2) == rows.size(1))
      << "factor must be [E, width, K], with K the columns of rows";
  TVM_FFI_ICHECK(gathers || rows.size(0) >= r.rows) << "rows has " << rows.size(0) << " rows";
  TVM_FFI_ICHECK(is_fp16(factor) == is_fp16(rows) && is_fp16(out) == is_fp16(factor))
      << "rows, factor and out are of different dtypes";
  const int64_t width = checked_width(out, factor.size(1));
  NarrowWork work{r.row_token,
                  r.padded_offsets,
                  checked_half(factor, "factor", r.device, factor.numel()),
                  const_cast<uint16_t*>(checked_half(out, "out", r.device, r.rows * width)),
                  static_cast<int>(r.experts),
                  static_cast<int>(width),
                  static_cast<float>(by)};
  if (r.rows == 0 || r.experts == 0) return;
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  with_rows(rows, scale, gathers, r.device, [&](const auto& from) {
    using Rows = std::decay_t<decltype(from)>;
    if constexpr (Rows::kScaled) {
      if (fits_chunks(from.width, width)) {
        ChunkWork chunks{};
        chunks.row_token = work.row_token, chunks.padded_offsets = work.padded_offsets;
        chunks.factor = work.factor, chunks.out = work.out, chunks.by = work.by;
        chunks.chunks = r.rows / kChunkRows;
        chunks.experts = work.experts, chunks.width = work.width;
        launch_chunks<false>(from, chunks, chunks.chunks, stream);
        return;
      }
    }
    constexpr int kMost = kColumnsOfFactor<Rows>;
    with_tiles(std::min<int64_t>(width, kMost), [&](auto tiles) {
      constexpr int kTiles = std::min(tiles.value, kMost / 8);
      const dim3 ctas(static_cast<unsigned>(r.rows / kBlock),
                      static_cast<unsigned>(ceil_div(width, kMost)));
      narrow_rows_of<Rows, kTiles><<<ctas, 32 * kRowWarps, 0, as_stream(stream)>>>(from, work);
    });
  });
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// How many CTAs share the rows of an expert, so that there are enough for the GPU.
int64_t splits_of(int64_t rows, int64_t experts, int64_t wide, int64_t width) {
  constexpr int64_t kEnough = 1024, kLeastBlocks = 4;
  const int64_t ctas = experts * ceil_div(wide, kColumnsOfCta) * ceil_div(width, kMostColumns),
                most = std::max<int64_t>(rows / kBlock / std::max<int64_t>(experts, 1) / kLeastBlocks, 1);
  return std::min<int64_t>(std::max<int64_t>(ceil_div(kEnough, std::max<int64_t>(ctas, 1)), 1),
                           std::min<int64_t>(most, 64));
}

// Elements of `parts` that `narrow_gradient` needs; 0: it may be None.
int64_t gradient_parts(int64_t rows, int64_t experts, int64_t wide, int64_t width, int64_t rank) {
  const int64_t splits = splits_of(rows, experts, wide, width);
  return splits > 1 ? splits * experts * wide * rank : 0;
}

// `work` has the strides of `out`; those of its parts are such that they are contiguous.
template <class Wide>
void launch_gradient(const Wide& wide, GradientWork work, const RowsOfExperts& r, bool wide_first,
                     float* parts, float* out, int64_t stream) {
  const int64_t elements = r.experts * work.wide * work.rank;
  const int rows = wide_first ? work.wide : work.rank, columns = wide_first ? work.rank : work.wide;
  const SplitWork sums{parts, out, elements,
                       {work.step, wide_first ? work.wide_step : work.narrow_step,
                        wide_first ? work.narrow_step : work.wide_step},
                       work.splits, rows, columns};
  work.out = out;
  if (work.splits > 1) {
    work.out = parts, work.split_step = elements, work.step = elements / r.experts;
    work.wide_step = wide_first ? columns : 1, work.narrow_step = wide_first ? 1 : columns;
  }
  with_tiles(work.width, [&](auto tiles) {
    dim3 ctas(static_cast<unsigned>(ceil_div(work.wide, kColumnsOfCta)),
              static_cast<unsigned>(r.experts),
              static_cast<unsigned>(work.splits * ceil_div(int64_t(work.width), kMostColumns)));
    if (gathers_rows(wide)) std::swap(ctas.x, ctas.y);
    sum_gradients<Wide, tiles.value>
        <<<ctas, 32 * kGradientWarps, 0, as_stream(stream)>>>(wide, work);
  });
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  if (work.splits == 1) return;
  add_splits<<<static_cast<unsigned>(ceil_div(elements, 256)), 256, 0, as_stream(stream)>>>(sums);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// out fp32 = sums over the rows of each expert of narrow[row][n] * p * wide[row][c], n < rank: [E,
// rank, N], or, `wide_first`, [E, N, rank], of any strides. Experts without rows get zeros. narrow [R, width]; p:
// row_prob fp32 [R], or None: 1. rows, scale, gathers: see `with_rows`; or, `transposed`, codes [N, R]
// with a scale for 128 x 128. parts fp32: `gradient_parts` of scratch, or None.
void narrow_gradient(TensorView rows, Optional<TensorView> scale, bool gathers, bool transposed,
                     TensorView narrow, Optional<TensorView> row_prob, TensorView row_token,
                     TensorView padded_offsets, bool wide_first, Optional<TensorView> parts,
                     TensorView out, int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  TVM_FFI_ICHECK(rows.ndim() == 2 && narrow.ndim() == 2 && out.ndim() == 3)
      << "rows and narrow must be matrices, out [E, rank, N] or [E, N, rank]";
  const int64_t n = rows.size(transposed ? 0 : 1), rank = out.size(wide_first ? 2 : 1),
                width = checked_width(narrow, narrow.size(1));
  TVM_FFI_ICHECK(out.size(0) == r.experts && out.size(wide_first ? 1 : 2) == n && rank <= width)
      << "out is of another size than experts, rows and narrow";
  TVM_FFI_ICHECK(is_fp16(narrow) == is_fp16(rows)) << "rows and narrow are of different dtypes";
  TVM_FFI_ICHECK(r.experts < 65536) << "too many experts";
  float* to = checked_strided(out, r.device);
  GradientWork work{};
  work.row_token = r.row_token, work.padded_offsets = r.padded_offsets;
  work.narrow = checked_half(narrow, "narrow", r.device, r.rows * width);
  if (row_prob.has_value())
    work.row_prob = checked_f32(row_prob.value(), "row_prob", r.device, r.rows);
  work.step = out.stride(0), work.wide_step = out.stride(wide_first ? 1 : 2);
  work.narrow_step = out.stride(wide_first ? 2 : 1);
  work.rows = r.rows, work.experts = static_cast<int>(r.experts);
  work.width = static_cast<int>(width), work.rank = static_cast<int>(rank);
  work.wide = static_cast<int>(n);
  work.splits = static_cast<int>(splits_of(r.rows, r.experts, n, width));
  if (r.experts == 0 || n == 0) return;
  float* of_splits = nullptr;
  if (work.splits > 1) {
    TVM_FFI_ICHECK(parts.has_value()) << "parts is None; needed: scratch of gradient_parts";
    of_splits = checked_f32(parts.value(), "parts", r.device, work.splits * r.experts * n * rank);
  }
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  if (transposed) {
    TVM_FFI_ICHECK(scale.has_value() && rows.size(1) == r.rows)
        << "transposed codes must be [N, R], with scales";
    const TransposedCodes codes{
        aligned_16(checked_bytes(rows, "rows", r.device, n * r.rows), "rows"), r.rows,
        checked_f32(scale.value(), "scale", r.device, ceil_div(n, kScaleBlock) * (r.rows / kBlock))};
    return launch_gradient(codes, work, r, wide_first, of_splits, to, stream);
  }
  TVM_FFI_ICHECK(gathers || rows.size(0) >= r.rows) << "rows has " << rows.size(0) << " rows";
  with_rows(rows, scale, gathers, r.device, [&](const auto& from) {
    launch_gradient(from, work, r, wide_first, of_splits, to, stream);
  });
}

// Elements of `parts` that `narrow_both` needs.
int64_t parts_of_both(int64_t rows, int64_t experts, int64_t wide, int64_t width, int64_t rank) {
  if (!fits_chunks(wide, width)) return gradient_parts(rows, experts, wide, width, rank);
  return (multiprocessors() + experts) * wide * kFewColumns;
}

// Of rows of codes both products of a backward: `narrow_rows` with `factor` to out, and
// `narrow_gradient`, `wide_first`, with `narrow` and row_prob to gradient [E, N, rank]. parts:
// `parts_of_both`.
void narrow_both(TensorView rows, TensorView scale, bool gathers, TensorView factor,
                 TensorView narrow, Optional<TensorView> row_prob, TensorView row_token,
                 TensorView padded_offsets, Optional<TensorView> parts, TensorView out,
                 TensorView gradient, double by, int64_t stream) {
  const RowsOfExperts r(row_token, padded_offsets);
  const int64_t wide = rows.ndim() == 2 ? rows.size(1) : 0, width = checked_width(out, out.size(1));
  if (r.rows == 0) {
    const SplitWork zeros{nullptr, checked_strided(gradient, r.device), gradient.numel(),
                          {gradient.stride(0), gradient.stride(1), gradient.stride(2)}, 0,
                          static_cast<int>(gradient.size(1)), static_cast<int>(gradient.size(2))};
    tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
    if (zeros.elements > 0)
      add_splits<<<static_cast<unsigned>(ceil_div(zeros.elements, 256)), 256, 0, as_stream(stream)>>>(
          zeros);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
    return;
  }
  if (!fits_chunks(wide, width)) {
    narrow_rows(rows, scale, gathers, factor, row_token, padded_offsets, out, by, stream);
    narrow_gradient(rows, scale, gathers, false, narrow, row_prob, row_token, padded_offsets, true,
                    parts, gradient, stream);
    return;
  }
  TVM_FFI_ICHECK(factor.ndim() == 3 && factor.size(0) == r.experts && factor.size(1) == width &&
                 factor.size(2) == wide)
      << "factor must be [E, width, K], with K the columns of rows";
  TVM_FFI_ICHECK(!is_fp16(factor) && !is_fp16(out) && !is_fp16(narrow) && !is_fp16(rows))
      << "factor, narrow and out must be bfloat16, rows codes";
  TVM_FFI_ICHECK(gathers || rows.size(0) >= r.rows) << "rows has " << rows.size(0) << " rows";
  TVM_FFI_ICHECK(gradient.ndim() == 3 && gradient.size(0) == r.experts && gradient.size(1) == wide &&
                 gradient.size(2) <= width && checked_width(narrow, width) == width)
      << "gradient must be [E, N, rank]";
  if (r.experts == 0 || wide == 0) return;
  ChunkWork work{};
  work.row_token = r.row_token, work.padded_offsets = r.padded_offsets;
  work.factor = checked_half(factor, "factor", r.device, factor.numel());
  work.out = const_cast<uint16_t*>(checked_half(out, "out", r.device, r.rows * width));
  work.narrow = checked_half(narrow, "narrow", r.device, r.rows * width);
  if (row_prob.has_value())
    work.row_prob = checked_f32(row_prob.value(), "row_prob", r.device, r.rows);
  TVM_FFI_ICHECK(parts.has_value()) << "parts is None; needed: scratch of parts_of_both";
  const int64_t step = wide * kFewColumns, most = parts.value().numel() / step - r.experts;
  TVM_FFI_ICHECK(most > 0) << "parts has " << parts.value().numel() << " elements; needed: "
                           << (1 + r.experts) * step << " or more";
  work.parts = aligned_16(checked_f32(parts.value(), "parts", r.device, 0), "parts");
  work.chunks = r.rows / kChunkRows, work.by = static_cast<float>(by);
  work.experts = static_cast<int>(r.experts), work.width = static_cast<int>(width);
  SettleWork settle{};
  settle.padded_offsets = r.padded_offsets, settle.parts = work.parts;
  settle.out = checked_strided(gradient, r.device);
  settle.step = gradient.stride(0), settle.wide_step = gradient.stride(1);
  settle.narrow_step = gradient.stride(2), settle.chunks = work.chunks;
  settle.experts = work.experts, settle.wide = static_cast<int>(wide);
  settle.rank = static_cast<int>(gradient.size(2));
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  with_rows(rows, scale, gathers, r.device, [&](const auto& from) {
    if constexpr (std::decay_t<decltype(from)>::kScaled)
      settle.ctas = launch_chunks<true>(from, work, most, stream);
  });
  const dim3 tiles(static_cast<unsigned>(ceil_div(step, kSettleTile)),
                   static_cast<unsigned>(ceil_div(r.experts, kSettleTile)));
  settle_parts<<<tiles, kSettleTile * kSettleLanes, 0, as_stream(stream)>>>(settle);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// straight [E, rows, columns] and transposed [E, columns, rows], in bf16 or fp16, either of which may be
// None, of a factor of the same or fewer rows and columns, in bf16, fp16 or fp32.
void prepare_factor(TensorView source, Optional<TensorView> straight,
                    Optional<TensorView> transposed, int64_t stream) {
  TVM_FFI_ICHECK(source.ndim() == 3) << "source must be [E, rows, columns]";
  if (!straight.has_value() && !transposed.has_value()) return;
  const bool flips = !straight.has_value();
  const TensorView& like = flips ? transposed.value() : straight.value();
  const DLDevice device = source.device();
  TVM_FFI_ICHECK(device.device_type == kDLCUDA) << "source must be on a CUDA device";
  FactorWork work{};
  for (int axis = 0; axis < 3; ++axis) work.strides[axis] = source.stride(axis);
  work.experts = static_cast<int>(source.size(0));
  work.rows = static_cast<int>(source.size(1)), work.columns = static_cast<int>(source.size(2));
  work.rows_to = static_cast<int>(like.size(flips ? 2 : 1));
  work.columns_to = static_cast<int>(like.size(flips ? 1 : 2));
  TVM_FFI_ICHECK(like.size(0) == source.size(0) && work.rows <= work.rows_to &&
                 work.columns <= work.columns_to)
      << "the results are smaller than the source";
  const int64_t elements = source.size(0) * work.rows_to * work.columns_to;
  const auto result = [&](const Optional<TensorView>& tensor, const char* name) {
    return tensor.has_value()
               ? const_cast<uint16_t*>(checked_half(tensor.value(), name, device, elements))
               : nullptr;
  };
  work.straight = result(straight, "straight"), work.transposed = result(transposed, "transposed");
  if (elements == 0) return;
  const char* data = static_cast<const char*>(source.data_ptr()) + source.byte_offset();
  const auto tiles = [](int64_t size, int tile) { return static_cast<unsigned>(ceil_div(size, tile)); };
  const unsigned experts = tiles(work.experts, 1);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const auto launch_of = [&](auto from, auto of_half) {
    using From = decltype(from);
    constexpr bool kFp16 = of_half.value;
    const From* given = reinterpret_cast<const From*>(data);
    const bool one = work.straight == nullptr || work.transposed == nullptr;
    const bool in_fours = (work.strides[0] | work.strides[1] | work.columns | work.columns_to) % 4 == 0 &&
                          reinterpret_cast<uintptr_t>(data) % (4 * sizeof(From)) == 0;
    if (one && work.strides[0] == 1 && work.experts > 1 && work.rows_to % 2 + work.columns_to % 2 == 0) {
      const dim3 ctas(tiles(work.columns_to, kSideTile), tiles(work.rows_to, kSideTile),
                      tiles(work.experts, kExpertTile));
      if (work.straight != nullptr)
        part_factor<From, kFp16, false><<<ctas, 256, 0, as_stream(stream)>>>(given, work);
      else
        part_factor<From, kFp16, true><<<ctas, 256, 0, as_stream(stream)>>>(given, work);
    } else if (one && work.strides[2] == 1 && work.transposed != nullptr && work.rows_to % 8 == 0 &&
               work.columns_to >= kFactorTile && work.experts < 65536) {
      const dim3 ctas(tiles(work.columns_to, 256), experts);
      flip_factor<From, kFp16><<<ctas, 256, 0, as_stream(stream)>>>(given, work);
    } else if (one && work.strides[2] == 1 && work.straight != nullptr && in_fours &&
               work.columns == work.columns_to && work.rows_to < 65536 && work.experts < 65536) {
      const dim3 ctas(tiles(work.columns_to, 1024), tiles(work.rows_to, 1), experts);
      cast_factor<From, kFp16><<<ctas, 256, 0, as_stream(stream)>>>(given, work);
    } else {
      const dim3 ctas(tiles(work.columns_to, kFactorTile), tiles(work.rows_to, kFactorTile), experts);
      copy_factor<From, kFp16><<<ctas, kFactorTile * kFactorLanes, 0, as_stream(stream)>>>(given, work);
    }
  };
  const auto launch = [&](auto from) {
    is_fp16(like) ? launch_of(from, std::true_type()) : launch_of(from, std::false_type());
  };
  if (is_type(source, kDLFloat, 32))
    launch(float{});
  else if (is_fp16(source))
    launch(__half{});
  else if (is_type(source, kDLBfloat, 16))
    launch(__nv_bfloat16{});
  else
    TVM_FFI_THROW(TypeError) << "source must be bfloat16, float16 or float32";
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(narrow_rows, sonicmoe::narrow_rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(narrow_gradient, sonicmoe::narrow_gradient);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(narrow_both, sonicmoe::narrow_both);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gradient_parts, sonicmoe::gradient_parts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(parts_of_both, sonicmoe::parts_of_both);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare_factor, sonicmoe::prepare_factor);
