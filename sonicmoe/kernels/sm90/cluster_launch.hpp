// The two ways of launching a grouped GEMM for Hopper.
#pragma once

#include <algorithm>

#include "../host/border.hpp"
#include "grouped_tiles.cuh"

namespace sonicmoe {

template <class Kernel, class... Arguments>
void launch_clusters(Kernel kernel, int64_t clusters, DLDevice device, int64_t stream,
                     const Arguments&... arguments) {
  constexpr int kSharedBytes = sm90::kMostSharedBytes;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
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

// Clusters of a few tiles each, which the hardware hands to processors as they come free: beside
// kernels of another stream a persistent CTA that has to wait for its SM would keep its whole share
// of the tiles waiting.
template <class Kernel, class... Arguments>
void launch_sharing(Kernel kernel, int64_t tiles, DLDevice device, int64_t stream,
                    const Arguments&... arguments) {
  constexpr int64_t kTilesPerCluster = 2;  // the second hides the first one's way out
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  launch_clusters(kernel, ceil_div(tiles, kTilesPerCluster), device, stream, arguments...);
}

}  // namespace sonicmoe
