// The weights of the BF16 GEMMs for Hopper where the caller has them: one tensor of all experts, or,
// built with SEPARATE_WEIGHTS, a matrix for each expert.
#pragma once

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>

#include <array>
#include <mutex>
#include <vector>

#include "../host/tensor_map.hpp"
#include "bf16_grouped_gemm.cuh"

namespace sonicmoe {

using sm90::HalfMaps;
using tvm::ffi::Optional;

#ifdef FP16
constexpr DLDataTypeCode kHalfCode = kDLFloat;
#else
constexpr DLDataTypeCode kHalfCode = kDLBfloat;
#endif

// A box has 128 of the N columns of B, and 64 of K; `by_columns`: N is contiguous.
inline std::array<cuuint32_t, 3> box_of_b(bool by_columns) {
  return {sm90::kBlockColumns,
          static_cast<cuuint32_t>(by_columns ? sm90::kHalfTileK : sm90::kTileN / 2), 1};
}

// Weights as B of a GEMM: [E, N, K], or [E, K, N] where they lie transposed. The last axis is
// contiguous, and the other strides are any multiples of 16 bytes. Where gate and up are two
// tensors, the second has the other half of axis 1, in the strides of the first.
struct StackedWeights {
  const char *data, *second;  // second: null where there is one tensor
  int64_t experts, n, k;
  int64_t expert_stride, stride;  // elements from one expert, and one row, to the next
  bool by_columns;                // N is contiguous

  StackedWeights(const TensorView& w, const Optional<TensorView>& other, bool transposed,
                 const char* name, DLDevice device)
      : data(checked(w, name, device)), second(nullptr), by_columns(transposed) {
    experts = w.size(0), expert_stride = w.stride(0), stride = w.stride(1);
    int64_t rows = w.size(1);
    if (other.has_value()) {
      const TensorView& half = other.value();
      second = checked(half, name, device);
      for (int axis = 0; axis < 3; ++axis)
        TVM_FFI_ICHECK(half.size(axis) == w.size(axis) && half.stride(axis) == w.stride(axis))
            << "the halves of " << name << " differ in shape or strides";
      TVM_FFI_ICHECK(!by_columns || rows % sm90::kHalfTileK == 0)
          << "the halves of " << name << " have " << rows << " rows; needed: a multiple of "
          << sm90::kHalfTileK;
      rows *= 2;
    }
    n = transposed ? w.size(2) : rows, k = transposed ? rows : w.size(2);
    TVM_FFI_ICHECK(n > 0 && k > 0 && n < (int64_t(1) << 31) && k < (int64_t(1) << 31))
        << name << " has no elements, or too many";
  }

  // Sets the maps of B, whose N columns are `parts` parts that are loaded apart.
  void map_parts(int64_t parts, HalfMaps& maps) const {
    if (second != nullptr) {
      // Halves of the N columns that `up` loads apart anyway, or of K.
      TVM_FFI_ICHECK(by_columns ? parts == 1 : parts == 2) << "two tensors are gate and up halves";
      maps.b[0] = map(data, n / parts, k_of_map());
      maps.b[1] = map(second, n / parts, k_of_map());
      return;
    }
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = part * (n / parts);
      maps.b[part] = map(data + 2 * (by_columns ? first : first * stride), n / parts, k);
    }
  }

  // The rows of K behind which the second map begins.
  int64_t k_of_map() const { return by_columns && second != nullptr ? k / 2 : k; }

 private:
  static const char* checked(const TensorView& w, const char* name, DLDevice device) {
    TVM_FFI_ICHECK(w.ndim() == 3) << name << " has " << w.ndim() << " axes; needed: 3";
    TVM_FFI_ICHECK(w.device().device_type == kDLCUDA && w.device().device_id == device.device_id)
        << name << " is not on the device of the tokens";
    TVM_FFI_ICHECK(is_type(w, kHalfCode, 16)) << name << " has another dtype than the tokens";
    const char* data = static_cast<const char*>(w.data_ptr()) + w.byte_offset();
    const bool fits = w.stride(2) == 1 && (w.size(1) == 1 || w.stride(1) % 8 == 0) &&
                      (w.size(0) == 1 || w.stride(0) % 8 == 0) &&
                      reinterpret_cast<uintptr_t>(data) % 16 == 0;
    TVM_FFI_ICHECK(fits) << name << " [" << w.size(0) << ", " << w.size(1) << ", " << w.size(2)
                         << "] has strides " << w.stride(0) << ", " << w.stride(1) << ", "
                         << w.stride(2)
                         << "; needed: 1 in the last axis and multiples of 8 in the others, from a "
                            "multiple of 16 bytes on";
    return data;
  }

