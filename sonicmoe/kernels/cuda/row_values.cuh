// Rows as kernels read and write them: one element, or 16 bytes of elements, that become fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace sonicmoe {
namespace {

template <typename T>
__device__ T from_float(float value) {
  return static_cast<T>(value);
}
template <>
__device__ float from_float<float>(float value) {
  return value;
}

template <typename T, int kVec>
struct alignas(sizeof(T) * kVec) Vector {
  T at[kVec];
};

// One element as its raw bits, or 16 bytes of elements: kept packed until they are added, which
// halves the registers.
template <typename T, int kVec>
struct Packed {
  T bits;
  __device__ void clear() { bits = from_float<T>(0.f); }
  __device__ void load(const T* address) { bits = __ldg(address); }
  __device__ float get(int) const { return static_cast<float>(bits); }
};

template <typename T>
struct Packed16 {
  uint32_t word[4];
  __device__ void clear() { word[0] = word[1] = word[2] = word[3] = 0; }
  // Rows are read once and are larger than L1: do not let them displace what the SM reuses.
  __device__ void load(const T* address) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                 : "l"(address));
  }
};

template <>
struct Packed<float, 4> : Packed16<float> {
  __device__ float get(int i) const { return __uint_as_float(word[i]); }
};
template <>
struct Packed<__nv_bfloat16, 8> : Packed16<__nv_bfloat16> {
  __device__ float get(int i) const {
    return __uint_as_float(i % 2 ? word[i / 2] & 0xffff0000u : word[i / 2] << 16);
  }
};
template <>
struct Packed<__half, 8> : Packed16<__half> {
  __device__ float get(int i) const {
    return __half2float(
        __ushort_as_half(static_cast<unsigned short>(i % 2 ? word[i / 2] >> 16 : word[i / 2])));
  }
};

template <typename T, int kVec>
__device__ void store(T* address, const float (&values)[kVec]) {
  constexpr int kBytes = sizeof(T) * kVec;
  constexpr int kChunk = kBytes > 16 ? kVec * 16 / kBytes : kVec;
#pragma unroll
  for (int first = 0; first < kVec; first += kChunk) {
    Vector<T, kChunk> chunk;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk.at[i] = from_float<T>(values[first + i]);
    *reinterpret_cast<Vector<T, kChunk>*>(address + first) = chunk;
  }
}

}  // namespace
}  // namespace sonicmoe
