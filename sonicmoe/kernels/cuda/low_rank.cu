// The narrow products of low-rank adapters on Hopper: rows times a factor of few columns, and the
// gradients of the factors. Wide operands are read once, where they lie: tokens that are gathered,
// rows in expert order, or codes; codes become bf16 exactly, and their scales are multiplied into
// sums or into the narrow operand.
//
// The tensor cores' mma takes its fragments from registers. A contraction may run in any order, if
// both operands have the same one: so a thread loads 16 neighbouring bytes of a row, and what they
// hold is spread over the places of K that are this thread's.
//
// Two headers have faster kernels: code_products.cuh multiplies codes of up to 2,048 columns with up to
// 16 columns of a factor, and value_gradients.cuh sums gradients from bf16 or fp16 values.
//
// Rows without a token (row_token -1) are read nowhere and come out as zeros. Everything is added in
// a fixed order.
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <type_traits>

#include "../host/border.hpp"
#include "code_products.cuh"
#include "narrow_operands.cuh"
#include "rows_of_experts.cuh"
#include "value_gradients.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

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

constexpr int kGradientWarps = 8, kColumnsOfWarp = 64;
constexpr int kRowGroups = kGradientWarps * kColumnsOfWarp / kColumnsOfCta,
              kRowsOfGroup = kBlock / kRowGroups;
constexpr int kPitch = kBlock + 8;  // of the transposed narrow operand: no two lanes share a bank

// out += narrow[rows of an expert]^T * codes[rows of an expert]. A CTA takes 128 columns of the wide
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
  const GradientShare share(work, gathers_rows(wide));
  const int expert = share.expert, split = share.split, first = share.first, cta_column = share.column,
            column = cta_column + half * kColumnsOfWarp;
  const int64_t begin = share.begin, end = share.end;
  float total[4][kTiles][4] = {};
  // In this thread's rows of its columns: of the eight beside each other, or of each.
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
      int64_t of_scale = row;
      if constexpr (!kTransposed) of_scale = wide.gathers ? max(token, 0) : row;
      by *= wide.scale(of_scale, cta_column);
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint32_t pair = token < 0 ? 0 : scaled_pair<false>(word[k], by);
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
      uint2 packed[kSteps][4];
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
            multiply_add<false>(total[j][n], a, *reinterpret_cast<const uint32_t*>(b),
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
        uint32_t any = kTransposed ? nan_of[j][h] & kNanBits
                                   : nan[j / 2] >> (8 * (2 * (j % 2) + h)) & 0x80u;
        any |= __shfl_xor_sync(kFull, any, 1);
        any |= __shfl_xor_sync(kFull, any, 2);
        const float spoilt = any != 0 ? __uint_as_float(0x7fffffffu) : 0.f;
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
  const int chunk = scale.has_value() ? CodeRows::kChunk : HalfRows<false>::kChunk;
  TVM_FFI_ICHECK(rows.ndim() == 2 && rows.size(1) % chunk == 0 && rows.size(1) < (int64_t(1) << 30))
      << "rows must be a matrix whose columns are a multiple of " << chunk;
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

bool fits_tiles(int64_t wide, int64_t width) {
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
int launch_tiles(const CodeRows& rows, const TileWork& work, int64_t most, int64_t stream) {
  const int blocks = static_cast<int>(ceil_div(rows.width, kScaleBlock));
  const int threads = 2 * kGroup + (kGradient ? static_cast<int>(ceil_div(blocks, 4)) * kGroup : 0);
  const int bytes = TileMemory::bytes(blocks);
  const auto kernel = multiply_tiles<kGradient>;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const int ctas = static_cast<int>(std::min<int64_t>({most, work.tiles, multiprocessors()}));
  kernel<<<ctas, threads, bytes, as_stream(stream)>>>(rows, work);
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
      if (fits_tiles(from.width, width)) {
        const TileWork tiles{work, r.rows / kTileRows};
        launch_tiles<false>(from, tiles, tiles.tiles, stream);
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
  dim3 ctas(static_cast<unsigned>(ceil_div(work.wide, kColumnsOfCta)),
            static_cast<unsigned>(r.experts),
            static_cast<unsigned>(work.splits * ceil_div(int64_t(work.width), kMostColumns)));
  if (gathers_rows(wide)) std::swap(ctas.x, ctas.y);
  if constexpr (Wide::kScaled) {
    with_tiles(work.width, [&](auto tiles) {
      sum_gradients<Wide, tiles.value>
          <<<ctas, 32 * kGradientWarps, 0, as_stream(stream)>>>(wide, work);
    });
  } else {
    const auto kernel =
        work.width <= 16 ? sum_values<Wide::kFp16, 16> : sum_values<Wide::kFp16, kMostColumns>;
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ValueMemory::bytes()));
    kernel<<<ctas, 2 * kGroup, ValueMemory::bytes(), as_stream(stream)>>>(wide, work);
  }
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
  if (!fits_tiles(wide, width)) return gradient_parts(rows, experts, wide, width, rank);
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
  if (!fits_tiles(wide, width)) {
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
  TileWork work{};
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
  work.tiles = r.rows / kTileRows, work.by = static_cast<float>(by);
  work.experts = static_cast<int>(r.experts), work.width = static_cast<int>(width);
  SettleWork settle{};
  settle.padded_offsets = r.padded_offsets, settle.parts = work.parts;
  settle.out = checked_strided(gradient, r.device);
  settle.step = gradient.stride(0), settle.wide_step = gradient.stride(1);
  settle.narrow_step = gradient.stride(2), settle.tiles = work.tiles;
  settle.experts = work.experts, settle.wide = static_cast<int>(wide);
  settle.rank = static_cast<int>(gradient.size(2));
  tvm::ffi::CUDADeviceGuard guard(r.device.device_id);
  with_rows(rows, scale, gathers, r.device, [&](const auto& from) {
    if constexpr (std::decay_t<decltype(from)>::kScaled)
      settle.ctas = launch_tiles<true>(from, work, most, stream);
  });
  const dim3 tiles(static_cast<unsigned>(ceil_div(step, kSettlePlaces)),
                   static_cast<unsigned>(ceil_div(r.experts, kSettleExperts)));
  settle_parts<<<tiles, 32 * kSettleWarps, 0, as_stream(stream)>>>(settle);
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
