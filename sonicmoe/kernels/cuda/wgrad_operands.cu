// Token-major operands of the weight gradients: matrices [R, C] -> codes [C, R], in 128 x 128 tiles
// that are also the scale blocks.
//
// gather_transpose_quantize: rows gathered from tokens [T, C], E4M3 with one scale per tile.
// gather_transpose_requantize: the same of tokens that are E4M3 codes with one scale per 128
// columns of a row, so that their values are rounded a second time.
//
// The eight warps of a CTA have a tile in registers, 8 rows x 8 columns a thread: reads are whole
// lines of a row, bytes change places in registers, and a swizzled tile in shared memory turns the
// 8-byte pieces into whole lines of a column.
//
// CTAs take tiles one below the other at the same time. So their 128-byte pieces of a column of
// codes are neighbours in memory, and at any time K experts read the tokens of a few columns of
// tiles alone, which L2 can hold.
#include <algorithm>

#include "../host/border.hpp"
#include "quantize.cuh"

namespace sonicmoe {
namespace {

constexpr int kTile = kScaleBlock;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kPatch = 8;  // rows and columns of one thread
constexpr unsigned kFull = 0xffffffffu;
// Of 228 KB, the 100 KB that the CTAs of an SM need. The rest is L1, where what they load is kept
// until it has arrived: without this, or past L1, tiles took up to 1.6 times as long.
constexpr int kCarveoutPercent = 40;

template <typename T>
__device__ __forceinline__ void load_through_l1(Vector16<T>& vector, const T* address) {
  const uint4 words = __ldg(reinterpret_cast<const uint4*>(address));
  vector.word[0] = words.x, vector.word[1] = words.y, vector.word[2] = words.z,
  vector.word[3] = words.w;
}

struct Matrix {
  const void* source;
  const float* scale;  // of codes; values have none
  uint8_t* codes_t;
  float* scale_t;
};

struct Sizes {
  int64_t rows;                   // R, of the outputs
  unsigned tokens, width, pitch;  // of the source; pitch in bytes
  unsigned row_tiles, column_tiles;
};

struct TransposeWork {
  Matrix matrix[2];  // by blockIdx.y
  const int32_t* row_token;
  const int64_t* end;  // of the rows that are written
  Sizes n;
};

struct TilePlace {
  unsigned row, column;  // in tiles; no tile where the column is behind the last
};

// The tiles of a CTA: every gridDim.x-th, rows first.
struct TileWalk {
  unsigned rows, index = blockIdx.x;  // rows of tiles

  __device__ explicit TileWalk(const TransposeWork& launch)
      : rows(
            static_cast<unsigned>(max(int64_t(0), min(launch.n.rows, __ldg(launch.end)) / kTile))) {
  }
  __device__ __forceinline__ TilePlace next(const Sizes& n) {
    const TilePlace tile{index % max(1u, rows), rows == 0 ? n.column_tiles : index / rows};
    index += gridDim.x;
    return tile;
  }
};

__device__ __forceinline__ void store_past_l1(uint8_t* address, uint4 words) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w)
               : "memory");
}

// Eight rows of eight values. Four values of a column are encoded into a word, so that nothing is
// left to transpose.
template <typename T>
struct ValuePatch {
  static constexpr bool kHasRowScales = false;
  static constexpr int kCtas = sizeof(T) == 4 ? 2 : 4;  // of an SM: what its registers hold
  static constexpr int kCount = Vector16<T>::kCount;
  Vector16<T> at[kPatch][kPatch / kCount];

  __device__ __forceinline__ void load(int row, const T* address) {
#pragma unroll
    for (int v = 0; v < kPatch / kCount; ++v) load_through_l1(at[row][v], address + v * kCount);
  }
  __device__ __forceinline__ float scaled(int row, int column, float multiplier) const {
    return __fmul_rn(at[row][column / kCount].get(column % kCount), multiplier);
  }
  __device__ __forceinline__ void transpose() {}
  // The codes of a column, row 0 in the lowest byte.
  __device__ __forceinline__ uint2 codes(int column, float multiplier) const {
    const auto four = [&](int row) {
      return e4m3x4(scaled(row, column, multiplier), scaled(row + 1, column, multiplier),
                    scaled(row + 2, column, multiplier), scaled(row + 3, column, multiplier));
    };
    return make_uint2(four(0), four(4));
  }
};

