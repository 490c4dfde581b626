// Entry points of the block-scaled FP8 grouped GEMM: argument checks, tensor maps, launch.
#include "../cuda/border.cuh"
#include "epilogues.cuh"

namespace sonicmoe {
namespace {

using sm90::GemmParams;

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the runtime, so that the shared object loads on a machine without a driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    cudaDriverEntryPointQueryResult found;
    void* entry = nullptr;
    TVM_FFI_CHECK_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    TVM_FFI_ICHECK(entry != nullptr) << "the driver has no cuTensorMapEncodeTiled";
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// A row-major [rows, cols] matrix of `bytes`-wide elements in boxes of `box_rows` x 128 bytes, 128-byte swizzle.
CUtensorMap matrix_map(const void* base, int64_t rows, int64_t cols, int box_rows, int bytes = 1) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)}, strides[1] = {static_cast<cuuint64_t>(cols) * bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUtensorMapDataType type = bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const CUresult result = encode_tiled()(&map, type, 2, const_cast<void*>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                         CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  TVM_FFI_ICHECK(result == CUDA_SUCCESS) << "no tensor map for a " << rows << " x " << cols << " matrix (driver error " << result << ")";
  return map;
}

uint8_t* checked_bytes(const TensorView& tensor, const char* name, DLDevice device, int64_t elements) {
  TVM_FFI_ICHECK(tensor.dtype().bits == 8 && tensor.dtype().lanes == 1) << name << " must have 8-bit elements";
  return checked<uint8_t>(tensor, name, static_cast<DLDataTypeCode>(tensor.dtype().code), 8, device, elements);
}

struct Operands {
  GemmParams params;
  DLDevice device;
  int64_t rows;       // R
  const uint8_t* b;
};

// a [rows of A, K], a_scale [rows of A, ceil(K / 128)], b [E, N, K], b_scale [E, ceil(N / 128), ceil(K / 128)], offsets [E + 1]
Operands check_operands(const TensorView& a, const TensorView& a_scale, const TensorView& b, const TensorView& b_scale, const TensorView& offsets,
                        int64_t rows) {
  TVM_FFI_ICHECK(a.ndim() == 2 && b.ndim() == 3) << "a must be [rows, K] and b [E, N, K]";
  const int64_t experts = b.size(0), n = b.size(1), k = b.size(2);
  TVM_FFI_ICHECK(a.size(1) == k) << "a has K = " << a.size(1) << ", b has " << k;
  TVM_FFI_ICHECK(k % 16 == 0 && k > 0) << "K is " << k << "; needed: a multiple of 16";
  TVM_FFI_ICHECK(n % 16 == 0 && n > 0) << "N is " << n << "; needed: a multiple of 16";
  TVM_FFI_ICHECK(rows < (int64_t(1) << 31) && experts * n < (int64_t(1) << 31)) << "too many rows";
  TVM_FFI_ICHECK(a.size(0) * (k / 16) < (int64_t(1) << 32)) << "a is larger than 64 GiB";
  const DLDevice device = a.device();
  const int64_t k_blocks = ceil_div(k, 128);
  Operands o{};
  o.device = device;
  o.rows = rows;
  o.b = checked_bytes(b, "b", device, experts * n * k);
  o.params.a = checked_bytes(a, "a", device, a.size(0) * k);
  o.params.a_scale = checked_f32(a_scale, "a_scale", device, a.size(0) * k_blocks);
  o.params.b_scale = checked_f32(b_scale, "b_scale", device, experts * ceil_div(n, 128) * k_blocks);
  o.params.padded_offsets = checked_i64(offsets, "padded_offsets", device, experts + 1);
  o.params.max_rows = rows / sm90::kTileM * sm90::kTileM;
  o.params.experts = static_cast<int>(experts);
  o.params.n = static_cast<int>(n);
  o.params.k = static_cast<int>(k);
  return o;
}

template <bool kGather, class Epilogue>
void launch(const Operands& o, const CUtensorMap& c, const CUtensorMap& d, int64_t rows_of_a, int64_t stream) {
  tvm::ffi::CUDADeviceGuard guard(o.device.device_id);
  const GemmParams& p = o.params;
  const CUtensorMap a = matrix_map(p.a, rows_of_a, p.k, sm90::kTileM);
  const CUtensorMap b = matrix_map(o.b, static_cast<int64_t>(p.experts) * p.n, p.k, sm90::kTileN / sm90::kCluster);
  auto kernel = sm90::fp8_grouped_gemm<kGather, Epilogue>;
  constexpr int kSharedBytes = sizeof(sm90::SharedStorage) + 1024;
  int processors = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, o.device.device_id));
  kernel<<<processors / sm90::kCluster * sm90::kCluster, sm90::kThreads, kSharedBytes, as_stream(stream)>>>(a, b, c, d, p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

template <class Activation>
void launch_gated(const Operands& o, const CUtensorMap& y1, const CUtensorMap& z, bool store_z, int64_t rows_of_a, int64_t stream) {
  store_z ? launch<true, sm90::GatedFp8<Activation, true>>(o, y1, z, rows_of_a, stream)
          : launch<true, sm90::GatedFp8<Activation, false>>(o, y1, y1, rows_of_a, stream);
}

// out bf16 [R, N] = a * b^T; a e4m3 [R, K] in expert order with 1x128 scales, b e4m3 [E, N, K] with 128x128 scales.
// Rows at and behind padded_offsets[E] are not written.
void grouped_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale, TensorView padded_offsets, TensorView out, int64_t stream) {
  const int64_t rows = a.size(0);
  const Operands o = check_operands(a, a_scale, b, b_scale, padded_offsets, rows);
  void* data = checked<void>(out, "out", kDLBfloat, 16, o.device, rows * o.params.n);
  if (rows == 0) return;
  const CUtensorMap map = matrix_map(data, rows, o.params.n, 16, 2);
  launch<false, sm90::StoreBf16>(o, map, map, rows, stream);
}

