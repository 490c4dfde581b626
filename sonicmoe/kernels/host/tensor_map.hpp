// Tensor maps for the copy engine (TMA) of Hopper and later GPUs, encoded by the driver.
//
// A map is a kernel parameter. It names a tensor by address. Maps of operands are made at every
// launch, because the frameworks' allocators hand out other addresses in every step.
#pragma once

#include <cuda.h>

#include <array>

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

// A tensor and the boxes of it that are copied. The first axis is contiguous; strides are those of
// the others, in bytes.
template <size_t kRank>
struct Boxes {
  std::array<cuuint64_t, kRank> sizes;
  std::array<cuuint64_t, kRank - 1> strides;
  std::array<cuuint32_t, kRank> box;
};

// The map of these boxes, 128-byte swizzle. A box never reaches beyond an axis: what lies there
// reads as zero and is not written.
template <size_t kRank>
CUtensorMap tensor_map(const void* base, CUtensorMapDataType type, const Boxes<kRank>& boxes,
                       CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  CUtensorMap map;
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  const auto encode = [&] {
    return encode_tiled()(&map, type, kRank, const_cast<void*>(base), boxes.sizes.data(),
                          boxes.strides.data(), boxes.box.data(), steps.data(),
                          CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = encode();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread of autograd that has asked the runtime for nothing yet. The context is bound by
    // choosing the device it has chosen already, which a capture of a graph allows.
    int device = 0;
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetDevice(&device));
    TVM_FFI_CHECK_CUDA_ERROR(cudaSetDevice(device));
    result = encode();
  }
  if (result != CUDA_SUCCESS) {
    std::ostringstream sizes;
    for (const cuuint64_t size : boxes.sizes) sizes << " " << size;
    TVM_FFI_THROW(RuntimeError) << "no tensor map for a tensor of sizes" << sizes.str()
                                << ", innermost first (driver error " << result << ")";
  }
  return map;
}

// A row-major [rows, cols] matrix of `bytes`-wide elements in boxes of `box_rows` x 128 bytes.
inline CUtensorMap matrix_map(const void* base, int64_t rows, int64_t cols, int box_rows,
                              int bytes = 1) {
  const Boxes<2> boxes{{static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)},
                       {static_cast<cuuint64_t>(cols) * bytes},
                       {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows)}};
  return tensor_map(
      base, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, boxes);
}

}  // namespace sonicmoe
