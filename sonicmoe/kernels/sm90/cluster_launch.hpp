// How a grouped GEMM for Hopper is launched.
#pragma once

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "../host/border.hpp"
#include "grouped_tiles.cuh"

namespace sonicmoe {

// Lets a kernel have the most shared memory on a device. The driver is asked once for each, because it
// answers as slowly as it launches.
static void allow_shared_memory(const void* kernel, int device) {
  static std::mutex asking;
  static std::set<std::pair<const void*, int>> allowed;
  const std::lock_guard<std::mutex> alone(asking);
  if (allowed.count({kernel, device}) > 0) return;
  TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sm90::kMostSharedBytes));
  allowed.insert({kernel, device});
}

template <class Kernel, class... Arguments>
void launch_clusters(Kernel kernel, int64_t clusters, DLDevice device, int64_t stream,
                     const Arguments&... arguments) {
  constexpr int kSharedBytes = sm90::kMostSharedBytes;
  allow_shared_memory(reinterpret_cast<const void*>(kernel), device.device_id);
  kernel<<<static_cast<unsigned>(clusters * sm90::kCluster), sm90::kThreads, kSharedBytes,
           as_stream(stream)>>>(arguments...);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// One CTA per SM, in whole clusters. `limit` > 0: on so many SMs at most, because kernels of
// another stream are to have the rest.
template <class Kernel, class... Arguments>
void launch_persistent(Kernel kernel, int64_t limit, DLDevice device, int64_t stream,
                       const Arguments&... arguments) {
  TVM_FFI_ICHECK(limit == 0 || limit >= sm90::kCluster)
      << "multiprocessors is " << limit << "; needed: 0 for all of them, or at least "
      << sm90::kCluster << ", a cluster";
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  int processors = 0;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id));
  const int64_t used = limit > 0 ? std::min<int64_t>(limit, processors) : processors;
  launch_clusters(kernel, used / sm90::kCluster, device, stream, arguments...);
}

}  // namespace sonicmoe
