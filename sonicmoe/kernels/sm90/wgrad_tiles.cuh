// Tiles of the weight gradients for Hopper, which FP8 and BF16 share: who computes which tile of
// which expert, and how its sums get into C.
//
// A tile belongs to one CTA and is added to C by the copy engine, once: sums do not depend on
// timing. An expert without rows has no tile, and C is not touched. C may also be written instead,
// in fp32 or bf16; then such experts get zeros. Layouts of C: wgrad_places.cuh.
#pragma once

#include "grouped_tiles.cuh"
#include "wgrad_places.cuh"

namespace sonicmoe::sm90 {

// Experts of one launch. Kernel parameters hold 4 KB, and from CUDA 12.1 on 32764 bytes: their maps
// fit without a copy to the device, without a fence for it, and stay in a captured graph.
constexpr int kFewMaps = 28, kManyMaps = 248;

// The rows of each expert, along which is summed, and what becomes of the sums.
struct WgradGroups {
  const int64_t* padded_offsets;  // [E + 1], multiples of 128
  const int32_t* counts;          // [E]: rows behind these are padding and are left out; or nullptr
  int64_t rows;                   // R: offsets beyond it are not followed
  int first_expert, last_expert;  // the launch's are [first_expert, last_expert)
  int m, n;                       // n: of one part
  int parts;                      // 2 where C has gate and up columns as parts, else 1
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
struct WgradTile {
  int expert, row, col;
  int part;  // of the columns
  int first_row, k_blocks;
  bool active;
};

// Tiles of experts that have rows, or zeros to be written, and a destination: expert by expert,
// columns fastest, two row tiles (a cluster) at a time.
template <bool kMaySkip, int kBlockRows>
class WgradScheduler {
 public:
  __device__ __forceinline__ explicit WgradScheduler(const WgradGroups& p)
      : p_(p), index_(blockIdx.x / kCluster), expert_(p.first_expert) {}
  __device__ __forceinline__ bool next(WgradTile& tile) {
    const int tiles_of_part = (p_.n + kTileN - 1) / kTileN, n_tiles = p_.parts * tiles_of_part,
              tiles = ((p_.m + kTileM - 1) / kTileM + kCluster - 1) / kCluster * n_tiles;
    for (; expert_ < p_.last_expert; ++expert_) {
      if (kMaySkip && is_skipped()) continue;
      const int64_t first = clamped(p_.padded_offsets[expert_]),
                    end = p_.counts != nullptr ? first + p_.counts[expert_]
                                               : p_.padded_offsets[expert_ + 1],
                    last = clamped(end);
      if (last <= first && p_.output == WgradOutput::kAddF32) continue;
      if (index_ < tiles) {
        tile.expert = expert_;
        tile.row = (index_ / n_tiles * kCluster + Scheduler::rank()) * kTileM;
        tile.part = index_ % n_tiles / tiles_of_part;
        tile.col = index_ % n_tiles % tiles_of_part * kTileN;
        tile.first_row = static_cast<int>(first);
        tile.k_blocks = static_cast<int>((max(last - first, int64_t(0)) + kBlockRows - 1) / kBlockRows);
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
  const WgradGroups& p_;
  int index_, expert_;
};

// The producer calls for the sums that a tile will be added to when so many of the tile's k-blocks
// are left to load.
constexpr int kAfterSums = 2;

// Brings patch number `i` of the 64 of a tile into L2. kTransposed: C's rows are columns of the tile.
template <bool kTransposed>
__device__ __forceinline__ void prefetch_patch(const CUtensorMap* map, int expert_of_map,
                                               const WgradTile& tile, WgradSplit split, int i) {
  if constexpr (kTransposed) {
    constexpr int kAcross = kTileM * 4 / kPatchRowBytes;
    tma_prefetch_4d(map, tile.row + i % kAcross * (kTileM / kAcross),
                    tile.col + i / kAcross * kPatchRows, tile.part, expert_of_map);
  } else {
    constexpr int kPatchesOfSlab = kTileN * 4 / kPatchRowBytes;
    const PatchPlace at(split, tile.row, tile.col, i / kPatchesOfSlab, i % kPatchesOfSlab);
    tma_prefetch_4d(map, at.x, at.y, at.part, expert_of_map);
  }
}

// Brings the part of C that a tile will be added to into L2, shortly before the tile is handed
// over. An addition that has to fetch its line from memory holds up those behind it: without this,
// the additions of an expert with 1024 rows take longer than its products.
//
// One warp of its own does this, because an arrival at a barrier waits for the prefetches that its
// thread has issued. The producer says when: earlier, C takes the bandwidth of the tile before;
// later, it arrives too late.
template <int kBlockRows, int kMaps, class Storage>
__device__ __forceinline__ void prefetch_sums(const WgradGroups& p, const WgradMaps<kMaps>& maps,
                                              Storage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  constexpr int kSlabs = kTileM / kPatchRows, kPatchesOfSlab = kTileN * 4 / kPatchRowBytes;
  if (p.output != WgradOutput::kAddF32) return;
  const int lane = threadIdx.x % 32;
  WgradTile tile;
  int tiles = 0;
  for (WgradScheduler<kOwnMap, kBlockRows> scheduler(p); scheduler.next(tile);) {
    if (!tile.active) continue;
    barrier_wait(&s.due, tiles++ & 1);
    __syncwarp();
    if (lane == 0) barrier_arrive(&s.taken);
    const CUtensorMap* map = &maps.c[kOwnMap ? tile.expert - p.first_expert : 0];
    for (int i = lane; i < kSlabs * kPatchesOfSlab; i += 32) {
      prefetch_patch<false>(map, kOwnMap ? 0 : tile.expert, tile, p.split, i);
    }
  }
}

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

}  // namespace sonicmoe::sm90
