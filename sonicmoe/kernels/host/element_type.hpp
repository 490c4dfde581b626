// The dtypes of the user's tensors, for kernels that take several. Callers name them, so no number
// is agreed upon between Python and C++.
#pragma once

#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <string_view>

namespace sonicmoe {

enum class ElementType : unsigned { kBfloat16, kFloat16, kFloat32 };

inline ElementType element_type(const tvm::ffi::String& dtype) {
  const std::string_view name(dtype.data(), dtype.size());
  if (name == "bfloat16") return ElementType::kBfloat16;
  if (name == "float16") return ElementType::kFloat16;
  if (name == "float32") return ElementType::kFloat32;
  TVM_FFI_THROW(ValueError) << "dtype is " << name << "; needed: bfloat16, float16 or float32";
  return ElementType::kFloat32;
}

inline int bytes_of(ElementType type) { return type == ElementType::kFloat32 ? 4 : 2; }

}  // namespace sonicmoe