__device__ __forceinline__ float amax_of(const ValuePatch<float>& patch) {
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) amax = patch.at[i][1].amax(patch.at[i][0].amax(amax));
  return amax;
}

// Two 16-bit values at a time. Both comparisons pass NaN over; two of them cost less than taking
// magnitudes.
template <typename Pair, typename T>
__device__ __forceinline__ float amax_of_pairs(const ValuePatch<T>& patch) {
  Pair highest, lowest;
  highest.x = highest.y = lowest.x = lowest.y = static_cast<T>(0.f);
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const Pair pair = reinterpret_cast<const Pair&>(patch.at[i][0].word[w]);
      highest = __hmax2(highest, pair);
      lowest = __hmin2(lowest, pair);
    }
  }
  const float high = fmaxf(static_cast<float>(highest.x), static_cast<float>(highest.y));
  const float low = fminf(static_cast<float>(lowest.x), static_cast<float>(lowest.y));
  return fmaxf(fabsf(high), fabsf(low));  // never -0, whose bits would be the largest
}
__device__ __forceinline__ float amax_of(const ValuePatch<__nv_bfloat16>& patch) {
  return amax_of_pairs<__nv_bfloat162>(patch);
}
__device__ __forceinline__ float amax_of(const ValuePatch<__half>& patch) {
  return amax_of_pairs<__half2>(patch);
}

// Byte j of word i <-> byte i of word j.
__device__ __forceinline__ void transpose_4x4(uint32_t (&word)[4]) {
  const uint32_t low = __byte_perm(word[0], word[1], 0x5140),
                 high = __byte_perm(word[0], word[1], 0x7362);
  const uint32_t next_low = __byte_perm(word[2], word[3], 0x5140),
                 next_high = __byte_perm(word[2], word[3], 0x7362);
  word[0] = __byte_perm(low, next_low, 0x5410);
  word[1] = __byte_perm(low, next_low, 0x7632);
  word[2] = __byte_perm(high, next_high, 0x5410);
  word[3] = __byte_perm(high, next_high, 0x7632);
}

// Eight rows of eight codes of tokens that have one scale a row: a tile is as wide as a scale
// block.
struct TokenCodes {
  static constexpr bool kHasRowScales = true;
  static constexpr int kCtas = 4;
  uint32_t at[2][2][4];  // [columns / 4][rows / 4][row % 4], four columns a word
  float scale;           // of the row whose token this lane knows

  __device__ __forceinline__ void load(int row, const uint8_t* address) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(address));
    at[0][row / 4][row % 4] = words.x, at[1][row / 4][row % 4] = words.y;
  }
};

// The codes are rounded a second time.
struct RowScaledPatch : TokenCodes {
  float row_scale[kPatch];  // behind `transpose`

  __device__ __forceinline__ void transpose() {
#pragma unroll
    for (int i = 0; i < 4; ++i) transpose_4x4(at[i / 2][i % 2]);
#pragma unroll
    for (int row = 0; row < kPatch; ++row) row_scale[row] = __shfl_sync(kFull, scale, row, 16);
  }
  __device__ __forceinline__ uint32_t four(uint32_t word, int row, float multiplier) const {
    const float2 low = __half22float2(halves_of(word)),
                 high = __half22float2(halves_of(word >> 16));
    const auto again = [&](float code, int i) {
      return __fmul_rn(__fmul_rn(code, row_scale[row + i]), multiplier);
    };
    return e4m3x4(again(low.x, 0), again(low.y, 1), again(high.x, 2), again(high.y, 3));
  }
  __device__ __forceinline__ uint2 codes(int column, float multiplier) const {
    return make_uint2(four(at[column / 4][0][column % 4], 0, multiplier),
                      four(at[column / 4][1][column % 4], 4, multiplier));
  }
};

