// Host side of low-rank adapters: the operands that follow those of a GEMM.
#pragma once

#include <tvm/ffi/optional.h>

#include <utility>

#include "../host/border.hpp"
#include "grouped_tiles.cuh"

namespace sonicmoe {

using tvm::ffi::Optional;

// u [R, width] and its factor [E, N, width], contiguous, both or neither; only in a module built with
// LOW_RANK. width: a multiple of 8.
using Adapter = std::pair<Optional<TensorView>, Optional<TensorView>>;

// `visit(maps)` where there are maps of an adapter.
template <class Maps, class Visit>
void fill_adapter(Maps& maps, Visit visit) {
  if constexpr (sm90::kLowRank) visit(maps);
}

// The address of the factor, nullptr where there is no adapter; u goes to `to`. code: DLPack's, of
// the 16-bit elements.
inline const uint8_t* take_adapter(const Adapter& adapter, const sm90::RowGroups& groups,
                                   sm90::AdapterRows& to, int64_t rows, DLDataTypeCode code,
                                   DLDevice device) {
  const auto& [u, factor] = adapter;
  TVM_FFI_ICHECK(u.has_value() == factor.has_value()) << "needed: both u and factor, or neither";
  if (!u.has_value()) return nullptr;
  TVM_FFI_ICHECK(sm90::kLowRank) << "u is given, and the module was built without LOW_RANK";
  TVM_FFI_ICHECK(u.value().ndim() == 2 && factor.value().ndim() == 3)
      << "u must be [R, width] and factor [E, N, width]";
  const int64_t width = u.value().size(1);
  TVM_FFI_ICHECK(width > 0 && width % 8 == 0 && width <= 1024 && factor.value().size(2) == width)
      << "u has " << width << " columns; needed: as many as the factor, a multiple of 8";
  const auto checked_16 = [&](const TensorView& tensor, const char* name, int64_t elements) {
    return aligned_16(checked<uint8_t>(tensor, name, code, 16, device, elements), name);
  };
  to.u = checked_16(u.value(), "u", rows * width);
  to.width = static_cast<int>(width);
  return checked_16(factor.value(), "factor", int64_t(groups.experts) * groups.n * width);
}

}  // namespace sonicmoe
