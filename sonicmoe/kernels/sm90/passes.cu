// The launches of a pass as one call: from Python each of them would cost more host time than the
// launch itself.
//
// Host code only. The kernels are functions of other modules, with their own checks; temporaries
// lie in a scratch of the caller's, whose size the `*_bytes` functions say. With an `observer`
// every stage is announced to it as (event, name, ...):
//   "begin" and "end" around the launches of a stage, "show" with what it has written for later
//   ones: the address, rows and columns of its codes, and of their scales.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <array>
#include <cstdint>

namespace sonicmoe {
namespace {

using tvm::ffi::Function;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int64_t kAlignment = 512;  // that of a framework's allocator
constexpr int64_t kBlock = 128;      // of the quantisation
constexpr int64_t kDprobColumns = 256;  // of dy1 in one partial sum: a tile's
constexpr DLDataType kByte{kDLUInt, 8, 1}, kFloat{kDLFloat, 32, 1}, kBfloat{kDLBfloat, 16, 1};

int64_t blocks(int64_t n, int64_t size = kBlock) { return (n + size - 1) / size; }

// Cuts matrices off a scratch, in order; without one it only measures.
class Arena {
 public:
  Arena() = default;
  explicit Arena(const TensorView& scratch)
      : base_(static_cast<char*>(scratch.data_ptr()) + scratch.byte_offset()),
        device_(scratch.device()),
        size_(scratch.numel()) {
    TVM_FFI_ICHECK(scratch.dtype().bits == 8) << "scratch must have 8-bit elements";
  }
  Arena(const Arena&) = delete;

  TensorView matrix(int64_t rows, int64_t columns, DLDataType dtype) {
    TVM_FFI_ICHECK(count_ < static_cast<int>(slices_.size()));
    Slice& slice = slices_[count_++];
    slice.shape = {rows, columns};
    slice.strides = {columns, 1};
    used_ = blocks(used_, kAlignment) * kAlignment;  // the last one ends where the scratch does
    slice.tensor = {base_ + used_, device_, 2, dtype, slice.shape.data(), slice.strides.data(), 0};
    used_ += rows * columns * (dtype.bits / 8);
    TVM_FFI_ICHECK(base_ == nullptr || used_ <= size_)
        << "scratch has " << size_ << " bytes; needed: " << used_ << " or more";
    return TensorView(&slice.tensor);
  }
  int64_t used() const { return used_; }

 private:
  struct Slice {
    std::array<int64_t, 2> shape, strides;
    DLTensor tensor;
  };
  char* base_ = nullptr;
  DLDevice device_{kDLCPU, 0};
  int64_t size_ = 0, used_ = 0;
  int count_ = 0;
  std::array<Slice, 8> slices_;  // views point into it
};

// Codes with their scales.
struct Quantized {
  TensorView codes, scale;
};

// One scale per row and 128 columns.
Quantized by_rows(Arena& arena, int64_t rows, int64_t columns) {
  return {arena.matrix(rows, columns, kByte), arena.matrix(rows, blocks(columns), kFloat)};
}

// One scale per 128 x 128 block.
Quantized by_blocks(Arena& arena, int64_t rows, int64_t columns) {
  return {arena.matrix(rows, columns, kByte), arena.matrix(blocks(rows), blocks(columns), kFloat)};
}

class Observed {
 public:
  explicit Observed(const Optional<Function>& observer) : observer_(observer) {}

  template <class Launches>
  void stage(const char* name, Launches launches) const {
    if (observer_) observer_.value()("begin", name);
    launches();
    if (observer_) observer_.value()("end", name);
  }
  void show(const char* name, const TensorView& values) const {
    if (observer_) observer_.value()("show", name, address(values), values.size(0), values.size(1));
  }
  void show(const char* name, const Quantized& q) const {
    if (!observer_) return;
    observer_.value()("show", name, address(q.codes), q.codes.size(0), q.codes.size(1),
                      address(q.scale), q.scale.size(0), q.scale.size(1));
  }

