// Tiles of the weight gradients for Hopper, which FP8 and BF16 share: who computes which tile of
// which expert, and how its sums get into C.
//
// A tile belongs to one CTA and is added to C once, by the copy engine or in shared memory: sums do
// not depend on timing. An expert without rows has no tile, and C is not touched. C may also be
// written instead, in fp32 or bf16; then such experts get zeros. Layouts of C: wgrad_places.cuh.
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
// In shared memory, beside the stages.
struct SumsMemory {
  uint64_t landed[kConsumerWarps][kPatches];  // a patch has C's sums
  uint64_t due, taken;  // of FP8: the producer wants a tile's sums in L2; the prefetching warp has
                        // heard that
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
        tile.k_blocks =
            static_cast<int>((max(last - first, int64_t(0)) + kBlockRows - 1) / kBlockRows);
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

// Brings patch number `i` of the 64 of a tile into L2. kTransposed: C's rows are columns of the
// tile.
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
// additions take 10 % longer with 2,048 rows an expert.
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

__device__ __forceinline__ void init_landed(SumsMemory& s) {
  for (int warp = 0; warp < kConsumerWarps; ++warp)
    for (int i = 0; i < kPatches; ++i) barrier_init(&s.landed[warp][i], 1);
}

// A warp's way out where C's sums stay where they are: they are overwritten, or the copy engine
// adds to them.
struct SumsStore : WarpStore {
  static constexpr bool kFetches = false;
  template <class Storage>
  __device__ __forceinline__ SumsStore(Storage& s, int slab) : WarpStore(s.patch[slab]) {}
  static __device__ __forceinline__ void put(uint32_t at, float a, float b) {
    store_shared_8(at, a, b);
  }
  __device__ __forceinline__ uint32_t acquire(int, int lane) { return WarpStore::acquire(lane); }
  template <class Where>
  __device__ __forceinline__ void publish(const CUtensorMap* map, int expert_of_map, Where where,
                                          int i, bool adds, int lane) {
    const auto to = where(i);
    publish_4d(map, to.x, to.y, to.part, expert_of_map, adds, lane);
  }
};

// A warp's way out where they are fetched (fetched_sums.hpp says when, and why). The number of a
// patch is a constant in an unrolled loop over a tile's patches, and so is the parity of a barrier.
struct FetchedSums {
  static constexpr bool kFetches = true;
  static constexpr int kPatchesOfTile = 8;
  static_assert(kPatchesOfTile % (2 * kPatches) == 0, "every tile begins with the same parity");
  uint8_t (*patch)[kPatchBytes];
  uint64_t* landed;  // [kPatches]

