// Calls of kernels that read tensors of a routing, straight from the memory that its builder has
// filled: a framework's views of it would take the host longer than the launch.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <string>
#include <vector>

#include "routing_places.hpp"

namespace sonicmoe {
namespace {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::PackedArgs;
using tvm::ffi::String;
using tvm::ffi::TensorView;

constexpr int kHead = 5;  // arguments that say where the routing lies
constexpr int kMostArguments = 32, kMostFields = 5;

enum class Field { kExpertCounts, kPaddedOffsets, kRowToken, kSlotRow, kRowProb };
constexpr std::array kFieldNames = {"expert_counts", "padded_offsets", "row_token", "slot_row",
                                    "row_prob"};

Field field_named(const String& name) {
  for (size_t i = 0; i < kFieldNames.size(); ++i)
    if (std::string(name) == kFieldNames[i]) return static_cast<Field>(i);
  TVM_FFI_THROW(ValueError) << "a routing has no " << name;
  return Field::kRowProb;
}

// A tensor [first], or [first, second], that begins so many bytes into the memory.
struct Part {
  std::array<int64_t, 2> shape, strides;
  DLTensor tensor;

  void cut(const DLTensor& memory, int64_t begin, DLDataType dtype, int64_t first,
           int64_t second = -1) {
    shape = {first, second};
    strides = {second < 0 ? 1 : second, 1};
    tensor = memory;
    tensor.data = static_cast<char*>(memory.data) + begin;
    tensor.ndim = second < 0 ? 1 : 2;
    tensor.dtype = dtype;
    tensor.shape = shape.data();
    tensor.strides = strides.data();
  }
};

// The function (memory, T, K, E, R, arguments...): it calls `kernel` with the arguments, and with
// these fields of the routing in front of argument `at`.
Function with_routing(const Function& kernel, const Array<String>& names, int64_t at) {
  std::vector<Field> fields;
  for (const String& name : names) fields.push_back(field_named(name));
  TVM_FFI_ICHECK(fields.size() <= kMostFields) << "a routing has " << kMostFields << " fields";
  return Function::FromPacked([kernel, fields, at](PackedArgs all, Any* result) {
    const int given = all.size() - kHead;
    if (given < at || given + static_cast<int>(fields.size()) > kMostArguments)
      TVM_FFI_THROW(TypeError) << "a kernel over a routing got " << all.size() << " arguments";
    const DLTensor& memory = *all[0].cast<DLTensor*>();
    const auto tokens = all[1].cast<int64_t>(), slots = all[2].cast<int64_t>(),
               experts = all[3].cast<int64_t>(), rows = all[4].cast<int64_t>();
    const RoutingPlaces places(tokens * slots, experts, rows);
    if (memory.dtype.bits != 8 || !tvm::ffi::IsContiguous(memory) ||
        TensorView(&memory).numel() < places.bytes)
      TVM_FFI_THROW(ValueError) << "the memory of a routing has " << TensorView(&memory).numel()
                                << " elements; needed: " << places.bytes << " bytes or more";
    std::array<Part, kMostFields> parts;
    std::array<AnyView, kMostArguments> passed;
    int count = 0;
    const auto pass = [&](int begin, int end) {
      for (int i = begin; i < end; ++i) passed[count++] = all[kHead + i];
    };
    pass(0, static_cast<int>(at));
    for (size_t i = 0; i < fields.size(); ++i) {
      constexpr DLDataType kInt32{kDLInt, 32, 1}, kInt64{kDLInt, 64, 1}, kSingle{kDLFloat, 32, 1};
      Part& part = parts[i];
      switch (fields[i]) {
        case Field::kExpertCounts:
          part.cut(memory, places.expert_counts, kInt32, experts);
          break;
        case Field::kPaddedOffsets:
          part.cut(memory, places.padded_offsets, kInt64, experts + 1);
          break;
        case Field::kRowToken:
          part.cut(memory, places.row_token, kInt32, rows);
          break;
        case Field::kSlotRow:
          part.cut(memory, places.slot_row, kInt64, tokens, slots);
          break;
        case Field::kRowProb:
          part.cut(memory, places.row_prob, kSingle, rows);
          break;
      }
      passed[count++] = &part.tensor;
    }
    pass(static_cast<int>(at), given);
    kernel.CallPacked(passed.data(), count, result);
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(with_routing, sonicmoe::with_routing);
