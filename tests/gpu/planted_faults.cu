// What a trial must survive: a kernel that computes a wrong number, one that faults, one that never
// ends. KIND: 0, 1, 2.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <cuda_runtime.h>

namespace {

__global__ void plant_kernel(float* values, volatile int* flag) {
#if KIND == 0
  values[0] += 100.f;  // dprobs of a trial are some tens
#elif KIND == 1
  values[1ll << 40] = 1.f;
#else
  while (*flag == 0) {
  }
  values[0] = 0.f;
#endif
}

// flag: an int32 that is zero, where the endless loop looks.
void Plant(tvm::ffi::TensorView values, tvm::ffi::TensorView flag) {
  TVM_FFI_ICHECK(values.device().device_type == kDLCUDA) << "values must be on a CUDA device";
  const DLDevice device = values.device();
  const auto stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  plant_kernel<<<1, 1, 0, stream>>>(static_cast<float*>(values.data_ptr()),
                                    static_cast<int*>(flag.data_ptr()));
  const cudaError_t status = cudaGetLastError();
  TVM_FFI_ICHECK(status == cudaSuccess) << "plant: " << cudaGetErrorString(status);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(plant, Plant);
