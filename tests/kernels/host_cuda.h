// Runs CUDA kernels on the host: CTAs one after the other, a fibre for each thread of a CTA. Slow,
// and exact in its indices. A fibre runs until it waits at a barrier, and every other CTA takes its
// threads in the opposite order, so a barrier that is missing shows in one of them.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <sched.h>
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

namespace host_cuda {

struct Index {
  unsigned x;
};
inline Index thread, block, grid, cta_size;

struct Barrier {
  unsigned size, arrived = 0, generation = 0;
};

struct Fibre {
  static constexpr size_t kStackBytes = 256 << 10;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  jmp_buf place;  // where it goes on
  bool started = false, ended = false;
  const Barrier* barrier = nullptr;  // at which it waits, until this generation is over
  unsigned generation = 0;
};

inline std::vector<Fibre> fibres;
inline Barrier cta;
inline std::vector<Barrier> warps;
inline std::vector<uint32_t> shuffled;
inline std::function<void()> body;
inline jmp_buf scheduler;
inline bool trapped = false;

inline void enter() {
  body();
  fibres[thread.x].ended = true;
  _longjmp(scheduler, 1);
}

// Ends the launch, which throws then.
inline void trap() {
  trapped = true;
  _longjmp(scheduler, 1);
}

inline int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

inline void go_on(Fibre& fibre) {
  if (_setjmp(scheduler)) return;
  if (fibre.started) _longjmp(fibre.place, 1);
  fibre.started = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fibre.stack.get();
  context.uc_stack.ss_size = Fibre::kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

inline void wait_at(Barrier& barrier) {
  Fibre& fibre = fibres[thread.x];
  fibre.generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  fibre.barrier = &barrier;
  if (!_setjmp(fibre.place)) _longjmp(scheduler, 1);
  fibre.barrier = nullptr;
}

inline void run_cta(unsigned threads) {
  for (unsigned ended = 0; ended < threads;) {
    bool moved = false;
    for (unsigned turn = 0; turn < threads; ++turn) {
      thread.x = block.x % 2 ? threads - 1 - turn : turn;
      Fibre& fibre = fibres[thread.x];
      if (fibre.ended || (fibre.barrier && fibre.barrier->generation == fibre.generation)) continue;
      go_on(fibre);
      if (trapped) return;
      moved = true;
      ended += fibre.ended;
    }
    if (!moved) {
      std::fputs("host_cuda: threads wait at a barrier that others never reach\n", stderr);
      std::abort();
    }
  }
}

template <typename Kernel>
auto launch(Kernel kernel, unsigned blocks, unsigned threads, int, cudaStream_t) {
  return [=](auto... arguments) {
    grid.x = blocks;
    cta_size.x = threads;
    cta = {threads};
    warps.assign(threads / 32, {32});
    shuffled.assign(threads, 0);
    if (fibres.size() < threads) fibres.resize(threads);
    body = [=] { kernel(arguments...); };
    for (block.x = 0; block.x < blocks; ++block.x) {
      for (Fibre& fibre : fibres) fibre.started = fibre.ended = false;
      run_cta(threads);
      if (!trapped) continue;
      trapped = false;
      throw std::runtime_error("unspecified launch failure");
    }
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

// Two codes as fp16.
inline uint32_t halves_of_e4m3x2(uint16_t codes) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; ++i) {
    const uint32_t code = codes >> 8 * i & 0xff, exponent = code >> 3 & 15, fraction = code & 7;
    const float magnitude = (code & 0x7f) == 0x7f ? NAN
                            : exponent == 0       ? std::ldexp(float(fraction), -9)
                                                  : std::ldexp(float(8 + fraction), int(exponent) - 10);
    const __half half = __float2half(code & 0x80 ? -magnitude : magnitude);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    halves |= static_cast<uint32_t>(bits) << 16 * i;
  }
  return halves;
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
#define blockDim host_cuda::cta_size
#define fmaxf host_cuda::larger_number
#undef __shared__
#undef __launch_bounds__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define TVM_FFI_CHECK_CUDA_ERROR(call) static_cast<void>(call)

inline void __syncthreads() { host_cuda::wait_at(host_cuda::cta); }
template <typename T>
T __shfl_xor_sync(unsigned, T value, int distance) {
  host_cuda::Barrier& warp = host_cuda::warps[threadIdx.x / 32];
  host_cuda::shuffled[threadIdx.x] = std::bit_cast<uint32_t>(value);
  host_cuda::wait_at(warp);
  const uint32_t other = host_cuda::shuffled[threadIdx.x ^ distance];
  host_cuda::wait_at(warp);
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
template <typename T>
T __ldcv(const T* address) {
  return *static_cast<const volatile T*>(address);
}
inline int __popc(uint32_t bits) { return std::popcount(bits); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __threadfence(); }
inline void __nanosleep(unsigned) { sched_yield(); }  // to the other ranks
inline uint32_t atomicOr(uint32_t* address, uint32_t bits) {
  return __atomic_fetch_or(address, bits, __ATOMIC_SEQ_CST);
}
inline int atomicAdd(int* address, int value) {
  return __atomic_fetch_add(address, value, __ATOMIC_SEQ_CST);
}
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline cudaError_t cuda_success() { return cudaSuccess; }
using std::max;
using std::min;
