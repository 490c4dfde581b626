// What happens to the sums of a BF16 tile in forward and dgrad: rows with a bias, or z with the
// activation.
//
// A thread has rows `lane / 4` and 8 below it, and of each 8 columns the neighbours 2 (lane % 4) and
// + 1. With gate and up in halves, acc[0] are gates and acc[1] the up values that belong to them;
// with gate and up in turns, the neighbours are a gate and its up.
#pragma once

#include "activations.cuh"
#include "bf16_grouped_gemm.cuh"

namespace sonicmoe::sm90 {

// The way out of a warpgroup: its warps fill 16 rows each of 64 rows x 128 bytes (swizzled), one
// thread hands them to the copy engine, and all go on with the other one of two buffers. A warp that
// handed over its own rows would ask the copy engine four times as often, which costs 3 %.
struct GroupStore {
  uint8_t* buffers;  // two, of 64 rows
  int group, warp, lane;
  int turn = 0;
  static constexpr int kBytes = 4 * kPatchBytes;

  __device__ __forceinline__ GroupStore(HalfStorage& s, int warp_of_both, int lane_)
      : buffers(&s.patch[warp_of_both / 4 * 4][0][0]),
        group(warp_of_both / 4),
        warp(warp_of_both % 4),
        lane(lane_) {}
  // The rows of this warp in the buffer of this turn, which is free.
  __device__ __forceinline__ uint32_t acquire() const {
    if (elected()) bulk_wait_read<1>();
    meet();
    return smem_address(buffer()) + warp * kPatchBytes;
  }
  // `send` hands the buffer over, and with it whatever else the warps have written.
  template <class Send>
  __device__ __forceinline__ void publish(Send send) {
    fence_async_proxy();
    meet();
    if (elected()) {
      send(buffer());
      bulk_commit();
    }
    ++turn;
  }
  __device__ __forceinline__ void publish(const CUtensorMap* map, int x, int y) {
    publish([&](const uint8_t* from) { tma_store_2d(map, from, x, y); });
  }
  __device__ __forceinline__ void publish_3d(const CUtensorMap* map, int x, int y, int z) {
    publish([&](const uint8_t* from) { tma_store_3d(map, from, x, y, z); });
  }
  // Everything that was handed over has been read.
  __device__ __forceinline__ void await_read() const {
    if (elected()) bulk_wait_read<0>();
    meet();
  }
  __device__ __forceinline__ void finish() const {
    if (elected()) bulk_wait<0>();
  }

 private:
  __device__ __forceinline__ uint8_t* buffer() const { return buffers + turn % 2 * kBytes; }
  __device__ __forceinline__ bool elected() const { return warp == 0 && lane == 0; }
  __device__ __forceinline__ void meet() const { named_barrier_sync(3 + group, 128); }
};

// What the epilogues of these GEMMs share: 64 columns at a time leave through a warpgroup's buffers.
struct HalfEpilogue {
  static constexpr int kZStages = 0, kZBytes = 0;
  static constexpr bool kSplitsColumns = false, kSplitsDepth = false;
  const HalfParams& p;
  const HalfMaps& maps;
  GroupStore way_out;
  const int warp, lane;
  __device__ __forceinline__ HalfEpilogue(const HalfParams& params, const HalfMaps& tensor_maps,
                                          HalfStorage& s, int warp_, int lane_)
      : p(params), maps(tensor_maps), way_out(s, warp_, lane_), warp(warp_), lane(lane_) {}
  __device__ static __forceinline__ void load_z(const HalfMaps&, uint64_t*, uint8_t*,
                                                const OutputTile&, int) {}
  __device__ __forceinline__ void finish() { way_out.finish(); }

 protected:
  __device__ __forceinline__ int first_row(const OutputTile& tile) const {
    return tile.row + warp / 4 * 64;  // of the warpgroup
  }
  // A patch of `value(j, h, c)`: columns 8 j + 2 (lane % 4) + c of row lane / 4 + 8 h.
  template <class Value>
  __device__ __forceinline__ void fill(uint32_t patch, Value value) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // four 8x8 matrices: rows 0-7 | 8-15, columns 0-7 | 8-15
      uint32_t w[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int j = 2 * i + m / 2, h = m % 2;
        w[m] = half_pair(value(j, h, 0), value(j, h, 1));
      }
      stmatrix_x4(matrix_address(patch, i), w);
    }
  }
  // Where this lane's row of the matrices of 16 columns number `i` begins.
  __device__ __forceinline__ uint32_t matrix_address(uint32_t patch, int i) const {
    return chunk_address(patch, lane / 8 % 2 * 8 + lane % 8, 2 * i + lane / 16);
  }
  // acc += bias[column] for the 128 columns of one half, those below `columns`.
  __device__ __forceinline__ void add_bias(float (&acc)[64], const float* bias, int column,
                                           int columns) const {
    constexpr int kAtOnce = 8;  // loads that are on their way together
#pragma unroll
    for (int first = 0; first < 16; first += kAtOnce) {
      float2 b[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = column + 8 * (first + i) + 2 * (lane % 4);
        // Columns behind the last one are not stored, so it does not matter what is added there.
        b[i] = load_early_8(bias + min(at, columns - 2));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float* sum = &acc[4 * (first + i) + 2 * h];
          sum[0] += b[i].x, sum[1] += b[i].y;
        }
    }
  }
};

