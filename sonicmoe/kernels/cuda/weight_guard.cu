// Have the user's expert weights changed since they were quantised? Found out on the device, from a
// sample, so that no forward waits or trusts; and the table of where they lie.
#include <tvm/ffi/container/array.h>

#include <algorithm>

#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"
#include "weight_layout.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Array;

constexpr int kStretchBytes = 256;  // of one row, read for every 128 rows
constexpr int kStretchLanes = kStretchBytes / 16;
constexpr int kGuardThreads = 256;

__device__ __forceinline__ uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

struct Stretches {
  const int64_t* addresses;
  int rows, row_bytes;
  uint32_t per_stripe, per_matrix;  // stretches beside each other; stretches of a matrix
};

struct GuardWork {
  Stretches up, down;
  uint32_t up_count, count;
};

// Half a warp reads one stretch: of 128 rows x 256 bytes one row, chosen by the stretch's number.
__global__ void __launch_bounds__(kGuardThreads)
    compare_stretches(const __grid_constant__ GuardWork work, uint32_t* checksums, int32_t* state) {
  const uint32_t number = (blockIdx.x * kGuardThreads + threadIdx.x) / kStretchLanes,
                 lane = threadIdx.x % kStretchLanes;
  const bool down = number >= work.up_count;
  const Stretches& s = down ? work.down : work.up;
  const uint32_t local = down ? number - work.up_count : number;
  uint32_t sum = 0;
  if (number < work.count) {
    const uint32_t matrix = local / s.per_matrix, in_matrix = local - matrix * s.per_matrix;
    const uint32_t stripe = in_matrix / s.per_stripe;
    const int first = stripe * kTile,
              byte = (in_matrix - stripe * s.per_stripe) * kStretchBytes + lane * 16;
    const int row =
        first + static_cast<int>(mixed(number) % static_cast<uint32_t>(min(kTile, s.rows - first)));
    if (byte < s.row_bytes) {
      const char* source = reinterpret_cast<const char*>(__ldg(s.addresses + matrix)) +
                           static_cast<int64_t>(row) * s.row_bytes + byte;
      Vector16<float> bits;
      bits.load(reinterpret_cast<const float*>(source));
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += mixed(bits.word[i] + (lane * 4 + i + 1) * 0x9e3779b9u);
    }
  }
#pragma unroll
  for (int distance = kStretchLanes / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  if (lane == 0 && number < work.count && checksums[number] != sum) {
    checksums[number] = sum;
    *static_cast<volatile int32_t*>(state) = 1;  // all writers write the same
  }
}

constexpr int kAddressesPerLaunch = 256;
struct Addresses {
  int64_t value[kAddressesPerLaunch];
};

__global__ void __launch_bounds__(kAddressesPerLaunch)
    copy_addresses(const __grid_constant__ Addresses from, int64_t* table, const int count) {
  if (threadIdx.x < count) table[threadIdx.x] = from.value[threadIdx.x];
}

Stretches stretches_of(const int64_t* addresses, int64_t rows, int64_t columns, int element_bytes) {
  const int64_t row_bytes = columns * element_bytes,
                per_stripe = ceil_div(row_bytes, kStretchBytes);
  return {addresses, static_cast<int>(rows), static_cast<int>(row_bytes),
          static_cast<uint32_t>(per_stripe),
          static_cast<uint32_t>(per_stripe * ceil_div(rows, kTile))};
}

GuardWork guard_work(const Layout& layout) {
  GuardWork work{stretches_of(layout.addresses, layout.up_rows() / layout.parts(),
                              layout.up_columns(), bytes_of(layout.element)),
                 stretches_of(layout.down_addresses(), layout.down_rows(), layout.down_columns(),
                              bytes_of(layout.element)),
                 0, 0};
  const int64_t up = layout.experts * layout.parts() * work.up.per_matrix,
                all = up + layout.experts * work.down.per_matrix;
  TVM_FFI_ICHECK(all < (int64_t(1) << 27)) << all << " checksums exceed one launch";
  work.up_count = static_cast<uint32_t>(up), work.count = static_cast<uint32_t>(all);
  return work;
}

// How many checksums `check_weights` needs.
int64_t num_checksums(TensorView addresses, int64_t n1, int64_t hidden, int64_t intermediate,
                      bool transposed, bool apart, tvm::ffi::String dtype) {
  // The guard compares bytes: only where gate and up are apart does it know halves.
  const Layout layout(addresses, n1, hidden, intermediate, transposed, apart, apart, dtype);
  return guard_work(layout).count;
}

// Write `values` to the int64 table, in stream order: they travel as launch arguments, so no host
// memory must outlive the call. Refused while a CUDA graph is captured: the table would hold
// nothing before the first replay, and old addresses after a move.
void store_addresses(Array<int64_t> values, TensorView table, int64_t stream) {
  const int64_t count = static_cast<int64_t>(values.size());
  int64_t* target = checked_i64(table, "table", table.device(), count);
  tvm::ffi::CUDADeviceGuard guard(table.device().device_id);
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  TVM_FFI_CHECK_CUDA_ERROR(cudaStreamIsCapturing(as_stream(stream), &capturing));
  TVM_FFI_ICHECK(capturing == cudaStreamCaptureStatusNone)
      << "weights are new or have moved within a CUDA graph capture; update them once before it";
  for (int64_t first = 0; first < count; first += kAddressesPerLaunch) {
    Addresses some{};
    const int here = static_cast<int>(std::min<int64_t>(kAddressesPerLaunch, count - first));
    for (int i = 0; i < here; ++i) {
      some.value[i] = values[first + i];
      TVM_FFI_ICHECK(some.value[i] != 0 && some.value[i] % 16 == 0)
          << "weight " << first + i << " does not start on a 16-byte boundary";
    }
    copy_addresses<<<1, kAddressesPerLaunch, 0, as_stream(stream)>>>(some, target + first, here);
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
  }
}

// Compare a sample of every weight with its checksum of last time; store the new ones and set
// state[0] = 1 where one differs.
//
// Sampled are 256 bytes of one row in every 128: each change of a sampled bit shows (but for 2^-32
// where several change), as some do in any optimizer step; a change by hand elsewhere does not.
// Nothing else is written.
//
// addresses int64 [2E]: up matrices, then down matrices; or, where gate and up lie `apart`, [3E]:
// gate matrices, up matrices, down matrices; dtype: of the weights; checksums int32
// [num_checksums]; state int32 [2], zeroed once by its owner.
void check_weights(TensorView addresses, int64_t n1, int64_t hidden, int64_t intermediate,
                   bool transposed, bool apart, tvm::ffi::String dtype, TensorView checksums,
                   TensorView state, int64_t stream) {
  const DLDevice device = addresses.device();
  const GuardWork work =
      guard_work(Layout(addresses, n1, hidden, intermediate, transposed, apart, apart, dtype));
  uint32_t* sums =
      reinterpret_cast<uint32_t*>(checked_i32(checksums, "checksums", device, work.count));
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const unsigned ctas = static_cast<unsigned>(
      ceil_div(static_cast<int64_t>(work.count) * kStretchLanes, kGuardThreads));
  compare_stretches<<<ctas, kGuardThreads, 0, as_stream(stream)>>>(work, sums, flags);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_checksums, sonicmoe::num_checksums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(store_addresses, sonicmoe::store_addresses);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(check_weights, sonicmoe::check_weights);
