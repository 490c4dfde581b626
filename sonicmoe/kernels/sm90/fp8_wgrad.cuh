// Block-scaled FP8 weight gradient for Hopper: C[e] += A[:, rows of expert e] * B[:, rows of expert
// e]^T, fp32, A and B token-major.
//
// The same tiles, ring and rescaled accumulator as fp8_grouped_gemm.cuh; here K is an expert's
// padded rows, and both operands have one scale per 128 of K and 128 rows, or 256 where the rows
// are gate and up in turns. So one number per k-block and half of the columns rescales a whole
// warpgroup. A tile belongs to one CTA and is added to C by the copy engine, once: sums do not
// depend on timing. An expert without rows has no tile, and C is not touched. C may also be written
// instead, in fp32 or bf16; then such experts get zeros. Layouts of C: wgrad_places.cuh.
#pragma once

#include "fp8_grouped_gemm.cuh"
#include "wgrad_places.cuh"

namespace sonicmoe::sm90 {

// Experts of one launch. Kernel parameters hold 4 KB, and from CUDA 12.1 on 32764 bytes: their maps
// fit without a copy to the device, without a fence for it, and stay in a captured graph.
constexpr int kFewMaps = 28, kManyMaps = 248;

struct WgradParams {
  const float* a_scale;           // [ceil(M / rows that share one), R / 128]
  const float* b_scale;           // [ceil(N / ...), R / 128]
  int a_shift, b_shift;           // log2 of the rows of an operand that share a scale: 7 or 8
  const int64_t* padded_offsets;  // [E + 1], multiples of 128
  int64_t rows;                   // R: offsets beyond it are not followed
  int first_expert, last_expert;  // the launch's are [first_expert, last_expert)
  int m, n;
  WgradSplit split;
  WgradOutput output;
  uint32_t skipped[(kManyMaps + 31) / 32];  // a bit for each expert whose gradient nobody wants;
                                            // not read where one map serves all
};

// The operands' maps and C's: one for all experts, or one for each of the launch.
template <int kMaps>
struct WgradMaps {
  static constexpr bool kOwnMap = kMaps > 1;
  CUtensorMap a, b, c[kMaps];
};
static_assert(sizeof(WgradMaps<kFewMaps>) + sizeof(WgradParams) <= 4096);
static_assert(sizeof(WgradMaps<kManyMaps>) + sizeof(WgradParams) <= 32764);

struct WgradTile {
  int expert, row, col, first_block, k_blocks;
  bool active;
};

// Tiles of experts that have rows, or zeros to be written, and a destination: expert by expert,
// columns fastest, two row tiles (a cluster) at a time.
template <bool kMaySkip>
class WgradScheduler {
 public:
  __device__ __forceinline__ explicit WgradScheduler(const WgradParams& p)
      : p_(p), index_(blockIdx.x / kCluster), expert_(p.first_expert) {}
  __device__ __forceinline__ bool next(WgradTile& tile) {
    const int n_tiles = (p_.n + kTileN - 1) / kTileN,
              tiles = ((p_.m + kTileM - 1) / kTileM + kCluster - 1) / kCluster * n_tiles;
    for (; expert_ < p_.last_expert; ++expert_) {
      if (kMaySkip && is_skipped()) continue;
      const int64_t first = clamped(p_.padded_offsets[expert_]),
                    last = clamped(p_.padded_offsets[expert_ + 1]);
      if (last - first < kTileK && p_.output == WgradOutput::kAddF32) continue;
      if (index_ < tiles) {
        tile.expert = expert_;
        tile.row = (index_ / n_tiles * kCluster + Scheduler::rank()) * kTileM;
        tile.col = index_ % n_tiles * kTileN;
        tile.first_block = static_cast<int>(first / kTileK);
        tile.k_blocks = static_cast<int>((last - first) / kTileK);
        tile.active = tile.row < p_.m;
        index_ += gridDim.x / kCluster;
        return true;
      }
      index_ -= tiles;
    }
    return false;
  }

