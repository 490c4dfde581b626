// Weight gradients from the fp32 accumulators into the user's own matrices, and the accumulators
// back to zero: one pass, one launch.
//
// Accumulators dw1 [E, N1, H] and dw2 [E, H, I], gate and up rows of dw1 interleaved. Destinations
// lie anywhere, one matrix per expert, in native orientation or transposed, with gate and up as
// halves or interleaved; fp32, bf16 or fp16; added to or written.
//
// A CTA has a tile of 64 rows x 64 columns of the contraction: 256 contiguous bytes on both sides.
// A thread turns 4 x 4 elements in its registers, shared memory takes them from the lanes along the
// contraction to lanes along the rows, 16 bytes at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <tvm/ffi/container/array.h>

#include <algorithm>

#include "../host/border.hpp"
#include "../host/element_type.hpp"

namespace sonicmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kPatch = 4;  // rows and columns of a thread
constexpr int kTile = 64;
constexpr int kLanes = kTile / kPatch;
constexpr int kTilesOfBand = 16;  // of rows whose tiles run at about the same time: the destination
                                  // is written in stretches as long
constexpr int kExpertsPerLaunch = 192;  // their addresses travel as kernel arguments: no copy, no
                                        // buffer that must outlive the call

// The format of a destination in one byte, because formats travel as kernel arguments: its
// ElementType, and whether memory is fresh, that is, written and not added to.
constexpr unsigned kTypeMask = 3, kFresh = 4;

struct Projection {
  float* accumulator;  // of the launch's first expert
  unsigned n, k;       // of one expert's native matrix [n, k]
  unsigned
      rows;  // n / 2 with rows gate_0, up_0, ... that go to [gate; up], else n: those of a part
  unsigned tiles_n, tiles_k, tiles;
  uint8_t format[kExpertsPerLaunch];
  uint64_t address[kExpertsPerLaunch];  // 0: nobody wants the gradient
};

struct FlushWork {
  Projection projection[2];
};

// Rows [n, n + 64) of a part and columns [k, k + 64).
struct PartTile {
  unsigned part, n, k;
};

// Bands of rows, across all columns; both parts of a row at about the same time, because they are
// neighbours in the accumulator.
__device__ __forceinline__ PartTile tile_of(unsigned tile, const Projection& p) {
  const unsigned band = tile / (kTilesOfBand * p.tiles_k),
                 of_band = tile % (kTilesOfBand * p.tiles_k);
  const unsigned first = band * kTilesOfBand,
                 height = min(static_cast<unsigned>(kTilesOfBand), p.tiles_n - first);
  const unsigned of_n = first + of_band % height;
  const unsigned split = p.rows != p.n;
  return {of_n & split, (of_n >> split) * kTile, of_band / height * kTile};
}

// Offsets of row n of a part: in the accumulator, and in the destination.
__device__ __forceinline__ uint64_t native_offset(unsigned part, unsigned n, unsigned k,
                                                  const Projection& p) {
  return static_cast<uint64_t>(p.rows == p.n ? n : 2 * n + part) * p.k + k;
}
template <bool kTransposed>
__device__ __forceinline__ uint64_t offset(unsigned part, unsigned n, unsigned k,
                                           const Projection& p) {
  n += part * p.rows;
  return kTransposed ? static_cast<uint64_t>(k) * p.n + n : static_cast<uint64_t>(n) * p.k + k;
}

template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[kPatch];
};

template <typename T>
__device__ __forceinline__ Four<T> sum(const Four<T>& target, const Four<float>& gradient,
                                       bool fresh) {
  Four<T> out;
#pragma unroll
  for (int i = 0; i < kPatch; ++i)
    out.at[i] =
        static_cast<T>(fresh ? gradient.at[i] : static_cast<float>(target.at[i]) + gradient.at[i]);
  return out;
}

// From a patch whose rows are of the accumulator to four vectors of the destination's rows. Every
// thread must come.
__device__ __forceinline__ void transpose_tile(Four<float> (&patch)[kPatch],
                                               Four<float> (&turned)[kTile][kLanes]) {
  const unsigned of_k = threadIdx.x % kLanes, of_n = threadIdx.x / kLanes;
#pragma unroll
  for (unsigned j = 0; j < kPatch; ++j) {
    // Exchanged by a number that differs between the lanes that write: they meet in no bank.
    turned[of_k * kPatch + j][of_n ^ of_k % 8] = {
        {patch[0].at[j], patch[1].at[j], patch[2].at[j], patch[3].at[j]}};
  }
  __syncthreads();
#pragma unroll
  for (unsigned i = 0; i < kPatch; ++i) {
    const unsigned row = threadIdx.x / kLanes + i * kLanes;
    patch[i] = turned[row][threadIdx.x % kLanes ^ row / kPatch % 8];
  }
}

