// The wide operands of narrow products: how a thread loads their rows, and makes 16-bit values of them
// for the tensor cores' mma.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../sm90/ptx.cuh"
#include "quantize.cuh"

namespace sonicmoe {
namespace {

constexpr int kBlock = kRowAlignment;
constexpr unsigned kFull = 0xffffffffu;

template <bool kFp16>
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  if constexpr (kFp16) {
    const __half2 halves = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(halves);
  } else {
    return sm90::bf16x2(low, high);
  }
}
// A pair of 16-bit values, multiplied.
template <bool kFp16>
__device__ __forceinline__ uint32_t scaled_pair(uint32_t pair, float by) {
  if constexpr (kFp16) {
    const float2 v = __half22float2(reinterpret_cast<const __half2&>(pair));
    return half_pair<true>(by * v.x, by * v.y);
  } else {
    return sm90::bf16x2(by * __uint_as_float(pair << 16), by * __uint_as_float(pair & 0xffff0000u));
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

// Four codes as fp16, which has the value of every code; a NaN stays one.
__device__ __forceinline__ void fp16_of_codes(uint32_t word, uint32_t& low, uint32_t& high) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

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
// 16-bit values of them; of codes also eight. `gathers`: a row is that of its token.
template <bool kHalf>
struct HalfRows {
  static constexpr bool kFp16 = kHalf, kScaled = false;
  static constexpr int kChunk = 8;
  const uint8_t* data;
  int width;
  bool gathers;
  __device__ __forceinline__ uint4 load(bool wanted, int64_t row, int column) const {
    return load_if(wanted, data + 2 * (row * width + column));
  }
  __device__ static __forceinline__ void unpack(const uint4& v, uint32_t (&to)[4], uint32_t&) {
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
};
struct CodeRows {
  static constexpr bool kFp16 = false, kScaled = true;
  static constexpr int kChunk = 16;
  const uint8_t* data;
  int width;
  bool gathers;
  const float* scales;
  int log2_rows, log2_columns;  // of a block that shares a scale; columns are 128 or 256
  __device__ __forceinline__ uint4 load(bool wanted, int64_t row, int column) const {
    return load_if(wanted, data + row * width + column);
  }
  __device__ __forceinline__ uint2 load_8(bool wanted, int64_t row, int column) const {
    return load_8_if(wanted, data + row * width + column);
  }
  __device__ static __forceinline__ void unpack(const uint4& v, uint32_t (&to)[8], uint32_t& nan) {
    const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) bf16_of_codes(word[i], to[2 * i], to[2 * i + 1], nan);
  }
  __device__ static __forceinline__ void unpack_8(const uint2& v, uint32_t (&to)[4],
                                                  uint32_t (&nan)[2]) {
    bf16_of_codes(v.x, to[0], to[1], nan[0]);
    bf16_of_codes(v.y, to[2], to[3], nan[1]);
  }
  __device__ __forceinline__ int scales_of_row() const {
    return (width + (1 << log2_columns) - 1) >> log2_columns;
  }
  __device__ __forceinline__ float scale(int64_t row, int column) const {
    return scales[(row >> log2_rows) * scales_of_row() + (column >> log2_columns)];
  }
  // of 128 columns, the last one perhaps of fewer
  __device__ __forceinline__ int blocks() const { return (width + kScaleBlock - 1) / kScaleBlock; }
};
// Codes [columns, rows] with a scale for 128 x 128, as operands of wgrad lie.
struct TransposedCodes {
  static constexpr bool kScaled = true;
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

}  // namespace
}  // namespace sonicmoe
