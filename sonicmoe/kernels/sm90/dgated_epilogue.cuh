// dy1 = dout * W2 leaves as the gradients that follow from it: with z = (gate, up) as it was kept
// and p the row's probability
//   y1 = act(gate) up,  dz = (p dy1 up act'(gate), p dy1 act(gate)),  y1s = p y1,  dprob = <dy1,
//   y1>.
// dz goes out as e4m3 in 128x128 blocks, by rows for dgrad and transposed for wgrad (the same
// codes), y1s transposed only.
//
// A block's maximum spans both consumer warpgroups, so all of them go through the tile together, 64
// columns of dy1 (one block of dz) at a time. The gather puts neighbouring tokens into one thread:
// stmatrix then transposes pairs of bytes for free.
#pragma once

#include "epilogues.cuh"

namespace sonicmoe::sm90 {

struct DgatedParams {
  const uint8_t* z;        // int8 or bf16 [R, 2I], gate and up interleaved
  const float* z_scale;    // [R, I / 64], of int8
  const float* row_prob;   // [R]
  uint8_t* dz;             // e4m3 [R, 2I]
  float* dz_scale;         // [R / 128, I / 64]
  float* dz_t_scale;       // [I / 64, R / 128]
  float* y1s_t_scale;      // [ceil(I / 128), R / 128]
  float* dprob_parts;      // [ceil(I / 256), R]: a row's sum over the columns of one tile
  __nv_bfloat16* dz_wide;  // [R, 2I] and
  __nv_bfloat16*
      y1s_wide;  // [R, I]: operands of an unquantised wgrad, instead of the transposed codes
  int64_t rows;  // R
};

// Two 128 x 128-byte tiles that the whole CTA fills in turns: one barrier a turn, after which the
// tile filled before is sent.
struct SharedTiles {
  SharedStorage& s;
  const TensorMaps& maps;
  int turn = 0;
  __device__ __forceinline__ SharedTiles(SharedStorage& storage, const TensorMaps& tensor_maps)
      : s(storage), maps(tensor_maps) {
    if (elected()) s.destination = make_int2(0, -1);
  }

  __device__ static __forceinline__ bool elected() { return threadIdx.x == kProducerThreads; }
  __device__ __forceinline__ uint8_t* tile() const {
    return &s.patch[0][0][0] + (turn & 1) * (kTileM * 128);
  }
  // Behind this every warp has filled the tile of the turn before, and that of this turn may be
  // written.
  __device__ __forceinline__ void next() {
    fence_async_proxy();
    if (elected()) bulk_wait_read<0>();
    __syncwarp();
    named_barrier_sync(3, 32 * kConsumerWarps);
    send();
    ++turn;
  }
  __device__ __forceinline__ void will_go_to_dz(int token, int feature) {
    if (elected()) s.destination = make_int2(token, 2 * feature);
  }
  __device__ __forceinline__ void will_go_to_y1s(int token, int feature) {
    if (elected()) s.destination = make_int2(token, 2 * feature + 1);
  }
  __device__ __forceinline__ void finish() {
    fence_async_proxy();
    named_barrier_sync(3, 32 * kConsumerWarps);
    send();
    if (elected()) bulk_wait<0>();
  }

