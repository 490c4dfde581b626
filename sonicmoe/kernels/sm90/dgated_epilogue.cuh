// dy1 = dout * W2 leaves as the gradients that follow from it: with z = (gate, up) as it was kept
// and p the row's probability
//   y1 = act(gate) up,  dz = (p dy1 up act'(gate), p dy1 act(gate)),  y1s = p y1,  dprob = <dy1,
//   y1>.
// dz goes out as e4m3 in 128x256 blocks, by rows for dgrad and transposed for wgrad (the same
// codes), y1s in 128x128 blocks and transposed only.
//
// A block's maximum spans both consumer warpgroups, so all of them go through the tile together,
// 128 columns of dy1 (one block of dz and one of y1s) at a time. They wait for one another once in
// such a turn, for both maxima. What waits for its scale takes the registers of the accumulators
// that it was made of. The gather puts neighbouring tokens into one thread: stmatrix then
// transposes pairs of bytes for free.
#pragma once

#include "epilogues.cuh"

namespace sonicmoe::sm90 {

struct DgatedParams {
  const uint8_t* z;       // codes or bf16 [R, 2I], gate and up interleaved
  const float* z_scale;   // [R, I / 64], of codes: negative where they are E4M3, else they are INT8
  const float* row_prob;  // [R]
  uint8_t* dz;            // e4m3 [R, 2I]
  float* dz_scale;        // [R / 128, ceil(I / 128)]
  float* dz_t_scale;      // [ceil(I / 128), R / 128]
  float* y1s_t_scale;     // [ceil(I / 128), R / 128]
  float* dprob_parts;     // [ceil(I / 256), R]: a row's sum over the columns of one tile
  __nv_bfloat16* dz_wide;  // [R, 2I] and
  __nv_bfloat16*
      y1s_wide;  // [R, I]: operands of an unquantised wgrad, instead of the transposed codes
  int64_t rows;  // R
  int dz_features,
      y1s_features;  // that leave transposed: 2I and I, or none, where nobody reads them
};

// The transposed tiles of a turn, 128 features x 128 tokens each: dz^T of the left 64 columns, of
// the right ones, and y1s^T. All warps fill a tile; the first warp hands it to the copy engine. The
// others only announce that they have filled their part, and the first warp looks for that later,
// when it is long true: nobody waits for the slowest. There are two buffers. y1s^T goes where the
// left tile was, and leaves in the middle of the next turn.
enum TileOfTurn : int { kDzLeft = 0, kDzRight = 1, kY1s = 2 };

struct SharedTiles {
  SharedStorage& s;
  const TensorMaps& maps;
  const int warp;
  int turn = 0;
  __device__ __forceinline__ SharedTiles(SharedStorage& storage, const TensorMaps& tensor_maps,
                                         int warp_)
      : s(storage), maps(tensor_maps), warp(warp_) {}

  __device__ __forceinline__ uint32_t buffer(TileOfTurn tile) const {
    return smem_address(bytes(tile));
  }
  // This warp has written its part of the tile.
  __device__ __forceinline__ void filled(TileOfTurn tile) {
    fence_async_proxy();
    if (!sends()) named_barrier_arrive(kFilled + tile, kAll);
  }
  __device__ __forceinline__ void send_dz(TileOfTurn tile, int token, int feature, int features) {
    if (!sends()) return;
    named_barrier_sync(kFilled + tile, kAll);
    if (elected()) {
      if (feature < features) tma_store_2d(&maps.c, bytes(tile), token, feature);
      bulk_commit();
    }
    __syncwarp();  // a warp that stays apart would shuffle lane by lane
  }
  __device__ __forceinline__ void will_go_to_y1s(int token, int feature) {
    if (elected()) s.destination = make_int2(token, feature);
  }
  // The tile of y1s^T of the turn before.
  __device__ __forceinline__ void send_y1s() {
    if (!sends() || turn == 0) return;
    named_barrier_sync(kFilled + kY1s, kAll);
    if (elected()) {
      if (s.destination.y >= 0)
        tma_store_2d(&maps.d, bytes(kY1s), s.destination.x, s.destination.y);
      bulk_commit();
    }
    __syncwarp();
  }
  // Behind this the left tile, sent before the right one, may be overwritten.
  __device__ __forceinline__ void await_left() {
    if (elected()) {
      bulk_wait_read<1>();
      barrier_arrive(&s.freed);
    }
    barrier_wait(&s.freed, turn & 1);
    __syncwarp();
  }
  // Every warp comes here before any goes on; then both buffers are free.
  __device__ __forceinline__ void meet() {
    if (elected()) bulk_wait_read<0>();
    __syncwarp();
    named_barrier_sync(kMeeting, kAll);
  }
  __device__ __forceinline__ void finish() {
    send_y1s();
    if (elected()) bulk_wait<0>();
  }

