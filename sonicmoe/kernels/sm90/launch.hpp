// Host side of the FP8 GEMMs for Hopper: what their operands must look like, the tensor maps whose
// boxes follow the WGMMA tiles.
#pragma once

#include "../host/tensor_map.hpp"
#include "adapter_launch.hpp"
#include "cluster_launch.hpp"
#include "fp8_grouped_gemm.cuh"

namespace sonicmoe {

using sm90::GemmParams;
using sm90::TensorMaps;

// Rows of a row-major matrix of `bytes`-wide elements, 128 of them and 128 bytes of columns a box, in
// the order of `kColumnGroup`: of each `group` rows 0, 1, group / 4, group / 4 + 1, group / 2, ...
// first. `rows` must be a multiple of the group.
inline CUtensorMap grouped_rows_map(const void* base, int64_t rows, int64_t cols, int group,
                                    int bytes = 1) {
  const cuuint64_t pitch = static_cast<cuuint64_t>(cols) * bytes,
                   rows_of_thread = static_cast<cuuint64_t>(group) / 4;
  const Boxes<5> boxes{
      {static_cast<cuuint64_t>(cols), 2, 4, rows_of_thread / 2,
       static_cast<cuuint64_t>(rows / group)},
      {pitch, rows_of_thread * pitch, 2 * pitch, group * pitch},
      {static_cast<cuuint32_t>(128 / bytes), 2, 4, static_cast<cuuint32_t>(group / 8),
       static_cast<cuuint32_t>(128 / group)}};
  return tensor_map(
      base, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, boxes);
}

struct Operands {
  GemmParams params;
  DLDevice device;
  int64_t rows;  // R
  const uint8_t *b, *factor;
};

// a [rows of A, K], a_scale [rows of A, ceil(K / depth)] or one per 128 rows, b [E, N, K], b_scale
// [E, ceil(N / columns), ceil(K / depth)], offsets [E + 1]
template <class Blocks>
inline Operands check_operands(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                               const TensorView& b_scale, const TensorView& offsets, int64_t rows) {
  TVM_FFI_ICHECK(a.ndim() == 2 && b.ndim() == 3) << "a must be [rows, K] and b [E, N, K]";
  const int64_t experts = b.size(0), n = b.size(1), k = b.size(2);
  TVM_FFI_ICHECK(a.size(1) == k) << "a has K = " << a.size(1) << ", b has " << k;
  TVM_FFI_ICHECK(k % 16 == 0 && k > 0) << "K is " << k << "; needed: a multiple of 16";
  TVM_FFI_ICHECK(n % 16 == 0 && n > 0) << "N is " << n << "; needed: a multiple of 16";
  TVM_FFI_ICHECK(rows < (int64_t(1) << 31) && experts * n < (int64_t(1) << 31)) << "too many rows";
  TVM_FFI_ICHECK(a.size(0) * (k / 16) < (int64_t(1) << 32)) << "a is larger than 64 GiB";
  const DLDevice device = a.device();
  const int64_t k_scales = ceil_div(k, Blocks::kDepth),
                b_scales = experts * ceil_div(n, Blocks::kColumns) * k_scales;
  TVM_FFI_ICHECK(b_scales < (int64_t(1) << 32)) << "b has too many scales";
  Operands o{};
  o.device = device;
  o.rows = rows;
  o.b = checked_bytes(b, "b", device, experts * n * k);
  o.params.a = aligned_16(checked_bytes(a, "a", device, a.size(0) * k), "a");
  TVM_FFI_ICHECK(a_scale.ndim() != 2 || a_scale.size(1) == k_scales)
      << "a_scale has " << a_scale.size(1) << " scales a row; needed: " << k_scales
      << ", as b_scale has";
  const bool blocks = a_scale.ndim() == 2 && a.size(0) > 0 && a.size(0) % 128 == 0 &&
                      a_scale.size(0) == a.size(0) / 128;
  o.params.a_scale_shift = blocks ? 7 : 0;
  o.params.a_scale = aligned_16(
      checked_f32(a_scale, "a_scale", device, (blocks ? a.size(0) / 128 : a.size(0)) * k_scales),
      "a_scale");
  o.params.b_scale = aligned_16(checked_f32(b_scale, "b_scale", device, b_scales), "b_scale");
  o.params.padded_offsets = checked_i64(offsets, "padded_offsets", device, experts + 1);
  o.params.max_rows = rows / sm90::kTileM * sm90::kTileM;
  o.params.experts = static_cast<int>(experts);
  o.params.n = static_cast<int>(n);
  o.params.k = static_cast<int>(k);
  return o;
}

inline void take_adapter(const Adapter& adapter, Operands& o) {
  o.factor = take_adapter(adapter, o.params, o.params, o.rows, kDLBfloat, o.device);
}

// The operands' maps; a gathered A has none, nor has its u. `column_group`: the epilogue's.
inline TensorMaps operand_maps(const Operands& o, int64_t rows_of_a, int column_group) {
  const GemmParams& p = o.params;
  TensorMaps maps{};
  if (rows_of_a > 0) maps.a = matrix_map(p.a, rows_of_a, p.k, sm90::kTileM);
  const int64_t rows_of_b = static_cast<int64_t>(p.experts) * p.n;
  maps.b = column_group > 0 ? grouped_rows_map(o.b, rows_of_b, p.k, column_group)
                            : matrix_map(o.b, rows_of_b, p.k, sm90::kTileN / sm90::kCluster);
  fill_adapter(maps, [&](auto& with) {
    if (p.width == 0) return;  // nobody loads through these
    if (rows_of_a > 0) with.u = matrix_map(p.u, rows_of_a, p.width, sm90::kTileM, 2);
    with.factor[0] =
        column_group > 0
            ? grouped_rows_map(o.factor, rows_of_b, p.width, column_group, 2)
            : matrix_map(o.factor, rows_of_b, p.width, sm90::kTileN / sm90::kCluster, 2);
  });
  return maps;
}

}  // namespace sonicmoe