// Of values, before `transpose`. The largest code of a row times its scale is the largest value,
// because rounding keeps the order.
__device__ __forceinline__ float amax_of(const RowScaledPatch& patch) {
  float amax = 0.f;
#pragma unroll
  for (int row = 0; row < kPatch; ++row) {
    __half2 largest = __float2half2_rn(0.f);
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const uint32_t four = patch.at[word][row / 4][row % 4];
      // Both pass NaN over.
      largest = __hmax2(largest, __habs2(halves_of(four)));
      largest = __hmax2(largest, __habs2(halves_of(four >> 16)));
    }
    const float2 pair = __half22float2(largest);
    const float scale = __shfl_sync(kFull, patch.scale, row, 16);
    amax = fmaxf(amax, __fmul_rn(fmaxf(pair.x, pair.y), scale));
  }
  return amax;
}

// Where a thread's patch is in a tile: 16 lanes side by side in columns, two patches of a warp and
// eight warps down the rows.
__device__ __forceinline__ unsigned patch_column() { return threadIdx.x % 16 * kPatch; }
__device__ __forceinline__ unsigned patch_row() { return threadIdx.x / 16 * kPatch; }

// The tokens of a patch's rows, in the first eight of the 16 lanes that share them.
__device__ __forceinline__ int token_of_lane(const int32_t* row_token, TilePlace tile) {
  return __ldg(row_token + static_cast<int64_t>(tile.row) * kTile + patch_row() +
               threadIdx.x % kPatch);
}

// What rows without a token and columns behind the last one read: cheaper than clearing their
// registers.
__device__ const uint4 kZeros[2] = {};

template <typename Value, typename Patch>
__device__ __forceinline__ void load_patch(Patch& patch, const Matrix& m, TilePlace tile, int token,
                                           const Sizes& n) {
  const unsigned column = tile.column * kTile + patch_column();
  const char* first = reinterpret_cast<const char*>(static_cast<const Value*>(m.source) + column);
  if constexpr (Patch::kHasRowScales) {
    const auto row = static_cast<unsigned>(token);
    patch.scale = row < n.tokens
                      ? __ldg(m.scale + static_cast<uint64_t>(row) * n.column_tiles + tile.column)
                      : 0.f;
  }
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const auto from = static_cast<unsigned>(__shfl_sync(kFull, token, i, 16));
    const bool valid = column < n.width && from < n.tokens;  // -1 in padding rows
    const char* address = valid ? first + static_cast<uint64_t>(from) * n.pitch
                                : reinterpret_cast<const char*>(kZeros);
    patch.load(i, reinterpret_cast<const Value*>(address));
  }
}

// Columns of 128 bytes. The 8-byte pieces of a column are exchanged by its number / 8, so that the
// 16 lanes that write one row of pieces, and the 8 lanes that read a column, meet in no bank.
__device__ __forceinline__ unsigned piece_swizzle(unsigned column) {
  return column / 8 % 8 * 2 + column / 64;
}

template <typename Patch>
__device__ __forceinline__ void stage(Patch& patch, float multiplier,
                                      uint2 (&columns)[kTile][kTile / 8]) {
  patch.transpose();
  const unsigned column = patch_column(), piece = patch_row() / 8 ^ piece_swizzle(column);
#pragma unroll
  for (int j = 0; j < kPatch; ++j) columns[column + j][piece] = patch.codes(j, multiplier);
}

