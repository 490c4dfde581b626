// Handles: checked groups of tensors that a pass takes instead of a long row of arguments.
//
// A handle is described by a table of fields. The table is the only place that knows which tensors
// there are, in which order they arrive, and which dtype and shape each must have. Python asks for
// the names of a table and passes tensors by keyword, so that no caller writes an order down. Code
// in here asks for a tensor by its name.
//
// Shapes are written in the letters of the project: T tokens, K slots of a token, E experts, H
// hidden, I intermediate, R padded rows. The first field with a letter decides its size, every
// later one must agree, and so must the handles that meet in one pass.
//
// Ownership: `Weights` and `Routing` own references to their tensors, because they outlive the call
// that made them. Whoever makes one keeps it beside the very tensors it was made of, so that it
// never holds memory that would be free without it. A `Call` lives on the stack of one pass and
// owns nothing: memory that its caller frees after the pass is really free.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/memory.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>

#include "../numbers.hpp"
#include "routing_places.hpp"

namespace sonicmoe {

using tvm::ffi::AnyView;
using tvm::ffi::Optional;
using tvm::ffi::PackedArgs;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

// The size of one axis: ceil(times * letter / per) + plus. A letter of 0 ends a shape.
struct Axis {
  char letter = 0;
  int times = 1, plus = 0, per = 1;
};

constexpr Axis kAnySize{'*'};
constexpr Axis T{'T'}, K{'K'}, E{'E'}, H{'H'}, I{'I'}, R{'R'};
constexpr Axis TwoI{'I', 2}, EPlus1{'E', 1, 1};
constexpr Axis HBlocks{'H', 1, 0, kScaleBlock}, IBlocks{'I', 1, 0, kScaleBlock};
constexpr Axis TwoIBlocks{'I', 2, 0, kScaleBlock}, RBlocks{'R', 1, 0, kScaleBlock};
constexpr Axis GateUpBlocks{'I', 2, 0, kGateUpBlock};

// kTokens: bf16, fp16 or fp32, but the same in all fields of a handle. kCodes: 8 bits, as bytes.
enum class Element { kTokens, kCodes, kBfloat, kFloat, kInt32, kInt64 };
constexpr bool kOptional = true;

// What is known of T, K, E, H, I and R, and which field said it first.
class Sizes {
 public:
  int64_t operator[](char letter) const { return known_[slot(letter)].size; }
  std::string_view said_by(char letter) const { return known_[slot(letter)].field; }
  void learn(char letter, int64_t size, std::string_view field) {
    known_[slot(letter)] = {size, field};
  }

 private:
  struct Known {
    int64_t size = -1;  // not said yet
    std::string_view field;
  };
  static int slot(char letter) { return letter - 'A'; }
  std::array<Known, 26> known_{};
};

// `bytes`: how many a scratch must have, once the sizes are known.
struct Field {
  std::string_view name;
  Element element = Element::kCodes;
  std::array<Axis, 3> shape{};
  bool optional = false;
  int64_t (*bytes)(const Sizes&) = nullptr;
  bool any_strides = false;  // else contiguous

  constexpr int rank() const {
    int axes = 0;
    while (axes < 3 && shape[axes].letter != 0) ++axes;
    return axes;
  }
};

constexpr int kMaxFields = 28;

struct FieldTable {
  std::string_view handle;  // what messages call it
  std::array<Field, kMaxFields> fields;
  int size = 0;

  constexpr FieldTable(std::string_view handle, std::array<Field, kMaxFields> fields)
      : handle(handle), fields(fields) {
    while (size < kMaxFields && !fields[size].name.empty()) ++size;
  }
  int index(std::string_view name) const {
    for (int i = 0; i < size; ++i)
      if (name == fields[i].name) return i;
    TVM_FFI_THROW(InternalError) << handle << " has no field " << name;
    return -1;
  }
};

inline int64_t ceil_of(int64_t n, int64_t per) { return (n + per - 1) / per; }

inline std::string to_text(const Axis& axis) {
  std::ostringstream text;
  if (axis.per > 1) text << "ceil(";
  if (axis.times > 1) text << axis.times << " ";
  text << (axis.letter == '*' ? "any" : std::string(1, axis.letter));
  if (axis.per > 1) text << " / " << axis.per << ")";
  if (axis.plus > 0) text << " + " << axis.plus;
  return text.str();
}

inline const char* to_text(Element element) {
  switch (element) {
    case Element::kTokens:
      return "bfloat16, float16 or float32";
    case Element::kCodes:
      return "uint8";
    case Element::kBfloat:
      return "bfloat16";
    case Element::kFloat:
      return "float32";
    case Element::kInt32:
      return "int32";
    default:
      return "int64";
  }
}

inline bool is_element(Element element, DLDataType dtype) {
  if (dtype.lanes != 1) return false;
  const bool bfloat = dtype.code == kDLBfloat && dtype.bits == 16;
  const bool single = dtype.code == kDLFloat && dtype.bits == 32;
  switch (element) {
    case Element::kTokens:
      return bfloat || (dtype.code == kDLFloat && dtype.bits == 16) || single;
    case Element::kCodes:
      return dtype.code == kDLUInt && dtype.bits == 8;
    case Element::kBfloat:
      return bfloat;
    case Element::kFloat:
      return single;
    case Element::kInt32:
      return dtype.code == kDLInt && dtype.bits == 32;
    default:
      return dtype.code == kDLInt && dtype.bits == 64;
  }
}

// The tensors of one handle in the order of its table. A missing optional one has no dtype.
struct Values {
  std::array<DLTensor, kMaxFields> tensor{};

