// Fields: what a tensor under a name must be, and why given tensors do not fit, in words.
//
// Shapes are written in the letters of the project: T tokens, K slots of a token, E experts, H
// hidden, I intermediate, R padded rows. The first field with a letter decides its size, and every
// later one must agree.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

namespace sonicmoe {

using tvm::ffi::Any;
using tvm::ffi::Array;

// The size of one axis: ceil(times * letter / per) + plus; letter '*': any.
struct Axis {
  char letter;
  int64_t times, per, plus;
};

// kTokens: bf16, fp16 or fp32, but the same in all fields that are checked together. kCodes: 8
// bits, as bytes. kSize: a number that says its letter. kValue: whatever a kernel takes.
enum class Element { kTokens, kCodes, kBfloat, kFloat, kInt32, kInt64, kHalf, kSize, kValue };

// A division takes the host as long as the rest of an axis, and most axes have none.
inline int64_t ceil_of(int64_t n, int64_t per) { return per == 1 ? n : (n + per - 1) / per; }

// What is known of the letters, and which field said it first.
struct Sizes {
  std::array<int64_t, 26> size;
  std::array<const char*, 26> said_by{};

  Sizes() { size.fill(-1); }
  int64_t operator[](char letter) const { return size[letter - 'A']; }
  void learn(char letter, int64_t value, const char* field) {
    size[letter - 'A'] = value;
    said_by[letter - 'A'] = field;
  }
  int64_t of(const Axis& axis) const {
    return ceil_of(axis.times * (*this)[axis.letter], axis.per) + axis.plus;
  }
  // Checks an axis against what is known, or learns its letter. False where they contradict.
  bool agree(const Axis& axis, int64_t value, const char* field) {
    if (axis.letter == '*') return true;
    if ((*this)[axis.letter] >= 0) return value == of(axis);
    if (axis.per > 1) return true;  // rounded up: says too little, and the codes come first
    const int64_t letter = axis.times == 1 ? value - axis.plus : (value - axis.plus) / axis.times;
    if (letter < 0 || letter * axis.times + axis.plus != value) return false;
    learn(axis.letter, letter, field);
    return true;
  }
  // Adds what others say; `name` is theirs in the message where they contradict.
  void join(const Sizes& other, const std::string& name) {
    for (const char letter : {'T', 'K', 'E', 'H', 'I', 'R'}) {
      const int64_t value = other[letter];
      if (value < 0) continue;
      if ((*this)[letter] >= 0 && (*this)[letter] != value)
        TVM_FFI_THROW(ValueError) << name << ": " << other.said_by[letter - 'A'] << " says "
                                  << letter << " = " << value << ", but " << said_by[letter - 'A']
                                  << " says " << letter << " = " << (*this)[letter];
      learn(letter, value, other.said_by[letter - 'A']);
    }
  }
};

struct Field {
  std::string name;
  Element element;
  bool any_strides;  // else contiguous
  int rank = 0;
  std::array<Axis, 3> shape;

