// Block-scaled FP8 weight gradient for Hopper: C[e] += A[:, rows of expert e] * B[:, rows of expert
// e]^T, fp32, A and B token-major.
//
// The same tiles, ring and rescaled accumulator as fp8_grouped_gemm.cuh; here K is an expert's
// padded rows, and both operands have one scale per 128 of K and 128 rows, or 256 where the rows
// are gate and up in turns. So one number per k-block and half of the columns rescales a whole
// warpgroup. What becomes of the sums: wgrad_tiles.cuh.
#pragma once

#include "fp8_grouped_gemm.cuh"
#include "wgrad_tiles.cuh"

namespace sonicmoe::sm90 {

struct alignas(1024) WgradStorage : StageMemory, SumsMemory {};
static_assert(sizeof(WgradStorage) + 1024 <= kMostSharedBytes);

struct WgradParams : WgradGroups {
  const float* a_scale;  // [ceil(M / rows that share one), R / 128]
  const float* b_scale;  // [ceil(N / ...), R / 128]
  int a_shift, b_shift;  // log2 of the rows of an operand that share a scale: 7 or 8
};

static_assert(sizeof(WgradMaps<kFewMaps>) + sizeof(WgradParams) <= 4096);
static_assert(sizeof(WgradMaps<kManyMaps>) + sizeof(WgradParams) <= 32764);

template <bool kFetches, int kMaps>
__device__ __forceinline__ void produce_wgrad(const WgradParams& p, const WgradMaps<kMaps>& maps,
                                              WgradStorage& s) {
  Ring ring;
  WgradTile tile;
  int tiles = 0;
  for (WgradScheduler<WgradMaps<kMaps>::kOwnMap, kTileK> scheduler(p); scheduler.next(tile);) {
    const int half = Scheduler::rank();
    const int a_row = WgradSplit::first_row(tile.row, p.split.a);
    const int b_row = WgradSplit::first_row(tile.col + half * (kTileN / kCluster), p.split.b);
    const int sums_at = !kFetches && tile.active && p.output == WgradOutput::kAddF32
                            ? max(tile.k_blocks - kAfterSums - 1, 0)
                            : -1;
    for (int kb = 0; kb < tile.k_blocks; ++kb, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      const int k = tile.first_row + kb * kTileK;
      barrier_arrive_expect(full, tile.active ? kBytesA + kBytesB : kBytesB);
      tma_load_3d_multicast(&maps.b, full, s.b[ring.stage] + half * (kBytesB / kCluster), k, b_row,
                            0, (1 << kCluster) - 1);
      if (tile.active) tma_load_3d(&maps.a, full, s.a[ring.stage], k, a_row, 0);
      if (kb == sums_at) {
        barrier_wait(&s.taken, ++tiles & 1);
        barrier_arrive(&s.due);
      }
    }
  }
}

// Scale products of 32 k-blocks, one lane each; the next 32 are on their way.
struct BlockScales {
  const float *a, *b[2];
  int count, lane;
  float now[2], next[2], peak[2];
  __device__ __forceinline__ BlockScales(const WgradParams& p, const WgradTile& tile, int lane_)
      : count(tile.k_blocks), lane(lane_) {
    const int64_t blocks = p.rows / kTileK;
    a = p.a_scale + (tile.row >> p.a_shift) * blocks + tile.first_row / kTileK;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int block = min(tile.col + 128 * h, p.n - 1) >> p.b_shift;
      b[h] = p.b_scale + block * blocks + tile.first_row / kTileK;
      peak[h] = 0.f;
    }
    load(0);
    enter();
  }
  // Entries behind the end repeat the last one.
  __device__ __forceinline__ void load(int first) {
    const int block = min(first + lane, count - 1);
    const float scale = __ldg(a + block);
#pragma unroll
    for (int h = 0; h < 2; ++h) next[h] = scale * __ldg(b[h] + block);
  }
  // The loaded batch becomes the current one, each product at most kMaxDrop^2 below the largest
  // before it, and normal: two blocks of zeros multiply to less, and the reciprocal of a subnormal
  // number is infinite.
  __device__ __forceinline__ void enter() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = next[h];
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const float below = __shfl_up_sync(~0u, top, distance);
        top = lane >= distance ? fmaxf(top, below) : top;
      }
      top = fmaxf(top, peak[h]);
      now[h] = fmaxf(fmaxf(next[h], top * (kMaxDrop * kMaxDrop)), 0x1p-126f);
      peak[h] = __shfl_sync(~0u, top, 31);
    }
  }
  __device__ __forceinline__ float at(int half, int block) const {
    return __shfl_sync(~0u, now[half], block % 32);
  }
};