  bool given(int i) const { return tensor[i].dtype.bits != 0; }
};

inline std::string to_text(const DLTensor& tensor) {
  std::ostringstream text;
  text << tvm::ffi::DLDataTypeToString(tensor.dtype) << " [";
  for (int axis = 0; axis < tensor.ndim; ++axis)
    text << (axis > 0 ? ", " : "") << tensor.shape[axis];
  text << "]";
  return text.str();
}

inline std::string needed(const Field& field) {
  std::ostringstream text;
  text << to_text(field.element) << " [";
  for (int axis = 0; axis < field.rank(); ++axis)
    text << (axis > 0 ? ", " : "") << to_text(field.shape[axis]);
  text << "]";
  return text.str();
}

// Checks one axis against what is known, or learns its letter. False where they contradict.
inline bool agrees(const Axis& axis, int64_t size, std::string_view field, Sizes& sizes) {
  if (axis.letter == '*') return true;
  const int64_t known = sizes[axis.letter];
  if (known >= 0) return size == ceil_of(axis.times * known, axis.per) + axis.plus;
  if (axis.per > 1) return true;  // rounded up: says too little, and the codes come first
  const int64_t letter = (size - axis.plus) / axis.times;
  if (letter < 0 || letter * axis.times + axis.plus != size) return false;
  sizes.learn(axis.letter, letter, field);
  return true;
}

// Why the tensors do not fit the table, or an empty text. `sizes` comes with what other handles of
// the same pass have said, and leaves with what these tensors say. Texts are made for errors only,
// because this runs in every pass.
inline std::string problem_of(const FieldTable& table, const Values& values, Sizes& sizes) {
  const DLTensor* first = nullptr;
  const DLTensor* tokens = nullptr;
  for (int i = 0; i < table.size; ++i) {
    const Field& field = table.fields[i];
    if (!values.given(i)) {
      if (field.optional) continue;
      return std::string(field.name) + " is None; needed: " + needed(field);
    }
    const DLTensor& tensor = values.tensor[i];
    if (!is_element(field.element, tensor.dtype) || tensor.ndim != field.rank())
      return std::string(field.name) + " is " + to_text(tensor) + "; needed: " + needed(field);
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      if (agrees(field.shape[axis], tensor.shape[axis], field.name, sizes)) continue;
      std::ostringstream text;
      text << field.name << " is " << to_text(tensor) << "; needed: " << needed(field);
      const char letter = field.shape[axis].letter;
      if (sizes[letter] >= 0)
        text << ", and " << sizes.said_by(letter) << " says " << letter << " = " << sizes[letter];
      return text.str();
    }
    if (field.bytes != nullptr && tensor.shape[0] < field.bytes(sizes))
      return std::string(field.name) + " has " + std::to_string(tensor.shape[0]) +
             " bytes; needed: " + std::to_string(field.bytes(sizes)) + " or more";
    if (!field.any_strides && !tvm::ffi::IsContiguous(tensor))
      return std::string(field.name) + " is not contiguous";
    if (field.element == Element::kTokens) {
      if (tokens != nullptr && tokens->dtype != tensor.dtype)
        return std::string(field.name) + " is " + to_text(tensor) + ", but other tokens are " +
               to_text(*tokens);
      tokens = &tensor;
    }
    if (first != nullptr && (first->device.device_type != tensor.device.device_type ||
                             first->device.device_id != tensor.device.device_id))
      return std::string(field.name) + " is on another device than other tensors";
    if (first == nullptr) first = &tensor;
  }
  return "";
}

