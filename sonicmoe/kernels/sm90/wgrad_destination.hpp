// The memory that the gradients of one weight are added to: a matrix for each expert, wherever it
// lies, and the tensor maps by which the copy engine adds to it.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>

#include <mutex>
#include <optional>
#include <vector>

#include "../host/tensor_map.hpp"
#include "wgrad_places.cuh"

namespace sonicmoe {

inline CUtensorMap output_map(void* base, const sm90::OutputShape& shape,
                              sm90::WgradOutput output = sm90::WgradOutput::kAddF32) {
  Boxes<4> boxes;
  std::copy_n(shape.sizes, 4, boxes.sizes.begin());
  std::copy_n(shape.strides, 3, boxes.strides.begin());
  std::copy_n(shape.box, 4, boxes.box.begin());
  const auto dtype = output == sm90::WgradOutput::kWriteBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return tensor_map(base, dtype, boxes, CU_TENSOR_MAP_L2_PROMOTION_NONE);
}

// Holds addresses and owns no memory. Maps are encoded once, at the first launch, because only that
// needs a driver.
class WgradDestinationObj : public tvm::ffi::Object {
 public:
  // The native matrix of an expert is [m, n] (0 where nobody wants any); places: (address, stride
  // of m, of part, of n) of each expert, strides in elements, address 0 where nobody wants the
  // gradient. split: m's gate and up rows lie apart, `part` is the stride from one to the other,
  // and `m` strides over gates. output: a `WgradOutput` by its number.
  WgradDestinationObj(int64_t m, int64_t n, bool split, const tvm::ffi::Array<int64_t>& places,
                      int64_t output)
      : m(m), n(n), split(split), output(static_cast<sm90::WgradOutput>(output)) {
    TVM_FFI_CHECK(output >= 0 && output <= 2, ValueError) << "output is " << output;
    TVM_FFI_CHECK(!places.empty() && places.size() % 4 == 0, ValueError)
        << "places has " << places.size() << " numbers; needed: 4 for each expert";
    for (size_t i = 0; i < places.size(); i += 4)
      add({static_cast<uint64_t>(places[i]), places[i + 1], places[i + 2], places[i + 3]});
    TVM_FFI_CHECK(!is_wanted() || (m > 0 && n > 0 && (!split || m % 2 == 0)), ValueError)
        << "a matrix of " << m << " x " << n << (split ? " in two parts" : "");
    step_ = common_step();
  }

  const int64_t m, n;
  const bool split;
  const sm90::WgradOutput output;

  int64_t experts() const { return static_cast<int64_t>(places_.size()); }
  bool is_wanted(int64_t expert) const { return places_[expert].address != 0; }
  bool is_wanted() const { return first_ >= 0; }
  // Contiguous along m, so that the operands change places.
  bool swapped() const { return places_[first_].swapped(); }
  bool has_one_map() const { return step_.has_value(); }

  // One for all experts, or one for each; that of an unwanted one is not to be used.
  const std::vector<CUtensorMap>& maps() const {
    std::call_once(encoded_, [this] {
      if (has_one_map()) {
        maps_ = {map_of(places_[0], experts(), *step_)};
        return;
      }
      for (const sm90::MatrixPlace& place : places_)
        maps_.push_back(place.address == 0 ? CUtensorMap{} : map_of(place, 1, 0));
    });
    return maps_;
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("sonicmoe.WgradDestination", WgradDestinationObj,
                                    tvm::ffi::Object);

 private:
  void add(const sm90::MatrixPlace& place) {
    const int64_t expert = experts();
    places_.push_back(place);
    if (place.address == 0) return;
    const int item = sm90::item_bytes(output);
    const auto fits = [item](int64_t stride) {
      return stride > 0 && stride * item % 16 == 0 && stride < (int64_t(1) << 38);
    };
    const bool rows_fit =
        place.swapped() ? place.stride_m == 1 && fits(place.stride_n) : fits(place.stride_m);
    TVM_FFI_CHECK(place.address % 16 == 0 && rows_fit && (!split || fits(place.stride_part)),
                  ValueError)
        << "expert " << expert << " lies at " << place.address << " with strides " << place.stride_m
        << ", " << place.stride_part << ", " << place.stride_n
        << "; needed: one of the first and the last is 1, the others and the address are positive "
           "multiples of 16 bytes";
    if (first_ < 0) first_ = expert;
    TVM_FFI_CHECK(place.swapped() == swapped(), ValueError)
        << "experts " << first_ << " and " << expert << " are contiguous along different axes";
  }

  // Bytes from each expert's matrix to the next, where they are equally far apart: slices of one
  // tensor.
  std::optional<uint64_t> common_step() const {
    if (first_ != 0) return std::nullopt;
    uint64_t step = 16;
    for (size_t i = 1; i < places_.size(); ++i) {
      const sm90::MatrixPlace &before = places_[i - 1], &place = places_[i];
      if (place.address <= before.address || !place.same_strides(before)) return std::nullopt;
      if (i > 1 && place.address - before.address != step) return std::nullopt;
      step = place.address - before.address;
    }
    return step < (uint64_t(1) << 40) ? std::optional(step) : std::nullopt;
  }

  CUtensorMap map_of(const sm90::MatrixPlace& place, int64_t experts, uint64_t step) const {
    return output_map(
        reinterpret_cast<void*>(place.address),
        sm90::OutputShape(place, m, n, split, experts, step, sm90::item_bytes(output)), output);
  }

  std::vector<sm90::MatrixPlace> places_;
  int64_t first_ = -1;  // the first wanted expert
  std::optional<uint64_t> step_;
  mutable std::once_flag encoded_;
  mutable std::vector<CUtensorMap> maps_;
};

class WgradDestination : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(WgradDestination, ObjectRef, WgradDestinationObj);
};

}  // namespace sonicmoe