// A tile in 16-byte accesses (8-byte ones of 16-bit types); everything is asked for before anything
// is waited for. Zeros are written last, when their lines have arrived: a store to a line whose
// load is under way is queued behind it.
template <typename T, bool kTransposed>
__device__ __forceinline__ void flush_vectors(float* accumulator, T* destination, bool fresh,
                                              PartTile tile, const Projection& p,
                                              Four<float> (&turned)[kTile][kLanes]) {
  const unsigned lane = threadIdx.x % kLanes * kPatch, line = threadIdx.x / kLanes;
  // Line i of a thread: row 4 line + i of the accumulator; of a transposed destination, column line
  // + 16 i.
  const unsigned row = tile.n + line * kPatch, column = tile.k + lane;
  const unsigned to_row = kTransposed ? tile.n + lane : row,
                 to_column = kTransposed ? tile.k + line : column;
  float* from = accumulator + native_offset(tile.part, row, column, p);
  T* to = destination + offset<kTransposed>(tile.part, to_row, to_column, p);
  const uint64_t from_step = p.rows == p.n ? p.k : 2 * static_cast<uint64_t>(p.k);
  const uint64_t to_step = kTransposed ? static_cast<uint64_t>(kLanes) * p.n : p.k;
  const bool held = row < p.rows && column < p.k;  // rows and columns come in fours
  const auto wanted = [&](unsigned i) {
    return kTransposed ? to_row < p.rows && to_column + i * kLanes < p.k : held;
  };

  Four<float> gradient[kPatch] = {};
  Four<T> target[kPatch];
  if (held) {
#pragma unroll
    for (unsigned i = 0; i < kPatch; ++i)
      gradient[i] = *reinterpret_cast<const Four<float>*>(from + i * from_step);
  }
#pragma unroll
  for (unsigned i = 0; i < kPatch; ++i) {
    if (!fresh && wanted(i)) target[i] = *reinterpret_cast<const Four<T>*>(to + i * to_step);
  }
  if constexpr (kTransposed) transpose_tile(gradient, turned);
#pragma unroll
  for (unsigned i = 0; i < kPatch; ++i) {
    if (wanted(i))
      *reinterpret_cast<Four<T>*>(to + i * to_step) = sum(target[i], gradient[i], fresh);
  }
  if (held) {
#pragma unroll
    for (unsigned i = 0; i < kPatch; ++i)
      *reinterpret_cast<Four<float>*>(from + i * from_step) = Four<float>{};
  }
}

// Matrices that no 16-byte access fits.
template <typename T, bool kTransposed>
__device__ __forceinline__ void flush_elements(float* accumulator, T* destination, bool fresh,
                                               PartTile tile, const Projection& p) {
#pragma unroll 1
  for (unsigned element = threadIdx.x; element < kTile * kTile; element += kThreads) {
    const unsigned n = tile.n + element / kTile, k = tile.k + element % kTile;
    if (n >= p.rows || k >= p.k) continue;
    float& gradient = accumulator[native_offset(tile.part, n, k, p)];
    T& target = destination[offset<kTransposed>(tile.part, n, k, p)];
    target = static_cast<T>(fresh ? gradient : static_cast<float>(target) + gradient);
    gradient = 0.f;
  }
}

__device__ __forceinline__ void clear_tile(float* accumulator, PartTile tile, const Projection& p) {
#pragma unroll 1
  for (unsigned element = threadIdx.x; element < kTile * kTile; element += kThreads) {
    const unsigned n = tile.n + element / kTile, k = tile.k + element % kTile;
    if (n < p.rows && k < p.k) accumulator[native_offset(tile.part, n, k, p)] = 0.f;
  }
}

template <typename T, bool kTransposed>
__device__ __forceinline__ void flush_tile(float* accumulator, uint64_t address, bool fresh,
                                           PartTile tile, const Projection& p,
                                           Four<float> (&turned)[kTile][kLanes]) {
  const bool fours = p.k % kPatch == 0 && p.rows % kPatch == 0 && address % sizeof(Four<T>) == 0;
  T* destination = reinterpret_cast<T*>(address);
  if (fours) return flush_vectors<T, kTransposed>(accumulator, destination, fresh, tile, p, turned);
  flush_elements<T, kTransposed>(accumulator, destination, fresh, tile, p);
}

template <bool kTransposed>
__global__ void __launch_bounds__(kThreads, 4)
    flush_tiles(const __grid_constant__ FlushWork launch) {
  __shared__ Four<float> turned[kTile][kLanes];
  const unsigned per_expert = launch.projection[0].tiles + launch.projection[1].tiles;
  const unsigned expert = blockIdx.x / per_expert, of_expert = blockIdx.x % per_expert;
  const bool down = of_expert >= launch.projection[0].tiles;
  const Projection& p = launch.projection[down];
  const PartTile tile = tile_of(down ? of_expert - launch.projection[0].tiles : of_expert, p);
  float* accumulator = p.accumulator + static_cast<uint64_t>(expert) * p.n * p.k;
  const uint64_t address = p.address[expert];
  const unsigned format = p.format[expert];
  const bool fresh = format & kFresh;
  if (address == 0) return clear_tile(accumulator, tile, p);
  switch (static_cast<ElementType>(format & kTypeMask)) {
    case ElementType::kBfloat16:
      return flush_tile<__nv_bfloat16, kTransposed>(accumulator, address, fresh, tile, p, turned);
    case ElementType::kFloat16:
      return flush_tile<__half, kTransposed>(accumulator, address, fresh, tile, p, turned);
    default:
      return flush_tile<float, kTransposed>(accumulator, address, fresh, tile, p, turned);
  }
}

