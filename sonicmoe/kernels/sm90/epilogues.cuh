// What happens to a tile's accumulators: bf16 rows, or the gated activation with FP8 y1 and INT8 z.
#pragma once

#include "fp8_grouped_gemm.cuh"

namespace sonicmoe::sm90 {

// Butterfly transpose of a 4x4 matrix of words that the four lanes of a quad hold one row each.
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4], int q) {
  const bool odd = q & 1, high = q & 2;
  uint32_t a = odd ? w[0] : w[1], b = odd ? w[2] : w[3];
  a = __shfl_xor_sync(~0u, a, 1);
  b = __shfl_xor_sync(~0u, b, 1);
  if (odd) {
    w[0] = a, w[2] = b;
  } else {
    w[1] = a, w[3] = b;
  }
  a = high ? w[0] : w[2];
  b = high ? w[1] : w[3];
  a = __shfl_xor_sync(~0u, a, 2);
  b = __shfl_xor_sync(~0u, b, 2);
  if (high) {
    w[0] = a, w[1] = b;
  } else {
    w[2] = a, w[3] = b;
  }
}

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(~0u, v, 1));
  return fmaxf(v, __shfl_xor_sync(~0u, v, 2));
}
// NaN wins, as the INT8 code's scale needs it
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
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
// The low byte is x rounded to the nearest even integer; |x| < 2^22.
__device__ __forceinline__ uint32_t int8_bits(float x) { return __float_as_uint(__fadd_rn(x, 12582912.f)); }

struct Silu {
  __device__ static __forceinline__ float value(float x) { return x * reciprocal(1.f + __expf(-x)); }
};
struct Gelu {
  __device__ static __forceinline__ float value(float x) { return x * (0.5f * (1.f + erff(x * 0.70710678118654752f))); }
};
struct Relu {
  __device__ static __forceinline__ float value(float x) { return x > 0.f ? x : x * 0.f; }  // x * 0 keeps NaN
};

struct StoreBf16 {
  __device__ static __forceinline__ void run(const Accumulators& acc, const float (&unit)[2][2], const GemmParams&, const CUtensorMap* out,
                                             const CUtensorMap*, int col, int row0, int lane, WarpStore& store) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {  // 64 columns, 128 bytes
      const uint32_t patch = store.acquire(lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // four 8x8 matrices: rows 0-7 | 8-15, columns 0-7 | 8-15
        uint32_t w[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int j = 8 * c + 2 * i + m / 2, h = m % 2;
          const float scale = unit[h][j / 16];
          const float low = acc[j / 16][4 * (j % 16) + 2 * h] * scale, high = acc[j / 16][4 * (j % 16) + 2 * h + 1] * scale;
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[m]) : "f"(high), "f"(low));
        }
        stmatrix_x4(chunk_address(patch, lane / 8 % 2 * 8 + lane % 8, 2 * i + lane / 16), w);
      }
      store.publish(out, col + 64 * c, row0, lane);
    }
  }
};