 private:
  static int64_t address(const TensorView& tensor) {
    return reinterpret_cast<int64_t>(tensor.data_ptr());
  }

  const Optional<Function>& observer_;
};

void quantize_tokens(const Function& quantize_rows, const TensorView& tokens, const Quantized& q,
                     int64_t stream) {
  if (tokens.numel() > 0) quantize_rows(tokens, q.codes, q.scale, stream);
}

// ---- forward ----

struct UpScratch {
  Quantized x, y1;

  UpScratch(Arena& arena, int64_t tokens, int64_t rows, int64_t hidden, int64_t inner)
      : x(by_rows(arena, tokens, hidden)), y1(by_rows(arena, rows, inner)) {}
};

// only_z: for a forward without `out`.
int64_t forward_bytes(int64_t tokens, int64_t rows, int64_t hidden, int64_t inner, bool only_z) {
  Arena arena;
  UpScratch(arena, tokens, rows, hidden, inner);
  if (!only_z) arena.matrix(rows, hidden, kBfloat);
  return arena.used();
}

// forward(x [T, H], row_token [R], padded_offsets [E + 1], slot_row [T, K], row_prob [R], w1 [E,
// 2I, H], w1_scale, w2 [E, H, I], w2_scale,
//         z [R, 2I] | None, z_scale | None, scratch, out [T, H] | None to stop at z, activation,
//         observer | None, stream)
Function make_forward(Function quantize_rows, Function gather_gated_gemm, Function grouped_gemm,
                      Function aggregate_rows) {
  return Function::FromTyped([=](TensorView x, TensorView row_token, TensorView padded_offsets,
                                 TensorView slot_row, TensorView row_prob, TensorView w1,
                                 TensorView w1_scale, TensorView w2, TensorView w2_scale,
                                 Optional<TensorView> z, Optional<TensorView> z_scale,
                                 TensorView scratch, Optional<TensorView> out, int64_t activation,
                                 Optional<Function> observer, int64_t stream) {
    const Observed observed(observer);
    const bool store_z = z.has_value();
    Arena arena(scratch);
    const UpScratch t(arena, x.size(0), row_token.numel(), x.size(1), w2.size(2));
    observed.stage("quantize_x", [&] { quantize_tokens(quantize_rows, x, t.x, stream); });
    observed.show("x_fp8", t.x);
    observed.stage("up", [&] {
      gather_gated_gemm(t.x.codes, t.x.scale, w1, w1_scale, row_token, padded_offsets,
                        store_z ? z.value() : t.y1.codes, store_z ? z_scale.value() : t.y1.scale,
                        t.y1.codes, t.y1.scale, activation, store_z, stream);
    });
    if (store_z) observed.show("z", {z.value(), z_scale.value()});
    observed.show("y1", t.y1);
    if (!out.has_value()) return;
    const TensorView y2 = arena.matrix(row_token.numel(), x.size(1), kBfloat);
    observed.stage("down", [&] {
      grouped_gemm(t.y1.codes, t.y1.scale, w2, w2_scale, padded_offsets, y2, stream);
    });
    observed.show("y2", y2);
    observed.stage("aggregate_out",
                   [&] { aggregate_rows(y2, slot_row, row_prob, out.value(), true, stream); });
  });
}

// ---- backward to the tokens ----

struct DgatedScratch {  // dz goes on to dgrad
  Quantized dz;
  TensorView dprob_parts;

