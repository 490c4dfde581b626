// BF16 (or FP16) weight gradient for Hopper: C[e] (+)= tokens[rows of expert e]^T * rows[rows of
// expert e], in fp32. Tokens [T, M] are gathered; rows [R, parts * N] lie in expert order. Both
// operands are contiguous along M and N, and the sum runs along their other axis, so both lie in a
// stage by columns.
//
// A tile has 128 of the tokens' columns as its rows and 256 columns of `rows` as its columns. C lies
// in the same way, or, for `kTransposed`, has the tokens' columns as its contiguous axis. Whichever
// way C lies, the products and their order are the same, and so are the bits of the sums.
#pragma once

#include "bf16_grouped_gemm.cuh"
#include "wgrad_tiles.cuh"

namespace sonicmoe::sm90 {

struct alignas(1024) HalfWgradStorage : HalfStorage, SumsMemory {};
static_assert(sizeof(HalfWgradStorage) + 1024 <= kMostSharedBytes);

struct HalfWgradParams : WgradGroups {
  const Half* tokens;        // [T, M]
  const int32_t* row_token;  // [R], -1 in padding rows
};

// Copies 64 rows x 128 columns of the tokens of a tile's expert. A thread has 16 bytes of each of
// eight neighbouring rows, whose indices it reads a k-block ahead.
class TokenGather {
 public:
  __device__ __forceinline__ TokenGather(const HalfWgradParams& p, const WgradTile& tile)
      : width_(p.m),
        inside_(tile.active && tile.row + 8 * chunk() < p.m),
        tokens_(p.tokens + (inside_ ? tile.row + 8 * chunk() : 0)),
        indices_(reinterpret_cast<const int4*>(p.row_token + tile.first_row + first_row())) {
    fetch(0);
  }
  // The indices of k-block `block`, which `copy` is to read.
  __device__ __forceinline__ void fetch(int block) {
#pragma unroll
    for (int i = 0; i < 2; ++i) next_[i] = load_early_int4(indices_ + block * (kHalfTileK / 4) + i);
  }
  __device__ __forceinline__ void copy(uint8_t* stage) const {
    // Rows 8 apart have the same swizzle, so one address serves all rows of a thread.
    const uint32_t at =
        smem_address(stage) + chunk() / 8 * kColumnBlockBytes + first_row() * kRowBytes;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int4& four = next_[i / 4];
      const int token = i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
      const bool read = inside_ && token >= 0;
      const Half* from = read ? tokens_ + static_cast<int64_t>(token) * width_ : tokens_;
      cp_async_16(at + i * kRowBytes + ((chunk() % 8 ^ i) << 4), from, read);
    }
  }

 private:
  __device__ static __forceinline__ int chunk() { return threadIdx.x % 16; }
  __device__ static __forceinline__ int first_row() { return threadIdx.x / 16 * 8; }
  int width_;
  bool inside_;
  const Half* tokens_;
  const int4* indices_;
  int4 next_[2];
};

// k-blocks that a tile loads behind the prefetch of its sums. One more, or one less, costs 15 %.
constexpr int kAfterPrefetch = 1;

// Brings the sums that a tile will be added to into L2, 16 patches of them a warp. The lanes that do
// this arrive at no barrier by themselves, because an arrival would wait for the prefetches.
template <bool kTransposed>
__device__ __forceinline__ void prefetch_patches(const CUtensorMap* map, int expert_of_map,
                                                 const WgradTile& tile, WgradSplit split) {
  constexpr int kSlabs = kTileM / kPatchRows, kPatchesOfSlab = kTileN * 4 / kPatchRowBytes;
  static_assert(kSlabs * kPatchesOfSlab == kProducerThreads / 2);
  const int lane = threadIdx.x % 32;
  if (lane < 16) return;
  prefetch_patch<kTransposed>(map, expert_of_map, tile, split,
                              threadIdx.x / 32 * 16 + lane - 16);
}

