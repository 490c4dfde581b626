// dy1 = dout * W2 leaves as the gradients that follow from it: with z as it was kept and p the row's
// probability
//   y1 = act(gate) up,  dz = (p dy1 up act'(gate), p dy1 act(gate)),  y1s = p y1,  dprob = <dy1, y1>,
// and without a gate y1 = act(z), dz = p dy1 act'(z).
//
// z comes through the ring of stages, 64 columns of y1 at a time: the producer asks for it while the
// last products run. dz replaces z where it lies, and the copy engine fetches it from there.
#pragma once

#include "bf16_epilogues.cuh"

namespace sonicmoe::sm90 {

struct DgatedHalfParams {
  const float* row_prob;  // [R]
  float* partials;        // [ceil(I / 256), R]: a row's sum over the columns of one tile
  int64_t rows;           // R
};

template <class Activation, GateOrder kOrder>
struct DgatedHalf : HalfEpilogue {
  struct Params : Activation, DgatedHalfParams {};
  static constexpr int kZStages = kTileN / 64;  // of 64 columns of y1
  // Boxes of 128 rows x 64 columns of z: the gates and the up values of these columns, or 32
  // columns each of both in turns.
  static constexpr int kZBoxes = kOrder == GateOrder::kNone ? 1 : 2;
  static constexpr int kZBoxBytes = kTileM * kRowBytes;
  static constexpr int kZBytes = kZBoxes * kZBoxBytes;
  static_assert(kZBytes <= kBytesB);
  const Params& e;
  HalfStorage& s;
  __device__ __forceinline__ DgatedHalf(const HalfParams& params, const Params& more,
                                        const HalfMaps& tensor_maps, HalfStorage& storage,
                                        int warp_, int lane_)
      : HalfEpilogue(params, tensor_maps, storage, warp_, lane_), e(more), s(storage) {}

  __device__ static __forceinline__ int column_of_z(const OutputTile& tile, int chunk, int box) {
    const int column = tile.col + 64 * chunk;
    return kOrder == GateOrder::kTurns ? 2 * column + 64 * box : column;
  }
  __device__ static __forceinline__ int part_of_z(int box) {
    return kOrder == GateOrder::kHalves ? box : 0;
  }
  __device__ static __forceinline__ void load_z(const HalfMaps& maps, uint64_t* full,
                                                uint8_t* stage, const OutputTile& tile,
                                                int chunk) {
#pragma unroll
    for (int box = 0; box < kZBoxes; ++box)
      tma_load_3d(&maps.z, full, stage + box * kZBoxBytes, column_of_z(tile, chunk, box),
                  part_of_z(box), tile.row);
  }

  // A loop that shifts the accumulators down, because straight-line code for the whole tile misses
  // the instruction cache.
  __device__ __forceinline__ void store(Accumulators& acc, const OutputTile& tile, Ring& ring) {
    const int row = tile.row + warp * 16 + lane / 4;
    const float prob[2] = {__ldg(e.row_prob + row), __ldg(e.row_prob + row + 8)};
    float dprob[2] = {0.f, 0.f};
    int stages[2] = {0, 0};  // of the chunks before this one, the older one last
#pragma unroll 1
    for (int chunk = 0; chunk < kZStages; ++chunk) {
      const uint32_t patch = way_out.acquire();
      // The copy engine has read what was handed over two chunks ago.
      if (chunk >= 2) release(s, stages[1], lane);
      barrier_wait(&s.full[ring.stage], ring.phase);
      uint8_t* z = s.b[ring.stage] + warp * kPatchBytes;
      compute(acc[0], smem_address(z), patch, prob, dprob);
      hand_over(z, tile, chunk);
      stages[1] = stages[0];
      stages[0] = ring.stage;
      ring.advance();
#pragma unroll
      for (int i = 0; i < 32; ++i)
        acc[0][i] = acc[0][i + 32], acc[0][i + 32] = acc[1][i], acc[1][i] = acc[1][i + 32];
    }
    way_out.await_read();
    release(s, stages[1], lane);
    release(s, stages[0], lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 1);
      dprob[h] += __shfl_xor_sync(~0u, dprob[h], 2);
      if (lane % 4 == 0) e.partials[tile.col / kTileN * e.rows + row + 8 * h] = dprob[h];
    }
  }

