// Runs CUDA kernels on the host: CTAs one after the other, a host thread for each thread of a CTA.
// Slow, and exact in its indices.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace host_cuda {

struct Index {
  unsigned x;
};
inline thread_local Index thread, block;
inline Index grid;
inline std::unique_ptr<std::barrier<>> cta;
inline std::vector<std::unique_ptr<std::barrier<>>> warps;
inline std::vector<uint32_t> shuffled;

template <typename Kernel>
auto launch(Kernel kernel, unsigned blocks, unsigned threads, int, cudaStream_t) {
  return [=](auto... arguments) {
    grid.x = blocks;
    cta = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (unsigned warp = 0; warp < threads / 32; ++warp)
      warps.push_back(std::make_unique<std::barrier<>>(32));
    shuffled.assign(threads, 0);
    std::vector<std::thread> pool;
    for (unsigned number = 0; number < threads; ++number) {
      pool.emplace_back([=] {
        for (unsigned of = 0; of < blocks; ++of) {
          thread.x = number, block.x = of;
          kernel(arguments...);
          cta->arrive_and_wait();
        }
      });
    }
    for (auto& one : pool) one.join();
  };
}

// The E4M3 code of x: round to nearest even, saturate, NaN -> 0x7F.
inline uint8_t e4m3(float x) {
  if (std::isnan(x)) return 0x7f;
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448.f) return sign | 0x7e;
  const int exponent = magnitude == 0.f ? -6 : std::max(std::ilogb(magnitude), -6);
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign |
         static_cast<uint8_t>(((exponent + 6) << 3) +
                              steps);  // 8 steps to the next exponent, which carries by itself
}
inline uint16_t e4m3x2(float high, float low) {
  return static_cast<uint16_t>(e4m3(high) << 8 | e4m3(low));
}

inline void load16(uint32_t (&word)[4], const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) std::abort();
  std::memcpy(word, address, 16);
}

// As on the GPU, and unlike fmaxf of the C library, a signalling NaN is passed over like any other.
inline float larger_number(float a, float b) { return std::isnan(a) || b > a ? b : a; }

// The larger of both halves of non-negative words; `Vector` says what the halves are.
template <typename Vector>
uint32_t max_of_halves(uint32_t a, uint32_t b) {
  Vector x, y;
  x.word[0] = a, y.word[0] = b;
  const auto first = [&](int i) { return larger_number(x.get(i), y.get(i)) == x.get(i); };
  return ((first(0) ? a : b) & 0xffffu) | ((first(1) ? a : b) & 0xffff0000u);
}

}  // namespace host_cuda

namespace tvm::ffi {
struct CUDADeviceGuard {
  explicit CUDADeviceGuard(int) {}
};
}  // namespace tvm::ffi

#define threadIdx host_cuda::thread
#define blockIdx host_cuda::block
#define gridDim host_cuda::grid
#define fmaxf host_cuda::larger_number
#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define TVM_FFI_CHECK_CUDA_ERROR(call) static_cast<void>(call)

inline void __syncthreads() { host_cuda::cta->arrive_and_wait(); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  auto& warp = *host_cuda::warps[threadIdx.x / 32];
  host_cuda::shuffled[threadIdx.x] = std::bit_cast<uint32_t>(value);
  warp.arrive_and_wait();
  const uint32_t other = host_cuda::shuffled[threadIdx.x ^ distance];
  warp.arrive_and_wait();
  return std::bit_cast<T>(other);
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i)
    out |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline cudaError_t cuda_success() { return cudaSuccess; }
using std::max;
using std::min;