template <bool kTransposed, bool kFetches, int kMaps>
__device__ __forceinline__ void produce_half_wgrad(const HalfWgradParams& p,
                                                   const WgradMaps<kMaps>& maps,
                                                   HalfWgradStorage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  Ring ring;
  WgradTile tile;
  for (WgradScheduler<kOwnMap, kHalfTileK> scheduler(p); scheduler.next(tile);) {
    if (tile.k_blocks == 0) continue;
    const int half = Scheduler::rank();
    const int sums_at = !kFetches && tile.active && p.output == WgradOutput::kAddF32
                            ? max(tile.k_blocks - 1 - kAfterPrefetch, 0)
                            : -1;
    TokenGather gather(p, tile);
    for (int kb = 0; kb < tile.k_blocks; ++kb, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      if (threadIdx.x == 0) {
        barrier_arrive_expect(full, kBytesB);
        uint8_t* to = s.b[ring.stage] + half * kBytesHalfB;
        const int column = tile.part * p.n + tile.col + half * (kTileN / kCluster);
#pragma unroll
        for (int i = 0; i < kTileN / kCluster / kBlockColumns; ++i)
          tma_load_2d_multicast(&maps.b, full, to + i * kColumnBlockBytes,
                                column + i * kBlockColumns, tile.first_row + kb * kHalfTileK,
                                (1 << kCluster) - 1);
      }
      gather.copy(s.a[ring.stage]);
      cp_async_arrive(full);
      if (kb + 1 < tile.k_blocks) gather.fetch(kb + 1);
      if (kb == sums_at)
        prefetch_patches<kTransposed>(&maps.c[kOwnMap ? tile.expert - p.first_expert : 0],
                                      kOwnMap ? 0 : tile.expert, tile, p.split);
    }
  }
}

// The places in C of a warp's fp32 patches, one a turn.
struct TransposedPlaces {
  int x, y, part;
  __device__ __forceinline__ TransposedPlaces(const WgradTile& tile, int group, int warp)
      : x(tile.row + 64 * group + warp % 2 * 32), y(tile.col + warp / 2 * 16), part(tile.part) {}
  __device__ __forceinline__ TransposedPlaces operator()(int turn) const {
    TransposedPlaces place = *this;
    place.y += 32 * turn;
    return place;
  }
};

// The way out of a warpgroup whose sums lie transposed in C: rows of C are columns of the tile, and
// 64 of them leave together, each warp's part of every row beside that of the others.
struct TransposedStore {
  static constexpr bool kFetches = false;
  uint8_t (*patches)[kPatches][kPatchBytes];  // of the warpgroup's four warps
  int group, warp, lane;
  int turn = 0;

  __device__ __forceinline__ TransposedStore(HalfWgradStorage& s, int group_, int warp_, int lane_)
      : patches(s.patch + 4 * group_), group(group_), warp(warp_), lane(lane_) {}
  __device__ __forceinline__ void finish() {
    if (lane == 0) bulk_wait<0>();
  }
  __device__ __forceinline__ void meet() const { named_barrier_sync(3 + group, 128); }
  // Patch number `i` of this turn; all of them are free behind `acquire`.
  __device__ __forceinline__ uint8_t* patch(int i) const { return patches[i][turn & 1]; }
  __device__ __forceinline__ uint8_t* patch(int i, int) const { return patch(i); }
  __device__ __forceinline__ void acquire(int) const { acquire(); }
  __device__ __forceinline__ void acquire() const {
    if (lane == 0) bulk_wait_read<1>();
    meet();
  }
  static __device__ __forceinline__ void put(uint32_t at, float v) {
    store_shared_4(at, __float_as_uint(v));
  }
  // Each warp hands over the patch of its own number: 16 rows of C, from its column x and row y on.
  __device__ __forceinline__ void publish(const CUtensorMap* map, int x, int y, int part,
                                          int expert, bool adds) {
    fence_async_proxy();
    meet();
    if (lane == 0) {
      if (adds)
        tma_reduce_add_4d(map, patch(warp), x, y, part, expert);
      else
        tma_store_4d(map, patch(warp), x, y, part, expert);
      bulk_commit();
    }
    ++turn;
  }
  __device__ __forceinline__ void publish(const CUtensorMap* map, int expert,
                                          const TransposedPlaces& places, int i, bool adds) {
    const TransposedPlaces to = places(i);
    publish(map, to.x, to.y, to.part, expert, adds);
  }
};

