// What happens to a tile's accumulators: bf16 rows, or the gated activation with FP8 y1 and z as it
// is kept for the backward.
#pragma once

#include "activations.cuh"
#include "fp8_grouped_gemm.cuh"

namespace sonicmoe::sm90 {

// How z is kept: 8-bit codes with a scale for 128 columns of a row, or plain bf16. The codes of a
// block are INT8, or, where its scale is negative, E4M3.
#ifdef Z_BF16
constexpr bool kZIsBf16 = true;
#else
constexpr bool kZIsBf16 = false;
#endif
// How far below a block's amax the largest gate, or the largest up, of 8 neighbouring pairs may lie
// before the block's codes are E4M3 (quant/reference.py, `_is_wide`). Built with Z_INT8 none are.
#ifdef Z_INT8
constexpr float kSpread = __builtin_huge_valf();
#else
constexpr float kSpread = 8.f;
#endif
// Whether both projections have biases.
#ifdef BIAS
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
// NaN wins, as the INT8 code's scale needs it
__device__ __forceinline__ float quad_max_nan(float v) {
  v = max_nan(v, __shfl_xor_sync(~0u, v, 1));
  return max_nan(v, __shfl_xor_sync(~0u, v, 2));
}

// low 16 bits: e4m3 of `low`, then of `high`; saturating, NaN -> 0x7F
__device__ __forceinline__ uint32_t e4m3x2(float low, float high) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
// The value of a byte without its sign. As fp32 bits its exponent is 120 too small.
__device__ __forceinline__ float e4m3_value(uint32_t byte) {
  return __uint_as_float(byte << 20) * 0x1p120f;
}
// The low byte is x * by rounded to the nearest even integer; |x * by| < 2^22.
__device__ __forceinline__ uint32_t int8_bits(float x, float by) {
  return __float_as_uint(__fmaf_rn(x, by, 12582912.f));
}

// The values that are kept next to a bound: the last one within it, and the first one beyond.
struct Sides {
  float limit = 0.f, within = 0.f, beyond = 0.f;

  // x as it may be rounded: to a kept value on its own side of the bound. NaN stays. In place, and
  // element by element: registers do not suffice for more.
  __device__ __forceinline__ void gate(float& x) const {
    asm volatile(
        "{\n.reg .pred p;\nsetp.gt.f32 p, %0, %1;\n@p max.f32 %0, %0, %3;\n"
        "@!p min.NaN.f32 %0, %0, %2;\n}"
        : "+f"(x)
        : "f"(limit), "f"(within), "f"(beyond));
  }
  __device__ __forceinline__ void up(float& x) const {
    asm volatile(
        "{\n.reg .pred p;\n.reg .f32 m;\nabs.f32 m, %0;\nsetp.gt.f32 p, m, %1;\n"
        "@p max.f32 m, m, %3;\n@!p min.NaN.f32 m, m, %2;\ncopysign.f32 %0, %0, m;\n}"
        : "+f"(x)
        : "f"(limit), "f"(within), "f"(beyond));
  }