  template <class Storage>
  __device__ __forceinline__ FetchedSums(Storage& s, int slab)
      : patch(s.patch[slab]), landed(s.landed[slab]) {}
  // By lane 0: fetches patch number `i` of the tile, whose place in C `where` tells.
  template <class Where>
  __device__ __forceinline__ void request(int i, const CUtensorMap* map, int expert_of_map,
                                          Where where) {
    const auto from = where(i);
    barrier_arrive_expect(&landed[i % kPatches], kPatchBytes);
    tma_load_4d(map, &landed[i % kPatches], patch[i % kPatches], from.x, from.y, from.part,
                expert_of_map);
  }
  // The first patches of a tile.
  template <class Where>
  __device__ __forceinline__ void begin(const CUtensorMap* map, int expert_of_map, Where where,
                                        int lane) {
    if (lane == 0) {
      bulk_wait_read<0>();
#pragma unroll
      for (int i = 0; i < kPatches; ++i) request(i, map, expert_of_map, where);
    }
  }
  __device__ __forceinline__ uint32_t acquire(int i, int) {
    barrier_wait_together(&landed[i % kPatches], i / kPatches % 2);
    return smem_address(patch[i % kPatches]);
  }
  static __device__ __forceinline__ void put(uint32_t at, float a, float b) {
    const uint2 bits = load_shared_8(at);
    store_shared_8(at, add_without_subnormals(__uint_as_float(bits.x), a),
                   add_without_subnormals(__uint_as_float(bits.y), b));
  }
  template <class Where>
  __device__ __forceinline__ void publish(const CUtensorMap* map, int expert_of_map, Where where,
                                          int i, bool, int lane) {
    fence_async_proxy();
    __syncwarp();
    write_and_fetch(map, expert_of_map, where, i, lane);
  }
  // Writes the patch, and fetches the one that is to follow in its place.
  template <class Where>
  __device__ __forceinline__ void write_and_fetch(const CUtensorMap* map, int expert_of_map,
                                                  Where where, int i, int lane) {
    if (lane == 0) {
      const auto to = where(i);
      tma_store_4d(map, patch[i % kPatches], to.x, to.y, to.part, expert_of_map);
      bulk_commit();
      if (i + kPatches < kPatchesOfTile) {
        bulk_wait_read<0>();
        request(i + kPatches, map, expert_of_map, where);
      }
    }
  }
  __device__ __forceinline__ void finish(int lane) {
    if (lane == 0) bulk_wait<0>();
  }
};

// The places in C of the patches of a warp's 16 rows.
__device__ __forceinline__ auto patches_of(WgradSplit split, const WgradTile& tile, int slab) {
  return [=](int c) { return PatchPlace(split, tile.row, tile.col, slab, c); };
}

// Rows of 128 bytes at a time through a patch; the copy engine adds them to C or writes them, and
// drops what lies outside. Fetched sums were added in the patch before.
template <class WayOut>
__device__ __forceinline__ void hand_over(const Accumulators& acc, const float (&unit)[2],
                                          const CUtensorMap* map, int expert_of_map,
                                          WgradOutput output, WgradSplit split,
                                          const WgradTile& tile, int slab, int lane,
                                          WayOut& way_out) {
  const int q = lane % 4;
  const auto place = patches_of(split, tile, slab);
  if (!WayOut::kFetches && output == WgradOutput::kWriteBf16) {  // 64 columns
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t patch = way_out.acquire(c, lane);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* v = &acc[c / 2][4 * (8 * (c % 2) + j) + 2 * h];
          store_shared_4(chunk_address(patch, lane / 4 + 8 * h, j) + q * 4,
                         bf16x2(v[0] * unit[c / 2], v[1] * unit[c / 2]));
        }
      way_out.publish(map, expert_of_map, place, 2 * c, false, lane);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const uint32_t patch = way_out.acquire(c, lane);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float* v = &acc[c / 4][4 * (4 * (c % 4) + j) + 2 * h];
        way_out.put(chunk_address(patch, lane / 4 + 8 * h, 2 * j + q / 2) + q % 2 * 8,
                    __fmul_rn(v[0], unit[c / 4]), __fmul_rn(v[1], unit[c / 4]));
      }
    way_out.publish(map, expert_of_map, place, c, output == WgradOutput::kAddF32, lane);
  }
}

// What `hand_over` writes of an expert without rows.
__device__ __forceinline__ void write_zeros(const CUtensorMap* map, int expert_of_map,
                                            WgradOutput output, WgradSplit split,
                                            const WgradTile& tile, int slab, int lane,
                                            SumsStore& way_out) {
  const int step = output == WgradOutput::kWriteBf16 ? 2 : 1;
  for (int c = 0; c < 8; c += step) {
    const uint32_t patch = way_out.acquire(c, lane);
#pragma unroll
    for (int i = 0; i < kPatchBytes / 512; ++i)
      store_shared_16(patch + (32 * i + lane) * 16, 0, 0, 0, 0);
    const PatchPlace to(split, tile.row, tile.col, slab, c);
    way_out.publish_4d(map, to.x, to.y, to.part, expert_of_map, false, lane);
  }
}

}  // namespace sonicmoe::sm90
