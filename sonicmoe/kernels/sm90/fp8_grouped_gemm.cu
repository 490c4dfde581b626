// Entry points of the forward and dgrad GEMMs.
#include "epilogues.cuh"
#include "launch.hpp"

namespace sonicmoe {
namespace {

template <bool kGather, class Blocks, class Epilogue>
void launch(const Operands& o, const TensorMaps& maps, const typename Epilogue::Params& more,
            int64_t multiprocessors, int64_t stream) {
  launch_persistent(sm90::fp8_grouped_gemm<kGather, Blocks, Epilogue>, multiprocessors, o.device,
                    stream, maps, o.params, more);
}

// fp32 [E, N], of which kernels read 16 bytes at a time; nullptr where it is None.
const float* checked_bias(const Optional<TensorView>& bias, const char* name, const Operands& o) {
  if (!bias.has_value()) return nullptr;
  const int64_t elements = static_cast<int64_t>(o.params.experts) * o.params.n;
  return aligned_16(checked_f32(bias.value(), name, o.device, elements), name);
}

template <class Blocks, bool kAddsBias>
void plain_gemm(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                const TensorView& b_scale, const Optional<TensorView>& bias, const Adapter& adapter,
                const TensorView& padded_offsets, const TensorView& out, int64_t multiprocessors,
                int64_t stream) {
  using Epilogue = sm90::StoreBf16<kAddsBias>;
  const int64_t rows = a.size(0);
  Operands o = check_operands<Blocks>(a, a_scale, b, b_scale, padded_offsets, rows);
  take_adapter(adapter, o);
  void* data = checked<void>(out, "out", kDLBfloat, 16, o.device, rows * o.params.n);
  const float* added = checked_bias(bias, "bias", o);
  if (rows == 0) return;
  TensorMaps maps = operand_maps(o, rows, Epilogue::kColumnGroup);
  maps.c = matrix_map(data, rows, o.params.n, 16, 2);
  launch<false, Blocks, Epilogue>(o, maps, {added}, multiprocessors, stream);
}

// out bf16 [R, N] = a * b^T + bias; a e4m3 [R, K] in expert order, b e4m3 [E, N, K]. b_scale [E,
// ceil(N / 128), ceil(K / 128)]; a_scale [R, ceil(K / 128)], or one per 128 rows: [R / 128, ceil(K /
// 128)]. Or both with ceil(K / 256) in the place of ceil(K / 128), where K are gate and up in turns.
// bias fp32 [E, N], or None: only in a module built with BIAS, and with scales of 128 of K. u, factor:
// see `take_adapter`. Rows at
// and behind padded_offsets[E] are not written. multiprocessors: how many at most; 0: all.
void grouped_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                  Optional<TensorView> bias, Optional<TensorView> u, Optional<TensorView> factor,
                  TensorView padded_offsets, TensorView out, int64_t multiprocessors,
                  int64_t stream) {
  TVM_FFI_ICHECK(b.ndim() == 3 && b_scale.ndim() == 3)
      << "b must be [E, N, K], b_scale [E, ceil(N / 128), ceil(K / 128 or 256)]";
  const bool wide = b_scale.size(2) < ceil_div(b.size(2), kScaleBlock);
  auto gemm = wide ? plain_gemm<sm90::GateUpDepth, false> : plain_gemm<sm90::SquareBlocks, false>;
  if (bias.has_value()) {
    TVM_FFI_ICHECK(sm90::kBiased && !wide)
        << "bias is given; needed: a module built with BIAS, and scales of 128 of K";
    gemm = plain_gemm<sm90::SquareBlocks, sm90::kBiased>;
  }
  gemm(a, a_scale, b, b_scale, bias, {u, factor}, padded_offsets, out, multiprocessors, stream);
}

// y1_scale and, where z is stored in INT8, z_scale; b1 where there is one.
struct GatedOperands {
  float *y1_scale, *z_scale;
  const float* b1;
};

template <class Activation>
void launch_gated(const Operands& o, const TensorMaps& maps, const Activation& gate,
                  const GatedOperands& more, bool store_z, int64_t multiprocessors,
                  int64_t stream) {
  using Blocks = sm90::GateUpColumns;
  store_z ? launch<true, Blocks, sm90::GatedFp8<Activation, true>>(
                o, maps, {gate, more.y1_scale, more.z_scale, more.b1}, multiprocessors, stream)
          : launch<true, Blocks, sm90::GatedFp8<Activation, false>>(
                o, maps, {gate, more.y1_scale, nullptr, more.b1}, multiprocessors, stream);
}

// z = a[row_token] * b^T + b1 with gate and up columns interleaved; y1 = act(gate) * up. a_scale [T,
// ceil(K / 128)], b_scale [E, ceil(N / 256), ceil(K / 128)]. Writes z [R, N] unless `store_z` is
// false: int8 with z_scale [R, N / 128], or, built with Z_BF16, bf16; and y1 e4m3 [R, N / 2] with
// y1_scale [R, ceil(N / 256)]. b1 fp32 [E, N], in the order of b's rows, where the module is built
// with BIAS, else None. u, factor: see `take_adapter`.
// activation: a place in `activation_names()`; first, second: its parameters in the order that stands
// there, else anything. Padding rows (row_token -1) come out as if their tokens were zeros.
// multiprocessors: how many at most; 0: all.
void gather_gated_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                       Optional<TensorView> b1, Optional<TensorView> u, Optional<TensorView> factor,
                       TensorView row_token, TensorView padded_offsets, TensorView z,
                       TensorView z_scale, TensorView y1, TensorView y1_scale, int64_t activation,
                       double first, double second, bool store_z, int64_t multiprocessors,
                       int64_t stream) {
  const int64_t rows = row_token.numel();
  Operands o = check_operands<sm90::GateUpColumns>(a, a_scale, b, b_scale, padded_offsets, rows);
  take_adapter({u, factor}, o);
  const int64_t n = o.params.n;
  check_activation(activation);
  TVM_FFI_ICHECK(n % 128 == 0) << "N = 2 I is " << n
                               << "; needed: a multiple of 128 (I a multiple of 64)";
  TVM_FFI_ICHECK(o.params.a_scale_shift == 0)
      << "a_scale has one row per 128 tokens; needed: one per token, they are gathered";
  o.params.row_token = checked_i32(row_token, "row_token", o.device, rows);
  TVM_FFI_ICHECK(b1.has_value() == sm90::kBiased)
      << "b1 is " << (b1.has_value() ? "given, and the module was built without BIAS"
                                     : "None, and the module was built with BIAS");
  GatedOperands more{};
  more.b1 = checked_bias(b1, "b1", o);
  more.y1_scale = checked_f32(y1_scale, "y1_scale", o.device, rows * ceil_div(n, 256));
  const uint8_t* y1_data = checked_bytes(y1, "y1", o.device, rows * (n / 2));
  const void* z_data = nullptr;
  if (store_z && sm90::kZIsBf16) {
    z_data = checked<void>(z, "z", kDLBfloat, 16, o.device, rows * n);
  } else if (store_z) {
    z_data = checked_bytes(z, "z", o.device, rows * n);
    more.z_scale = checked_f32(z_scale, "z_scale", o.device, rows * (n / 128));
  }
  if (rows == 0 || a.size(0) == 0) return;
  TensorMaps maps = operand_maps(o, 0, sm90::GatedFp8<sm90::Silu, true>::kColumnGroup);
  maps.c = matrix_map(y1_data, rows, n / 2, 16);
  if (store_z) maps.d = matrix_map(z_data, rows, n, 16, sm90::kZIsBf16 ? 2 : 1);
  with_activation(activation, first, second, [&](const auto& gate) {
    launch_gated(o, maps, gate, more, store_z, multiprocessors, stream);
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_names, sonicmoe::activation_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm, sonicmoe::grouped_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_gated_gemm, sonicmoe::gather_gated_gemm);