  // (name, element, any_strides, letter, times, per, plus, letter, ...)
  explicit Field(const Array<Any>& told)
      : name(told[0].cast<tvm::ffi::String>()),
        element(static_cast<Element>(told[1].cast<int64_t>())),
        any_strides(told[2].cast<bool>()) {
    for (size_t i = 3; i < told.size(); i += 4)
      shape[rank++] = {static_cast<char>(told[i].cast<int64_t>()), told[i + 1].cast<int64_t>(),
                       told[i + 2].cast<int64_t>(), told[i + 3].cast<int64_t>()};
  }
  bool is_tensor() const { return element < Element::kSize; }
};

inline std::vector<Field> fields_of(const Array<Array<Any>>& told) {
  return std::vector<Field>(told.begin(), told.end());
}

inline DLDataType dtype_of(Element element) {
  constexpr std::array<DLDataType, 7> kTypes = {
      {{kDLBfloat, 16, 1}, {kDLUInt, 8, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 32, 1},
       {kDLInt, 32, 1}, {kDLInt, 64, 1}, {kDLFloat, 16, 1}}};
  return kTypes[static_cast<int>(element)];
}

inline bool is_element(Element element, DLDataType dtype) {
  if (element == Element::kTokens && dtype.code == kDLFloat && dtype.lanes == 1)
    return dtype.bits == 16 || dtype.bits == 32;
  return dtype == dtype_of(element);
}

inline std::string to_text(const DLTensor& tensor) {
  std::ostringstream text;
  text << tvm::ffi::DLDataTypeToString(tensor.dtype) << " [";
  for (int axis = 0; axis < tensor.ndim; ++axis)
    text << (axis > 0 ? ", " : "") << tensor.shape[axis];
  text << "]";
  return text.str();
}

inline std::string to_text(const Axis& axis) {
  std::ostringstream text;
  if (axis.per > 1) text << "ceil(";
  if (axis.times > 1) text << axis.times << " ";
  text << (axis.letter == '*' ? "any" : std::string(1, axis.letter));
  if (axis.per > 1) text << " / " << axis.per << ")";
  if (axis.plus > 0) text << " + " << axis.plus;
  return text.str();
}

inline std::string needed(const Field& field) {
  if (!field.is_tensor()) return "a value";
  std::ostringstream text;
  text << (field.element == Element::kTokens
               ? "bfloat16, float16 or float32"
               : std::string(tvm::ffi::DLDataTypeToString(dtype_of(field.element))))
       << " [";
  for (int axis = 0; axis < field.rank; ++axis)
    text << (axis > 0 ? ", " : "") << to_text(field.shape[axis]);
  text << "]";
  return text.str();
}

// Why the tensors do not fit the fields of their numbers, or an empty text; null where there is no
// tensor. which: the numbers. `sizes` comes with what others have said, and
// leaves with what these tensors say. Texts are made for errors only, because this runs in every
// call.
inline std::string problem_of(const std::vector<Field>& fields, const std::vector<int>& which,
                              const DLTensor* const* tensors, Sizes& sizes) {
  const DLTensor *first = nullptr, *tokens = nullptr;
  for (const int i : which) {
    if (tensors[i] == nullptr) continue;
    const Field& field = fields[i];
    const DLTensor& tensor = *tensors[i];
    if (!is_element(field.element, tensor.dtype) || tensor.ndim != field.rank)
      return field.name + " is " + to_text(tensor) + "; needed: " + needed(field);
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      if (sizes.agree(field.shape[axis], tensor.shape[axis], field.name.c_str())) continue;
      const char letter = field.shape[axis].letter;
      std::ostringstream text;
      text << field.name << " is " << to_text(tensor) << "; needed: " << needed(field);
      if (sizes[letter] >= 0)
        text << ", and " << sizes.said_by[letter - 'A'] << " says " << letter << " = "
             << sizes[letter];
      return text.str();
    }
    if (!field.any_strides && !tvm::ffi::IsContiguous(tensor))
      return field.name + " is not contiguous";
    if (field.element == Element::kTokens) {
      if (tokens != nullptr && tokens->dtype != tensor.dtype)
        return field.name + " is " + to_text(tensor) + ", but other tokens are " +
               to_text(*tokens);
      tokens = &tensor;
    }
    if (first != nullptr && (first->device.device_type != tensor.device.device_type ||
                             first->device.device_id != tensor.device.device_id))
      return field.name + " is on another device than other tensors";
    if (first == nullptr) first = &tensor;
  }
  return "";
}

// Throws the problem of the tensors, if there is one, and says which two of them must be exchanged
// so that all fit. problem(tensors): the text of a problem, or an empty one.
template <class Problem>
void require_fit(const std::string& name, const std::vector<Field>& fields,
                 const std::vector<int>& which, const DLTensor** tensors, Problem problem) {
  const std::string found = problem();
  if (found.empty()) return;
  std::string exchanged;
  for (auto one = which.begin(); one != which.end() && exchanged.empty(); ++one) {
    for (auto other = one + 1; other != which.end() && exchanged.empty(); ++other) {
      const int i = *one, j = *other;
      if (tensors[i] == nullptr || tensors[j] == nullptr) continue;
      std::swap(tensors[i], tensors[j]);
      if (problem().empty())
        exchanged = " (" + fields[i].name + " and " + fields[j].name + " are exchanged)";
      std::swap(tensors[i], tensors[j]);
    }
  }
  TVM_FFI_THROW(ValueError) << name << ": " << found << exchanged;
}

// The tensor of an argument; null for None.
inline const DLTensor* tensor_of(const tvm::ffi::AnyView& argument, const std::string& name,
                                 const Field& field) {
  if (argument == nullptr) return nullptr;
  const auto tensor = argument.try_cast<DLTensor*>();
  if (!tensor.has_value())
    TVM_FFI_THROW(TypeError) << name << ": " << field.name
                             << " is no tensor; needed: " << needed(field);
  return *tensor;
}

}  // namespace sonicmoe