 private:
  static constexpr int kMeeting = 3, kFilled = 4, kAll = 32 * kConsumerWarps;
  __device__ static __forceinline__ bool elected() { return threadIdx.x == kProducerThreads; }
  __device__ __forceinline__ bool sends() const { return warp == 0; }
  __device__ __forceinline__ uint8_t* bytes(TileOfTurn tile) const {
    return &s.patch[0][0][0] + (tile == kDzRight ? kTileM * 128 : 0);
  }
};

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Of magnitudes: their bits are ordered as they are. NaN loses.
__device__ __forceinline__ float warp_max(float v) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(v, 0.f))));
}

// Magnitudes of the larger of each half; signs are of no meaning. NaN loses.
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ float larger_magnitude(uint32_t pair) {
  return fmaxf(fabsf(low_of(pair)), fabsf(high_of(pair)));
}

// byte `i` of a word of biased INT8 codes (code + 128) as a float
template <int i>
__device__ __forceinline__ float biased_byte(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440 + i)) - 8388736.f;  // 2^23 + 128
}

// byte `i` of a word of E4M3 codes as a float
template <int i>
__device__ __forceinline__ float e4m3_byte(uint32_t word) {
  const uint32_t top = __byte_perm(word, 0, 0x0444 + (i << 12));
  // The sign stays, and the other seven bits go to the exponent's low end and the mantissa's top.
  return __uint_as_float((static_cast<uint32_t>(static_cast<int32_t>(top) >> 4)) & 0x87f00000u) *
         0x1p120f;
}

template <class Activation, bool kWgradFp8>
struct DgatedFp8 {
  struct Params : Activation, DgatedParams {};
  // z of 64 columns of dy1: of each row, 32 columns at a time. Of codes word j holds (gate, up) of
  // columns 8 (lane % 4) + 2 j and + 1, in bf16 of column 8 (lane % 4) + j.
  static constexpr int kZChunks = kZIsBf16 ? 2 : 1;  // of 16 bytes
  struct ZWords {
    uint4 word[2][2][kZChunks];
    float scale[2];
  };
  static constexpr bool kAdjacentRows = true, kNeedsRegisters = true;
  static constexpr int kColumnGroup = 32;  // z's, and dz's, 16 bytes of 8 columns lie together
  // The z of a side's columns comes in two parts where registers do not suffice for all of it.
  static constexpr bool kLoadsZInParts = !kWgradFp8 && kZIsBf16 && Activation::kBoundsUp;
  const GemmParams& p;
  const Params& e;
  SharedTiles tiles;
  SharedStorage& s;
  const int warp, lane;
  ZWords z;
  float prob[2];

  __device__ __forceinline__ DgatedFp8(const GemmParams& params, const Params& more,
                                       const TensorMaps& tensor_maps, SharedStorage& storage,
                                       int warp_, int lane_)
      : p(params),
        e(more),
        tiles(storage, tensor_maps, warp_),
        s(storage),
        warp(warp_),
        lane(lane_) {}

  // The first codes of z are asked for before the products, whose time it takes them to come.
  __device__ __forceinline__ void begin(int row0, const OutputTile& tile) {
    const int row = row0 + slab_row<true>(lane, 0);
    if constexpr (kWgradFp8) {
      load_z(row, tile.col);
    }
    prob[0] = load_early(e.row_prob + row);
    prob[1] = load_early(e.row_prob + row + 1);
  }