 private:
  struct Gradient {
    float gate, up, y1s;
  };
  __device__ __forceinline__ Gradient gradient(float dy1, float gate, float up, float prob,
                                               float& dprob) const {
    float value, slope, up_value = 1.f, up_slope = 0.f;
    e.both(gate, 1.f, Activation::kArgument, value, slope);
    if constexpr (kOrder != GateOrder::kNone) e.up_both(up, up_value, up_slope);
    const float y1 = value * up_value, d = dy1 * prob;
    dprob = fmaf(dy1, y1, dprob);
    return {d * slope * up_value, d * value * up_slope, prob * y1};
  }

  // 64 columns: z at `z` becomes dz, y1s goes into the patch.
  __device__ __forceinline__ void compute(const float (&acc)[64], uint32_t z, uint32_t patch,
                                          const float (&prob)[2], float (&dprob)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 columns
      uint32_t first[4], second[4], y1s[4];
      load_fragments(z, i, first, second);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int h = m % 2;
        const float* dy1 = &acc[4 * (2 * i + m / 2) + 2 * h];
        const float2 a = floats_of(first[m]), b = floats_of(second[m]);
        constexpr bool kTurns = kOrder == GateOrder::kTurns;
        const Gradient left = gradient(dy1[0], a.x, kTurns ? a.y : b.x, prob[h], dprob[h]),
                       right = gradient(dy1[1], kTurns ? b.x : a.y, b.y, prob[h], dprob[h]);
        first[m] = half_pair(left.gate, kTurns ? left.up : right.gate);
        second[m] = half_pair(kTurns ? right.gate : left.up, right.up);
        y1s[m] = half_pair(left.y1s, right.y1s);
      }
      store_fragments(z, i, first, second);
      stmatrix_x4(matrix_address(patch, i), y1s);
    }
  }

  // Word m is of columns 16 i + 8 (m / 2) + 2 (lane % 4) and + 1 of y1, row lane / 4 + 8 (m % 2). In
  // turns `first` is gate and up of the first of them and `second` of the other; else they are both
  // gates and both up values.
  __device__ __forceinline__ void load_fragments(uint32_t z, int i, uint32_t (&first)[4],
                                                 uint32_t (&second)[4]) const {
    if constexpr (kOrder == GateOrder::kTurns) {
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const uint2 v = load_shared_8(turns_address(z, i, m));
        first[m] = v.x, second[m] = v.y;
      }
    } else {
      ldmatrix_x4(matrix_address(z, i), first);
#pragma unroll
      for (int m = 0; m < 4; ++m) second[m] = 0;
      if constexpr (kOrder == GateOrder::kHalves)
        ldmatrix_x4(matrix_address(z + kZBoxBytes, i), second);
    }
  }
  __device__ __forceinline__ void store_fragments(uint32_t z, int i, const uint32_t (&first)[4],
                                                  const uint32_t (&second)[4]) const {
    if constexpr (kOrder == GateOrder::kTurns) {
#pragma unroll
      for (int m = 0; m < 4; ++m) store_shared_8(turns_address(z, i, m), first[m], second[m]);
    } else {
      stmatrix_x4(matrix_address(z, i), first);
      if constexpr (kOrder == GateOrder::kHalves)
        stmatrix_x4(matrix_address(z + kZBoxBytes, i), second);
    }
  }
  __device__ __forceinline__ uint32_t turns_address(uint32_t z, int i, int m) const {
    const int group = 2 * i + m / 2, q = lane % 4;  // of 8 columns of y1, which are 16 of z
    return chunk_address(z + group / 4 * kZBoxBytes, lane / 4 + 8 * (m % 2),
                         group % 4 * 2 + q / 2) +
           q % 2 * 8;
  }

  // dz from where z was, and y1s from the buffer: one group of the copy engine.
  __device__ __forceinline__ void hand_over(const uint8_t* dz, const OutputTile& tile, int chunk) {
    const int row = first_row(tile);
    way_out.publish([&](const uint8_t* y1s) {
#pragma unroll
      for (int box = 0; box < kZBoxes; ++box)
        tma_store_3d(&maps.d, dz + box * kZBoxBytes, column_of_z(tile, chunk, box), part_of_z(box),
                     row);
      tma_store_2d(&maps.c, y1s, tile.col + 64 * chunk, row);
    });
  }
};

}  // namespace sonicmoe::sm90
