// Host side of the BF16 GEMMs for Hopper: what their operands must look like, their tensor maps, and
// the activation that a module is compiled for.
#pragma once

#include <tvm/ffi/optional.h>

#include "adapter_launch.hpp"
#include "bf16_epilogues.cuh"
#include "bf16_weights.hpp"
#include "cluster_launch.hpp"

// X(name of the ActivationType, struct of its formula, whether it has a gate). A module is compiled
// for one of them, ACTIVATION.
#define SONICMOE_HALF_ACTIVATIONS(X)   \
  X(swiglu, Silu, true)                \
  X(geglu, Gelu, true)                 \
  X(geglu_tanh, GeluTanh, true)        \
  X(reglu, Relu, true)                 \
  X(swiglu_oai, Oai, true)             \
  X(swiglu_clamp, ClampedSilu, true)   \
  X(situ_glu, Situ, true)              \
  X(relu_sq, SquaredRelu, false)       \
  X(relu, Relu, false)                 \
  X(gelu, Gelu, false)                 \
  X(gelu_tanh, GeluTanh, false)        \
  X(silu, Silu, false)

namespace sonicmoe {

using sm90::GateOrder;
using sm90::Half;
using sm90::HalfParams;

// Whether `up` and `dgated` gather their tokens. A module that is built with ROWS_FIRST takes rows
// in expert order instead: where many column tiles read a row, gathering it once costs less.
#ifdef ROWS_FIRST
constexpr bool kGathers = false;
#else
constexpr bool kGathers = true;
#endif

// Calls `launch` with the module's activation, which holds these parameters, and the order of gate and
// up as a type.
template <class Launch>
void with_gate(double first, double second, bool halves, Launch launch) {
#define SONICMOE_LAUNCH(name, Gate, gated)                                                  \
  if constexpr (is_compiled(#name))                                                         \
    return with_parameters<sm90::Gate>(first, second, [&](const auto& gate) {               \
      if constexpr (!gated)                                                                 \
        launch(gate, std::integral_constant<GateOrder, GateOrder::kNone>{});                \
      else if (halves)                                                                      \
        launch(gate, std::integral_constant<GateOrder, GateOrder::kHalves>{});              \
      else                                                                                  \
        launch(gate, std::integral_constant<GateOrder, GateOrder::kTurns>{});               \
    });
  SONICMOE_HALF_ACTIVATIONS(SONICMOE_LAUNCH)
#undef SONICMOE_LAUNCH
}

// The module's activation and, behind it, the names of its parameters.
inline tvm::ffi::Array<tvm::ffi::String> half_activation_names() {
  tvm::ffi::Array<tvm::ffi::String> names;
#define SONICMOE_NAME(name, Gate, gated) \
  if (is_compiled(#name)) names.push_back(std::string(#name " ") + sm90::Gate::kParameters);
  SONICMOE_HALF_ACTIVATIONS(SONICMOE_NAME)
#undef SONICMOE_NAME
  return names;
}

// Whether the module's activation has a gate.
constexpr bool has_gate() {
#define SONICMOE_GATED(name, Gate, gated) \
  if (is_compiled(#name)) return gated;
  SONICMOE_HALF_ACTIVATIONS(SONICMOE_GATED)
#undef SONICMOE_GATED
  return true;
}

inline Half* checked_half(const TensorView& tensor, const char* name, DLDevice device,
                          int64_t elements) {
  return aligned_16(checked<Half>(tensor, name, kHalfCode, 16, device, elements), name);
}

// z or dz [R, columns], whose columns are `parts` parts; `box_rows` rows and 64 columns a box.
inline CUtensorMap parts_map(const void* data, int64_t rows, int64_t columns, int64_t parts,
                             int box_rows) {
  const cuuint64_t width = static_cast<cuuint64_t>(columns / parts);
  const Boxes<3> boxes{{width, static_cast<cuuint64_t>(parts), static_cast<cuuint64_t>(rows)},
                       {2 * width, static_cast<cuuint64_t>(2 * columns)},
                       {64, 1, static_cast<cuuint32_t>(box_rows)}};
  return tensor_map(data, CU_TENSOR_MAP_DATA_TYPE_UINT16, boxes);
}

// The rows of each expert, and tokens that are gathered through `row_token` where there is one.
inline HalfParams half_params(const TensorView& a, const HalfWeights& b,
                              const Optional<TensorView>& row_token,
                              const TensorView& padded_offsets, int64_t rows) {
  const DLDevice device = a.device();
  TVM_FFI_ICHECK(a.ndim() == 2 && a.size(1) == b.k)
      << "rows have " << a.size(a.ndim() - 1) << " columns, the weights " << b.k;
  TVM_FFI_ICHECK(b.k % 8 == 0 && b.n % 8 == 0)
      << "the weights are " << b.n << " x " << b.k << "; needed: multiples of 8";
  TVM_FFI_ICHECK(rows < (int64_t(1) << 31) && a.size(0) * (b.k / 8) < (int64_t(1) << 32))
      << "too many rows";
  HalfParams p{};
  p.padded_offsets = checked_i64(padded_offsets, "padded_offsets", device, b.experts + 1);
  p.max_rows = rows / sm90::kTileM * sm90::kTileM;
  p.experts = static_cast<int>(b.experts);
  p.n = static_cast<int>(b.n);
  p.a = checked_half(a, "rows", device, a.size(0) * b.k);
  if (row_token.has_value())
    p.row_token = checked_i32(row_token.value(), "row_token", device, rows);
  p.k = static_cast<int>(b.k), p.k_of_map = static_cast<int>(b.k_of_map());
  return p;
}

// Takes an adapter and makes its maps. The factor's rows are those of B, in the native order: gate and
// up in turns. parts: of B's columns, that are loaded apart; rows_of_u: 0 where A is gathered.
inline void map_adapter(const Adapter& adapter, int64_t parts, int64_t rows, int64_t rows_of_u,
                        DLDevice device, HalfParams& p, HalfMaps& maps) {
  const uint8_t* factor = take_adapter(adapter, p, p, rows, kHalfCode, device);
  if (factor == nullptr) return;
  fill_adapter(maps, [&](auto& with) {
    if (rows_of_u > 0) with.u = matrix_map(p.u, rows_of_u, p.width, sm90::kTileM, 2);
    const cuuint64_t pitch = 2 * static_cast<cuuint64_t>(p.width);
    const Boxes<3> boxes{{static_cast<cuuint64_t>(p.width),
                          static_cast<cuuint64_t>(p.n / parts),
                          static_cast<cuuint64_t>(p.experts)},
                         {parts * pitch, p.n * pitch},
                         {sm90::kAdapterColumns, sm90::kTileN / 2, 1}};
    for (int64_t part = 0; part < parts; ++part)
      with.factor[part] =
          tensor_map(factor + part * pitch, CU_TENSOR_MAP_DATA_TYPE_UINT16, boxes);
  });
}

inline const float* optional_f32(const Optional<TensorView>& tensor, const char* name,
                                 DLDevice device, int64_t elements) {
  if (!tensor.has_value()) return nullptr;
  const float* data = checked_f32(tensor.value(), name, device, elements);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 8 == 0) << name << " must start on 8 bytes";
  return data;
}

}  // namespace sonicmoe