// Eight lanes write the 128 bytes of a column; a CTA has 32 columns at a time.
__device__ __forceinline__ void write_tile(uint8_t* codes_t,
                                           const uint2 (&columns)[kTile][kTile / 8], TilePlace tile,
                                           const Sizes& n) {
  constexpr unsigned kSteps = kTile / 32;
  const unsigned line = threadIdx.x % 8, column = threadIdx.x / 8;
  uint4 sixteen[kSteps];
#pragma unroll
  for (unsigned i = 0; i < kSteps; ++i) {
    // piece_swizzle(column + 32 i): its even part is that of `column`, with 8 flipped for odd i;
    // its lowest bit is i / 2.
    const unsigned piece = (line * 2) ^ (piece_swizzle(column) & ~1u) ^ (i % 2 * 8);
    sixteen[i] = *reinterpret_cast<const uint4*>(&columns[column + 32 * i][piece]);
    if (i / 2) sixteen[i] = make_uint4(sixteen[i].z, sixteen[i].w, sixteen[i].x, sixteen[i].y);
  }
  const unsigned first = tile.column * kTile + column;
  uint8_t* to = codes_t + first * n.rows + (static_cast<int64_t>(tile.row) * kTile + line * 16);
#pragma unroll
  for (unsigned i = 0; i < kSteps; ++i) {
    if (first + 32 * i < n.width) store_past_l1(to + 32 * i * n.rows, sixteen[i]);
  }
}

// The block's scale and, from all patches of the tile, its multiplier. Ends behind a barrier.
template <typename Patch>
__device__ __forceinline__ float scale_tile(const Patch& patch, unsigned (&warp_amax)[kWarps],
                                            const Matrix& m, TilePlace tile, const Sizes& n) {
  float* scale_t = m.scale_t + tile.column * (n.rows / kTile) + tile.row;
  // Magnitudes compare like their bits.
  const unsigned of_warp = __reduce_max_sync(kFull, __float_as_uint(amax_of(patch)));
  if (threadIdx.x % 32 == 0) warp_amax[threadIdx.x / 32] = of_warp;
  __syncthreads();
  unsigned amax = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) amax = max(amax, warp_amax[w]);
  const BlockScale scale = block_scale(__uint_as_float(amax));
  if (threadIdx.x == 0) *scale_t = scale.scale_inv;
  return scale.multiplier;
}

template <typename Value, typename Patch>
__global__ void __launch_bounds__(kThreads, Patch::kCtas)
    transpose_tiles(const __grid_constant__ TransposeWork launch) {
  __shared__ uint2 columns[kTile][kTile / 8];
  __shared__ unsigned warp_amax[kWarps];
  const Sizes& n = launch.n;
  const Matrix& m = launch.matrix[blockIdx.y];
  const auto exists = [&](TilePlace tile) { return tile.column < n.column_tiles; };
  const auto token_of = [&](TilePlace tile) {
    return exists(tile) ? token_of_lane(launch.row_token, tile) : 0;
  };
  TileWalk walk(launch);
  Patch patch;
  TilePlace tile = walk.next(n);
  if (!exists(tile)) return;
  load_patch<Value>(patch, m, tile, token_of(tile), n);
  TilePlace ahead = walk.next(n);
  int token = token_of(ahead);
  while (true) {
    const float multiplier = scale_tile(patch, warp_amax, m, tile, n);
    stage(patch, multiplier, columns);
    const TilePlace done = tile;
    tile = ahead;
    if (exists(tile)) {  // the next tile is under way while this one is written
      load_patch<Value>(patch, m, tile, token, n);
      ahead = walk.next(n);
      token = token_of(ahead);
    }
    __syncthreads();
    write_tile(m.codes_t, columns, done, n);
    if (!exists(tile)) return;
  }
}

// One wave of CTAs for each matrix.
template <typename Value, typename Patch>
void launch_tiles(const TransposeWork& launch, int matrices, DLDevice device, int64_t stream) {
  const unsigned tiles = launch.n.row_tiles * launch.n.column_tiles;
  if (tiles == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  auto* kernel = transpose_tiles<Value, Patch>;
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device.device_id));
  TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributePreferredSharedMemoryCarveout, kCarveoutPercent));
  const dim3 grid(std::min(tiles, static_cast<unsigned>(sms * Patch::kCtas)), matrices);
  kernel<<<grid, kThreads, 0, as_stream(stream)>>>(launch);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