  // A loop that shifts the accumulators down, because straight-line code for the whole tile misses
  // the instruction cache.
  __device__ __forceinline__ void store(Accumulators& acc, const float (&unit)[2][2], int row0,
                                        const OutputTile& tile) {
    const int row = row0 + slab_row<true>(lane, 0);  // and the next one
    const int end = min(tile.col + kTileN, p.n);
    float by[2] = {unit[0][0], unit[1][0]}, dprob[2] = {0.f, 0.f};
#pragma unroll 1
    for (int col = tile.col;;) {
      const bool both = col + 64 < end;
      Gradients gradients;
      compute<0>(acc[0], gradients, by, dprob, row, col + 64, end);
      if constexpr (kWgradFp8) tiles.send_y1s();
      if (!both) clear_right(acc[0]);
      compute<1>(acc[0], gradients, by, dprob, row, col + 128, end);
      hand_over(gradients, by, row, col, end, tile);
      col += 128;
      if (col >= end) break;
      by[0] = unit[0][1], by[1] = unit[1][1];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 1);
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 2);
    }
    // 32 bits are enough for this index.
    const uint32_t at =
        static_cast<uint32_t>(tile.col / kTileN) * static_cast<uint32_t>(e.rows) + row;
    if (lane % 4 == 0)
      *reinterpret_cast<float2*>(e.dprob_parts + at) = make_float2(dprob[0], dprob[1]);
  }

  __device__ __forceinline__ void finish() {
    if constexpr (kWgradFp8) tiles.finish();
  }

 private:
  // What a turn has computed and what its scales are still to multiply: values wait as bf16, or
  // registers would not suffice. To e4m3's 2^-4 of error that adds 2^-9. What is constant in a row
  // (the accumulator's unit, z's scale, the probability) is left to the quantisation. Indices: left
  // or right 64 columns, row, columns.
  struct Gradients {
    uint32_t dz[2][2][8][2];  // (gate, up) pairs
    uint32_t y1s[2][2][8];    // two columns each
    float z_scale[2][2];
    float top_dz = 0.f, top_y1s = 0.f;
  };
  // Columns behind the last one, whose products are of another expert.
  __device__ __forceinline__ void clear_right(float (&acc)[64]) {
#pragma unroll
    // Not as a selection between zero and the sum, for every one of them in every turn.
    for (int i = 32; i < 64; ++i) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(acc[i]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (!kZIsBf16) asm volatile("mov.f32 %0, 0f3f800000;" : "=f"(z.scale[h]));
#pragma unroll
      for (int g = 0; g < 2; ++g)
#pragma unroll
        for (int i = 0; i < kZChunks; ++i) {
          uint4& w = z.word[h][g][i];
          asm volatile("mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;"
                       : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w));
        }
    }
  }

  __device__ __forceinline__ void load_z(int row, int col) {
    load_row_of_z(0, row, col);
    load_row_of_z(1, row, col);
  }
  __device__ __forceinline__ void load_row_of_z(int h, int row, int col) {
    z.scale[h] = 1.f;
    if constexpr (!kZIsBf16)
      z.scale[h] = load_early(e.z_scale + static_cast<uint32_t>(row + h) * (p.n / 64) + col / 64);
#pragma unroll
    for (int g = 0; g < 2; ++g) load_part_of_z(h, g, row, col);
  }
  __device__ __forceinline__ void load_part_of_z(int h, int g, int row, int col) {
#pragma unroll
    for (int i = 0; i < kZChunks; ++i)
      z.word[h][g][i] =
          load_early_16(e.z + kZChunks * chunk_offset(row + h, col + 32 * g) + 16 * i);
  }
  // gate and up of columns 8 (lane % 4) + 2 (j % 4) and + 1 of 32, in units of z's scale. kMixed:
  // the codes may be E4M3, and are where `wide` says so.
  template <bool kMixed>
  __device__ __forceinline__ void decode(int h, int j, bool wide, float (&gate)[2],
                                         float (&up)[2]) const {
    if constexpr (kZIsBf16) {
      const uint4& words = z.word[h][j / 4][kZChunks * (j % 4) / 4];
      const uint32_t pair[2] = {j % 2 == 0 ? words.x : words.z, j % 2 == 0 ? words.y : words.w};
#pragma unroll
      for (int c = 0; c < 2; ++c) gate[c] = low_of(pair[c]), up[c] = high_of(pair[c]);
    } else {
      const uint4& words = z.word[h][j / 4][0];
      const uint32_t codes = j % 4 == 0   ? words.x
                             : j % 4 == 1 ? words.y
                             : j % 4 == 2 ? words.z
                                          : words.w,
                     word = codes ^ 0x80808080u;
      gate[0] = biased_byte<0>(word), gate[1] = biased_byte<2>(word);
      up[0] = biased_byte<1>(word), up[1] = biased_byte<3>(word);
      if constexpr (kMixed) {
        if (wide) {
          gate[0] = e4m3_byte<0>(codes), gate[1] = e4m3_byte<2>(codes);
          up[0] = e4m3_byte<1>(codes), up[1] = e4m3_byte<3>(codes);
        }
      }
    }
  }
  // Where this thread's 16 bytes of 32 columns lie in [R, 2I]; in units of 16 bytes 32 bits are
  // enough for it.
  __device__ __forceinline__ int64_t chunk_offset(int row, int col) const {
    return static_cast<int64_t>(static_cast<uint32_t>(row) * (p.n / 8) + col / 8 + lane % 4) * 16;
  }
  // 64 columns.
  template <int kSide>
  __device__ __forceinline__ void compute(const float (&acc)[64], Gradients& out,
                                          const float (&by)[2], float (&dprob)[2], int row,
                                          int next, int end) {
    const int col = next - 64;
    const bool inside = kSide == 0 || col < end;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Not before where results are wide: registers would not suffice.
      if (!kWgradFp8 && !kLoadsZInParts && inside) load_row_of_z(h, row, col);
      if constexpr (kZIsBf16) z.scale[h] = 1.f;
      // Few blocks have E4M3 codes, so warps that meet none do not pay for decoding both.
      if (!kZIsBf16 && __any_sync(~0u, z.scale[h] < 0.f)) {
        const bool wide = z.scale[h] < 0.f;
        z.scale[h] = fabsf(z.scale[h]);
        compute_row<kSide, true>(h, wide, acc, out, by, dprob, row, col, inside);
      } else {
        compute_row<kSide, false>(h, false, acc, out, by, dprob, row, col, inside);
      }
      if (kWgradFp8 && next < end) {
        // The compiler then does not ask for z before the values of both rows have their places:
        // with GeLU registers would not suffice. Nor would they under a clamp for either row.
        if ((h == 1 || Activation::kClamps) && !kZIsBf16) __syncwarp();
        load_row_of_z(h, row, next);
      }
    }
  }
  // One row of them.
  template <int kSide, bool kMixed>
  __device__ __forceinline__ void compute_row(int h, bool wide, const float (&acc)[64],
                                              Gradients& out, const float (&by)[2],
                                              float (&dprob)[2], int row, int col, bool inside) {
    // In units of z's scale, but for an activation with bounds: it decodes every element.
    const float scale = Activation::kBoundsUp ? 1.f : z.scale[h],
                argument_scale = Activation::kArgument * scale;
    out.z_scale[kSide][h] = scale;
    float sum = 0.f;
    uint32_t largest_dz = 0, largest_y1 = 0;  // pairs
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float gate[2], up[2], y1[2];
      if (kLoadsZInParts && j % 4 == 0 && inside) load_part_of_z(h, j / 4, row, col);
      decode<kMixed>(h, j, wide, gate, up);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float factor, factor_slope, value, slope;
        e.up_both(Activation::kBoundsUp ? up[c] * z.scale[h] : up[c], factor, factor_slope);
        const float dy1 = acc[4 * (8 * kSide + j) + 2 * h + c], dy1_up = dy1 * factor;
        e.both(Activation::kBoundsUp ? gate[c] * z.scale[h] : gate[c], scale, argument_scale, value,
               slope);
        y1[c] = value * factor;
        sum = fmaf(dy1_up, value, sum);
        uint32_t& dz = out.dz[kSide][h][j][c];
        dz = bf16x2(dy1_up * slope, dy1 * value * factor_slope);
        largest_dz = max_magnitudes(largest_dz, dz);
      }
      out.y1s[kSide][h][j] = bf16x2(y1[0], y1[1]);
      largest_y1 = max_magnitudes(largest_y1, out.y1s[kSide][h][j]);
      if constexpr (!kWgradFp8) {
        if (inside) store_wide<kSide>(out, by, h, j, row, col);
        __syncwarp();  // the compiler then does not mix columns: registers would not suffice
      }
    }
    dprob[h] = fmaf(sum, by[h] * scale * scale, dprob[h]);
    out.top_dz = fmaxf(out.top_dz, larger_magnitude(largest_dz) * fabsf(dz_by(out, kSide, h, by)));
    out.top_y1s = fmaxf(out.top_y1s, larger_magnitude(largest_y1) * fabsf(y1s_by(out, kSide, h)));
  }

  // What a row of 64 columns is still to be multiplied by.
  __device__ __forceinline__ float dz_by(const Gradients& g, int side, int h,
                                         const float (&by)[2]) const {
    return by[h] * prob[h] * g.z_scale[side][h];
  }
  __device__ __forceinline__ float y1s_by(const Gradients& g, int side, int h) const {
    return prob[h] * g.z_scale[side][h] * g.z_scale[side][h];
  }

  // 128 columns, when their scales are known.
  __device__ __forceinline__ void hand_over(const Gradients& g, const float (&by)[2], int row,
                                            int col, int end, const OutputTile& tile) {
    const Multipliers multiplier = exchange(g, col, tile);
    uint32_t left[2][8], right[2][8];
    quantise_dz<0>(g, by, multiplier.dz, left);
    if constexpr (kWgradFp8) {
      transpose_dz(left, tiles.buffer(kDzLeft));
      tiles.filled(kDzLeft);
    }
    store_dz(left, row, col);
    quantise_dz<1>(g, by, multiplier.dz, right);
    if constexpr (kWgradFp8) {
      tiles.send_dz(kDzLeft, tile.row, 2 * col, e.dz_features);
      transpose_dz(right, tiles.buffer(kDzRight));
      tiles.filled(kDzRight);
    }
    if (col + 64 < end) store_dz(right, row, col + 64);
    if constexpr (kWgradFp8) store_y1s(g, multiplier.y1s, col, tile);
    ++tiles.turn;
  }

  struct Multipliers {
    float dz, y1s;
  };
  // Both scales of the turn, from every warp's maxima. Divisions are dear and every lane needs the
  // same four: lanes 0 and 1 make the multipliers, lanes 2 and 3 the scales.
  __device__ __forceinline__ Multipliers exchange(const Gradients& g, int col,
                                                  const OutputTile& tile) {
    const float amax_dz = warp_max(g.top_dz), amax_y1s = kWgradFp8 ? warp_max(g.top_y1s) : 0.f;
    float2* slots = s.amax[tiles.turn & 1];  // a slow warp may still read those of the turn before
    if (lane == 0) slots[warp] = make_float2(amax_dz, amax_y1s);
    tiles.meet();
    float2 amax = make_float2(kAmaxFloor, kAmaxFloor);
#pragma unroll
    for (int i = 0; i < kConsumerWarps / 2; ++i) {
      const float4 two = reinterpret_cast<const float4*>(slots)[i];
      amax.x = fmaxf(amax.x, fmaxf(two.x, two.z));
      amax.y = fmaxf(amax.y, fmaxf(two.y, two.w));
    }
    const float mine = lane % 2 == 0 ? amax.x : amax.y;
    const bool is_scale = lane / 2 % 2 != 0;
    const float quotient = __fdiv_rn(is_scale ? mine : kE4m3Max, is_scale ? kE4m3Max : mine);
    if (warp == 1 && lane / 2 == 1) {  // of the warps that hand over nothing
      const int64_t row_block = tile.row / kTileM, row_blocks = e.rows / kTileM, block = col / 128;
      if (lane % 2 == 0) e.dz_scale[row_block * ((p.n + 127) / 128) + block] = quotient;
      if constexpr (kWgradFp8)
        (lane % 2 == 0 ? e.dz_t_scale : e.y1s_t_scale)[block * row_blocks + row_block] = quotient;
    }
    __syncwarp();
    return {__shfl_sync(~0u, quotient, 0), __shfl_sync(~0u, quotient, 1)};
  }

  // 64 columns.
  template <int kSide>
  __device__ __forceinline__ void quantise_dz(const Gradients& g, const float (&by)[2],
                                              float multiplier, uint32_t (&codes)[2][8]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float all = dz_by(g, kSide, h, by) * multiplier;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const uint32_t (&dz)[2] = g.dz[kSide][h][j];
        codes[h][j] = e4m3x4(low_of(dz[0]) * all, high_of(dz[0]) * all, low_of(dz[1]) * all,
                             high_of(dz[1]) * all);
      }
    }
  }
  // 64 columns by rows.
  __device__ __forceinline__ void store_dz(const uint32_t (&codes)[2][8], int row, int col) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < 2; ++g)
        *reinterpret_cast<uint4*>(e.dz + chunk_offset(row + h, col + 32 * g)) = make_uint4(
            codes[h][4 * g], codes[h][4 * g + 1], codes[h][4 * g + 2], codes[h][4 * g + 3]);
  }

  // A 16-bit element is one column of two neighbouring tokens, so 8x8 matrices of them transpose
  // into 16 tokens a column.
  __device__ __forceinline__ void transpose_dz(const uint32_t (&codes)[2][8], uint32_t tile) const {
    const int index = lane % 8,
              column = index / 2 * 16 + index % 2 + lane / 16 * 4 + lane / 8 % 2 * 2;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const uint32_t w[4] = {__byte_perm(codes[0][j], codes[1][j], 0x5140),
                             __byte_perm(codes[0][j], codes[1][j], 0x7362),
                             __byte_perm(codes[0][j + 1], codes[1][j + 1], 0x5140),
                             __byte_perm(codes[0][j + 1], codes[1][j + 1], 0x7362)};
      stmatrix_x4_trans(chunk_address(tile, j / 4 * 64 + j % 4 * 4 + column, warp), w);
    }
  }

  __device__ __forceinline__ void store_y1s(const Gradients& g, float multiplier, int col,
                                            const OutputTile& tile) {
    uint32_t codes[4][4];
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // 32 columns
      const float by[2] = {y1s_by(g, group / 2, 0) * multiplier,
                           y1s_by(g, group / 2, 1) * multiplier};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t first = g.y1s[group / 2][0][group % 2 * 4 + i],
                       second = g.y1s[group / 2][1][group % 2 * 4 + i];
        codes[group][i] = e4m3x4(low_of(first) * by[0], low_of(second) * by[1],
                                 high_of(first) * by[0], high_of(second) * by[1]);
      }
    }
    tiles.send_dz(kDzRight, tile.row, 2 * col + 128, e.dz_features);
    tiles.await_left();
    const uint32_t buffer = tiles.buffer(kY1s);
    const int column = lane % 8 / 2 * 8 + lane % 2 + lane / 8 * 2;