 private:
  __device__ __forceinline__ void send() {
    if (elected()) {
      const int2 to = s.destination;
      if (to.y >= 0) {
        tma_store_2d(to.y % 2 == 0 ? &maps.c : &maps.d, tile(), to.x, to.y / 2);
        bulk_commit();
      }
      s.destination.y = -1;
    }
    __syncwarp();  // a warp that stays apart would shuffle lane by lane
  }
};

__device__ __forceinline__ float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float warp_max(float v) { return amax_of_lanes<32>(v); }

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

template <class Activation, bool kWgradFp8>
struct DgatedFp8 {
  using Params = DgatedParams;
  // z of 64 columns of dy1: of each row, 32 columns at a time. In INT8 word j holds (gate, up) of
  // columns 8 (lane % 4) + 2 j and + 1, in bf16 of column 8 (lane % 4) + j.
  static constexpr int kZChunks = kZIsBf16 ? 2 : 1;  // of 16 bytes
  struct ZWords {
    uint4 word[2][2][kZChunks];
    float scale[2];
  };
  static constexpr bool kAdjacentRows = true, kNeedsRegisters = true;
  static constexpr int kColumnGroup = 32;  // z's, and dz's, 16 bytes of 8 columns lie together
  const GemmParams& p;
  const DgatedParams& e;
  SharedTiles tiles;
  SharedStorage& s;
  const int warp, lane;
  ZWords z;
  float prob[2];

  __device__ __forceinline__ DgatedFp8(const GemmParams& params, const Params& more,
                                       const TensorMaps& tensor_maps, SharedStorage& storage,
                                       int warp_, int lane_)
      : p(params), e(more), tiles(storage, tensor_maps), s(storage), warp(warp_), lane(lane_) {}