  // So many of the N columns and of the rows of K, from `from` on.
  CUtensorMap map(const char* from, int64_t columns, int64_t depth) const {
    const int64_t rows = by_columns ? depth : columns, across = by_columns ? columns : depth,
                  next = experts > 1 ? expert_stride : (rows * stride + 7) / 8 * 8;
    const Boxes<3> boxes{
        {static_cast<cuuint64_t>(across), static_cast<cuuint64_t>(rows),
         static_cast<cuuint64_t>(experts)},
        {static_cast<cuuint64_t>(2 * stride), static_cast<cuuint64_t>(2 * next)},
        box_of_b(by_columns)};
    return tensor_map(from, CU_TENSOR_MAP_DATA_TYPE_UINT16, boxes);
  }
};

// Contiguous matrices [rows, columns] of equal size, one an expert. Holds addresses and owns no
// memory. Maps are encoded once for each way of reading, at the first launch that reads so.
class ExpertMatricesObj : public tvm::ffi::Object {
 public:
  ExpertMatricesObj(const tvm::ffi::Array<int64_t>& addresses, int64_t rows, int64_t columns)
      : rows(rows), columns(columns), addresses_(addresses.begin(), addresses.end()) {
    TVM_FFI_CHECK(!addresses_.empty(), ValueError) << "no matrices; needed: one an expert";
    TVM_FFI_CHECK(rows > 0 && columns > 0 && columns % 8 == 0 && rows < (int64_t(1) << 31) &&
                      columns < (int64_t(1) << 31),
                  ValueError)
        << "matrices are [" << rows << ", " << columns
        << "]; needed: rows, and columns in multiples of 8";
    for (const int64_t address : addresses_)
      TVM_FFI_CHECK(address != 0 && address % 16 == 0, ValueError)
          << "expert " << &address - addresses_.data() << " lies at " << address
          << "; needed: a multiple of 16";
  }

  const int64_t rows, columns;

  int64_t experts() const { return static_cast<int64_t>(addresses_.size()); }

  // An expert's map, whose last axis are the `parts` (1 or 2) parts of N. by_columns: N are the
  // matrix's columns, else its rows.
  const std::vector<CUtensorMap>& maps(bool by_columns, int64_t parts) const {
    const std::scoped_lock lock(mutex_);
    std::vector<CUtensorMap>& made = made_[by_columns][parts - 1];
    if (made.empty())
      for (const int64_t address : addresses_) made.push_back(map(address, by_columns, parts));
    return made;
  }

  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("sonicmoe.ExpertMatrices", ExpertMatricesObj,
                                    tvm::ffi::Object);

 private:
  CUtensorMap map(int64_t address, bool by_columns, int64_t parts) const {
    const int64_t across = by_columns ? columns / parts : columns,
                  down = by_columns ? rows : rows / parts,
                  next = parts == 1 ? rows * columns : by_columns ? across : down * columns;
    const Boxes<3> boxes{
        {static_cast<cuuint64_t>(across), static_cast<cuuint64_t>(down),
         static_cast<cuuint64_t>(parts)},
        {static_cast<cuuint64_t>(2 * columns), static_cast<cuuint64_t>(2 * next)},
        box_of_b(by_columns)};
    return tensor_map(reinterpret_cast<const void*>(address), CU_TENSOR_MAP_DATA_TYPE_UINT16,
                      boxes);
  }

  std::vector<int64_t> addresses_;
  mutable std::mutex mutex_;
  mutable std::array<std::array<std::vector<CUtensorMap>, 2>, 2> made_;
};

class ExpertMatrices : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(ExpertMatrices, ObjectRef, ExpertMatricesObj);
};

inline ExpertMatrices expert_matrices(tvm::ffi::Array<int64_t> addresses, int64_t rows,
                                      int64_t columns) {
  return ExpertMatrices(tvm::ffi::make_object<ExpertMatricesObj>(addresses, rows, columns));
}

// The same as `StackedWeights`, of a matrix for each expert.
struct SeparateWeights {
  ExpertMatrices matrices;
  int64_t experts, n, k;
  bool by_columns;

  SeparateWeights(const ExpertMatrices& w, const Optional<TensorView>& other, bool transposed,
                  const char* name, DLDevice)
      : matrices(w),
        experts(w->experts()),
        n(transposed ? w->columns : w->rows),
        k(transposed ? w->rows : w->columns),
        by_columns(transposed) {
    TVM_FFI_ICHECK(experts <= sm90::kMapsOfB)
        << name << " are " << experts << " matrices; needed: at most " << sm90::kMapsOfB;
    TVM_FFI_ICHECK(!other.has_value()) << name << " has matrices of experts and a second tensor";
  }

  void map_parts(int64_t parts, HalfMaps& maps) const {
    const std::vector<CUtensorMap>& made = matrices->maps(by_columns, parts);
    std::copy(made.begin(), made.end(), maps.b);
  }
  int64_t k_of_map() const { return k; }
};

#ifdef SEPARATE_WEIGHTS
using WeightArgument = ExpertMatrices;
using HalfWeights = SeparateWeights;
#else
using WeightArgument = TensorView;
using HalfWeights = StackedWeights;
#endif

}  // namespace sonicmoe
