// Which way a weight gradient is added to its sums in memory, C: they are fetched into shared
// memory, added to there and written back, or the copy engine adds where they lie. Both give the
// same bits.
//
// Where C is not in L2, additions by the copy engine reach two thirds of the bandwidth of loads and
// stores, with a prefetch and without. That is the bound where experts have few rows. The first
// patches of a tile are asked for before its products begin. With more rows, products hide the copy
// engine's additions better than the wait for patches, and the faster the memory, the fewer rows
// that takes.
#pragma once

#include <map>
#include <mutex>

#include "../host/border.hpp"
#include "wgrad_places.cuh"

namespace sonicmoe {

// Mean rows of an expert, padding included, up to which C's sums are fetched: measured on an H100
// (3.35 TB/s) and on an H200 (4.9 TB/s).
struct RowsToFetch {
  int64_t usual, in_fast_memory;
};
constexpr double kFastMemory = 4.2e12;  // bytes per second
constexpr RowsToFetch kRowsToFetch{1280, 832};
// About half, because products take twice as long.
constexpr RowsToFetch kRowsToFetchHalf{640, 320};

// By the clock and the width of the device's memory. Each device is asked once: while every launch
// asked, the host took about a millisecond longer for it.
inline bool has_fast_memory(int device) {
  static std::mutex mutex;
  static std::map<int, bool> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    int kilohertz = 0, bits = 0;
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, device));
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, device));
    found = known.emplace(device, 2e3 * kilohertz * bits / 8 > kFastMemory).first;
  }
  return found->second;
}

inline bool fetches_sums(sm90::WgradOutput output, int64_t rows, int64_t experts, RowsToFetch most,
                         DLDevice device) {
  if (output != sm90::WgradOutput::kAddF32) return false;
  return rows <= experts * (has_fast_memory(device.device_id) ? most.in_fast_memory : most.usual);
}

}  // namespace sonicmoe
