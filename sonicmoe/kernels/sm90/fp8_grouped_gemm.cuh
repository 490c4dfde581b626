// Block-scaled FP8 grouped GEMM for Hopper: C[rows of expert e] = A[rows of expert e] * B[e]^T, A
// and B K-major e4m3.
//
// One persistent CTA per SM, paired in clusters of two that take neighbouring 128-row tiles and
// share B's 256 columns by multicast. A producer warpgroup fills a ring of stages; two consumer
// warpgroups hold 64 x 256 fp32 accumulators each.
//
// Scales: A has one per row and 128 of K (or 256, see `ScaleBlocks`), B one per as much of K and
// 128 columns (or 256). The accumulator is kept in units of the current scale product and
// multiplied by the ratio of old to new where it changes, so there is one accumulator and not two,
// which leaves registers for 256 columns. How
// far a scale may fall within a row is bounded (kMaxDrop), or a block of zeros would make the
// accumulator overflow: a block 2^44 below the largest before it counts as if it were 2^44 below.
//
// An adapter's stages (grouped_tiles.cuh) are added to sums that were multiplied out of their units.
//
// Padding rows of A are zeros (the gather) or whatever the caller's finite rows hold; a token is
// read at its own rows only.
#pragma once

#include "../cuda/quantize.cuh"
#include "grouped_tiles.cuh"

