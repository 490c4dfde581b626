// Temporaries of a pass: matrices cut off a scratch that the caller has allocated.
//
// The caller allocates because its framework then does: the memory comes from the framework's pool,
// belongs to the caller's stream, and running out of it is the framework's own error. The layout of
// each scratch is a struct below. Its constructor is run without memory to learn how many bytes a
// pass needs, and with memory to cut them, so that the two cannot differ.
#pragma once

#include <algorithm>

#include "handles.hpp"

namespace sonicmoe {

constexpr int64_t kPartAlignment = 512;  // that of a framework's allocator
constexpr DLDataType kByte{kDLUInt, 8, 1}, kSingle{kDLFloat, 32, 1}, kBrain{kDLBfloat, 16, 1};

// A matrix, and where a listener finds it: an offset, in elements, in the tensor that the caller
// passed under the name `field`.
struct Matrix {
  TensorView view;
  std::string_view field;
  int64_t offset;
};

// How a matrix is quantised, as listeners are told.
struct Format {
  const char* code;
  int64_t block_rows, block_columns;  // of the logical matrix
  bool transposed;                    // stored so
};

constexpr Format kTokenFormat{"e4m3", 1, kScaleBlock, false};  // x, dout, y1: one scale a row
// What was built for INT8 alone writes codes that read as adaptive ones do.
constexpr Format kZFormat{"adaptive", 1, kScaleBlock, false};
constexpr Format kDzFormat{"e4m3", kScaleBlock, kGateUpBlock, false};
// Operands of wgrad are token-major.
constexpr Format kWgradDzFormat{"e4m3", kScaleBlock, kGateUpBlock, true};
constexpr Format kWgradFormat{"e4m3", kScaleBlock, kScaleBlock, true};

struct Quantized {
  Matrix codes, scale;
  const Format* format;
};

class Arena {
 public:
  Arena() = default;  // measures only
  Arena(std::string_view field, const TensorView& scratch) { in(field, scratch); }
  Arena(const Arena&) = delete;

  // `behind`: bytes of the scratch that belong to others.
  Arena& in(std::string_view field, const TensorView& scratch, int64_t behind = 0) {
    field_ = field;
    used_ = behind;
    base_ = static_cast<char*>(scratch.data_ptr()) + scratch.byte_offset();
    device_ = scratch.device();
    size_ = scratch.numel();
    return *this;
  }

  Matrix matrix(int64_t rows, int64_t columns, DLDataType dtype) {
    TVM_FFI_ICHECK(count_ < static_cast<int>(parts_.size()));
    Part& part = parts_[count_++];
    part.shape = {rows, columns};
    part.strides = {columns, 1};
    used_ = ceil_of(used_, kPartAlignment) * kPartAlignment;  // the last part ends with the scratch
    const int64_t bytes = dtype.bits / 8;
    part.tensor = {base_ + used_, device_, 2, dtype, part.shape.data(), part.strides.data(), 0};
    const int64_t offset = used_ / bytes;
    used_ += rows * columns * bytes;
    if (base_ != nullptr && used_ > size_)
      TVM_FFI_THROW(ValueError) << field_ << " has " << size_ << " bytes; needed: " << used_
                                << " or more";
    return {TensorView(&part.tensor), field_, offset};
  }
  // A matrix that is stored as [rows, columns] with the scales of `format`.
  Quantized quantized(int64_t rows, int64_t columns, const Format& format) {
    const int64_t row_block = format.transposed ? format.block_columns : format.block_rows;
    const int64_t column_block = format.transposed ? format.block_rows : format.block_columns;
    const Matrix codes = matrix(rows, columns, kByte);
    return {codes, matrix(ceil_of(rows, row_block), ceil_of(columns, column_block), kSingle),
            &format};
  }
  int64_t used() const { return used_; }

 private:
  struct Part {
    std::array<int64_t, 2> shape, strides;
    DLTensor tensor;
  };
  std::string_view field_;
  char* base_ = nullptr;
  DLDevice device_{kDLCPU, 0};
  int64_t size_ = 0, used_ = 0;
  int count_ = 0;
  std::array<Part, 8> parts_;  // views point into it
};

// ---- what lies in each scratch ----

struct UpScratch {
  Quantized x, y1;
  UpScratch(Arena& arena, const Sizes& n)
      : x(arena.quantized(n['T'], n['H'], kTokenFormat)),
        y1(arena.quantized(n['R'], n['I'], kTokenFormat)) {}
};

struct ForwardScratch : UpScratch {
  Matrix y2;
  ForwardScratch(Arena& arena, const Sizes& n)
      : UpScratch(arena, n), y2(arena.matrix(n['R'], n['H'], kBrain)) {}
};

// dgrad reads dz from here, so this scratch lives from dgated to dgrad.
// no_scales: the kernel writes scales also of operands of wgrad that nobody wants; they go here.
struct DzScratch {
  Quantized dz;
  Matrix dprob_parts, no_scales;
  DzScratch(Arena& arena, const Sizes& n)
      : dz(arena.quantized(n['R'], 2 * n['I'], kDzFormat)),
        dprob_parts(arena.matrix(ceil_of(n['I'], kDprobColumns), n['R'], kSingle)),
        no_scales(
            arena.matrix(ceil_of(n['I'], kScaleBlock), ceil_of(n['R'], kRowAlignment), kSingle)) {}
};

// Apart from dz's, because nothing needs it behind dgated.
struct DoutScratch {
  Quantized dout;
  DoutScratch(Arena& arena, const Sizes& n) : dout(arena.quantized(n['T'], n['H'], kTokenFormat)) {}
};

struct DxScratch {
  Matrix dx_rows;
  DxScratch(Arena& arena, const Sizes& n) : dx_rows(arena.matrix(n['R'], n['H'], kBrain)) {}
};

// The operands of wgrad that dgated writes: they wait for the weight gradients, each in memory of
// its own, so that each can be freed when its product is done.
struct WgradDz {
  Quantized dz;
  WgradDz(Arena& arena, const Sizes& n)
      : dz(arena.quantized(2 * n['I'], n['R'], kWgradDzFormat)) {}
};

struct WgradY1s {
  Quantized y1s;
  WgradY1s(Arena& arena, const Sizes& n) : y1s(arena.quantized(n['I'], n['R'], kWgradFormat)) {}
};

// Tokens in expert order, transposed: what a weight gradient contracts over is contiguous.
struct TokensScratch {
  Quantized tokens;
  TokensScratch(Arena& arena, const Sizes& n)
      : tokens(arena.quantized(n['H'], n['R'], kWgradFormat)) {}
};

struct TokenPairScratch {
  TokensScratch x, dout;
  TokenPairScratch(Arena& arena, const Sizes& n) : x(arena, n), dout(arena, n) {}
};

template <class Layout>
int64_t bytes_of(const Sizes& sizes) {
  Arena arena;
  Layout(arena, sizes);
  return arena.used();
}

// One memory of two scratches that live equally long.
template <class First, class Then>
struct Behind {
  First first;
  Then then;
  Behind(Arena& arena, const Sizes& n) : first(arena, n), then(arena, n) {}
};

// Where nothing is to be freed between dgated and dgrad: dx_rows overwrites the codes of dout.
inline int64_t bytes_of_backward(const Sizes& n) {
  return std::max(bytes_of<Behind<DzScratch, DoutScratch>>(n),
                  bytes_of<Behind<DzScratch, DxScratch>>(n));
}

}  // namespace sonicmoe