  DgatedScratch(Arena& arena, int64_t rows, int64_t inner)
      : dz(by_blocks(arena, rows, 2 * inner)),
        dprob_parts(arena.matrix(blocks(inner, kDprobColumns), rows, kFloat)) {}
};

int64_t dgated_bytes(int64_t rows, int64_t inner) {
  Arena arena;
  DgatedScratch(arena, rows, inner);
  return arena.used();
}

int64_t tokens_bytes(int64_t tokens, int64_t hidden) {
  Arena arena;
  by_rows(arena, tokens, hidden);
  return arena.used();
}

// dgated(dout [T, H], row_token [R], row_prob [R], padded_offsets [E + 1], slot_row [T, K], w2 [E,
// I, H], w2_scale, z [R, 2I], z_scale,
//        wgrad_dz, wgrad_dz_scale, wgrad_y1s, wgrad_y1s_scale, wide, scratch, tokens_scratch,
//        dprobs [T, K], activation, observer | None, stream); operands of wgrad as
//        `gather_dgated_gemm` writes them, scales None when `wide`
Function make_dgated(Function quantize_rows, Function gather_dgated_gemm, Function sum_or_zero) {
  return Function::FromTyped(
      [=](TensorView dout, TensorView row_token, TensorView row_prob, TensorView padded_offsets,
          TensorView slot_row, TensorView w2, TensorView w2_scale, TensorView z, TensorView z_scale,
          TensorView wgrad_dz, Optional<TensorView> wgrad_dz_scale, TensorView wgrad_y1s,
          Optional<TensorView> wgrad_y1s_scale, bool wide, TensorView scratch,
          TensorView tokens_scratch, TensorView dprobs, int64_t activation,
          Optional<Function> observer, int64_t stream) {
        const Observed observed(observer);
        TVM_FFI_ICHECK(wide || (wgrad_dz_scale.has_value() && wgrad_y1s_scale.has_value()))
            << "quantised operands of wgrad need their scales";
        Arena arena(scratch), tokens_arena(tokens_scratch);
        const DgatedScratch t(arena, row_token.numel(), w2.size(1));
        const Quantized dout_fp8 = by_rows(tokens_arena, dout.size(0), dout.size(1));
        observed.stage("quantize_dout",
                       [&] { quantize_tokens(quantize_rows, dout, dout_fp8, stream); });
        observed.show("dout_fp8", dout_fp8);
        observed.stage("dgated", [&] {  // what it does not write it does not look at
          gather_dgated_gemm(dout_fp8.codes, dout_fp8.scale, w2, w2_scale, row_token, row_prob,
                             padded_offsets, z, z_scale, t.dz.codes, t.dz.scale, t.dprob_parts,
                             wgrad_dz, wide ? t.dprob_parts : wgrad_dz_scale.value(), wgrad_y1s,
                             wide ? t.dprob_parts : wgrad_y1s_scale.value(), wide, activation,
                             stream);
          sum_or_zero(slot_row, t.dprob_parts, dprobs, stream);
        });
        observed.show("dz_fp8", t.dz);
      });
}

int64_t dgrad_bytes(int64_t rows, int64_t hidden) {
  Arena arena;
  arena.matrix(rows, hidden, kBfloat);
  return arena.used();
}

// dgrad(dgated's scratch, w1 [E, H, 2I], w1_scale, padded_offsets [E + 1], slot_row [T, K],
// row_prob [R], scratch, dx [T, H],
//       observer | None, stream)
Function make_dgrad(Function grouped_gemm, Function aggregate_rows) {
  return Function::FromTyped([=](TensorView dgated_scratch, TensorView w1, TensorView w1_scale,
                                 TensorView padded_offsets, TensorView slot_row,
                                 TensorView row_prob, TensorView scratch, TensorView dx,
                                 Optional<Function> observer, int64_t stream) {
    const Observed observed(observer);
    Arena dgated_arena(dgated_scratch), arena(scratch);
    const DgatedScratch t(dgated_arena, row_prob.numel(), w1.size(2) / 2);
    const TensorView dx_rows = arena.matrix(row_prob.numel(), w1.size(1), kBfloat);
    observed.stage("dx_gemm", [&] {
      grouped_gemm(t.dz.codes, t.dz.scale, w1, w1_scale, padded_offsets, dx_rows, stream);
    });
    observed.show("dx_rows", dx_rows);
    observed.stage("aggregate_dx",
                   [&] { aggregate_rows(dx_rows, slot_row, row_prob, dx, false, stream); });
  });
}

// ---- weight gradients ----

// Of x and of dout alike: codes [H, R], transposed.
int64_t wgrad_bytes(int64_t rows, int64_t hidden, int64_t matrices) {
  Arena arena;
  for (int64_t i = 0; i < matrices; ++i) by_blocks(arena, hidden, rows);
  return arena.used();
}

// wgrad(x [T, H], dout [T, H], row_token [R], padded_offsets [E + 1], dz [2I, R], dz_scale, y1s [I,
// R], y1s_scale, dw1 [E, 2I, H],
//       dw2 [E, H, I], scratch, shares_gpu, observer | None, stream)
Function make_wgrad(Function gather_transpose_quantize_pair, Function grouped_wgrad) {
  return Function::FromTyped([=](TensorView x, TensorView dout, TensorView row_token,
                                 TensorView padded_offsets, TensorView dz, TensorView dz_scale,
                                 TensorView y1s, TensorView y1s_scale, TensorView dw1,
                                 TensorView dw2, TensorView scratch, bool shares_gpu,
                                 Optional<Function> observer, int64_t stream) {
    const Observed observed(observer);
    Arena arena(scratch);
    const Quantized x_t = by_blocks(arena, x.size(1), row_token.numel()),
                    dout_t = by_blocks(arena, x.size(1), row_token.numel());
    observed.stage("wgrad_operands", [&] {
      gather_transpose_quantize_pair(x, dout, row_token, padded_offsets, x_t.codes, x_t.scale,
                                     dout_t.codes, dout_t.scale, stream);
    });
    observed.show("wgrad_x", x_t);
    observed.show("wgrad_dout", dout_t);
    observed.stage("dw2", [&] {
      grouped_wgrad(dout_t.codes, dout_t.scale, y1s, y1s_scale, padded_offsets, dw2, shares_gpu,
                    stream);
    });
    observed.stage("dw1", [&] {
      grouped_wgrad(dz, dz_scale, x_t.codes, x_t.scale, padded_offsets, dw1, shares_gpu, stream);
    });
  });
}

// One product of the two, so that the other's operands need not lie beside its own: dw2 from dout
// and y1s, or dw1 from dz and x. wgrad_of(tokens [T, H], row_token [R], padded_offsets [E + 1],
// rows (dz or y1s), rows_scale, accumulator, is_dw2, scratch, shares_gpu,
//          observer | None, stream)
Function make_wgrad_of(Function gather_transpose_quantize, Function grouped_wgrad) {
  return Function::FromTyped([=](TensorView tokens, TensorView row_token, TensorView padded_offsets,
                                 TensorView rows, TensorView rows_scale, TensorView accumulator,
                                 bool is_dw2, TensorView scratch, bool shares_gpu,
                                 Optional<Function> observer, int64_t stream) {
    const Observed observed(observer);
    Arena arena(scratch);
    const Quantized t = by_blocks(arena, tokens.size(1), row_token.numel());
    observed.stage("wgrad_operands", [&] {
      gather_transpose_quantize(tokens, row_token, padded_offsets, t.codes, t.scale, stream);
    });
    observed.show(is_dw2 ? "wgrad_dout" : "wgrad_x", t);
    observed.stage(is_dw2 ? "dw2" : "dw1", [&] {
      is_dw2 ? grouped_wgrad(t.codes, t.scale, rows, rows_scale, padded_offsets, accumulator,
                             shares_gpu, stream)
             : grouped_wgrad(rows, rows_scale, t.codes, t.scale, padded_offsets, accumulator,
                             shares_gpu, stream);
    });
  });
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(forward_bytes, sonicmoe::forward_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dgated_bytes, sonicmoe::dgated_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tokens_bytes, sonicmoe::tokens_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(dgrad_bytes, sonicmoe::dgrad_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgrad_bytes, sonicmoe::wgrad_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_forward, sonicmoe::make_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_dgated, sonicmoe::make_dgated);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_dgrad, sonicmoe::make_dgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_wgrad, sonicmoe::make_wgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_wgrad_of, sonicmoe::make_wgrad_of);
