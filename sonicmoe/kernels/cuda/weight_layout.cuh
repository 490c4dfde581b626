// Where the user's expert weights lie and how: the arguments that the weight kernels share,
// checked.
#pragma once

#include "../host/border.hpp"
#include "../host/element_type.hpp"

namespace sonicmoe {

// E up matrices [N1, H] and E down matrices [H, I], or their transposes; dtype: bfloat16, float16
// or float32. apart: E gate and E up matrices [I, H] instead of E up matrices, each in a tensor of
// its own. See WeightSource.
struct Layout {
  const int64_t* addresses;
  int64_t experts, n1, hidden, intermediate;
  bool transposed, split_half, apart;
  ElementType element;

  Layout(const TensorView& table, int64_t n1, int64_t hidden, int64_t intermediate, bool transposed,
         bool split_half, bool apart, const tvm::ffi::String& dtype)
      : addresses(checked_i64(table, "addresses", table.device(), 2)),
        experts(table.numel() / (apart ? 3 : 2)),
        n1(n1),
        hidden(hidden),
        intermediate(intermediate),
        transposed(transposed),
        split_half(split_half),
        apart(apart),
        element(element_type(dtype)) {
    TVM_FFI_ICHECK(n1 > 0 && hidden > 0 && intermediate > 0)
        << "weights of " << n1 << ", " << hidden << ", " << intermediate;
    TVM_FFI_ICHECK(n1 % 16 == 0 && hidden % 16 == 0 && intermediate % 16 == 0)
        << "N1, H and I must be multiples of 16";
    TVM_FFI_ICHECK(!split_half || n1 == 2 * intermediate)
        << "split halves need N1 = 2 I, not " << n1 << " and " << intermediate;
    TVM_FFI_ICHECK(!apart || (split_half && !transposed))
        << "gate and up matrices are [I, H] where they lie apart";
    TVM_FFI_ICHECK(n1 < (1 << 28) && hidden < (1 << 28) && intermediate < (1 << 28))
        << "a weight is too large";
  }
  // The table has up matrices (or gate matrices, then up matrices), then down matrices.
  const int64_t* down_addresses() const { return addresses + experts * parts(); }
  int64_t parts() const { return apart ? 2 : 1; }  // of an expert's w1
  int second() const { return apart ? static_cast<int>(experts) : 0; }  // as of `Projection`
  // Of the user's matrices.
  int64_t up_rows() const { return transposed ? hidden : n1; }
  int64_t up_columns() const { return transposed ? n1 : hidden; }
  int64_t down_rows() const { return transposed ? intermediate : hidden; }
  int64_t down_columns() const { return transposed ? hidden : intermediate; }
};

}  // namespace sonicmoe