#pragma unroll
    for (int group = 0; group < 4; ++group)
      stmatrix_x4_trans(chunk_address(buffer, 32 * group + column, warp), codes[group]);
    tiles.will_go_to_y1s(tile.row, e.y1s_features > 0 ? col : -1);
    tiles.filled(kY1s);
  }

  // Of two columns as soon as they are there.
  template <int kSide>
  __device__ __forceinline__ void store_wide(const Gradients& g, const float (&by)[2], int h, int j,
                                             int row, int col) const {
    const float of_dz = dz_by(g, kSide, h, by), of_y1s = y1s_by(g, kSide, h);
    const int64_t at = chunk_offset(row + h, col + j / 4 * 32) / 2 + j % 4 * 2;
    uint32_t pairs[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t dz = g.dz[kSide][h][j][c];
      pairs[c] = bf16x2(low_of(dz) * of_dz, high_of(dz) * of_dz);
    }
    *reinterpret_cast<uint2*>(e.dz_wide + 2 * at) = make_uint2(pairs[0], pairs[1]);
    const uint32_t y1s = g.y1s[kSide][h][j];
    *reinterpret_cast<uint32_t*>(e.y1s_wide + at) =
        bf16x2(low_of(y1s) * of_y1s, high_of(y1s) * of_y1s);
  }
};

}  // namespace sonicmoe::sm90