// The same with fetched sums: each warp fetches a patch of its own, and two warps add to it.
struct FetchedTransposed {
  static constexpr bool kFetches = true;
  FetchedSums own;
  uint8_t (*patches)[kPatches][kPatchBytes];
  uint64_t (*landed)[kPatches];
  int group, warp, lane;

  __device__ __forceinline__ FetchedTransposed(HalfWgradStorage& s, int group_, int warp_,
                                               int lane_)
      : own(s, 4 * group_ + warp_),
        patches(s.patch + 4 * group_),
        landed(s.landed + 4 * group_),
        group(group_),
        warp(warp_),
        lane(lane_) {}
  __device__ __forceinline__ void begin(const CUtensorMap* map, int expert_of_map,
                                        const WgradTile& tile) {
    own.begin(map, expert_of_map, TransposedPlaces(tile, group, warp), lane);
  }
  __device__ __forceinline__ uint8_t* patch(int i, int turn) const {
    return patches[i][turn % kPatches];
  }
  // Of the two patches that this warp adds to.
  __device__ __forceinline__ void acquire(int turn) const {
    for (int i = warp / 2; i < 4; i += 2)
      barrier_wait_together(&landed[i][turn % kPatches], turn / kPatches % 2);
  }
  static __device__ __forceinline__ void put(uint32_t at, float v) {
    const float sum = __uint_as_float(load_shared_4(at));
    store_shared_4(at, __float_as_uint(add_without_subnormals(sum, v)));
  }
  __device__ __forceinline__ void publish(const CUtensorMap* map, int expert_of_map,
                                          const TransposedPlaces& places, int turn, bool) {
    fence_async_proxy();
    named_barrier_sync(3 + group, 128);
    own.write_and_fetch(map, expert_of_map, places, turn, lane);
  }
  __device__ __forceinline__ void finish() { own.finish(lane); }
};

constexpr uint32_t kPatchStride = kPatches * kPatchBytes;  // from one warp's patch to the next one's

// Hands over the sums: bf16 in four turns of 64 columns, fp32 in eight of 32. In fp32 the
// warpgroup's 64 rows are two patches.
template <class WayOut>
__device__ __forceinline__ void hand_over_transposed(const Accumulators& acc,
                                                     const CUtensorMap* map, int expert_of_map,
                                                     WgradOutput output, const WgradTile& tile,
                                                     WayOut& way_out) {
  int lane = way_out.lane;
  // The compiler would compute the addresses below before the products, and keep them in registers
  // that the products need.
  asm volatile("" : "+r"(lane));
  // Stored as they are, the sums would have to stay in the order of the products' registers, and the
  // products would then run one after the other.
  float one;
  asm volatile("mov.f32 %0, 0f3f800000;" : "=f"(one));
  const int group = way_out.group, warp = way_out.warp, q = lane % 4;
  const bool adds = output == WgradOutput::kAddF32;
  const int x = tile.row + 64 * group;
  if constexpr (!WayOut::kFetches) {
    if (output == WgradOutput::kWriteBf16) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        way_out.acquire();
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 16 columns: one patch
          uint32_t w[4];
#pragma unroll
          for (int m = 0; m < 4; ++m) {  // columns 8 (m / 2) of them, rows 8 (m % 2)
            const float* v = &acc[c / 2][4 * (8 * (c % 2) + 2 * i + m / 2) + 2 * (m % 2)];
            w[m] = bf16x2(v[0], v[1]);
          }
          // Matrix m is stored with its columns as rows.
          const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
          stmatrix_x4_trans(chunk_address(smem_address(way_out.patch(i)), row, chunk), w);
        }
        way_out.publish(map, x, tile.col + 64 * c + 16 * warp, tile.part, expert_of_map, adds);
      }
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    way_out.acquire(c);
    // Patches 0 and 1 are columns 0 to 15, of the first and the last 32 rows; 2 and 3 the others.
    const uint32_t patch = smem_address(way_out.patch(warp / 2, c));
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = 2 * q + n, row = warp % 2 * 16 + 8 * h + lane / 4;
        const uint32_t at = chunk_address(patch, column, row / 4) + row % 4 * 4;
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // column + 8 j
          const float v = acc[c / 4][4 * (4 * (c % 4) + j) + 2 * h + n] * one;
          way_out.put(at + j / 2 * 2 * kPatchStride + j % 2 * 8 * kPatchRowBytes, v);
        }
      }
    way_out.publish(map, expert_of_map, TransposedPlaces(tile, group, warp), c, adds);
  }
}