Sizes checked_sizes(const TensorView& source, int64_t rows) {
  TVM_FFI_ICHECK(source.ndim() == 2)
      << "the source has " << source.ndim() << " axes; needed: a matrix";
  const int64_t width = source.size(1);
  TVM_FFI_ICHECK(width % 16 == 0 && width < (int64_t(1) << 29))
      << "the source has " << width << " columns; needed: a multiple of 16";
  TVM_FFI_ICHECK(rows % kTile == 0)
      << "codes_t has " << rows << " rows of the matrix; needed: a multiple of " << kTile;
  TVM_FFI_ICHECK(source.size(0) < (int64_t(1) << 31))
      << "the source has " << source.size(0) << " rows";
  const int64_t row_tiles = rows / kTile, column_tiles = ceil_div(width, kTile);
  TVM_FFI_ICHECK(row_tiles * column_tiles < (int64_t(1) << 30))
      << row_tiles << " x " << column_tiles << " tiles exceed one launch";
  return {rows,
          static_cast<unsigned>(source.size(0)),
          static_cast<unsigned>(width),
          static_cast<unsigned>(width * (source.dtype().bits / 8)),
          static_cast<unsigned>(row_tiles),
          static_cast<unsigned>(column_tiles)};
}

void* aligned_16(void* address, const char* name) {
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(address) % 16 == 0)
      << name << " must start at a multiple of 16 bytes";
  return address;
}

void* checked_values(const TensorView& tensor, const char* name, DLDataType dtype,
                     DLDevice device) {
  return aligned_16(checked<void>(tensor, name, static_cast<DLDataTypeCode>(dtype.code), dtype.bits,
                                  device, tensor.numel()),
                    name);
}

uint8_t* checked_codes(const TensorView& tensor, const char* name, DLDevice device) {
  return static_cast<uint8_t*>(checked_values(tensor, name, DLDataType{tensor.dtype().code, 8, 1},
                                              device));  // frameworks differ in the name
}

// The outputs of one matrix: codes_t [C, R], scale_t [ceil(C / 128), R / 128].
Matrix checked_outputs(const TensorView& codes_t, const TensorView& scale_t, const Sizes& n,
                       DLDevice device) {
  TVM_FFI_ICHECK(codes_t.ndim() == 2 && codes_t.size(0) == n.width && codes_t.size(1) == n.rows)
      << "codes_t must be [C, R] = [" << n.width << ", " << n.rows << "]";
  const int64_t blocks = static_cast<int64_t>(n.row_tiles) * n.column_tiles;
  TVM_FFI_ICHECK(scale_t.numel() == blocks)
      << "scale_t has " << scale_t.numel() << " elements; needed: " << blocks;
  return {nullptr,
          nullptr,
          checked_codes(codes_t, "codes_t", device),
          checked_f32(scale_t, "scale_t", device, blocks)};
}

// padded_offsets + E, where all rows end.
const int64_t* checked_end(const TensorView& padded_offsets, DLDevice device) {
  TVM_FFI_ICHECK(padded_offsets.numel() > 0) << "padded_offsets is empty; needed: [E + 1]";
  return checked_i64(padded_offsets, "padded_offsets", device, 1) + padded_offsets.numel() - 1;
}

void launch_gather(const TensorView& x, const TransposeWork& launch, int matrices, int64_t stream) {
  if (is_type(x, kDLFloat, 32))
    return launch_tiles<float, ValuePatch<float>>(launch, matrices, x.device(), stream);
  if (is_type(x, kDLFloat, 16))
    return launch_tiles<__half, ValuePatch<__half>>(launch, matrices, x.device(), stream);
  launch_tiles<__nv_bfloat16, ValuePatch<__nv_bfloat16>>(launch, matrices, x.device(), stream);
}

