// y = a * x + y in fp32: the smallest thing that uses every part of the toolchain. The benchmark of
// the cache and its tests compile, load and launch it.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cuda_runtime.h>

#include <cstdint>

#ifndef THREADS
#define THREADS 256
#endif

namespace {

__global__ void __launch_bounds__(THREADS) scale_add(const float* x, float* y, float a, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}

void check_vector(const tvm::ffi::TensorView& v, const char* name) {
  const DLDataType dtype = v.dtype();
  TVM_FFI_ICHECK(v.device().device_type == kDLCUDA) << name << " must be on a CUDA device";
  TVM_FFI_ICHECK(dtype.code == kDLFloat && dtype.bits == 32 && dtype.lanes == 1)
      << name << " must be float32";
  TVM_FFI_ICHECK(v.ndim() == 1 && (v.size(0) <= 1 || v.stride(0) == 1))
      << name << " must be a contiguous vector";
}

void ScaleAdd(tvm::ffi::TensorView x, tvm::ffi::TensorView y, double a) {
  check_vector(x, "x");
  check_vector(y, "y");
  TVM_FFI_ICHECK(x.size(0) == y.size(0))
      << "x has " << x.size(0) << " elements, y has " << y.size(0);
  const int64_t n = x.size(0);
  if (n == 0) return;
  const DLDevice device = x.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  scale_add<<<(n + THREADS - 1) / THREADS, THREADS, 0, stream>>>(
      static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()),
      static_cast<float>(a), n);
  const cudaError_t status = cudaGetLastError();
  TVM_FFI_ICHECK(status == cudaSuccess) << "scale_add: " << cudaGetErrorString(status);
}

int64_t Threads() { return THREADS; }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(scale_add, ScaleAdd);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(threads, Threads);
