// Entry points of the weight-gradient GEMM, into matrices in the layouts of the user's parameters, of
// which fp32 accumulators are one.
#include "fp8_wgrad.cuh"
#include "fetched_sums.hpp"
#include "launch.hpp"
#include "wgrad_destination.hpp"

namespace sonicmoe {
namespace {

// One operand, e4m3 [size, R], token-major with one scale per 128x128 block, or per 256x128 where
// its rows are gate and up in turns.
struct WgradOperand {
  const uint8_t* codes;
  const float* scale;  // [ceil(size / 128 or 256), R / 128]
  int64_t size;
  int scale_shift;  // log2 of the rows that share a scale
};

// What all launches of a product share.
struct Product {
  WgradOperand a, b;
  int64_t rows, experts;  // R, E
  const int64_t* padded_offsets;
  int64_t multiprocessors;
  DLDevice device;
  int64_t stream;
};

WgradOperand checked_operand(const TensorView& codes, const TensorView& scale, const char* name,
                             DLDevice device) {
  const int64_t size = codes.size(0), rows = codes.size(1);
  TVM_FFI_ICHECK(size > 0 && size % 4 == 0 && size < (int64_t(1) << 31))
      << name << " has " << size << " rows; needed: a multiple of 4";
  TVM_FFI_ICHECK(scale.ndim() == 2) << "scales of " << name << " must be a matrix";
  const int shift = scale.size(0) < ceil_div(size, kScaleBlock) ? 8 : 7;
  static_assert(1 << 7 == kScaleBlock && 1 << 8 == kGateUpBlock);
  return {aligned_16(checked_bytes(codes, name, device, size * rows), name),
          checked_f32(scale, name, device, ceil_div(size, 1 << shift) * (rows / 128)), size, shift};
}

Product checked_product(const TensorView& a, const TensorView& a_scale, const TensorView& b,
                        const TensorView& b_scale, const TensorView& padded_offsets, int64_t m,
                        int64_t n, int64_t experts, int64_t multiprocessors, int64_t stream) {
  TVM_FFI_ICHECK(a.ndim() == 2 && b.ndim() == 2) << "a must be [M, R] and b [N, R]";
  const int64_t rows = a.size(1);
  TVM_FFI_ICHECK(a.size(0) == m && b.size(0) == n && b.size(1) == rows)
      << "a is [" << a.size(0) << ", " << rows << "], b [" << b.size(0) << ", " << b.size(1)
      << "], and gradients are [" << m << ", " << n << "]";
  TVM_FFI_ICHECK(rows % 128 == 0 && rows < (int64_t(1) << 31))
      << "R is " << rows << "; needed: a multiple of 128 below 2^31";
  const DLDevice device = a.device();
  return {checked_operand(a, a_scale, "a", device),
          checked_operand(b, b_scale, "b", device),
          rows,
          experts,
          checked_i64(padded_offsets, "padded_offsets", device, experts + 1),
          multiprocessors,
          device,
          stream};
}

CUtensorMap operand_map(const WgradOperand& operand, int64_t rows, bool split) {
  const sm90::OperandShape shape(operand.size, rows, split);
  Boxes<3> boxes;
  std::copy_n(shape.sizes, 3, boxes.sizes.begin());
  std::copy_n(shape.strides, 2, boxes.strides.begin());
  std::copy_n(shape.box, 3, boxes.box.begin());
  return tensor_map(operand.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, boxes);
}

// Experts [first, last) of a product; maps: of C, one for all experts of the layer, or from
// `maps[first]` on one for each.
template <int kMaps>
void launch_wgrad(const Product& product, sm90::WgradSplit split, int64_t first, int64_t last,
                  const CUtensorMap* maps_of_c, const WgradDestinationObj& destination) {
  const WgradOperand &a = product.a, &b = product.b;
  sm90::WgradMaps<kMaps> maps;
  maps.a = operand_map(a, product.rows, split.a);
  maps.b = operand_map(b, product.rows, split.b);
  sm90::WgradParams p{};
  p.a_scale = a.scale, p.b_scale = b.scale;
  p.a_shift = a.scale_shift, p.b_shift = b.scale_shift;
  p.padded_offsets = product.padded_offsets;
  p.rows = product.rows;
  p.parts = 1;
  p.first_expert = static_cast<int>(first);
  p.last_expert = static_cast<int>(last);
  p.m = static_cast<int>(a.size);
  p.n = static_cast<int>(b.size);
  p.split = split;
  p.output = destination.output;
  if constexpr (kMaps > 1) {
    std::copy(maps_of_c + first, maps_of_c + last, maps.c);
    for (int64_t e = first; e < last; ++e)
      p.skipped[(e - first) / 32] |= uint32_t(!destination.is_wanted(e)) << (e - first) % 32;
  } else {
    maps.c[0] = *maps_of_c;
  }
  const auto kernel =
      fetches_sums(p.output, product.rows, product.experts, kRowsToFetch, product.device)
          ? sm90::fp8_wgrad<kMaps, true>
          : sm90::fp8_wgrad<kMaps, false>;
  launch_persistent(kernel, product.multiprocessors, product.device, product.stream, maps, p);
}

// destination += a[:, rows of e] * b[:, rows of e]^T, for each expert e; a e4m3 [M, R], b e4m3 [N, R],
// both token-major with one scale per 128x128 block (a_scale [ceil(M / 128), R / 128], b_scale
// alike), or one per 256 rows of an operand, which are gate and up in turns, and 128 of R. Rows of
// expert e: padded_offsets[e] to padded_offsets[e + 1], both multiples of 128, clamped to R.
// destination: of `wgrad_destination`, for matrices [M, N] of fp32, and an expert without rows leaves
// its matrix untouched. Or it is written, in fp32 or bf16, as the destination says: zeros for an
// expert without rows. An expert whose gradient nobody wants is not computed. multiprocessors: how
// many at most; 0: all.
void grouped_wgrad(TensorView a, TensorView a_scale, TensorView b, TensorView b_scale,
                   TensorView padded_offsets, WgradDestination destination, int64_t multiprocessors,
                   int64_t stream) {
  if (!destination->is_wanted()) return;
  const int64_t experts = destination->experts();
  Product product = checked_product(a, a_scale, b, b_scale, padded_offsets, destination->m,
                                    destination->n, experts, multiprocessors, stream);
  TVM_FFI_ICHECK(padded_offsets.numel() == experts + 1)
      << "padded_offsets is of " << padded_offsets.numel() - 1 << " experts, the destination of "
      << experts;
  if (product.rows == 0) {
    TVM_FFI_CHECK(destination->output == sm90::WgradOutput::kAddF32, ValueError)
        << "R is 0; needed: rows, or zeros written by the caller";
    return;
  }
  const bool swapped = destination->swapped();
  if (swapped) std::swap(product.a, product.b);
  const sm90::WgradSplit split{destination->split && !swapped, destination->split && swapped};
  const CUtensorMap* maps = destination->maps().data();
  if (destination->has_one_map()) {
    launch_wgrad<1>(product, split, 0, experts, maps, *destination.get());
  } else if (experts <= sm90::kFewMaps) {
    launch_wgrad<sm90::kFewMaps>(product, split, 0, experts, maps, *destination.get());
  } else {
    for (int64_t first = 0; first < experts; first += sm90::kManyMaps)
      launch_wgrad<sm90::kManyMaps>(product, split, first,
                                    std::min<int64_t>(first + sm90::kManyMaps, experts), maps,
                                    *destination.get());
  }
}

// See `WgradDestinationObj`.
WgradDestination wgrad_destination(int64_t m, int64_t n, bool split,
                                   tvm::ffi::Array<int64_t> places, int64_t output) {
  return WgradDestination(tvm::ffi::make_object<WgradDestinationObj>(m, n, split, places, output));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(grouped_wgrad, sonicmoe::grouped_wgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgrad_destination, sonicmoe::wgrad_destination);