// Which two tensors must be exchanged so that all fit, for the message only; empty where no
// exchange helps.
inline std::string exchanged(const FieldTable& table, const Values& values, const Sizes& before) {
  for (int i = 0; i < table.size; ++i) {
    for (int j = i + 1; j < table.size; ++j) {
      Values other = values;
      std::swap(other.tensor[i], other.tensor[j]);
      Sizes sizes = before;
      if (problem_of(table, other, sizes).empty())
        return " (" + std::string(table.fields[i].name) + " and " +
               std::string(table.fields[j].name) + " are exchanged)";
    }
  }
  return "";
}

inline void require_fit(const FieldTable& table, const Values& values, Sizes& sizes) {
  const Sizes before = sizes;
  const std::string problem = problem_of(table, values, sizes);
  if (problem.empty()) return;
  TVM_FFI_THROW(ValueError) << table.handle << ": " << problem << exchanged(table, values, before);
}

// The tensors of `arguments` from `begin` on, one for each field.
inline Values values_of(const FieldTable& table, const PackedArgs& arguments, int begin) {
  Values values;
  if (arguments.size() - begin != table.size)
    TVM_FFI_THROW(TypeError) << table.handle << " takes " << table.size << " tensors, got "
                             << arguments.size() - begin;
  for (int i = 0; i < table.size; ++i) {
    const AnyView argument = arguments[begin + i];
    if (argument == nullptr) continue;
    const auto tensor = argument.try_cast<DLTensor*>();
    if (!tensor.has_value())
      TVM_FFI_THROW(TypeError) << table.handle << ": " << table.fields[i].name
                               << " is no tensor; needed: " << needed(table.fields[i]);
    values.tensor[i] = **tensor;
  }
  return values;
}

// The tensors of one pass, for as long as it runs.
class Call {
 public:
  Call(const FieldTable& table, const PackedArgs& arguments, int begin, Sizes& sizes)
      : table_(table), values_(values_of(table, arguments, begin)) {
    require_fit(table, values_, sizes);
  }
  Call(const Call&) = delete;

  bool has(std::string_view name) const { return values_.given(table_.index(name)); }
  TensorView operator[](std::string_view name) const {
    const int i = table_.index(name);
    TVM_FFI_ICHECK(values_.given(i))
        << table_.handle << ": " << table_.fields[i].name << " is None";
    return TensorView(&values_.tensor[i]);
  }
  tvm::ffi::Optional<TensorView> find(std::string_view name) const {
    if (!has(name)) return {};
    return (*this)[name];
  }

 private:
  const FieldTable& table_;
  Values values_;
};

// What `Weights` and `Routing` share: owned tensors and what their shapes say.
class HandleObj : public tvm::ffi::Object {
 public:
  HandleObj(const FieldTable& table, const PackedArgs& arguments)
      : table_(table), values_(values_of(table, arguments, 0)) {
    require_fit(table, values_, sizes_);
    for (int i = 0; i < table.size; ++i) {
      if (arguments[i] == nullptr) continue;
      tensors_[i] = arguments[i].cast<Tensor>();
      values_.tensor[i] = *tensors_[i].GetDLTensorPtr();  // whose shape lives as long
    }
  }

  const Sizes& sizes() const { return sizes_; }
  TensorView operator[](std::string_view name) const {
    const int i = table_.index(name);
    if (!values_.given(i))
      TVM_FFI_THROW(ValueError) << table_.handle << ": " << name
                                << " is None, and this pass needs it";
    return TensorView(&values_.tensor[i]);
  }
  // For a kernel that takes None too.
  Optional<TensorView> find(std::string_view name) const {
    const int i = table_.index(name);
    if (!values_.given(i)) return {};
    return TensorView(&values_.tensor[i]);
  }

 protected:
  explicit HandleObj(const FieldTable& table) : table_(table) {}

  const FieldTable& table_;
  std::array<Tensor, kMaxFields> tensors_{};
  Values values_;
  Sizes sizes_;
};