TransposeWork gather_launch(const TensorView& x, const TensorView& row_token,
                            const TensorView& padded_offsets) {
  TransposeWork launch{};
  launch.n = checked_sizes(x, row_token.numel());
  launch.row_token = checked_i32(row_token, "row_token", x.device(), 0);
  launch.end = checked_end(padded_offsets, x.device());
  return launch;
}

TransposeWork gather_values_launch(const TensorView& x, const TensorView& row_token,
                                   const TensorView& padded_offsets) {
  TVM_FFI_ICHECK(is_type(x, kDLBfloat, 16) || is_type(x, kDLFloat, 16) || is_type(x, kDLFloat, 32))
      << "x must be bfloat16, float16 or float32";
  return gather_launch(x, row_token, padded_offsets);
}

Matrix gathered(const TensorView& x, const TensorView& codes_t, const TensorView& scale_t,
                const TransposeWork& launch, DLDataType dtype, DLDevice device) {
  Matrix matrix = checked_outputs(codes_t, scale_t, launch.n, device);
  matrix.source = checked_values(x, "x", dtype, device);
  return matrix;
}

// x [T, C] bf16, fp16 or fp32; row_token int32 [R], none of [0, T) for a row of zeros;
// padded_offsets int64 [E + 1], multiples of 128. Writes codes_t e4m3 [C, R], scale_t fp32 [ceil(C
// / 128), R / 128] for the rows before padded_offsets[E]; the others stay as they are.
void gather_transpose_quantize(TensorView x, TensorView row_token, TensorView padded_offsets,
                               TensorView codes_t, TensorView scale_t, int64_t stream) {
  TransposeWork launch = gather_values_launch(x, row_token, padded_offsets);
  launch.matrix[0] = gathered(x, codes_t, scale_t, launch, x.dtype(), x.device());
  launch_gather(x, launch, 1, stream);
}

// codes e4m3 [T, C] with scale fp32 [T, ceil(C / 128)], the values being their products in fp32.
// Everything else as in gather_transpose_quantize. Rows of codes and scales that `row_token` does
// not name are not read.
void gather_transpose_requantize(TensorView codes, TensorView scale, TensorView row_token,
                                 TensorView padded_offsets, TensorView codes_t, TensorView scale_t,
                                 int64_t stream) {
  TransposeWork launch = gather_launch(codes, row_token, padded_offsets);
  Matrix matrix = checked_outputs(codes_t, scale_t, launch.n, codes.device());
  matrix.source = checked_codes(codes, "codes", codes.device());
  const int64_t scales = static_cast<int64_t>(launch.n.tokens) * launch.n.column_tiles;
  TVM_FFI_ICHECK(scale.numel() == scales)
      << "scale has " << scale.numel() << " elements; needed: [T, ceil(C / 128)], " << scales;
  matrix.scale = checked_f32(scale, "scale", codes.device(), scales);
  launch.matrix[0] = matrix;
  launch_tiles<uint8_t, RowScaledPatch>(launch, 1, codes.device(), stream);
}

// gather_transpose_quantize for two matrices of one shape and dtype, in one launch.
void gather_transpose_quantize_pair(TensorView x, TensorView y, TensorView row_token,
                                    TensorView padded_offsets, TensorView x_codes_t,
                                    TensorView x_scale_t, TensorView y_codes_t,
                                    TensorView y_scale_t, int64_t stream) {
  TVM_FFI_ICHECK(y.ndim() == 2 && y.size(0) == x.size(0) && y.size(1) == x.size(1))
      << "x and y must have one shape";
  TransposeWork launch = gather_values_launch(x, row_token, padded_offsets);
  launch.matrix[0] = gathered(x, x_codes_t, x_scale_t, launch, x.dtype(), x.device());
  launch.matrix[1] = gathered(y, y_codes_t, y_scale_t, launch, x.dtype(), x.device());
  launch_gather(x, launch, 2, stream);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_transpose_quantize, sonicmoe::gather_transpose_quantize);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_transpose_quantize_pair,
                              sonicmoe::gather_transpose_quantize_pair);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_transpose_requantize, sonicmoe::gather_transpose_requantize);