// What `hand_over_transposed` writes of an expert without rows.
__device__ __forceinline__ void write_zeros_transposed(const CUtensorMap* map, int expert_of_map,
                                                       WgradOutput output, const WgradTile& tile,
                                                       TransposedStore& way_out) {
  const int warp = way_out.warp, x = tile.row + 64 * way_out.group;
  const bool wide = output == WgradOutput::kWriteBf16;
  for (int c = 0; c < (wide ? 4 : 8); ++c) {
    way_out.acquire();
#pragma unroll
    for (int i = 0; i < kPatchBytes / 512; ++i)
      store_shared_16(smem_address(way_out.patch(warp)) + (32 * i + way_out.lane) * 16, 0, 0, 0, 0);
    const int column = wide ? 64 * c + 16 * warp : 32 * c + warp / 2 * 16;
    way_out.publish(map, wide ? x : x + warp % 2 * 32, tile.col + column, tile.part, expert_of_map,
                    false);
  }
}

template <bool kTransposed, bool kFetches, int kMaps>
__device__ __forceinline__ void consume_half_wgrad(const HalfWgradParams& p,
                                                   const WgradMaps<kMaps>& maps,
                                                   HalfWgradStorage& s) {
  constexpr bool kOwnMap = WgradMaps<kMaps>::kOwnMap;
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int slab = 4 * group + warp;
  Ring ring;
  WgradTile tile;
  std::conditional_t<kFetches, FetchedSums, SumsStore> rows_out(s, slab);
  std::conditional_t<kFetches, FetchedTransposed, TransposedStore> columns_out(s, group, warp,
                                                                               lane);
  for (WgradScheduler<kOwnMap, kHalfTileK> scheduler(p); scheduler.next(tile);) {
    const CUtensorMap* map = &maps.c[kOwnMap ? tile.expert - p.first_expert : 0];
    const int expert = kOwnMap ? 0 : tile.expert;
    if (!tile.active) {
      pass_stages(s, ring, tile.k_blocks, lane);
      continue;
    }
    if constexpr (kFetches) {
      if constexpr (kTransposed)
        columns_out.begin(map, expert, tile);
      else
        rows_out.begin(map, expert, patches_of(p.split, tile, slab), lane);
    } else if (tile.k_blocks == 0) {  // there is nothing to multiply
      if constexpr (kTransposed)
        write_zeros_transposed(map, expert, p.output, tile, columns_out);
      else
        write_zeros(map, expert, p.output, p.split, tile, slab, lane, rows_out);
      continue;
    }
    Accumulators acc;
    multiply_tile<true, true, true>(s, ring, tile.k_blocks, group, lane, acc);
    if constexpr (kTransposed) {
      hand_over_transposed(acc, map, expert, p.output, tile, columns_out);
    } else {
      const float unit[2] = {1.f, 1.f};
      hand_over(acc, unit, map, expert, p.output, p.split, tile, slab, lane, rows_out);
    }
  }
  kTransposed ? columns_out.finish() : rows_out.finish(lane);
}

// kFetches: C's sums come to shared memory; see `FetchedSums`.
template <bool kTransposed, bool kFetches, int kMaps>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    bf16_wgrad(const __grid_constant__ WgradMaps<kMaps> maps,
               const __grid_constant__ HalfWgradParams p) {
  HalfWgradStorage& s = half_storage<HalfWgradStorage>();
  if (kFetches && threadIdx.x == 0) init_landed(s);
  init_half_storage(s, kProducerThreads);
  if (threadIdx.x < kProducerThreads) {
    registers_lower<56>();
    produce_half_wgrad<kTransposed, kFetches>(p, maps, s);
  } else {
    registers_raise<224>();
    consume_half_wgrad<kTransposed, kFetches>(p, maps, s);
  }
  cluster_sync();
}

}  // namespace sonicmoe::sm90