// The products of a tile's k-blocks; `unit`: what each half of the accumulators is to be multiplied
// by.
__device__ __forceinline__ void multiply(const WgradParams& p, const WgradTile& tile,
                                         WgradStorage& s, Ring& ring, int group, int lane,
                                         Accumulators& acc, float (&unit)[2]) {
  BlockScales scales(p, tile, lane);
  unit[0] = scales.at(0, 0);
  unit[1] = scales.at(1, 0);
  for (int first = 0; first < tile.k_blocks; first += 32) {
    scales.load(first + 32);
    const int end = min(tile.k_blocks - first, 32);
#pragma unroll 2
    for (int u = 0; u < end; ++u) {
      const bool last = first + u + 1 == tile.k_blocks;
      barrier_wait(&s.full[ring.stage], ring.phase);
      named_barrier_sync(1 + group, 256);
      const uint64_t a = matrix_descriptor(smem_address(s.a[ring.stage]) + group * 64 * kTileK);
      const uint64_t b = matrix_descriptor(smem_address(s.b[ring.stage]));
      constexpr uint64_t kHalf = (128 * kTileK) >> 4;
      fence_registers(acc[0]);
      fence_registers(acc[1]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 32; ++k)
        wgmma_m64n128k32(acc[0], a + 2 * k, b + 2 * k, first + u + k != 0);
      wgmma_commit();
#pragma unroll
      for (int k = 0; k < kTileK / 32; ++k)
        wgmma_m64n128k32(acc[1], a + 2 * k, b + kHalf + 2 * k, first + u + k != 0);
      wgmma_commit();
      named_barrier_arrive(2 - group, 256);
      if (u == 31) scales.enter();
      float step[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float following = last ? unit[h] : scales.at(h, u + 1);
        step[h] = unit[h] * reciprocal(following);
        unit[h] = following;
      }
      wgmma_wait<1>();
      fence_registers(acc[0]);
      if (!last) rescale(acc[0], step[0], step[0]);
      wgmma_wait<0>();
      fence_registers(acc[1]);
      release(s, ring.stage, lane);
      ring.advance();
      if (!last) rescale(acc[1], step[1], step[1]);
    }
  }
}

template <class WayOut, int kMaps>
__device__ __forceinline__ void consume_wgrad(const WgradParams& p, const WgradMaps<kMaps>& maps,
                                              WgradStorage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int slab = 4 * group + warp;
  Ring ring;
  WgradTile tile;
  WayOut way_out(s, slab);
  if (group == 1) named_barrier_arrive(1, 256);
  for (WgradScheduler<kOwnMap, kTileK> scheduler(p); scheduler.next(tile);) {
    const CUtensorMap* map = &maps.c[kOwnMap ? tile.expert - p.first_expert : 0];
    const int expert = kOwnMap ? 0 : tile.expert;
    if (!tile.active) {
      for (int kb = 0; kb < tile.k_blocks; ++kb, ring.advance()) {
        barrier_wait(&s.full[ring.stage], ring.phase);
        named_barrier_sync(1 + group, 256);
        named_barrier_arrive(2 - group, 256);
        release(s, ring.stage, lane);
      }
      continue;
    }
    if constexpr (WayOut::kFetches) {
      way_out.begin(map, expert, patches_of(p.split, tile, slab), lane);
    } else if (tile.k_blocks == 0) {  // there is nothing to multiply
      write_zeros(map, expert, p.output, p.split, tile, slab, lane, way_out);
      continue;
    }
    Accumulators acc;
    float unit[2];
    multiply(p, tile, s, ring, group, lane, acc, unit);
    hand_over(acc, unit, map, expert, p.output, p.split, tile, slab, lane, way_out);
  }
  way_out.finish(lane);
}

// kFetches: C's sums come to shared memory; see `FetchedSums`.
template <int kMaps, bool kFetches>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    fp8_wgrad(const __grid_constant__ WgradMaps<kMaps> maps,
              const __grid_constant__ WgradParams p) {
  extern __shared__ uint8_t raw[];
  WgradStorage& s = *reinterpret_cast<WgradStorage*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                       ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumerWarps * kCluster);
    }
    if (kFetches) init_landed(s);
    barrier_init(&s.due, 1);
    barrier_init(&s.taken, 1);
    barrier_init_fence();
    tma_prefetch_descriptor(&maps.a);
    tma_prefetch_descriptor(&maps.b);
  }
  cluster_sync();
  if (threadIdx.x < kProducerThreads) {
    registers_lower<40>();
    if (threadIdx.x == 0)
      produce_wgrad<kFetches>(p, maps, s);
    else if (!kFetches && threadIdx.x / 32 == 1)
      prefetch_sums<kTileK>(p, maps, s);
  } else {
    registers_raise<232>();
    consume_wgrad<std::conditional_t<kFetches, FetchedSums, SumsStore>>(p, maps, s);
  }
  cluster_sync();
}

}  // namespace sonicmoe::sm90