  // The first codes of z are asked for before the products, whose time it takes them to come.
  __device__ __forceinline__ void begin(int row0, const OutputTile& tile) {
    const int row = row0 + slab_row<true>(lane, 0);
    load_z(row, tile.col);
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
    for (int col = tile.col; col < end; col += 128) {
      float top_y = 0.f, y1s_unit[2][2] = {};
      uint32_t y1s[2][2][8];
      piece<0>(acc[0], y1s[0], y1s_unit[0], by, dprob, top_y, row, col, end, tile);
      if (col + 64 < end) {
        piece<1>(acc[0], y1s[1], y1s_unit[1], by, dprob, top_y, row, col + 64, end, tile);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) y1s[1][0][j] = y1s[1][1][j] = 0;
      }
      if constexpr (kWgradFp8) store_y1s(y1s, y1s_unit, top_y, col, tile);
      by[0] = unit[0][1], by[1] = unit[1][1];
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 1);
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 2);
    }
    if (lane % 4 == 0)
      *reinterpret_cast<float2*>(e.dprob_parts + tile.col / kTileN * e.rows + row) =
          make_float2(dprob[0], dprob[1]);
  }

  __device__ __forceinline__ void finish() { tiles.finish(); }

 private:
  __device__ __forceinline__ void load_z(int row, int col) {
    load_row_of_z(0, row, col);
    load_row_of_z(1, row, col);
  }
  __device__ __forceinline__ void load_row_of_z(int h, int row, int col) {
    z.scale[h] = 1.f;
    if constexpr (!kZIsBf16)
      z.scale[h] = load_early(e.z_scale + static_cast<int64_t>(row + h) * (p.n / 64) + col / 64);
#pragma unroll
    for (int g = 0; g < 2; ++g)
#pragma unroll
      for (int i = 0; i < kZChunks; ++i)
        z.word[h][g][i] =
            load_early_16(e.z + kZChunks * chunk_offset(row + h, col + 32 * g) + 16 * i);
  }
  // gate and up of columns 8 (lane % 4) + 2 (j % 4) and + 1 of 32, in units of z's scale.
  __device__ __forceinline__ void decode(int h, int j, float (&gate)[2], float (&up)[2]) const {
    if constexpr (kZIsBf16) {
      const uint4& words = z.word[h][j / 4][kZChunks * (j % 4) / 4];
      const uint32_t pair[2] = {j % 2 == 0 ? words.x : words.z, j % 2 == 0 ? words.y : words.w};
#pragma unroll
      for (int c = 0; c < 2; ++c) gate[c] = low_of(pair[c]), up[c] = high_of(pair[c]);
    } else {
      const uint4& words = z.word[h][j / 4][0];
      const uint32_t word = (j % 4 == 0   ? words.x
                             : j % 4 == 1 ? words.y
                             : j % 4 == 2 ? words.z
                                          : words.w) ^
                            0x80808080u;
      gate[0] = biased_byte<0>(word), gate[1] = biased_byte<2>(word);
      up[0] = biased_byte<1>(word), up[1] = biased_byte<3>(word);
    }
  }
  // Where this thread's 16 bytes of 32 columns lie in [R, 2I]; in units of 16 bytes 32 bits are
  // enough for it.
  __device__ __forceinline__ int64_t chunk_offset(int row, int col) const {
    return static_cast<int64_t>(static_cast<uint32_t>(row) * (p.n / 8) + col / 8 + lane % 4) * 16;
  }
  // 64 columns: gradients in registers, their block's scale, then out. What is constant in a row
  // (the accumulator's unit, z's scale, the probability) is left to the quantisation. What waits
  // for a scale waits as bf16, or registers would not suffice: to e4m3's 2^-4 of error that adds
  // 2^-9. z of the next 64 columns is fetched meanwhile.
  template <int kPiece>
  __device__ __forceinline__ void piece(const float (&acc)[64], uint32_t (&y1s)[2][8],
                                        float (&y1s_unit)[2], const float (&by)[2],
                                        float (&dprob)[2], float& top_y, int row, int col, int end,
                                        const OutputTile& tile) {
    uint32_t dz[2][8][2];  // (gate, up) pairs
    float top[2], multiplier[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // In units of z's scale, but for an activation with bounds: it decodes every element.
      const float scale = Activation::kBoundsUp ? 1.f : z.scale[h],
                  argument_scale = Activation::kArgument * scale;
      float sum = 0.f;
      uint32_t largest_dz = 0, largest_y1 = 0;  // pairs
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        float gate[2], up[2], y1[2];
        decode(h, j, gate, up);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float factor, factor_slope, value, slope;
          Activation::up_both(Activation::kBoundsUp ? up[c] * z.scale[h] : up[c], factor,
                              factor_slope);
          const float dy1 = acc[4 * (8 * kPiece + j) + 2 * h + c], dy1_up = dy1 * factor;
          Activation::both(Activation::kBoundsUp ? gate[c] * z.scale[h] : gate[c], scale,
                           argument_scale, value, slope);
          y1[c] = value * factor;
          sum = fmaf(dy1_up, value, sum);
          dz[h][j][c] = bf16x2(dy1_up * slope, dy1 * value * factor_slope);
          largest_dz = max_magnitudes(largest_dz, dz[h][j][c]);
        }
        y1s[h][j] = bf16x2(y1[0], y1[1]);
        largest_y1 = max_magnitudes(largest_y1, y1s[h][j]);
      }
      dprob[h] = fmaf(sum, by[h] * scale * scale, dprob[h]);
      multiplier[h] = by[h] * prob[h] * scale;
      top[h] = larger_magnitude(largest_dz);
      y1s_unit[h] = prob[h] * scale * scale;
      top_y = fmaxf(top_y, larger_magnitude(largest_y1) * fabsf(y1s_unit[h]));
    }
    // z of the next 64 columns: the second row only when gradients have left their registers, where
    // both would not suffice.
    const bool more = col + 64 < end;
    if (more) load_row_of_z(0, row, col + 64);
    if (more && !kZIsBf16) load_row_of_z(1, row, col + 64);
    const BlockScale block =
        exchange(fmaxf(top[0] * fabsf(multiplier[0]), top[1] * fabsf(multiplier[1])));
    const int row_block = tile.row / kTileM, z_blocks = p.n / 64;
    if (tiles.elected())
      e.dz_scale[static_cast<int64_t>(row_block) * z_blocks + col / 64] = block.scale_inv;
    if constexpr (!kWgradFp8) store_wide(dz, y1s, multiplier, y1s_unit, row, col);
    multiplier[0] *= block.multiplier;
    multiplier[1] *= block.multiplier;
    uint32_t codes[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        codes[h][j] =
            e4m3x4(low_of(dz[h][j][0]) * multiplier[h], high_of(dz[h][j][0]) * multiplier[h],
                   low_of(dz[h][j][1]) * multiplier[h], high_of(dz[h][j][1]) * multiplier[h]);
    if (more && kZIsBf16) load_row_of_z(1, row, col + 64);
    if constexpr (kWgradFp8) {
      if (tiles.elected()) e.dz_t_scale[col / 64 * (e.rows / kTileM) + row_block] = block.scale_inv;
      transpose_dz(codes);
      tiles.will_go_to_dz(tile.row, 2 * col);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < 2; ++g)
        *reinterpret_cast<uint4*>(e.dz + chunk_offset(row + h, col + 32 * g)) = make_uint4(
            codes[h][4 * g], codes[h][4 * g + 1], codes[h][4 * g + 2], codes[h][4 * g + 3]);
  }

  // The block's scale from every warp's maximum; also the turn's barrier.
  __device__ __forceinline__ BlockScale exchange(float amax) {
    amax = warp_max(amax);
    float* slots = s.amax[tiles.turn & 1];
    if (lane == 0) slots[warp] = amax;
    tiles.next();
    const float4 a = *reinterpret_cast<const float4*>(slots),
                 b = *reinterpret_cast<const float4*>(slots + 4);
    return block_scale(
        fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w))));
  }

  // A 16-bit element is one column of two neighbouring tokens, so 8x8 matrices of them transpose
  // into 16 tokens a column.
  __device__ __forceinline__ void transpose_dz(const uint32_t (&codes)[2][8]) {
    const uint32_t tile = smem_address(tiles.tile());
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

  __device__ __forceinline__ void store_y1s(const uint32_t (&y1s)[2][2][8],
                                            const float (&unit)[2][2], float top, int col,
                                            const OutputTile& tile) {
    const BlockScale block = exchange(top);
    if (tiles.elected())
      e.y1s_t_scale[col / 128 * (e.rows / kTileM) + tile.row / kTileM] = block.scale_inv;
    const uint32_t buffer = smem_address(tiles.tile());
    const int column = lane % 8 / 2 * 8 + lane % 2 + lane / 8 * 2;
#pragma unroll
    for (int group = 0; group < 4; ++group) {  // 32 columns
      const float by[2] = {unit[group / 2][0] * block.multiplier,
                           unit[group / 2][1] * block.multiplier};
      uint32_t w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t first = y1s[group / 2][0][group % 2 * 4 + i],
                       second = y1s[group / 2][1][group % 2 * 4 + i];
        w[i] = e4m3x4(low_of(first) * by[0], low_of(second) * by[1], high_of(first) * by[0],
                      high_of(second) * by[1]);
      }
      stmatrix_x4_trans(chunk_address(buffer, 32 * group + column, warp), w);
    }
    tiles.will_go_to_y1s(tile.row, col);
  }

  __device__ __forceinline__ void store_wide(const uint32_t (&dz)[2][8][2],
                                             const uint32_t (&y1s)[2][8], const float (&by)[2],
                                             const float (&y1s_by)[2], int row, int col) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int64_t at =
            static_cast<int64_t>(row + h) * p.n + col + j / 4 * 32 + lane % 4 * 8 + j % 4 * 2;
        uint32_t pairs[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          pairs[c] = bf16x2(low_of(dz[h][j][c]) * by[h], high_of(dz[h][j][c]) * by[h]);
        *reinterpret_cast<uint2*>(e.dz_wide + 2 * at) = make_uint2(pairs[0], pairs[1]);
        *reinterpret_cast<uint32_t*>(e.y1s_wide + at) =
            bf16x2(low_of(y1s[h][j]) * y1s_by[h], high_of(y1s[h][j]) * y1s_by[h]);
      }
    }
  }
};

}  // namespace sonicmoe::sm90