  // Of bf16, whose magnitudes are ordered as their bits are.
  __device__ static __forceinline__ Sides of_bf16(float limit) {
    const uint32_t below = __float_as_uint(limit) & 0xffff0000u;
    return {limit, __uint_as_float(below), __uint_as_float(below + 0x10000u)};
  }
  // The largest INT8 code within the bound, as dgated decodes and compares codes of this scale: 0
  // to 127; or kNoCode where the scale is not finite, because neither is what a code stands for.
  static constexpr uint32_t kNoCode = 255;
  __device__ static __forceinline__ uint32_t code_within(float limit, float scale) {
    float code = floorf(limit * reciprocal(scale));  // off by one at most
    if (code * scale > limit) code -= 1.f;
    if ((code + 1.f) * scale <= limit) code += 1.f;
    return scale < __builtin_huge_valf() ? static_cast<uint32_t>(fminf(code, 127.f)) : kNoCode;
  }
  // The same of E4M3: a byte without its sign, of the scale's magnitude.
  __device__ static __forceinline__ uint32_t e4m3_within(float limit, float scale) {
    uint32_t code = e4m3x2(limit * reciprocal(scale), 0.f) & 0xff;  // off by one at most
    if (e4m3_value(code) * scale > limit) --code;
    if (code < 0x7e && e4m3_value(code + 1) * scale <= limit) ++code;
    return code;
  }
  __device__ static __forceinline__ Sides of_e4m3(float limit, uint32_t code, float multiply) {
    const float scale = reciprocal(multiply);
    return {limit, e4m3_value(code) * scale, e4m3_value(min(code + 1, 0x7eu)) * scale};
  }
  // Of codes that are x * multiply, rounded.
  __device__ static __forceinline__ Sides of_codes(float limit, uint32_t code, float multiply) {
    const float last = static_cast<float>(code), scale = reciprocal(multiply);
    if (code == kNoCode) return {limit, __builtin_huge_valf(), 0.f};
    return {limit, last * scale, fminf(last + 1.f, 127.f) * scale};
  }
};

// Base of the epilogues that leave through per-warp patches.
struct PatchEpilogue {
  static constexpr bool kAdjacentRows = false, kNeedsRegisters = false;
  const GemmParams& p;
  const TensorMaps& maps;
  WarpStore way_out;
  int lane;
  __device__ __forceinline__ PatchEpilogue(const GemmParams& params, const TensorMaps& tensor_maps,
                                           SharedStorage& s, int warp, int lane_)
      : p(params), maps(tensor_maps), way_out(s.patch[warp]), lane(lane_) {}
  __device__ __forceinline__ void begin(int, const OutputTile&) {}
  __device__ __forceinline__ void finish() { way_out.finish(lane); }
};

template <bool kAddsBias>
struct StoreBf16 : PatchEpilogue {
  static constexpr int kColumnGroup = 0;
  struct Params {
    const float* bias;  // [E, N]
  };
  const Params& e;
  __device__ __forceinline__ StoreBf16(const GemmParams& params, const Params& more,
                                       const TensorMaps& tensor_maps, SharedStorage& s, int warp,
                                       int lane_)
      : PatchEpilogue(params, tensor_maps, s, warp, lane_), e(more) {}

  __device__ __forceinline__ void store(Accumulators& acc, const float (&unit)[2][2], int row0,
                                        const OutputTile& tile) {
    if constexpr (kAddsBias) add_bias(acc, unit, tile);
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // 64 columns, 128 bytes
      const uint32_t patch = way_out.acquire(lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // four 8x8 matrices: rows 0-7 | 8-15, columns 0-7 | 8-15
        uint32_t w[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int j = 8 * c + 2 * i + m / 2, h = m % 2;
          const float scale = kAddsBias ? 1.f : unit[h][j / 16];
          const float low = acc[j / 16][4 * (j % 16) + 2 * h] * scale,
                      high = acc[j / 16][4 * (j % 16) + 2 * h + 1] * scale;
          w[m] = bf16x2(low, high);
        }
        stmatrix_x4(chunk_address(patch, lane / 8 % 2 * 8 + lane % 8, 2 * i + lane / 16), w);
      }
      way_out.publish(&maps.c, tile.col + 64 * c, row0, lane);
    }
  }

 private:
  // acc = acc * unit + bias
  __device__ __forceinline__ void add_bias(Accumulators& acc, const float (&unit)[2][2],
                                           const OutputTile& tile) const {
    const float* bias = e.bias + static_cast<int64_t>(tile.expert) * p.n;
    constexpr int kAtOnce = 8;  // loads that are on their way together
#pragma unroll
    for (int first = 0; first < 32; first += kAtOnce) {
      float2 b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = tile.col + 8 * (first + i) + 2 * (lane % 4);
        // Columns behind the last one are not stored, so it does not matter what is added there.
        b[i] = load_early_8(bias + min(at, p.n - 2));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int j = first + i;
          float* sum = &acc[j / 16][4 * (j % 16) + 2 * h];
          sum[0] = fmaf(sum[0], unit[h][j / 16], b[i].x);
          sum[1] = fmaf(sum[1], unit[h][j / 16], b[i].y);
        }
    }
  }
};

