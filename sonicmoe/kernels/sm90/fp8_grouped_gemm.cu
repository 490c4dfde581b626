// Entry points of the forward and dgrad GEMMs.
#include "epilogues.cuh"
#include "launch.hpp"

#include <type_traits>

namespace sonicmoe {
namespace {

template <bool kGather, class Blocks, class Epilogue>
void launch(const Operands& o, const TensorMaps& maps, const typename Epilogue::Params& more,
            int64_t multiprocessors, int64_t stream) {
  launch_persistent(sm90::fp8_grouped_gemm<kGather, Blocks, Epilogue>, multiprocessors, o.device,
                    stream, maps, o.params, more);
}

template <class Blocks>
void plain_gemm(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                const TensorView& b_scale, const TensorView& padded_offsets, const TensorView& out,
                int64_t multiprocessors, int64_t stream) {
  const int64_t rows = a.size(0);
  const Operands o = check_operands<Blocks>(a, a_scale, b, b_scale, padded_offsets, rows);
  void* data = checked<void>(out, "out", kDLBfloat, 16, o.device, rows * o.params.n);
  if (rows == 0) return;
  TensorMaps maps = operand_maps(o, rows, sm90::StoreBf16::kColumnGroup);
  maps.c = matrix_map(data, rows, o.params.n, 16, 2);
  launch<false, Blocks, sm90::StoreBf16>(o, maps, {}, multiprocessors, stream);
}

// out bf16 [R, N] = a * b^T; a e4m3 [R, K] in expert order, b e4m3 [E, N, K]. b_scale [E, ceil(N /
// 128), ceil(K / 128)]; a_scale [R, ceil(K / 128)], or one per 128 rows: [R / 128, ceil(K / 128)].
// Or both with ceil(K / 256) in the place of ceil(K / 128), where K are gate and up in turns. Rows
// at and behind padded_offsets[E] are not written. multiprocessors: how many at most; 0: all.
void grouped_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                  TensorView padded_offsets, TensorView out, int64_t multiprocessors,
                  int64_t stream) {
  TVM_FFI_ICHECK(b.ndim() == 3 && b_scale.ndim() == 3)
      << "b must be [E, N, K], b_scale [E, ceil(N / 128), ceil(K / 128 or 256)]";
  const bool wide = b_scale.size(2) < ceil_div(b.size(2), kScaleBlock);
  const auto gemm = wide ? plain_gemm<sm90::GateUpDepth> : plain_gemm<sm90::SquareBlocks>;
  gemm(a, a_scale, b, b_scale, padded_offsets, out, multiprocessors, stream);
}

using UpBlocks = std::conditional_t<sm90::kSteady, sm90::SquareBlocks, sm90::GateUpColumns>;

template <class Activation>
void launch_gated(const Operands& o, const TensorMaps& maps, float* y1_scale, float* z_scale,
                  bool store_z, int64_t multiprocessors, int64_t stream) {
  using Blocks = UpBlocks;
  store_z ? launch<true, Blocks, sm90::GatedFp8<Activation, true>>(o, maps, {y1_scale, z_scale},
                                                                   multiprocessors, stream)
          : launch<true, Blocks, sm90::GatedFp8<Activation, false>>(o, maps, {y1_scale, nullptr},
                                                                    multiprocessors, stream);
}

// z = a[row_token] * b^T with gate and up columns interleaved; y1 = act(gate) * up. a_scale [T,
// ceil(K / 128)], b_scale [E, ceil(N / 256), ceil(K / 128)], or, built with STEADY_SCALES, [E,
// ceil(N / 128), ceil(K / 128)]. Writes z [R, N] unless `store_z` is false: int8 with z_scale [R, N
// / 128], or, built with Z_BF16, bf16; and y1 e4m3 [R, N / 2] with y1_scale [R, ceil(N / 256)].
// activation: a place in `activation_names()`. Padding rows (row_token -1) come out as zeros.
// multiprocessors: how many at most; 0: all.
void gather_gated_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                       TensorView row_token, TensorView padded_offsets, TensorView z,
                       TensorView z_scale, TensorView y1, TensorView y1_scale, int64_t activation,
                       bool store_z, int64_t multiprocessors, int64_t stream) {
  const int64_t rows = row_token.numel();
  Operands o = check_operands<UpBlocks>(a, a_scale, b, b_scale, padded_offsets, rows);
  const int64_t n = o.params.n;
  check_activation(activation);
  TVM_FFI_ICHECK(n % 128 == 0) << "N = 2 I is " << n
                               << "; needed: a multiple of 128 (I a multiple of 64)";
  TVM_FFI_ICHECK(o.params.a_scale_shift == 0)
      << "a_scale has one row per 128 tokens; needed: one per token, they are gathered";
  o.params.row_token = checked_i32(row_token, "row_token", o.device, rows);
  float* y1_scales = checked_f32(y1_scale, "y1_scale", o.device, rows * ceil_div(n, 256));
  const uint8_t* y1_data = checked_bytes(y1, "y1", o.device, rows * (n / 2));
  float* z_scales = nullptr;
  const void* z_data = nullptr;
  if (store_z && sm90::kZIsBf16) {
    z_data = checked<void>(z, "z", kDLBfloat, 16, o.device, rows * n);
  } else if (store_z) {
    z_data = checked_bytes(z, "z", o.device, rows * n);
    z_scales = checked_f32(z_scale, "z_scale", o.device, rows * (n / 128));
  }
  if (rows == 0 || a.size(0) == 0) return;
  TensorMaps maps = operand_maps(o, 0, sm90::GatedFp8<sm90::Silu, true>::kColumnGroup);
  maps.c = matrix_map(y1_data, rows, n / 2, 16);
  if (store_z) maps.d = matrix_map(z_data, rows, n, 16, sm90::kZIsBf16 ? 2 : 1);
  with_activation(activation, [&](auto gate) {
    launch_gated<decltype(gate)>(o, maps, y1_scales, z_scales, store_z, multiprocessors, stream);
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(activation_names, sonicmoe::activation_names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm, sonicmoe::grouped_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_gated_gemm, sonicmoe::gather_gated_gemm);