Projection projection_of(const TensorView& accumulator, const char* name, bool split_half) {
  TVM_FFI_ICHECK(accumulator.ndim() == 3)
      << name << " has " << accumulator.ndim() << " axes; needed: [E, N, K]";
  const int64_t n = accumulator.size(1), k = accumulator.size(2), parts = split_half ? 2 : 1;
  const int64_t tiles_n = parts * ceil_div(n / parts, kTile), tiles_k = ceil_div(k, kTile);
  TVM_FFI_ICHECK(std::max(n, k) < (int64_t(1) << 31))
      << name << " is a matrix of " << n << " x " << k;
  Projection p{};
  p.accumulator = checked_f32(accumulator, name, accumulator.device(), accumulator.numel());
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(p.accumulator) % 16 == 0)
      << name << " must start at a multiple of 16 bytes";
  const int64_t tiles = tiles_n * tiles_k;
  TVM_FFI_ICHECK(tiles * kExpertsPerLaunch < (int64_t(1) << 30))
      << name << " is a matrix of " << n << " x " << k;
  p.n = static_cast<unsigned>(n);
  p.k = static_cast<unsigned>(k);
  p.rows = static_cast<unsigned>(n / parts);
  p.tiles_n = static_cast<unsigned>(tiles_n);
  p.tiles_k = static_cast<unsigned>(tiles_k);
  p.tiles = static_cast<unsigned>(tiles);
  return p;
}

// The number by which `flush_gradients` knows destinations of that dtype. fresh: written, not added
// to.
int64_t gradient_format(tvm::ffi::String dtype, bool fresh) {
  return static_cast<int64_t>(element_type(dtype)) + (fresh ? kFresh : 0);
}

// Adds dw1 fp32 [E, N1, H] and dw2 fp32 [E, H, I] into one destination per expert and projection,
// and zeroes them.
//
// destinations: E pairs for dw1, then E for dw2, of address (0: none) and format (see
// `gradient_format`). A destination is contiguous and has the shape of the native
// matrix, or of its transpose; with `split_half`, dw1's rows [gate_0, up_0, gate_1, ...] are [gate;
// up] in it. 16-bit destinations are added to in fp32 and rounded once. None may overlap another.
void flush_gradients(TensorView dw1, TensorView dw2, tvm::ffi::Array<int64_t> destinations,
                     bool transposed, bool split_half, int64_t stream) {
  FlushWork launch{{projection_of(dw1, "dw1", split_half), projection_of(dw2, "dw2", false)}};
  const int64_t experts = dw1.size(0);
  TVM_FFI_ICHECK(dw2.size(0) == experts)
      << "dw1 is of " << experts << " experts, dw2 of " << dw2.size(0);
  TVM_FFI_ICHECK(dw2.device().device_id == dw1.device().device_id)
      << "dw2 is on another device than dw1";
  TVM_FFI_ICHECK(!split_half || dw1.size(1) % 2 == 0)
      << "dw1 has " << dw1.size(1) << " rows; gate and up need an even number";
  TVM_FFI_ICHECK(static_cast<int64_t>(destinations.size()) == 4 * experts)
      << "destinations has " << destinations.size() << " numbers; needed: " << 4 * experts;
  const unsigned per_expert = launch.projection[0].tiles + launch.projection[1].tiles;
  if (per_expert == 0) return;
  tvm::ffi::CUDADeviceGuard guard(dw1.device().device_id);
  for (int64_t first = 0; first < experts; first += kExpertsPerLaunch) {
    const int64_t count = std::min<int64_t>(kExpertsPerLaunch, experts - first);
    for (int down = 0; down < 2; ++down) {
      Projection& p = launch.projection[down];
      for (int64_t e = 0; e < count; ++e) {
        const int64_t pair = 2 * (down * experts + first + e);
        p.address[e] = static_cast<uint64_t>(destinations[pair]);
        const int64_t format = destinations[pair + 1];
        TVM_FFI_ICHECK(p.address[e] == 0 || (0 <= format && format <= kFresh + 2 && format != 3))
            << "destination " << pair / 2 << " has format " << format
            << ", which gradient_format did not return";
        p.format[e] = static_cast<uint8_t>(format);
      }
    }
    auto* kernel = transposed ? flush_tiles<true> : flush_tiles<false>;
    kernel<<<static_cast<unsigned>(per_expert * count), kThreads, 0, as_stream(stream)>>>(launch);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
    for (Projection& p : launch.projection)
      p.accumulator += static_cast<uint64_t>(kExpertsPerLaunch) * p.n * p.k;
  }
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gradient_format, sonicmoe::gradient_format);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flush_gradients, sonicmoe::flush_gradients);