// z = (gate, up) pairs in neighbouring columns; y1 = act(gate) * up. A row's 128 y1 columns lie in
// one quad's registers. `up`, and with it y1 until it is quantised, stays in units of the
// accumulator's scale: maxima are scaled, not elements. Where the activation bounds `up`, the
// accumulators are scaled first, because a bound is in units of z; where there is a bias; and where
// z is kept in bf16.
template <class Activation, bool kStoreZ>
struct GatedFp8 : PatchEpilogue {
  static constexpr int kColumnGroup = 64;  // a thread's 16 columns of z, and 8 of y1, are
                                           // neighbours: no exchange before they are stored
  static constexpr bool kInUnitsOfZ = Activation::kBoundsUp || kZIsBf16 || kBiased;
  static constexpr bool kQuantisesZ = kStoreZ && !kZIsBf16;
  // Where registers do not suffice for the codes of two rows of y1.
  static constexpr bool kWritesRowsOfY1 = kBiased || (kQuantisesZ && Activation::kClamps);
  struct Params : Activation {
    float* y1_scale;  // [R, ceil(N / 256)]
    float* z_scale;   // [R, N / 128]
    const float* b1;  // [E, N], where layers have biases
  };
  const Params& e;
  __device__ __forceinline__ GatedFp8(const GemmParams& params, const Params& more,
                                      const TensorMaps& tensor_maps, SharedStorage& s, int warp,
                                      int lane_)
      : PatchEpilogue(params, tensor_maps, s, warp, lane_), e(more) {}

