// Tensor maps for the copy engine (TMA) of Hopper and later GPUs, encoded by the driver.
//
// A map is a kernel parameter. It names a matrix by address, so it is made at every launch: the
// frameworks' allocators hand out other addresses in every step.
#pragma once

#include <cuda.h>

#include "border.hpp"

namespace sonicmoe {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the runtime, so that the shared object loads on a machine without a driver.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                              12000, cudaEnableDefault, &found));
    TVM_FFI_ICHECK(entry != nullptr) << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// A row-major [rows, cols] matrix of `bytes`-wide elements in boxes of `box_rows` x 128 bytes,
// 128-byte swizzle.
inline CUtensorMap matrix_map(const void* base, int64_t rows, int64_t cols, int box_rows,
                              int bytes = 1) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)},
                   strides[1] = {static_cast<cuuint64_t>(cols) * bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes),
                             static_cast<cuuint32_t>(box_rows)},
                   steps[2] = {1, 1};
  const CUtensorMapDataType type =
      bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result =
      encode_tiled()(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "no tensor map for a " << rows << " x " << cols
                                         << " matrix (driver error " << result << ")";
  return map;
}

// A row-major fp32 [batch, rows, cols] tensor in boxes of 16 rows x 32 columns; a box never reaches
// into the next matrix.
inline CUtensorMap batch_map_f32(void* base, int64_t batch, int64_t rows, int64_t cols) {
  CUtensorMap map;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(cols) * 4,
                                 static_cast<cuuint64_t>(rows * cols) * 4};
  const cuuint32_t box[3] = {32, 16, 1}, steps[3] = {1, 1, 1};
  const CUresult result =
      encode_tiled()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, base, sizes, strides, box, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS)
      << "no tensor map for a " << batch << " x " << rows << " x " << cols
      << " tensor (driver error " << result << ")";
  return map;
}

}  // namespace sonicmoe