// z = (gate, up) pairs in neighbouring columns; y1 = act(gate) * up. A row's 128 y1 columns lie in one quad's registers.
template <class Activation, bool kStoreZ>
struct GatedFp8 {
  __device__ static __forceinline__ void run(Accumulators& acc, const float (&unit)[2][2], const GemmParams& p, const CUtensorMap* map_y,
                                             const CUtensorMap* map_z, int col, int row0, int lane, WarpStore& store) {
    const int q = lane % 4;
    uint32_t y8[2][8];
    float multiply_z[2][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t row = row0 + lane / 4 + 8 * h;
      float y[32], amax_y = 0.f, amax_z[2] = {0.f, 0.f};
#pragma unroll
      for (int j = 0; j < 32; ++j) {
        float& gate = acc[j / 16][4 * (j % 16) + 2 * h];
        float& up = acc[j / 16][4 * (j % 16) + 2 * h + 1];
        gate *= unit[h][j / 16];
        up *= unit[h][j / 16];
        if constexpr (kStoreZ) amax_z[j / 16] = max_nan(amax_z[j / 16], max_nan(fabsf(gate), fabsf(up)));
        y[j] = Activation::value(gate) * up;
        amax_y = fmaxf(amax_y, fabsf(y[j]));
      }
      amax_y = fmaxf(quad_max(amax_y), kAmaxFloor);
      const float multiply_y = __fdiv_rn(448.f, amax_y);
      if (q == 0) p.y1_scale[row * (p.n / 256) + col / 256] = __fdiv_rn(amax_y, 448.f);
      if constexpr (kStoreZ) {
        float2 scale;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          amax_z[b] = max_nan(quad_max_nan(amax_z[b]), kAmaxFloor);
          multiply_z[h][b] = __fdiv_rn(127.f, amax_z[b]);
          (b ? scale.y : scale.x) = __fdiv_rn(amax_z[b], 127.f);
        }
        if (q == 0) *reinterpret_cast<float2*>(p.z_scale + row * (p.n / 128) + col / 128) = scale;
      }
#pragma unroll
      for (int m = 0; m < 8; ++m)
        y8[h][m] = e4m3x2(y[4 * m] * multiply_y, y[4 * m + 1] * multiply_y) | e4m3x2(y[4 * m + 2] * multiply_y, y[4 * m + 3] * multiply_y) << 16;
    }
    store_y1(y8, map_y, col / 2, row0, lane, store);
    if constexpr (kStoreZ) store_z(acc, multiply_z, map_z, col, row0, lane, store);
  }

 private:
  static __device__ __forceinline__ void store_y1(const uint32_t (&y8)[2][8], const CUtensorMap* map, int col, int row0, int lane, WarpStore& store) {
    const int q = lane % 4;
    const uint32_t patch = store.acquire(lane);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < 2; ++g) {  // 64 columns
        uint32_t w[4] = {y8[h][4 * g], y8[h][4 * g + 1], y8[h][4 * g + 2], y8[h][4 * g + 3]};
        quad_transpose(w, q);  // word p, byte i: column 4 (j0 + i) + p with j0 = 16 g + 4 q
        const uint32_t a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
        const uint32_t c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
        store_shared_16(chunk_address(patch, lane / 4 + 8 * h, 4 * g + q), __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                        __byte_perm(c, d, 0x5410), __byte_perm(c, d, 0x7632));
      }
    store.publish(map, col, row0, lane);
  }

  static __device__ __forceinline__ void store_z(const Accumulators& acc, const float (&multiply)[2][2], const CUtensorMap* map, int col, int row0,
                                                 int lane, WarpStore& store) {
    const int q = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 128 columns
      const uint32_t patch = store.acquire(lane);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < 2; ++g) {  // 64 columns
          uint32_t w[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float* v = &acc[half][4 * (8 * g + 2 * m) + 2 * h];
            const float by = multiply[h][half];
            const uint32_t low = __byte_perm(int8_bits(__fmul_rn(v[0], by)), int8_bits(__fmul_rn(v[1], by)), 0x0040);
            const uint32_t high = __byte_perm(int8_bits(__fmul_rn(v[4], by)), int8_bits(__fmul_rn(v[5], by)), 0x0040);
            w[m] = __byte_perm(low, high, 0x5410);
          }
          quad_transpose(w, q);  // word p: bytes of lane p for two neighbouring groups of eight columns
          store_shared_16(chunk_address(patch, lane / 4 + 8 * h, 4 * g + q), __byte_perm(w[0], w[1], 0x5410), __byte_perm(w[2], w[3], 0x5410),
                          __byte_perm(w[0], w[1], 0x7632), __byte_perm(w[2], w[3], 0x7632));
        }
      store.publish(map, col + 128 * half, row0, lane);
    }
  }
};

}  // namespace sonicmoe::sm90
