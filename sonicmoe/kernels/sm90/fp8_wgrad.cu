// Entry point of the weight-gradient GEMM.
#include "fp8_wgrad.cuh"
#include "launch.hpp"

namespace sonicmoe {
namespace {

// accumulator fp32 [E, M, N] += a[:, rows of e] * b[:, rows of e]^T; a e4m3 [M, R], b e4m3 [N, R],
// both token-major with one scale per 128x128 block (a_scale [ceil(M / 128), R / 128], b_scale
// alike). Rows of expert e: padded_offsets[e] to padded_offsets[e + 1], both multiples of 128,
// clamped to R. An expert without rows leaves its matrix untouched. shares_gpu: kernels of another
// stream run beside it.
void grouped_wgrad(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                   TensorView padded_offsets, TensorView accumulator, bool shares_gpu,
                   int64_t stream) {
  TVM_FFI_ICHECK(a.ndim() == 2 && b.ndim() == 2 && accumulator.ndim() == 3)
      << "a must be [M, R], b [N, R] and accumulator [E, M, N]";
  const int64_t experts = accumulator.size(0), m = accumulator.size(1), n = accumulator.size(2),
                rows = a.size(1);
  TVM_FFI_ICHECK(a.size(0) == m && b.size(0) == n && b.size(1) == rows)
      << "a is [" << a.size(0) << ", " << rows << "], b [" << b.size(0) << ", " << b.size(1)
      << "], accumulator [E, " << m << ", " << n << "]";
  TVM_FFI_ICHECK(rows % 128 == 0 && rows < (int64_t(1) << 31))
      << "R is " << rows << "; needed: a multiple of 128 below 2^31";
  TVM_FFI_ICHECK(n % 4 == 0 && n > 0 && m > 0) << "N is " << n << "; needed: a multiple of 4";
  const DLDevice device = a.device();
  sm90::WgradParams p{};
  p.a_scale = checked_f32(a_scale, "a_scale", device, ceil_div(m, 128) * (rows / 128));
  p.b_scale = checked_f32(b_scale, "b_scale", device, ceil_div(n, 128) * (rows / 128));
  p.padded_offsets = checked_i64(padded_offsets, "padded_offsets", device, experts + 1);
  p.rows = rows;
  p.experts = static_cast<int>(experts);
  p.m = static_cast<int>(m);
  p.n = static_cast<int>(n);
  const uint8_t *a_data = checked_bytes(a, "a", device, m * rows),
                *b_data = checked_bytes(b, "b", device, n * rows);
  float* c_data = checked_f32(accumulator, "accumulator", device, experts * m * n);
  if (rows == 0 || experts == 0) return;
  TensorMaps maps{};
  maps.a = matrix_map(a_data, m, rows, sm90::kTileM);
  maps.b = matrix_map(b_data, n, rows, sm90::kTileN / sm90::kCluster);
  maps.c = batch_map_f32(c_data, experts, m, n);
  if (shares_gpu) {
    const int64_t row_groups = ceil_div(ceil_div(m, sm90::kTileM), sm90::kCluster);
    launch_sharing(sm90::fp8_wgrad, experts * row_groups * ceil_div(n, sm90::kTileN), device,
                   stream, maps, p);
  } else {
    launch_persistent(sm90::fp8_wgrad, device, stream, maps, p);
  }
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_wgrad, sonicmoe::grouped_wgrad);