namespace sonicmoe::sm90 {

constexpr int kTileK = kRowBytes;  // e4m3
static_assert(kTileK == kScaleBlock, "scales change between k-blocks, not within");
static_assert(kTileN == kGateUpBlock, "a tile has one scale of w1");
static_assert(kTileN == kDprobColumns, "a tile writes one partial sum of dprobs");
constexpr float kMaxDrop =
    0x1p-44f;  // a scale more than this below the largest before it is treated as this far below

// Which blocks share a scale: `columns` of B, and as much of K, in B and in A.
template <int columns, int depth>
struct ScaleBlocks {
  static constexpr int kColumns = columns, kDepth = depth;
  static constexpr int kOfTile = kTileN / columns;  // scales of B in a tile's columns: 1 or 2
  static constexpr int kPeriod = depth / kTileK;    // k-blocks between two rescales: 1 or 2
  static_assert(kOfTile * columns == kTileN && kOfTile <= 2);
  static_assert(kPeriod * kTileK == depth && kPeriod <= 2);
};
using SquareBlocks = ScaleBlocks<kScaleBlock, kScaleBlock>;
using GateUpColumns = ScaleBlocks<kGateUpBlock, kScaleBlock>;  // z = x * w1
using GateUpDepth = ScaleBlocks<kScaleBlock, kGateUpBlock>;    // dx = dz * w1

struct GemmParams : RowGroups, AdapterRows {
  const uint8_t*
      a;  // e4m3 [T, K], gathered through row_token; unused when A comes through a tensor map
  const float* a_scale;           // [rows of A, K / depth], or one per 128 rows
  int a_scale_shift;              // log2 of the rows that share a scale: 0 or 7
  const float* b_scale;           // [E, N / columns, K / depth]
  const int32_t* row_token;       // [R], -1 in padding rows
  int k;
};

// A kernel's tensor maps: the operands, and up to two outputs.
struct OwnMaps {
  CUtensorMap a, b, c, d;
};
using TensorMaps = WithAdapter<OwnMaps, 1>;

struct alignas(1024) SharedStorage : StageMemory {
  // An epilogue's exchange between warps: of dz and of y1s.
  float2 amax[2][kConsumerWarps];
  int2 destination;  // of the tile of y1s^T that waits for its sending: token, row
  uint64_t freed;    // an epilogue's first buffer: the copy engine has read it
};
static_assert(sizeof(SharedStorage) + 1024 <= kMostSharedBytes);

template <bool kGather, class Epilogue>
__device__ __forceinline__ void produce(const GemmParams& p, const typename Epilogue::Params& e,
                                        const TensorMaps& maps, SharedStorage& s) {
  static_assert(kGather || !Epilogue::kAdjacentRows);
  const int thread = threadIdx.x, lane_row = thread / 8, chunk = thread % 8;
  const int k_blocks = (p.k + kTileK - 1) / kTileK;
  Ring ring;
  OutputTile tile{};
  // B, or an adapter's factor, and A, or u, where the copy engine loads it; from `column` on.
  const auto load_operands = [&](const CUtensorMap* map_a, const CUtensorMap* map_b, int column) {
    uint64_t* full = &s.full[ring.stage];
    const bool loads_a = !kGather && tile.active;
    barrier_arrive_expect(full, !tile.active ? 0 : loads_a ? kBytesA + kBytesB : kBytesB);
    const auto load_b = [&](int half, uint16_t receivers) {
      const int b_row = tile.expert * p.n + tile.col + half * (kTileN / kCluster);
      uint8_t* b_stage = s.b[ring.stage] + half * (kBytesB / kCluster);
      if constexpr (Epilogue::kColumnGroup > 0) {
        tma_load_5d_multicast(map_b, full, b_stage, column, b_row / Epilogue::kColumnGroup,
                              receivers);
      } else {
        tma_load_2d_multicast(map_b, full, b_stage, column, b_row, receivers);
      }
    };
    if (tile.shares_b) {
      load_b(Scheduler::rank(), (1 << kCluster) - 1);
    } else if (tile.active) {
      for (int half = 0; half < kCluster; ++half) load_b(half, 1 << Scheduler::rank());
    }
    if (loads_a) tma_load_2d(map_a, full, s.a[ring.stage], column, tile.row);
  };
  const auto copy_chunk = [&](int i, const uint8_t* from, bool read) {
    const int row = lane_row + 16 * i;
    cp_async_16(smem_address(s.a[ring.stage]) + row * kTileK + ((chunk ^ (row & 7)) << 4),
                read ? from : p.a, read);
  };
  // The copies announce themselves when they have landed.
  const auto end_stage = [&] {
    if constexpr (kGather) cp_async_arrive(&s.full[ring.stage]);
    ring.advance();
  };
  for (Scheduler scheduler(p); scheduler.next(tile);) {
    uint32_t source[8];  // in units of 16 bytes: 32 bits reach 64 GiB and spare the producer's few
                         // registers
    uint32_t valid = 0;
    if constexpr (kGather) {
      const int from_row =
          tile.row + slab_row<Epilogue::kAdjacentRows>(lane_row % 8 * 4, lane_row / 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int token = tile.active ? p.row_token[from_row + 16 * i] : -1;
        valid |= static_cast<uint32_t>(token >= 0) << i;
        source[i] = static_cast<uint32_t>(max(token, 0)) * (p.k / 16) + chunk;
      }
    }
    for (int kb = 0; kb < k_blocks; ++kb) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      if (thread == 0) load_operands(&maps.a, &maps.b, kb * kTileK);
      if constexpr (kGather) {
        const bool inside = kb * kTileK + chunk * 16 < p.k;  // K need not be a multiple of 128
#pragma unroll
        for (int i = 0; i < 8; ++i)
          copy_chunk(i, p.a + (static_cast<int64_t>(source[i]) + kb * (kTileK / 16)) * 16,
                     inside && ((valid >> i) & 1));
      }
      end_stage();
    }
    if constexpr (kLowRank) {
      for (int column = 0; column < p.width; column += kAdapterColumns) {
        barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
        if (thread == 0)
          with_adapter(maps, [&](const auto& of_adapter) {
            load_operands(&of_adapter.u, &of_adapter.factor[0], column);
          });
        if constexpr (kGather) {
          const int from_row =
              tile.row + slab_row<Epilogue::kAdjacentRows>(lane_row % 8 * 4, lane_row / 8);
          const uint8_t* from =
              p.u + 2 * (static_cast<int64_t>(from_row) * p.width + column + chunk * 8);
          const bool inside = column + chunk * 8 < p.width;  // which need not be a multiple of 64
#pragma unroll
          for (int i = 0; i < 8; ++i)
            copy_chunk(i, from + 32 * static_cast<int64_t>(p.width) * i,
                       inside && ((valid >> i) & 1));
        }
        end_stage();
      }
    }
  }
}

__device__ __forceinline__ void rescale(float (&acc)[64], float low, float high) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    acc[4 * j] *= low;
    acc[4 * j + 1] *= low;
    acc[4 * j + 2] *= high;
    acc[4 * j + 3] *= high;
  }
}