inline constexpr FieldTable kWeightsTable{
    "weights",
    {{
        // As forward reads them, then as dgrad does. Under `iso_weight` the second order is made in
        // a scratch for one backward, so either half may be missing.
        {"w1", Element::kCodes, {E, TwoI, H}, kOptional},
        {"w1_scale", Element::kFloat, {E, kAnySize, HBlocks}, kOptional},  // of 256 rows, or of 128
        {"w2", Element::kCodes, {E, H, I}, kOptional},
        {"w2_scale", Element::kFloat, {E, HBlocks, IBlocks}, kOptional},
        {"w1_dgrad", Element::kCodes, {E, H, TwoI}, kOptional},
        {"w1_dgrad_scale", Element::kFloat, {E, HBlocks, GateUpBlocks}, kOptional},
        {"w2_dgrad", Element::kCodes, {E, I, H}, kOptional},
        {"w2_dgrad_scale", Element::kFloat, {E, IBlocks, HBlocks}, kOptional},
        {"b1", Element::kFloat, {E, TwoI}, kOptional},  // gate and up in turns
        {"b2", Element::kFloat, {E, H}, kOptional},
        // Factors of low-rank adapters, of one call.
        {"up_a", Element::kBfloat, {E, kAnySize, H}, kOptional},
        {"up_b", Element::kBfloat, {E, TwoI, kAnySize}, kOptional},
        {"down_a", Element::kBfloat, {E, kAnySize, I}, kOptional},
        {"down_b", Element::kBfloat, {E, H, kAnySize}, kOptional},
        {"up_a_t", Element::kBfloat, {E, H, kAnySize}, kOptional},
        {"up_b_t", Element::kBfloat, {E, kAnySize, TwoI}, kOptional},
        {"down_a_t", Element::kBfloat, {E, I, kAnySize}, kOptional},
        {"down_b_t", Element::kBfloat, {E, kAnySize, H}, kOptional},
    }}};

inline constexpr FieldTable kRoutingTable{"routing",
                                          {{
                                              {"row_token", Element::kInt32, {R}},
                                              {"padded_offsets", Element::kInt64, {EPlus1}},
                                              {"slot_row", Element::kInt64, {T, K}},
                                              {"row_prob", Element::kFloat, {R}},
                                          }}};

// The quantised weights of a layer. Made once per preparation, and kept beside it.
class WeightsObj : public HandleObj {
 public:
  explicit WeightsObj(const PackedArgs& arguments) : HandleObj(kWeightsTable, arguments) {}
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("sonicmoe.Weights", WeightsObj, tvm::ffi::Object);
};

class Weights : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(Weights, ObjectRef, WeightsObj);
};

// Which token goes where. Made once per forward and once per backward.
class RoutingObj : public HandleObj {
 public:
  explicit RoutingObj(const PackedArgs& arguments) : HandleObj(kRoutingTable, arguments) {}
  // Of the memory that a builder has filled.
  RoutingObj(const Tensor& memory, int64_t tokens, int64_t slots, int64_t experts, int64_t rows)
      : HandleObj(kRoutingTable) {
    const RoutingPlaces places(tokens * slots, experts, rows);
    const DLTensor& all = *memory.GetDLTensorPtr();
    if (!is_element(Element::kCodes, all.dtype) || !memory.IsContiguous() ||
        memory.numel() < places.bytes)
      TVM_FFI_THROW(ValueError) << "routing: the memory is " << to_text(all) << "; needed: "
                                << places.bytes << " bytes or more";
    tensors_[0] = memory;
    view("row_token", {kDLInt, 32, 1}, places.row_token, {rows});
    view("padded_offsets", {kDLInt, 64, 1}, places.padded_offsets, {experts + 1});
    view("slot_row", {kDLInt, 64, 1}, places.slot_row, {tokens, slots});
    view("row_prob", {kDLFloat, 32, 1}, places.row_prob, {rows});
    require_fit(kRoutingTable, values_, sizes_);
  }
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("sonicmoe.Routing", RoutingObj, tvm::ffi::Object);

 private:
  void view(std::string_view name, DLDataType dtype, int64_t first, std::array<int64_t, 2> shape) {
    const int i = table_.index(name), axes = table_.fields[i].rank();
    shapes_[i] = shape;
    strides_[i] = {axes == 2 ? shape[1] : 1, 1};
    DLTensor& made = values_.tensor[i] = *tensors_[0].GetDLTensorPtr();
    made.data = static_cast<char*>(made.data) + first;
    made.ndim = axes;
    made.dtype = dtype;
    made.shape = shapes_[i].data();
    made.strides = strides_[i].data();
  }

  std::array<std::array<int64_t, 2>, 4> shapes_, strides_;
};

class Routing : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(Routing, ObjectRef, RoutingObj);
};

// Adds what another handle says; `handle` is its name in the message where they contradict.
inline void join(Sizes& sizes, const Sizes& other, const char* handle) {
  for (const char letter : {'T', 'K', 'E', 'H', 'I', 'R'}) {
    if (other[letter] < 0) continue;
    if (sizes[letter] >= 0 && sizes[letter] != other[letter])
      TVM_FFI_THROW(ValueError) << handle << ": " << other.said_by(letter) << " says " << letter
                                << " = " << other[letter] << ", but " << sizes.said_by(letter)
                                << " says " << letter << " = " << sizes[letter];
    sizes.learn(letter, other[letter], other.said_by(letter));
  }
}

}  // namespace sonicmoe
