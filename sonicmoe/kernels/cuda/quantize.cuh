// E4M3 block quantisation in registers: scale arithmetic, conversions, 16-byte loads. No policy;
// equals quant/reference.py bit for bit.
//
//   amax = max |x| over the non-NaN elements, at least 2^-100        scale_inv = amax / 448,
//   multiplier = 448 / amax code = round-to-nearest-even(x * multiplier), saturated          NaN ->
//   0x7F
// An infinity makes amax and scale_inv infinite and the multiplier 0: infinity times 0 is the NaN
// code, finite elements are 0, and 0 times an infinite scale dequantises to NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../numbers.hpp"

namespace sonicmoe {

constexpr float kE4m3Max = 448.f;
constexpr float kAmaxFloor = 0x1p-100f;

// NaN wins.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// max(amax, |x|); a NaN x is passed over. Start from 0.
__device__ __forceinline__ float amax_nonan(float amax, float x) { return fmaxf(amax, fabsf(x)); }

// The largest amax of kLanes neighbouring lanes (a power of two), in all of them; every lane of the
// warp must come.
template <int kLanes>
__device__ __forceinline__ float amax_of_lanes(float amax) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, distance));
  return amax;
}

struct BlockScale {
  float scale_inv, multiplier;
};

// Both as IEEE divisions, which -use_fast_math could not loosen. amax >= 0, not NaN.
__device__ __forceinline__ BlockScale block_scale(float amax) {
  amax = fmaxf(amax, kAmaxFloor);
  return {__fdiv_rn(amax, kE4m3Max), __fdiv_rn(kE4m3Max, amax)};
}

// Four codes, that of `a` in the lowest byte: round to nearest even, saturate to +-448, NaN ->
// 0x7F.
__device__ __forceinline__ uint32_t e4m3x4(float a, float b, float c, float d) {
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return static_cast<uint32_t>(high) << 16 | low;
}

// Two codes as fp16, which holds every E4M3 value, NaN included.
__device__ __forceinline__ __half2 halves_of(uint32_t two_codes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(two_codes)));
  return reinterpret_cast<const __half2&>(halves);
}

// 16 bytes of bf16, fp16 or fp32, kept packed; `get(i)` is exact.
template <typename T>
struct Vector16 {
  static constexpr int kCount = 16 / sizeof(T);
  uint32_t word[4];

  // For data that is read once: 16-byte aligned, not written by the kernel, kept out of L1.
  __device__ __forceinline__ void load(const T* address) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
  }
  __device__ __forceinline__ void clear() { word[0] = word[1] = word[2] = word[3] = 0; }
  __device__ __forceinline__ float get(int i) const;
  // The larger of `amax` and the largest magnitude, NaN passed over.
  __device__ __forceinline__ float amax(float amax = 0.f) const;
};

template <>
__device__ __forceinline__ float Vector16<float>::get(int i) const {
  return __uint_as_float(word[i]);
}
template <>
__device__ __forceinline__ float Vector16<__nv_bfloat16>::get(int i) const {
  return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
}
template <>
__device__ __forceinline__ float Vector16<__half>::get(int i) const {
  return __half2float(
      __ushort_as_half(static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2])));
}

template <>
__device__ __forceinline__ float Vector16<float>::amax(float amax) const {
#pragma unroll
  for (int i = 0; i < 4; ++i) amax = amax_nonan(amax, get(i));
  return amax;
}
// Of |x| in both halves of each word: two at a time, and without unpacking, which would keep every
// element in a register of its own.
#define SONICMOE_PACKED_AMAX(T, instruction)                                                \
  template <>                                                                               \
  __device__ __forceinline__ float Vector16<T>::amax(float amax) const {                    \
    Vector16<T> largest;                                                                    \
    largest.word[0] = 0;                                                                    \
    for (int i = 0; i < 4; ++i)                                                             \
      asm(instruction " %0, %0, %1;" : "+r"(largest.word[0]) : "r"(word[i] & 0x7fff7fffu)); \
    return fmaxf(amax, fmaxf(largest.get(0), largest.get(1)));                              \
  }
SONICMOE_PACKED_AMAX(__nv_bfloat16, "max.bf16x2")
SONICMOE_PACKED_AMAX(__half, "max.f16x2")
#undef SONICMOE_PACKED_AMAX

// Codes of elements [first, first + 4) of a vector.
template <typename T>
__device__ __forceinline__ uint32_t e4m3x4(const Vector16<T>& x, int first, float multiplier) {
  return e4m3x4(__fmul_rn(x.get(first), multiplier), __fmul_rn(x.get(first + 1), multiplier),
                __fmul_rn(x.get(first + 2), multiplier), __fmul_rn(x.get(first + 3), multiplier));
}

}  // namespace sonicmoe