__device__ __forceinline__ void load_batch(float (&to)[4], const float* from) {
  const float4 v = __ldg(reinterpret_cast<const float4*>(from));
  to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
__device__ __forceinline__ void load_batch(float (&to)[2], const float* from) {
  const float2 v = __ldg(reinterpret_cast<const float2*>(from));
  to[0] = v.x, to[1] = v.y;
}

// The scales one thread needs (two rows, and the column blocks of a tile), those of four k-blocks
// at a time and one batch ahead: a load then has thousands of cycles to arrive. Entries behind the
// end repeat the last one.
template <class Blocks>
struct Scales {
  static constexpr int kCount = 2 + Blocks::kOfTile, kBatch = 4 / Blocks::kPeriod;
  static constexpr uint32_t kNone = ~0u;
  const GemmParams& p;
  uint32_t first_of[kCount];  // index of the first scale; kNone in a padding row: its scale is 1,
                              // not that of some token that may be infinite
  int count;                  // along K
  float now[kCount][kBatch], next[kCount][kBatch], peak[kCount];
  __device__ __forceinline__ explicit Scales(const GemmParams& params)
      : p(params), count((params.k + Blocks::kDepth - 1) / Blocks::kDepth) {}
  // The batch that begins with k-block `k_block`.
  __device__ __forceinline__ void load(int k_block) {
    const int first = k_block / Blocks::kPeriod;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float* source = (i < 2 ? p.a_scale : p.b_scale) + first_of[i];
      if (i < 2 && first_of[i] == kNone) {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) next[i][u] = 1.f;
      } else if (count % kBatch == 0) {
        load_batch(next[i], source + min(first, count - kBatch));
      } else {
#pragma unroll
        for (int u = 0; u < kBatch; ++u) next[i][u] = __ldg(source + min(first + u, count - 1));
      }
    }
  }
  // The loaded batch becomes the current one, each scale at most kMaxDrop below the largest before
  // it.
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        now[i][u] = fmaxf(next[i][u], peak[i] * kMaxDrop);
        peak[i] = fmaxf(peak[i], now[i][u]);
      }
  }
};

// All of its stages, added to sums that have no unit any more.
template <bool kGather>
__device__ __forceinline__ void add_low_rank(const GemmParams& p, SharedStorage& s, Ring& ring,
                                             int group, int lane, float (&acc)[2][64]) {
  for (int column = 0; column < p.width; column += kAdapterColumns) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    if constexpr (kGather) fence_async_proxy();
    named_barrier_sync(1 + group, 256);
    const uint64_t a = matrix_descriptor(smem_address(s.a[ring.stage]) + group * 64 * kTileK);
    const uint64_t b = matrix_descriptor(smem_address(s.b[ring.stage]));
    multiply_adapter(a, b, p.width - column, acc);
    named_barrier_arrive(2 - group, 256);
    release(s, ring.stage, lane);
    ring.advance();
  }
}

template <bool kGather, class Blocks, class Epilogue>
__device__ __forceinline__ void consume(const GemmParams& p, const typename Epilogue::Params& e,
                                        const TensorMaps& maps, SharedStorage& s) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int k_blocks = (p.k + kTileK - 1) / kTileK,
            stages = k_blocks + adapter_stages(p), n_blocks = (p.n + Blocks::kColumns - 1) / Blocks::kColumns;
  using TileScales = Scales<Blocks>;
  Ring ring;
  OutputTile tile;
  Epilogue epilogue(p, e, maps, s, group * 4 + warp, lane);
  if (group == 1) named_barrier_arrive(1, 256);  // the first turn is warpgroup 0's
  for (Scheduler scheduler(p); scheduler.next(tile);) {
    if (!tile.active) {
      for (int kb = 0; kb < stages; ++kb, ring.advance()) {
        barrier_wait(&s.full[ring.stage], ring.phase);
        named_barrier_sync(1 + group, 256);
        named_barrier_arrive(2 - group, 256);
        release(s, ring.stage, lane);
      }
      continue;
    }
    const int row0 = tile.row + group * 64 + warp * 16;
    Accumulators acc;
    if constexpr (Epilogue::kNeedsRegisters || kLowRank) {  // else the first products, which overwrite them,
                                                // seem to read the last tile's
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0.f;
    }
    epilogue.begin(row0, tile);
    TileScales scales(p);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + slab_row<Epilogue::kAdjacentRows>(lane, h);
      const int source = kGather ? p.row_token[row] : row >> p.a_scale_shift;
      scales.first_of[h] =
          source >= 0 ? static_cast<uint32_t>(source) * scales.count : TileScales::kNone;
    }
#pragma unroll
    for (int h = 0; h < Blocks::kOfTile; ++h) {
      const int block = min(tile.col / Blocks::kColumns + h, n_blocks - 1);
      scales.first_of[2 + h] =
          (static_cast<uint32_t>(tile.expert) * n_blocks + block) * scales.count;
    }
