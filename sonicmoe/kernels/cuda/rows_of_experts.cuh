// Where the rows of each expert lie, at the border of a function that walks them by blocks.
#pragma once

#include <cstdint>

#include "../host/border.hpp"
#include "../numbers.hpp"

namespace sonicmoe {

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
