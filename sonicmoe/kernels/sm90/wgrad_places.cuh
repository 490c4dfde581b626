// Which rows of its operands a tile of wgrad reads, and where its sums lie in C: index arithmetic
// alone, so that a test walks it on the host.
//
// C is one tensor of all experts, or a matrix of its own for each. The columns of B are contiguous
// in it, so its layout decides what A and B are:
//
//   C                              A          B          split
//   [2I, H], gate and up in turns  dz^T       x^T        none
//   [H, 2I], gate and up in turns  x^T        dz^T       none
//   [2, I, H], gate first          dz^T       x^T        A
//   [H, 2, I], gate first          x^T        dz^T       B
//   [H, I]                         dout^T     y1s^T      none
//   [I, H]                         y1s^T      dout^T     none
//
// Rows of dz^T are gate and up in turns. A split operand is read so that 128 rows, which share a
// scale, come as their 64 gate rows and then their 64 up rows, which is how C wants them. Scales,
// the order of the k-blocks and that of all products are the same in every layout, so a sum has the
// same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sonicmoe::sm90 {

// A warp hands 16 rows of 128 bytes to the copy engine at a time.
constexpr int kPatchRows = 16, kPatchRowBytes = 128;

// What becomes of the sums: added to fp32, or written over whatever is there. What is written is
// written whole: zeros where an expert has no rows.
enum class WgradOutput : int { kAddF32 = 0, kWriteF32 = 1, kWriteBf16 = 2 };

constexpr int item_bytes(WgradOutput output) { return output == WgradOutput::kWriteBf16 ? 2 : 4; }

struct WgradSplit {
  int a, b;  // 1: split

  // The first of the 128 rows of an operand that begin at `row`, as a coordinate of its map.
  __host__ __device__ static constexpr int first_row(int row, int split) { return row >> split; }
};

// Where the 32 columns number `c` (of 8) of a warp's 16 rows lie in C; `slab`: the warp's place
// among the eight of its tile. The 64 gate or up rows of a split operand are whole slabs, or whole
// groups of 32 columns, so a patch lies in one part.
struct PatchPlace {
  int x, y, part;
  __host__ __device__ constexpr PatchPlace(WgradSplit split, int row, int col, int slab, int c)
      : x(split.b ? col / 2 + c / 4 * 64 + c % 2 * 32 : col + c * 32),
        y(split.a ? row / 2 + slab % 4 * 16 : row + slab * 16),
        part(split.b   ? c / 2 % 2
             : split.a ? slab / 4
                       : 0) {}
};

// An operand [rows, R] by the axes of its map: R, rows, and the part where it is split.
struct OperandShape {
  uint64_t sizes[3], strides[2];
  uint32_t box[3];
  constexpr OperandShape(int64_t rows, int64_t tokens, bool split)
      : sizes{static_cast<uint64_t>(tokens), static_cast<uint64_t>(split ? rows / 2 : rows),
              split ? 2u : 1u},
        strides{static_cast<uint64_t>(split ? 2 * tokens : tokens),
                static_cast<uint64_t>(split ? tokens : rows * tokens)},
        box{128, split ? 64u : 128u, split ? 2u : 1u} {}
};

// One expert's matrix [m, n] where it lies, n counted by the columns of the native layout. Strides
// in elements. split: m is I, and `part` leads from a gate to its up; else m is all rows.
struct MatrixPlace {
  uint64_t address;
  int64_t stride_m, stride_part, stride_n;

  bool swapped() const { return stride_n != 1; }  // the contiguous axis is m: A and B change places
  bool same_strides(const MatrixPlace& other) const {
    return stride_m == other.stride_m && stride_part == other.stride_part &&
           stride_n == other.stride_n;
  }
};

// C by the axes of its map: contiguous columns, rows (both of one part), the part, the expert.
struct OutputShape {
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
  // `m`, `n`: of the native matrix; `step`: bytes from one expert's matrix to the next; `item`:
  // bytes of an element.
  OutputShape(const MatrixPlace& at, int64_t m, int64_t n, bool split, int64_t experts,
              uint64_t step, int item = 4)
      : box{static_cast<uint32_t>(kPatchRowBytes / item), kPatchRows, 1, 1} {
    const int64_t rows = split ? m / 2 : m;
    const bool swapped = at.swapped();
    sizes[0] = swapped ? rows : n;
    sizes[1] = swapped ? n : rows;
    sizes[2] = split ? 2 : 1;
    sizes[3] = experts;
    strides[0] = item * (swapped ? at.stride_n : at.stride_m);
    strides[1] = split ? item * at.stride_part : 0;
    strides[2] = experts > 1 ? step : 0;
    // The driver looks at the stride of an axis of one element too.
    for (int axis = 1; axis < 4; ++axis)
      if (sizes[axis] == 1) strides[axis - 1] = (item * sizes[0] + 15) / 16 * 16;
  }
};

}  // namespace sonicmoe::sm90