#pragma unroll
    for (int i = 0; i < TileScales::kCount; ++i) scales.peak[i] = 0.f;
    scales.load(0);
    constexpr int kLeft = 2, kRight = TileScales::kCount - 1;  // scales of B of either half
    float current[TileScales::kCount];
    const auto begin_scales = [&] {
      scales.enter();
#pragma unroll
      for (int i = 0; i < TileScales::kCount; ++i) current[i] = scales.now[i][0];
    };
    // Waiting for scales, and asking for them, costs least in the shadow of products, but there it
    // costs registers.
    constexpr bool kInShadow = !Epilogue::kNeedsRegisters && !(kLowRank && kGather);
    if constexpr (!kInShadow) begin_scales();
    for (int first = 0; first < k_blocks; first += 4) {
      if constexpr (!kInShadow) scales.load(first + 4);
#pragma unroll
      for (int u = 0; u < 4; ++u) {
        if (first + u >= k_blocks) break;
        const bool last = first + u + 1 == k_blocks,
                   rescales = (u + 1) % Blocks::kPeriod == 0 && !last;
        barrier_wait(&s.full[ring.stage], ring.phase);
        // Gathered rows were written by ordinary copies, which WGMMA sees behind this fence only. It is
        // here and not behind the copies, because there it would wait for all that are on their way.
        if constexpr (kGather) fence_async_proxy();
        named_barrier_sync(1 + group, 256);  // the warpgroups issue in turns
        const uint64_t a = matrix_descriptor(smem_address(s.a[ring.stage]) + group * 64 * kTileK);
        const uint64_t b = matrix_descriptor(smem_address(s.b[ring.stage]));
        constexpr uint64_t kHalf = (128 * kTileK) >> 4;
        fence_registers(acc[0]);
        fence_registers(acc[1]);
        wgmma_fence();
        // A gather and its epilogue leave less shared-memory bandwidth: there it pays to read A
        // once for all 256 columns, elsewhere to rescale one half of the columns while the other is
        // computed.
        if constexpr (kGather) {
#pragma unroll
          for (int k = 0; k < kTileK / 32; ++k)
            wgmma_m64n256k32(acc[0], acc[1], a + 2 * k, b + 2 * k, first + u + k != 0);
        } else {
#pragma unroll
          for (int k = 0; k < kTileK / 32; ++k)
            wgmma_m64n128k32(acc[0], a + 2 * k, b + 2 * k, first + u + k != 0);
          wgmma_commit();
#pragma unroll
          for (int k = 0; k < kTileK / 32; ++k)
            wgmma_m64n128k32(acc[1], a + 2 * k, b + kHalf + 2 * k, first + u + k != 0);
        }
        wgmma_commit();
        named_barrier_arrive(2 - group, 256);
        if (kInShadow && u == 0) {
          if (first == 0) begin_scales();
          scales.load(first + 4);
        }
        if (u == 3) scales.enter();
        float step[TileScales::kCount] = {};
        if ((u + 1) % Blocks::kPeriod == 0) {
#pragma unroll
          for (int i = 0; i < TileScales::kCount; ++i) {
            const float following = scales.now[i][(u + 1) % 4 / Blocks::kPeriod];
            step[i] = current[i] * reciprocal(following);
            current[i] = last ? current[i] : following;
          }
        }
        if constexpr (!kGather) {
          wgmma_wait<1>();
          fence_registers(acc[0]);
          if (rescales) rescale(acc[0], step[0] * step[kLeft], step[1] * step[kLeft]);
        }
        wgmma_wait<0>();
        if constexpr (kGather) fence_registers(acc[0]);
        fence_registers(acc[1]);
        release(s, ring.stage, lane);
        ring.advance();
        if constexpr (kGather) {
          if (rescales) rescale(acc[0], step[0] * step[kLeft], step[1] * step[kLeft]);
        }
        if (rescales) rescale(acc[1], step[0] * step[kRight], step[1] * step[kRight]);
      }
    }
    const float unit[2][2] = {{current[0] * current[kLeft], current[0] * current[kRight]},
                              {current[1] * current[kLeft], current[1] * current[kRight]}};
    if constexpr (kLowRank) {
      rescale(acc[0], unit[0][0], unit[1][0]);
      rescale(acc[1], unit[0][1], unit[1][1]);
      add_low_rank<kGather>(p, s, ring, group, lane, acc);
      constexpr float kOne[2][2] = {{1.f, 1.f}, {1.f, 1.f}};
      epilogue.store(acc, kOne, row0, tile);
    } else {
      epilogue.store(acc, unit, row0, tile);
    }
  }
  epilogue.finish();
}

template <bool kGather, class Blocks, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    fp8_grouped_gemm(const __grid_constant__ TensorMaps maps, const __grid_constant__ GemmParams p,
                     const __grid_constant__ typename Epilogue::Params e) {
  extern __shared__ uint8_t raw[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                       ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], kGather ? kProducerThreads + 1 : 1);
      barrier_init(&s.empty[i], kConsumerWarps * kCluster);
    }
    barrier_init(&s.freed, 1);
    barrier_init_fence();
    tma_prefetch_descriptor(&maps.b);
  }
  cluster_sync();
  if (threadIdx.x < kProducerThreads) {
    registers_lower<40>();
    if (kGather || threadIdx.x < 32) produce<kGather, Epilogue>(p, e, maps, s);
  } else {
    registers_raise<232>();
    consume<kGather, Blocks, Epilogue>(p, e, maps, s);
  }
  cluster_sync();  // a CTA that left could not take its peer's last arrivals
}

}  // namespace sonicmoe::sm90