  __device__ __forceinline__ void store(Accumulators& acc, const float (&acc_unit)[2][2], int row0,
                                        const OutputTile& tile) {
    if constexpr (kBiased) add_bias(acc, acc_unit, tile);
    if (tile.col + 128 >= p.n) {  // the second half lies behind the last column
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[1][i] = 0.f;
    }
    uint32_t y8[2][8], patch = 0;
    if constexpr (kWritesRowsOfY1) patch = way_out.acquire(lane);
    float multiply_z[2][2];  // negative where codes are E4M3
    uint32_t within_z = 0;   // of `Sides`: a byte for each of these
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float y[32], top_y[2] = {0.f, 0.f}, top_z[2] = {0.f, 0.f}, top_gate = 0.f, top_up = 0.f;
      uint32_t least_z[2] = {kNoGroup, kNoGroup};
      const float unit[2] = {kInUnitsOfZ ? 1.f : acc_unit[h][0],
                             kInUnitsOfZ ? 1.f : acc_unit[h][1]};
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        float &gate = acc[j / 16][4 * (j % 16) + 2 * h],
              &up = acc[j / 16][4 * (j % 16) + 2 * h + 1];
        if constexpr (kInUnitsOfZ && !kBiased)
          gate *= acc_unit[h][j / 16], up *= acc_unit[h][j / 16];
        if constexpr (kQuantisesZ) {
          top_gate = max_nan(j % 8 == 0 ? 0.f : top_gate, fabsf(gate));
          top_up = max_nan(j % 8 == 0 ? 0.f : top_up, fabsf(up));
          if (j % 8 == 7) {
            top_z[j / 16] = max_nan(top_z[j / 16], max_nan(top_gate, top_up));
            least_z[j / 16] = min(least_z[j / 16], min(group(top_gate), group(top_up)));
          }
        }
        y[j] = e.value(gate * unit[j / 16]) * e.up_value(up);
        if constexpr (kStoreZ && kZIsBf16 && Activation::kClamps) {
          const Sides sides = Sides::of_bf16(e.limit);
          sides.gate(gate), sides.up(up);
        }
        float& top = top_y[kInUnitsOfZ ? 0 : j / 16];  // in one unit, one maximum
        top = fmaxf(top, fabsf(y[j]));
        // The compiler then does not mix both halves, for which registers would not suffice.
        if (kInUnitsOfZ && j == 15) __syncwarp();
      }
      const float amax_y = quad_max(fmaxf(top_y[0] * unit[0], top_y[1] * unit[1]));
      const float amax_z[2] = {quad_max_nan(top_z[0] * unit[0]), quad_max_nan(top_z[1] * unit[1])};
      const bool wide_z[2] = {is_wide(least_z[0], unit[0], amax_z[0]),
                              is_wide(least_z[1], unit[1], amax_z[1])};
      const float multiply_y =
          scales_of_row(amax_y, amax_z, wide_z, row0 + slab_row<false>(lane, h), tile.col,
                        multiply_z[h], within_z);
      const float by[2] = {multiply_y * unit[0], multiply_y * unit[1]};
      multiply_z[h][0] *= unit[0];
      multiply_z[h][1] *= unit[1];
#pragma unroll
      for (int m = 0; m < 8; ++m)
        y8[h][m] = e4m3x4(y[4 * m] * by[m / 4], y[4 * m + 1] * by[m / 4], y[4 * m + 2] * by[m / 4],
                          y[4 * m + 3] * by[m / 4]);
      if constexpr (kWritesRowsOfY1) write_y1(patch, h, y8[h]);
    }
    if constexpr (kWritesRowsOfY1) {
      way_out.publish(&maps.c, tile.col / 2, row0, lane);
    } else {
      store_y1(y8, tile.col / 2, row0);
    }
    if constexpr (kQuantisesZ) store_z(acc, multiply_z, within_z, tile.col, row0);
    if constexpr (kStoreZ && kZIsBf16) store_plain_z(acc, tile.col, row0);
  }

 private:
  // acc = acc * unit + b1, 64 columns at a time: registers hold no more of b1.
  __device__ __forceinline__ void add_bias(Accumulators& acc, const float (&unit)[2][2],
                                           const OutputTile& tile) const {
    const float* bias = e.b1 + static_cast<int64_t>(tile.expert) * p.n + 16 * (lane % 4);
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      // Columns behind the last one are zeroed afterwards, so it does not matter what is added
      // there.
      const float4* from = reinterpret_cast<const float4*>(bias + min(tile.col + 64 * g, p.n - 64));
      float4 b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = __ldg(from + i);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* sum = &acc[g / 2][4 * (8 * (g % 2) + 2 * i) + 2 * h];
          const float by = unit[h][g / 2];
          sum[0] = fmaf(sum[0], by, b[i].x), sum[1] = fmaf(sum[1], by, b[i].y);
          sum[4] = fmaf(sum[4], by, b[i].z), sum[5] = fmaf(sum[5], by, b[i].w);
        }
      __syncwarp();  // the compiler then does not load ahead, for which registers would not suffice
    }
  }

  // The amax of a group of 8 gates or ups, as an integer that is larger for zero than for infinity:
  // a group of zeros decides nothing, because both codes keep it.
  static constexpr uint32_t kNoGroup = 0x7f800000u - 1u;
  __device__ static __forceinline__ uint32_t group(float amax) {
    return __float_as_uint(amax) - 1u;
  }
  // Whether the codes of a block are E4M3, the same for all lanes of a quad. least: of this
  // thread's groups; amax: of the block.
  __device__ __forceinline__ bool is_wide(uint32_t least, float unit, float amax) const {
    if constexpr (!kQuantisesZ || kSpread == __builtin_huge_valf()) return false;
    const float smallest = __uint_as_float(least + 1u) * unit;
    const bool here = smallest * kSpread < amax && amax < __builtin_huge_valf();
    return (__ballot_sync(~0u, here) >> (lane & ~3) & 15u) != 0;
  }

  // Divisions are dear and every lane of a quad needs the same three pairs: lane 0 makes y1's,
  // lanes 1 and 2 z's. Where the activation clamps, two bytes come into within_z, below the others.
  __device__ __forceinline__ float scales_of_row(float amax_y, const float (&amax_z)[2],
                                                 const bool (&wide_z)[2], int64_t row, int col,
                                                 float (&multiply_z)[2], uint32_t& within_z) const {
    const int q = lane % 4;
    const bool wide = q == 1 ? wide_z[0] : wide_z[1];
    const float limit = kQuantisesZ && q > 0 && !wide ? 127.f : kE4m3Max;
    const float amax = max_nan(!kQuantisesZ || q == 0 ? amax_y
                               : q == 1               ? amax_z[0]
                                                      : amax_z[1],
                               kAmaxFloor);
    const float multiply = __fdiv_rn(limit, amax), scale = __fdiv_rn(amax, limit);
    if (q == 0) e.y1_scale[row * ((p.n + 255) / 256) + col / 256] = scale;
    if constexpr (kQuantisesZ) {
      const int block = col / 128 + q - 1;
      if ((q == 1 || q == 2) && block < p.n / 128)
        e.z_scale[row * (p.n / 128) + block] = wide ? -scale : scale;
#pragma unroll
      for (int b = 0; b < 2; ++b)
        multiply_z[b] = __shfl_sync(~0u, wide ? -multiply : multiply, (lane & ~3) + 1 + b);
      if constexpr (Activation::kClamps) {
        const uint32_t code =
            wide ? Sides::e4m3_within(e.limit, scale) : Sides::code_within(e.limit, scale);
#pragma unroll
        for (int b = 0; b < 2; ++b)
          within_z = within_z << 8 | __shfl_sync(~0u, code, (lane & ~3) + 1 + b);
      }
    }
    return __shfl_sync(~0u, multiply, lane & ~3);
  }

  __device__ __forceinline__ void store_y1(const uint32_t (&y8)[2][8], int col, int row0) {
    const uint32_t patch = way_out.acquire(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) write_y1(patch, h, y8[h]);
    way_out.publish(&maps.c, col, row0, lane);
  }
  // One row.
  __device__ __forceinline__ void write_y1(uint32_t patch, int h, const uint32_t (&y8)[8]) const {
    const int q = lane % 4;
#pragma unroll
    for (int g = 0; g < 4; ++g)  // 32 columns, eight a thread
      store_shared_8(chunk_address(patch, lane / 4 + 8 * h, 2 * g + q / 2) + q % 2 * 8, y8[2 * g],
                     y8[2 * g + 1]);
  }

  // within: as `scales_of_row` leaves it; its first byte is of the first row and the left half.
  __device__ __forceinline__ void store_z(const Accumulators& acc, const float (&multiply)[2][2],
                                          uint32_t within, int col, int row0) {
    const int q = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 128 columns
      const uint32_t patch = way_out.acquire(lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float by = multiply[h][half];
        const uint32_t code = within >> (24 - 16 * h - 8 * half) & 255;
        uint32_t w[2][4];
        if (by < 0.f) {
          encode_z<true>(acc[half], h, -by, code, w);
        } else {
          encode_z<false>(acc[half], h, by, code, w);
        }
#pragma unroll
        for (int g = 0; g < 2; ++g)
          store_shared_16(chunk_address(patch, lane / 4 + 8 * h, 4 * g + q), w[g][0], w[g][1],
                          w[g][2], w[g][3]);
      }
      way_out.publish(&maps.d, col + 128 * half, row0, lane);
    }
  }

  // This thread's codes of a row's 128 columns, 16 neighbours of each 64. code: of `Sides`.
  template <bool kWide>
  __device__ __forceinline__ void encode_z(const float (&acc)[64], int h, float by, uint32_t code,
                                           uint32_t (&w)[2][4]) const {
    Sides sides;
    if constexpr (Activation::kClamps)
      sides = kWide ? Sides::of_e4m3(e.limit, code, by) : Sides::of_codes(e.limit, code, by);
    const auto bits = [&](float gate, float up) {
      if constexpr (Activation::kClamps) sides.gate(gate), sides.up(up);
      if constexpr (kWide) return e4m3x2(gate * by, up * by);
      return __byte_perm(int8_bits(gate, by), int8_bits(up, by), 0x0040);
    };
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* v = &acc[4 * (8 * g + 2 * m) + 2 * h];
        w[g][m] = __byte_perm(bits(v[0], v[1]), bits(v[4], v[5]), 0x5410);
      }
  }

  __device__ __forceinline__ void store_plain_z(const Accumulators& acc, int col, int row0) {
    const int q = lane % 4;
#pragma unroll
    for (int g = 0; g < 4; ++g) {  // 64 columns, 16 a thread
      const uint32_t patch = way_out.acquire(lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t w[8];
#pragma unroll
        for (int m = 0; m < 8; ++m) {
          const float* v = &acc[g / 2][4 * (8 * (g % 2) + m) + 2 * h];
          w[m] = bf16x2(v[0], v[1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_shared_16(chunk_address(patch, lane / 4 + 8 * h, 2 * q + i), w[4 * i], w[4 * i + 1],
                          w[4 * i + 2], w[4 * i + 3]);
      }
      way_out.publish(&maps.d, col + 64 * g, row0, lane);
    }
  }
};

}  // namespace sonicmoe::sm90