// c = a * b^T + bias.
struct StoreHalf : HalfEpilogue {
  static constexpr bool kSplitsDepth = true;
  struct Params {
    const float* bias;  // [E, N], or nullptr
  };
  const Params& e;
  __device__ __forceinline__ StoreHalf(const HalfParams& params, const Params& more,
                                       const HalfMaps& tensor_maps, HalfStorage& s, int warp_,
                                       int lane_)
      : HalfEpilogue(params, tensor_maps, s, warp_, lane_), e(more) {}

  __device__ __forceinline__ void store(Accumulators& acc, const OutputTile& tile, Ring&) {
    if (e.bias != nullptr) {
      const float* bias = e.bias + static_cast<int64_t>(tile.expert) * p.n;
      add_bias(acc[0], bias, tile.col, p.n);
      add_bias(acc[1], bias, tile.col + 128, p.n);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      fill(way_out.acquire(), [&](int j, int h, int n) {
        return acc[c / 2][4 * (8 * (c % 2) + j) + 2 * h + n];
      });
      way_out.publish(&maps.c, tile.col + 64 * c, first_row(tile));
    }
  }
};

struct ActivationParams {
  const float* bias;  // [E, N1], or nullptr
  bool store_z, store_y;
};

// z = a * b^T + bias, y1 = act(z).
template <class Activation, GateOrder kOrder>
struct Activate : HalfEpilogue {
  struct Params : Activation, ActivationParams {};
  static constexpr bool kSplitsColumns = kOrder == GateOrder::kHalves;
  const Params& e;
  __device__ __forceinline__ Activate(const HalfParams& params, const Params& more,
                                      const HalfMaps& tensor_maps, HalfStorage& s, int warp_,
                                      int lane_)
      : HalfEpilogue(params, tensor_maps, s, warp_, lane_), e(more) {}

  __device__ __forceinline__ void store(Accumulators& acc, const OutputTile& tile, Ring&) {
    constexpr bool kHalves = kOrder == GateOrder::kHalves;
    const int column[2] = {kHalves ? tile.col / 2 : tile.col,
                           kHalves ? tile.col / 2 : tile.col + 128},
              part[2] = {0, kHalves ? 1 : 0}, columns = kHalves ? p.n / 2 : p.n;
    if (e.bias != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        add_bias(acc[i], e.bias + static_cast<int64_t>(tile.expert) * p.n + part[i] * columns,
                 column[i], columns);
    }
    if (e.store_z) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float(&half)[64] = acc[c / 2];
        fill(way_out.acquire(),
             [&](int j, int h, int n) { return half[4 * (8 * (c % 2) + j) + 2 * h + n]; });
        way_out.publish_3d(&maps.z, column[c / 2] + 64 * (c % 2), part[c / 2], first_row(tile));
      }
    }
    if (e.store_y) store_y(acc, tile);
  }

 private:
  __device__ static __forceinline__ float gated(const Activation& act, float gate, float up) {
    return act.value(gate) * act.up_value(up);
  }

  __device__ __forceinline__ void store_y(const Accumulators& acc, const OutputTile& tile) {
    if constexpr (kOrder == GateOrder::kTurns) {
      store_y_of_turns(acc, tile);
    } else {
      constexpr bool kHalves = kOrder == GateOrder::kHalves;
      const Activation& act = e;
#pragma unroll
      for (int c = 0; c < (kHalves ? 2 : 4); ++c) {
        fill(way_out.acquire(), [&](int j, int h, int n) {
          const int i = 4 * (8 * (c % 2) + j) + 2 * h + n;
          if constexpr (kHalves) return gated(act, acc[0][i], acc[1][i]);
          return act.value(acc[c / 2][i]);
        });
        way_out.publish(&maps.c, (kHalves ? tile.col / 2 : tile.col) + 64 * c, first_row(tile));
      }
    }
  }

  // A thread has every fourth column of y1, in both of its rows. Neighbouring threads exchange
  // rows, so that each has two columns of one row.
  __device__ __forceinline__ void store_y_of_turns(const Accumulators& acc,
                                                   const OutputTile& tile) {
    const int q = lane % 4, odd = q % 2, row = lane / 4 + 8 * odd;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t patch = way_out.acquire();
#pragma unroll
      for (int j = 0; j < 16; ++j) {  // columns 4 j to 4 j + 3 of 64
        const float* z = &acc[c][4 * j];
        const float y[2] = {gated(e, z[0], z[1]), gated(e, z[2], z[3])};
        const float other = __shfl_xor_sync(~0u, odd ? y[0] : y[1], 1);
        const uint32_t pair = odd ? half_pair(other, y[1]) : half_pair(y[0], other);
        store_shared_4(chunk_address(patch, row, j / 2) + j % 2 * 8 + q / 2 * 4, pair);
      }
      way_out.publish(&maps.c, tile.col / 2 + 64 * c, first_row(tile));
    }
  }
};

}  // namespace sonicmoe::sm90