// z = a[row_token] * b^T with gate and up columns interleaved; y1 = act(gate) * up.
// Writes z int8 [R, N] with z_scale [R, N / 128] unless `store_z` is false, and y1 e4m3 [R, N / 2] with y1_scale [R, N / 256].
// activation: 0 SwiGLU, 1 GeGLU, 2 ReGLU. Padding rows (row_token -1) come out as zeros.
void gather_gated_gemm(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale, TensorView row_token, TensorView padded_offsets, TensorView z,
                       TensorView z_scale, TensorView y1, TensorView y1_scale, int64_t activation, bool store_z, int64_t stream) {
  const int64_t rows = row_token.numel();
  Operands o = check_operands(a, a_scale, b, b_scale, padded_offsets, rows);
  const int64_t n = o.params.n;
  TVM_FFI_ICHECK(n % 256 == 0) << "N = 2 I is " << n << "; needed: a multiple of 256 (I a multiple of 128)";
  TVM_FFI_ICHECK(activation >= 0 && activation < 3) << "activation is " << activation << "; needed: 0, 1 or 2";
  o.params.row_token = checked_i32(row_token, "row_token", o.device, rows);
  o.params.y1_scale = checked_f32(y1_scale, "y1_scale", o.device, rows * (n / 256));
  const uint8_t* y1_data = checked_bytes(y1, "y1", o.device, rows * (n / 2));
  const uint8_t* z_data = nullptr;
  if (store_z) {
    o.params.z_scale = checked_f32(z_scale, "z_scale", o.device, rows * (n / 128));
    z_data = checked_bytes(z, "z", o.device, rows * n);
  }
  if (rows == 0 || a.size(0) == 0) return;
  const CUtensorMap y1_map = matrix_map(y1_data, rows, n / 2, 16);
  const CUtensorMap z_map = store_z ? matrix_map(z_data, rows, n, 16) : y1_map;
  if (activation == 0) return launch_gated<sm90::Silu>(o, y1_map, z_map, store_z, a.size(0), stream);
  if (activation == 1) return launch_gated<sm90::Gelu>(o, y1_map, z_map, store_z, a.size(0), stream);
  launch_gated<sm90::Relu>(o, y1_map, z_map, store_z, a.size(0), stream);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_gemm, sonicmoe::grouped_gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_gated_gemm, sonicmoe::gather_gated_gemm);
