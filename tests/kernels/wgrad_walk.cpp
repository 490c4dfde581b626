// The tiles of one expert's product as the kernel of fp8_wgrad.cuh walks them, on the host: what
// the copy engine would fetch and add to, by the shapes of its maps.
#include "../../sonicmoe/kernels/sm90/wgrad_places.cuh"

namespace {

using namespace sonicmoe::sm90;

constexpr int64_t kTokens = 128;

// The operand's row that lands in a row of its box of 128; -1: outside, reads as zero.
int row_in_box(const OperandShape& shape, int first, int row) {
  const int in_part = row % shape.box[1], part = row / shape.box[1];
  if (static_cast<uint64_t>(first + in_part) >= shape.sizes[1]) return -1;
  return static_cast<int>(((first + in_part) * shape.strides[0] + part * shape.strides[1]) /
                          kTokens);
}

}  // namespace

// Adds 1 to `count` of every element that is added to or written, and notes which rows of the native
// matrix's left and right operand it is the product of; all three are indexed by the element's
// offset. item: bytes of an element, 4 or 2.
extern "C" void walk(int64_t m, int64_t n, bool split, int64_t stride_m, int64_t stride_part,
                     int64_t stride_n, int64_t step, int64_t expert, int item, int32_t* count,
                     int32_t* left, int32_t* right) {
  const MatrixPlace place{16, stride_m, stride_part, stride_n};
  const bool swapped = place.swapped();
  const WgradSplit splits{split && !swapped, split && swapped};
  const int64_t rows_a = swapped ? n : m, rows_b = swapped ? m : n;
  const OperandShape a(rows_a, kTokens, splits.a), b(rows_b, kTokens, splits.b);
  const OutputShape c(place, m, n, split, expert + 1, item * step, item);
  const int columns = kPatchRowBytes / item, width = columns / 32;
  const auto add = [&](const PatchPlace& to, int r, int k, int of_a, int of_b) {
    const uint64_t at[4] = {static_cast<uint64_t>(to.x + k), static_cast<uint64_t>(to.y + r),
                            static_cast<uint64_t>(to.part), static_cast<uint64_t>(expert)};
    uint64_t offset = at[0];
    for (int axis = 0; axis < 4; ++axis) {
      if (at[axis] >= c.sizes[axis]) return;
      if (axis > 0) offset += at[axis] * c.strides[axis - 1] / item;
    }
    ++count[offset];
    left[offset] = swapped ? of_b : of_a;
    right[offset] = swapped ? of_a : of_b;
  };
  for (int row = 0; row < rows_a; row += 128)
    for (int col = 0; col < rows_b; col += 256)
      for (int slab = 0; slab < 8; ++slab)
        for (int group = 0; group < 8; group += width)
          for (int r = 0; r < kPatchRows; ++r)
            for (int k = 0; k < columns; ++k) {
              const int column = group * 32 + k, half = column / 128 * 128;
              add(PatchPlace(splits, row, col, slab, group), r, k,
                  row_in_box(a, WgradSplit::first_row(row, splits.a), slab * kPatchRows + r),
                  row_in_box(b, WgradSplit::first_row(col + half, splits.b), column % 128));
            }
}
