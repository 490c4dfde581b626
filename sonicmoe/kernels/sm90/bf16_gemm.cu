// Entry points of the BF16 forward and dgrad GEMMs. Weights are tensors [E, ..], or, built with
// SEPARATE_WEIGHTS, `expert_matrices` of the same matrices.
#include "bf16_launch.hpp"

namespace sonicmoe {
namespace {

// z = x[row_token] * w1^T + b1, y1 = act(z), over the rows of each expert.
//
// x [T, H], or, built with ROWS_FIRST, [R, H] in expert order; w1 [E, N1, H], or [E, H, N1] where
// it is `transposed`; or w1 [E, I, H] are the gate rows and w1_up [E, I, H] the up rows. Where
// there is a gate, N1 is 2 I: with `halves` all gates and then all up values, else the two in
// turns. b1 fp32 [E, N1] in the same order, or None. Writes z [R, N1], in the order of w1's rows,
// and y1 [R, I], each unless it is None. Padding rows (row_token -1) are computed as if their
// tokens were zeros. u, factor: an adapter; see `map_adapter`. Rows at and behind padded_offsets[E]
// are not written. first, second: the activation's parameters in the order of `activation_names()`,
// else anything. multiprocessors: how many at most; 0: all.
void up(TensorView x, WeightArgument w1, Optional<TensorView> w1_up, bool transposed, bool halves,
        Optional<TensorView> b1, Optional<TensorView> u, Optional<TensorView> factor,
        TensorView row_token, TensorView padded_offsets, Optional<TensorView> z,
        Optional<TensorView> y1, double first, double second, int64_t multiprocessors,
        int64_t stream) {
  const int64_t rows = row_token.numel();
  const DLDevice device = x.device();
  const HalfWeights weights(w1, w1_up, transposed, "w1", device);
  HalfParams p = half_params(x, weights, row_token, padded_offsets, rows);
  const int64_t inner = has_gate() ? weights.n / 2 : weights.n;
  TVM_FFI_ICHECK(inner % 8 == 0) << "I is " << inner << "; needed: a multiple of 8";
  sm90::ActivationParams e{};
  e.bias = optional_f32(b1, "b1", device, weights.experts * weights.n);
  e.store_z = z.has_value(), e.store_y = y1.has_value();
  const void* z_data = e.store_z ? checked_half(z.value(), "z", device, rows * weights.n) : nullptr;
  const void* y_data = e.store_y ? checked_half(y1.value(), "y1", device, rows * inner) : nullptr;
  if (rows == 0 || x.size(0) == 0) return;
  TVM_FFI_ICHECK(kGathers || x.size(0) >= rows) << "x has " << x.size(0) << " rows, of " << rows;
  HalfMaps maps{};
  if (!kGathers) maps.a = matrix_map(p.a, rows, p.k, sm90::kTileM, 2);
  const int64_t parts = halves && has_gate() ? 2 : 1;
  weights.map_parts(parts, maps);
  map_adapter({u, factor}, parts, rows, kGathers ? 0 : rows, device, p, maps);
  if (e.store_z) maps.z = parts_map(z_data, rows, weights.n, parts, sm90::kGroupRows);
  if (e.store_y) maps.c = matrix_map(y_data, rows, inner, sm90::kGroupRows, 2);
  with_gate(first, second, halves, [&](const auto& gate, auto order) {
    using Epilogue = sm90::Activate<std::decay_t<decltype(gate)>, decltype(order)::value>;
    const auto kernel = weights.by_columns ? sm90::bf16_grouped_gemm<kGathers, true, Epilogue>
                                           : sm90::bf16_grouped_gemm<kGathers, false, Epilogue>;
    const typename Epilogue::Params more{gate, e};
    launch_persistent(kernel, multiprocessors, device, stream, maps, p, more);
  });
}

// out [R, N] = a * b^T + bias, a [R, K] in expert order, b [E, N, K], or [E, K, N] where it is
// `transposed`; or b and b_rest are the first and the last half of [E, K, N] along K, each of whole
// blocks of 64. bias fp32 [E, N] or None. u, factor: an adapter; see `map_adapter`. Rows at and
// behind padded_offsets[E] are not written.
void grouped_gemm(TensorView a, WeightArgument b, Optional<TensorView> b_rest, bool transposed,
                  Optional<TensorView> bias, Optional<TensorView> u, Optional<TensorView> factor,
                  TensorView padded_offsets, TensorView out, int64_t multiprocessors,
                  int64_t stream) {
  const int64_t rows = a.size(0);
  const DLDevice device = a.device();
  const HalfWeights weights(b, b_rest, transposed, "b", device);
  HalfParams p = half_params(a, weights, {}, padded_offsets, rows);
  const sm90::StoreHalf::Params e{
      optional_f32(bias, "bias", device, weights.experts * weights.n)};
  const void* data = checked_half(out, "out", device, rows * weights.n);
  if (rows == 0) return;
  HalfMaps maps{};
  maps.a = matrix_map(p.a, rows, p.k, sm90::kTileM, 2);
  weights.map_parts(1, maps);
  map_adapter({u, factor}, 1, rows, rows, device, p, maps);
  maps.c = matrix_map(data, rows, weights.n, sm90::kGroupRows, 2);
  const auto kernel = weights.by_columns ? sm90::bf16_grouped_gemm<false, true, sm90::StoreHalf>
                                         : sm90::bf16_grouped_gemm<false, false, sm90::StoreHalf>;
  launch_persistent(kernel, multiprocessors, device, stream, maps, p, e);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_names, sonicmoe::half_activation_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(up, sonicmoe::up);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm, sonicmoe::grouped_gemm);
#ifdef SEPARATE_WEIGHTS
TVM_FFI_DLL_EXPORT_TYPED_FUNC(expert_matrices, sonicmoe::expert_matrices);
#endif
