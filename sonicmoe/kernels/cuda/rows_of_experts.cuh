// Where the rows of each expert lie: of one row, and at the border of a function that walks blocks.
#pragma once

#include <cstdint>

#include "../host/border.hpp"
#include "../numbers.hpp"

namespace sonicmoe {

// The expert e with offsets[e] <= row < offsets[e + 1]; the last one for a row behind them all.
__device__ __forceinline__ int expert_of(const int64_t* offsets, int experts, int64_t row) {
  int below = 0, above = experts;
  while (above - below > 1) {
    const int middle = (below + above) / 2;
    (offsets[middle] <= row ? below : above) = middle;
  }
  return below;
}

struct RowsOfExperts {
  DLDevice device;
  int64_t rows, experts;
  const int32_t* row_token;
  const int64_t* padded_offsets;

  RowsOfExperts(const TensorView& row_token_, const TensorView& padded_offsets_)
      : device(row_token_.device()),
        rows(row_token_.numel()),
        experts(padded_offsets_.numel() - 1),
        row_token(checked_i32(row_token_, "row_token", device, rows)),
        padded_offsets(checked_i64(padded_offsets_, "padded_offsets", device, 1)) {
    TVM_FFI_ICHECK(rows % kRowAlignment == 0 && rows < (int64_t(1) << 31))
        << "row_token has " << rows << " rows; needed: a multiple of " << kRowAlignment;
  }

  int64_t blocks() const { return rows / kRowAlignment; }
};

}  // namespace sonicmoe
