// Entry point of the BF16 dgated GEMM: dy1 = dout * W2 and every gradient that follows from it. w2 is
// a tensor [E, ..], or, built with SEPARATE_WEIGHTS, `expert_matrices` of the same matrices.
#include "bf16_dgated_epilogue.cuh"
#include "bf16_launch.hpp"

namespace sonicmoe {
namespace {

// dout [T, H], gathered through row_token, or, built with ROWS_FIRST, [R, H] in expert order; w2
// [E, H, I], or [E, I, H] where it is `transposed`; z [R, N1] with its columns as `up` wrote them;
// row_prob fp32 [R], 0 in padding rows. Writes dz [R, N1] in the order of z's columns, y1s [R, I]
// and partials fp32 [ceil(I / 256), R], whose sums over the first axis are <dy1, y1>. dz may lie
// where z lies. u, factor: an adapter; see `map_adapter`. Rows at and behind padded_offsets[E] are
// not written. first, second: the activation's parameters in the order of `activation_names()`, else
// anything. multiprocessors: how many at most; 0: all.
void dgated(TensorView dout, WeightArgument w2, bool transposed, bool halves,
            Optional<TensorView> u, Optional<TensorView> factor, TensorView z,
            TensorView row_prob, TensorView row_token, TensorView padded_offsets, TensorView dz,
            TensorView y1s, TensorView partials, double first, double second,
            int64_t multiprocessors, int64_t stream) {
  const int64_t rows = row_token.numel();
  const DLDevice device = dout.device();
  // The product contracts over H: the matrices as dgrad reads them.
  const HalfWeights weights(w2, {}, !transposed, "w2", device);
  HalfParams p = half_params(dout, weights, row_token, padded_offsets, rows);
  const int64_t inner = weights.n, n1 = has_gate() ? 2 * inner : inner;
  TVM_FFI_ICHECK(rows % sm90::kTileM == 0)
      << "row_token has " << rows << " elements; needed: a multiple of " << sm90::kTileM;
  sm90::DgatedHalfParams e{};
  e.rows = rows;
  e.row_prob = checked_f32(row_prob, "row_prob", device, rows);
  e.partials =
      checked_f32(partials, "partials", device, rows * ceil_div(inner, sm90::kTileN));
  const void* z_data = checked_half(z, "z", device, rows * n1);
  const void* dz_data = checked_half(dz, "dz", device, rows * n1);
  const void* y1s_data = checked_half(y1s, "y1s", device, rows * inner);
  if (rows == 0 || dout.size(0) == 0) return;
  const int64_t parts = halves && has_gate() ? 2 : 1;
  TVM_FFI_ICHECK(kGathers || dout.size(0) >= rows)
      << "dout has " << dout.size(0) << " rows, of " << rows;
  HalfMaps maps{};
  if (!kGathers) maps.a = matrix_map(p.a, rows, p.k, sm90::kTileM, 2);
  weights.map_parts(1, maps);
  map_adapter({u, factor}, 1, rows, kGathers ? 0 : rows, device, p, maps);
  maps.c = matrix_map(y1s_data, rows, inner, sm90::kGroupRows, 2);
  maps.d = parts_map(dz_data, rows, n1, parts, sm90::kGroupRows);
  maps.z = parts_map(z_data, rows, n1, parts, sm90::kTileM);
  with_gate(first, second, halves, [&](const auto& gate, auto order) {
    using Epilogue = sm90::DgatedHalf<std::decay_t<decltype(gate)>, decltype(order)::value>;
    const auto kernel = weights.by_columns ? sm90::bf16_grouped_gemm<kGathers, true, Epilogue>
                                           : sm90::bf16_grouped_gemm<kGathers, false, Epilogue>;
    const typename Epilogue::Params more{gate, e};
    launch_persistent(kernel, multiprocessors, device, stream, maps, p, more);
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_names, sonicmoe::half_activation_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dgated, sonicmoe::dgated);
