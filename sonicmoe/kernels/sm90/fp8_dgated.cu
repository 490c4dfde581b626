// Entry point of the dgated GEMM: dy1 = dout * W2 and every gradient that follows from it.
#include "dgated_epilogue.cuh"
#include "launch.hpp"

namespace sonicmoe {
namespace {

template <class Epilogue>
void launch_dgated(const Operands& o, const TensorMaps& maps, const typename Epilogue::Params& more,
                   int64_t multiprocessors, int64_t stream) {
  launch_persistent(sm90::fp8_grouped_gemm<true, sm90::SquareBlocks, Epilogue>, multiprocessors,
                    o.device, stream, maps, o.params, more);
}

// dout e4m3 [T, H] with 1x128 scales, gathered through row_token; w2 e4m3 [E, I, H] (dgrad's order)
// with 128x128 scales; z int8 [R, 2I] with z_scale [R, I / 64], or, built with Z_BF16, bf16 [R,
// 2I]; row_prob fp32 [R], 0 in padding rows. Writes dz e4m3 [R, 2I] with one scale per 128x256
// block (dz_scale [R / 128, ceil(I / 128)]), dprob_parts fp32 [ceil(I / 256), R], whose sum over
// its first axis is <dy1, y1>, and the operands of wgrad: with `wide` bf16 dz [R, 2I] and y1s [R,
// I] in place of dz_t and y1s_t, else e4m3 dz_t [2I, R] and y1s_t [I, R] with dz_t_scale and
// y1s_t_scale, both [ceil(I / 128), R / 128]. Where dz_t or y1s_t is None, only its scales are
// written; with `wide` neither may be None. u, factor: see `take_adapter`. activation: a place in
// `activation_names()`; first, second: its parameters in the order that stands there, else anything.
// Rows at and behind padded_offsets[E] are not written. multiprocessors: how many at most; 0: all.
void gather_dgated_gemm(TensorView dout, TensorView dout_scale, TensorView w2, TensorView w2_scale,
                        Optional<TensorView> u, Optional<TensorView> factor, TensorView row_token,
                        TensorView row_prob, TensorView padded_offsets, TensorView z, TensorView z_scale, TensorView dz, TensorView dz_scale,
                        TensorView dprob_parts, Optional<TensorView> dz_t, TensorView dz_t_scale,
                        Optional<TensorView> y1s_t, TensorView y1s_t_scale, bool wide,
                        int64_t activation, double first, double second, int64_t multiprocessors,
                        int64_t stream) {
  const int64_t rows = row_token.numel();
  Operands o =
      check_operands<sm90::SquareBlocks>(dout, dout_scale, w2, w2_scale, padded_offsets, rows);
  take_adapter({u, factor}, o);
  const int64_t n = o.params.n;
  TVM_FFI_ICHECK(n % 64 == 0) << "I is " << n << "; needed: a multiple of 64";
  TVM_FFI_ICHECK(rows % 128 == 0) << "row_token has " << rows
                                  << " elements; needed: a multiple of 128";
  TVM_FFI_ICHECK(rows * (n / 8) < (int64_t(1) << 32)) << "z is larger than 64 GiB";
  check_activation(activation);
  TVM_FFI_ICHECK(o.params.a_scale_shift == 0)
      << "dout_scale has one row per 128 tokens; needed: one per token, they are gathered";
  o.params.row_token = checked_i32(row_token, "row_token", o.device, rows);
  sm90::DgatedParams more{};
  more.rows = rows;
  if (sm90::kZIsBf16) {
    more.z = aligned_16(checked<uint8_t>(z, "z", kDLBfloat, 16, o.device, rows * 2 * n), "z");
  } else {
    more.z = aligned_16(checked_bytes(z, "z", o.device, rows * 2 * n), "z");
    more.z_scale = checked_f32(z_scale, "z_scale", o.device, rows * (n / 64));
  }
  more.row_prob = checked_f32(row_prob, "row_prob", o.device, rows);
  more.dz = aligned_16(checked_bytes(dz, "dz", o.device, rows * 2 * n), "dz");
  const int64_t blocks = rows / 128 * ceil_div(n, 128);  // of dz and of y1s
  more.dz_scale = checked_f32(dz_scale, "dz_scale", o.device, blocks);
  more.dprob_parts =
      checked_f32(dprob_parts, "dprob_parts", o.device, ceil_div(n, kDprobColumns) * rows);
  const uint8_t *dz_t_data = nullptr, *y1s_t_data = nullptr;
  const bool has_dz = dz_t.has_value(), has_y1s = y1s_t.has_value();
  TVM_FFI_CHECK((has_dz && has_y1s) || !wide, ValueError)
      << "dz_t or y1s_t is None; needed: tensors, where they are wide";
  if (wide) {
    more.dz_wide =
        checked<__nv_bfloat16>(dz_t.value(), "dz_t", kDLBfloat, 16, o.device, rows * 2 * n);
    more.y1s_wide =
        checked<__nv_bfloat16>(y1s_t.value(), "y1s_t", kDLBfloat, 16, o.device, rows * n);
  } else {
    if (has_dz) dz_t_data = checked_bytes(dz_t.value(), "dz_t", o.device, rows * 2 * n);
    if (has_y1s) y1s_t_data = checked_bytes(y1s_t.value(), "y1s_t", o.device, rows * n);
    more.dz_features = has_dz ? static_cast<int>(2 * n) : 0;
    more.y1s_features = has_y1s ? static_cast<int>(n) : 0;
    more.dz_t_scale = checked_f32(dz_t_scale, "dz_t_scale", o.device, blocks);
    more.y1s_t_scale = checked_f32(y1s_t_scale, "y1s_t_scale", o.device, blocks);
  }
  if (rows == 0 || dout.size(0) == 0) return;
  TensorMaps maps = operand_maps(o, 0, sm90::DgatedFp8<sm90::Silu, true>::kColumnGroup);
  if (dz_t_data != nullptr) maps.c = matrix_map(dz_t_data, 2 * n, rows, 128);
  if (y1s_t_data != nullptr) maps.d = matrix_map(y1s_t_data, n, rows, 128);
  with_activation(activation, first, second, [&](const auto& gate) {
    using Gate = std::decay_t<decltype(gate)>;
    wide ? launch_dgated<sm90::DgatedFp8<Gate, false>>(o, maps, {gate, more}, multiprocessors,
                                                       stream)
         : launch_dgated<sm90::DgatedFp8<Gate, true>>(o, maps, {gate, more}, multiprocessors,
                                                      stream);
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_names, sonicmoe::activation_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_dgated_gemm, sonicmoe::gather_dgated_gemm);
