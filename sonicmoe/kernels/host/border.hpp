// What every kernel's entry point needs at its border: argument checks with names, the caller's
// device and stream.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <cstdint>

namespace sonicmoe {

using tvm::ffi::TensorView;

inline bool is_type(const TensorView& tensor, DLDataTypeCode code, int bits) {
  const DLDataType dtype = tensor.dtype();
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

// The address of a contiguous CUDA tensor on `device` with at least `elements` elements of
// `code`/`bits`.
template <typename T>
T* checked(const TensorView& tensor, const char* name, DLDataTypeCode code, int bits,
           DLDevice device, int64_t elements) {
  TVM_FFI_ICHECK(tensor.device().device_type == kDLCUDA) << name << " must be on a CUDA device";
  TVM_FFI_ICHECK(tensor.device().device_id == device.device_id)
      << name << " is on another device than the indices";
  TVM_FFI_ICHECK(is_type(tensor, code, bits))
      << name << " must have " << bits << "-bit elements of DLPack type " << code;
  TVM_FFI_ICHECK(tensor.IsContiguous()) << name << " must be contiguous";
  TVM_FFI_ICHECK(tensor.numel() >= elements)
      << name << " has " << tensor.numel() << " elements; needed: " << elements;
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

inline int32_t* checked_i32(const TensorView& tensor, const char* name, DLDevice device,
                            int64_t elements) {
  return checked<int32_t>(tensor, name, kDLInt, 32, device, elements);
}
inline int64_t* checked_i64(const TensorView& tensor, const char* name, DLDevice device,
                            int64_t elements) {
  return checked<int64_t>(tensor, name, kDLInt, 64, device, elements);
}
inline float* checked_f32(const TensorView& tensor, const char* name, DLDevice device,
                          int64_t elements) {
  return checked<float>(tensor, name, kDLFloat, 32, device, elements);
}

inline uint8_t* checked_bytes(const TensorView& tensor, const char* name, DLDevice device,
                              int64_t elements) {
  TVM_FFI_ICHECK(tensor.dtype().bits == 8 && tensor.dtype().lanes == 1)
      << name << " must have 8-bit elements";
  return checked<uint8_t>(tensor, name, static_cast<DLDataTypeCode>(tensor.dtype().code), 8, device,
                          elements);
}

// The address itself, for data that kernels read 16 bytes at a time.
template <class T>
T* aligned_16(T* data, const char* name) {
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " does not start at a multiple of 16 bytes";
  return data;
}

inline cudaStream_t as_stream(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace sonicmoe