 private:
  __device__ __forceinline__ int64_t clamped(int64_t offset) const {
    return offset < p_.rows ? offset : p_.rows;
  }
  __device__ __forceinline__ bool is_skipped() const {
    const int bit = expert_ - p_.first_expert;
    return p_.skipped[bit / 32] >> bit % 32 & 1;
  }
  const WgradParams& p_;
  int index_, expert_;
};

// The producer calls for the sums that a tile will be added to when so many of the tile's k-blocks
// are left to load.
constexpr int kAfterSums = 2;

template <int kMaps>
__device__ __forceinline__ void produce_wgrad(const WgradParams& p, const WgradMaps<kMaps>& maps,
                                              SharedStorage& s) {
  Ring ring;
  WgradTile tile;
  int tiles = 0;
  for (WgradScheduler<WgradMaps<kMaps>::kOwnMap> scheduler(p); scheduler.next(tile);) {
    const int half = Scheduler::rank();
    const int a_row = WgradSplit::first_row(tile.row, p.split.a);
    const int b_row = WgradSplit::first_row(tile.col + half * (kTileN / kCluster), p.split.b);
    const int sums_at = tile.active && p.output == WgradOutput::kAddF32
                            ? max(tile.k_blocks - kAfterSums - 1, 0)
                            : -1;
    for (int kb = 0; kb < tile.k_blocks; ++kb, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      const int k = (tile.first_block + kb) * kTileK;
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

// Brings the part of C that a tile will be added to into L2, shortly before the tile is handed
// over. An addition that has to fetch its line from memory holds up those behind it: without this,
// the additions of an expert with 1024 rows take longer than its products.
//
// One warp of its own does this, because an arrival at a barrier waits for the prefetches that its
// thread has issued. The producer says when: earlier, C takes the bandwidth of the tile before;
// later, it arrives too late.
template <int kMaps>
__device__ __forceinline__ void prefetch_sums(const WgradParams& p, const WgradMaps<kMaps>& maps,
                                              SharedStorage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  constexpr int kSlabs = kTileM / kPatchRows, kPatchesOfSlab = kTileN * 4 / kPatchRowBytes;
  if (p.output != WgradOutput::kAddF32) return;
  const int lane = threadIdx.x % 32;
  WgradTile tile;
  int tiles = 0;
  for (WgradScheduler<kOwnMap> scheduler(p); scheduler.next(tile);) {
    if (!tile.active) continue;
    barrier_wait(&s.due, tiles++ & 1);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.taken);
    const CUtensorMap* map = &maps.c[kOwnMap ? tile.expert - p.first_expert : 0];
    for (int i = lane; i < kSlabs * kPatchesOfSlab; i += 32) {
      const PatchPlace at(p.split, tile.row, tile.col, i / kPatchesOfSlab, i % kPatchesOfSlab);
      tma_prefetch_4d(map, at.x, at.y, at.part, kOwnMap ? 0 : tile.expert);
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
    a = p.a_scale + (tile.row >> p.a_shift) * blocks + tile.first_block;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int block = min(tile.col + 128 * h, p.n - 1) >> p.b_shift;
      b[h] = p.b_scale + block * blocks + tile.first_block;
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

// Rows of 128 bytes at a time through a patch; the copy engine adds them to C, or writes them
// there, and drops what lies outside.
__device__ __forceinline__ void hand_over(const Accumulators& acc, const float (&unit)[2],
                                          const CUtensorMap* map, int expert_of_map,
                                          WgradOutput output, WgradSplit split,
                                          const WgradTile& tile, int slab, int lane,
                                          WarpStore& way_out) {
  const int q = lane % 4;
  if (output == WgradOutput::kWriteBf16) {  // 64 columns
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t patch = way_out.acquire(lane);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* v = &acc[c / 2][4 * (8 * (c % 2) + j) + 2 * h];
          store_shared_4(chunk_address(patch, lane / 4 + 8 * h, j) + q * 4,
                         bf16x2(v[0] * unit[c / 2], v[1] * unit[c / 2]));
        }
      const PatchPlace to(split, tile.row, tile.col, slab, 2 * c);
      way_out.publish_4d(map, to.x, to.y, to.part, expert_of_map, false, lane);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint32_t patch = way_out.acquire(lane);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* v = &acc[c / 4][4 * (4 * (c % 4) + j) + 2 * h];
        store_shared_8(chunk_address(patch, lane / 4 + 8 * h, 2 * j + q / 2) + q % 2 * 8,
                       v[0] * unit[c / 4], v[1] * unit[c / 4]);
      }
    const PatchPlace to(split, tile.row, tile.col, slab, c);
    way_out.publish_4d(map, to.x, to.y, to.part, expert_of_map, output == WgradOutput::kAddF32,
                       lane);
  }
}

// What `hand_over` writes of an expert without rows.
__device__ __forceinline__ void write_zeros(const CUtensorMap* map, int expert_of_map,
                                            WgradOutput output, WgradSplit split,
                                            const WgradTile& tile, int slab, int lane,
                                            WarpStore& way_out) {
  const int step = output == WgradOutput::kWriteBf16 ? 2 : 1;
  for (int c = 0; c < 8; c += step) {
    const uint32_t patch = way_out.acquire(lane);
#pragma unroll
    for (int i = 0; i < kPatchBytes / 512; ++i)
      store_shared_16(patch + (32 * i + lane) * 16, 0, 0, 0, 0);
    const PatchPlace to(split, tile.row, tile.col, slab, c);
    way_out.publish_4d(map, to.x, to.y, to.part, expert_of_map, false, lane);
  }
}

// The products of a tile's k-blocks; `unit`: what each half of the accumulators is to be multiplied
// by.
__device__ __forceinline__ void multiply(const WgradParams& p, const WgradTile& tile,
                                         SharedStorage& s, Ring& ring, int group, int lane,
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

template <int kMaps>
__device__ __forceinline__ void consume_wgrad(const WgradParams& p, const WgradMaps<kMaps>& maps,
                                              SharedStorage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  Ring ring;
  WgradTile tile;
  WarpStore way_out(s.patch[group * 4 + warp]);
  if (group == 1) named_barrier_arrive(1, 256);
  for (WgradScheduler<kOwnMap> scheduler(p); scheduler.next(tile);) {
    const CUtensorMap* map = &maps.c[kOwnMap ? tile.expert - p.first_expert : 0];
    if (!tile.active) {
      for (int kb = 0; kb < tile.k_blocks; ++kb, ring.advance()) {
        barrier_wait(&s.full[ring.stage], ring.phase);
        named_barrier_sync(1 + group, 256);
        named_barrier_arrive(2 - group, 256);
        release(s, ring.stage, lane);
      }
      continue;
    }
    if (tile.k_blocks == 0) {  // there is nothing to multiply
      write_zeros(map, kOwnMap ? 0 : tile.expert, p.output, p.split, tile, group * 4 + warp, lane,
                  way_out);
      continue;
    }
    Accumulators acc;
    float unit[2];
    multiply(p, tile, s, ring, group, lane, acc, unit);
    hand_over(acc, unit, map, kOwnMap ? 0 : tile.expert, p.output, p.split, tile, group * 4 + warp,
              lane, way_out);
  }
  way_out.finish(lane);
}

template <int kMaps>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    fp8_wgrad(const __grid_constant__ WgradMaps<kMaps> maps,
              const __grid_constant__ WgradParams p) {
  extern __shared__ uint8_t raw[];
  SharedStorage& s = *reinterpret_cast<SharedStorage*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                       ~uintptr_t(1023));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumerWarps * kCluster);
    }
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
      produce_wgrad(p, maps, s);
    else if (threadIdx.x / 32 == 1)
      prefetch_sums(p, maps, s);
  } else {
    registers_raise<232>();
    consume_wgrad(p, maps, s);
  }
  cluster_sync();
}

}  // namespace sonicmoe::sm90
