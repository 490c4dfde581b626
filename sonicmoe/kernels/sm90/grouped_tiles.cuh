// Tiles of the grouped GEMMs for Hopper, which FP8 and BF16 share: who computes which tile, the ring
// of stages between producer and consumers, and a warp's way out of shared memory.
//
// One persistent CTA per SM, paired in clusters of two that take neighbouring 128-row tiles and
// share B's 256 columns by multicast. A producer warpgroup fills a ring of stages; two consumer
// warpgroups hold 64 x 256 fp32 accumulators each.
//
// Built with LOW_RANK, further stages may follow the k-blocks of a tile: those of a low-rank adapter,
// whose u [R, width], 16-bit values by rows, is multiplied with its factor [E, N, width].
#pragma once

#include <type_traits>

#include "../numbers.hpp"
#include "ptx.cuh"
#include "ring.cuh"

namespace sonicmoe::sm90 {

constexpr int kTileM = 128, kTileN = 256;
constexpr int kRowBytes = 128;  // of K in a stage: one row of the 128-byte swizzle
static_assert(kTileM == kRowAlignment, "a tile holds rows of one expert only");
constexpr int kCluster = 2;
constexpr int kStages = 4;
constexpr int kBytesA = kTileM * kRowBytes, kBytesB = kTileN * kRowBytes;
constexpr int kProducerThreads = 128, kConsumerWarps = 8;
constexpr int kThreads = kProducerThreads + 32 * kConsumerWarps;
constexpr int kPatchBytes = 16 * 128;  // what one consumer warp hands to the copy engine at a time
constexpr int kPatches = 2;            // of a warp
constexpr int kMostSharedBytes = 227 * 1024;  // of a block, whose start is aligned to 1024 bytes

// The rows of each expert, and the columns of all.
struct RowGroups {
  const int64_t* padded_offsets;  // [E + 1], multiples of 128
  int64_t max_rows;               // R: offsets beyond it are not followed
  int experts, n;
};

#ifdef LOW_RANK
constexpr bool kLowRank = true;
#else
constexpr bool kLowRank = false;
#endif
constexpr int kAdapterColumns = kRowBytes / 2;  // of a stage

struct AdapterRows {
  const uint8_t* u;  // read directly where A is gathered
  int width;         // 0 where there is no adapter; else a multiple of 8
};
__device__ __forceinline__ int adapter_stages(const AdapterRows& p) {
  return kLowRank ? (p.width + kAdapterColumns - 1) / kAdapterColumns : 0;
}

// A kernel's own tensor maps, and in a module with LOW_RANK those of u and of the factor, whose rows
// may be two parts.
template <class Own, int kParts>
struct AndAdapter : Own {
  CUtensorMap u, factor[kParts];
};
template <class Own, int kParts>
using WithAdapter = std::conditional_t<kLowRank, AndAdapter<Own, kParts>, Own>;
// `visit(maps)` where there are maps of an adapter.
template <class Maps, class Visit>
__device__ __forceinline__ void with_adapter(Maps& maps, Visit visit) {
  if constexpr (kLowRank) visit(maps);
}

struct OutputTile {
  int expert, row, col;
  bool active;    // false: this CTA only keeps its cluster company
  bool shares_b;  // with the other CTA of the cluster, which has the same columns
};

// This CTA's tiles: expert by expert, columns fastest (B stays in L2, A is streamed once), kCluster
// row tiles at a time. Where an expert has an odd number of row tiles, the CTAs of a cluster take
// neighbouring columns of the last one.
class Scheduler {
 public:
  __device__ __forceinline__ explicit Scheduler(const RowGroups& p)
      : p_(p), index_(blockIdx.x / kCluster) {
    read_expert();
  }
  __device__ static __forceinline__ int rank() { return blockIdx.x % kCluster; }
  __device__ __forceinline__ bool next(OutputTile& tile) {
    static_assert(kCluster == 2);
    const int n_tiles = (p_.n + kTileN - 1) / kTileN;
    while (expert_ < p_.experts) {
      const int row_tiles = max((last_ - first_) / kTileM, 0), paired = row_tiles / 2 * n_tiles,
                alone = row_tiles % 2 * ((n_tiles + 1) / 2);
      if (index_ < paired + alone) {
        tile.expert = expert_;
        tile.shares_b = index_ < paired;
        if (tile.shares_b) {
          tile.row = first_ + (index_ / n_tiles * 2 + rank()) * kTileM;
          tile.col = index_ % n_tiles * kTileN;
        } else {
          tile.row = last_ - kTileM;
          tile.col = ((index_ - paired) * 2 + rank()) * kTileN;
        }
        tile.active = tile.col < p_.n;
        index_ += gridDim.x / kCluster;
        return true;
      }
      index_ -= paired + alone;
      ++expert_;
      read_expert();
    }
    return false;
  }

 private:
  __device__ __forceinline__ void read_expert() {
    if (expert_ >= p_.experts) return;
    first_ = clamped(p_.padded_offsets[expert_]);
    last_ = clamped(p_.padded_offsets[expert_ + 1]);
  }
  __device__ __forceinline__ int clamped(int64_t offset) const {
    return static_cast<int>(offset < p_.max_rows ? offset : p_.max_rows);
  }
  const RowGroups& p_;
  int index_, expert_ = 0, first_ = 0, last_ = 0;
};

struct StageMemory {
  uint8_t a[kStages][kBytesA];
  uint8_t b[kStages][kBytesB];
  uint8_t patch[kConsumerWarps][kPatches][kPatchBytes];
  uint64_t full[kStages], empty[kStages];
};

using Ring = RingOf<kStages>;

// Which of its warp's 16 rows a thread's `high` accumulators belong to: 8 below the others, or,
// where an epilogue wants neighbouring tokens in one thread, the next one. Only a gather can lay A
// out for the second.
template <bool kAdjacentRows>
__device__ __forceinline__ int slab_row(int lane, int high) {
  return kAdjacentRows ? 2 * (lane / 4) + high : lane / 4 + 8 * high;
}

__device__ __forceinline__ void release(StageMemory& s, int stage, int lane) {
  // No .release.cluster here: the wait for the products orders the reads already, and the fence
  // would cost 15 % of the GEMM.
  if (lane < kCluster) barrier_arrive_remote(&s.empty[stage], lane);
}

template <int kSteps>
__device__ __forceinline__ void multiply_steps(uint64_t a, uint64_t b, float (&acc)[2][64]) {
  fence_registers(acc[0]);
  fence_registers(acc[1]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_m64n256k16<false, false>(acc[0], acc[1], a + 2 * k, b + 2 * k, true);
  wgmma_commit();
  wgmma_wait<0>();
  fence_registers(acc[0]);
  fence_registers(acc[1]);
}
// The products with an adapter's stage, of whose columns `columns` are left.
__device__ __forceinline__ void multiply_adapter(uint64_t a, uint64_t b, int columns,
                                                 float (&acc)[2][64]) {
  columns > 16 ? multiply_steps<kAdapterColumns / 16>(a, b, acc)
               : multiply_steps<1>(a, b, acc);  // the usual rank
}

// A warp's way out: fill a patch of 16 rows x 128 bytes (swizzled), hand it to the copy engine, go
// on with the other one.
struct WarpStore {
  uint8_t (*patch)[kPatchBytes];
  int turn = 0;
  __device__ __forceinline__ explicit WarpStore(uint8_t (*patches)[kPatchBytes]) : patch(patches) {}
  __device__ __forceinline__ uint32_t acquire(int lane) {
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
    return smem_address(patch[turn & 1]);
  }
  __device__ __forceinline__ void publish(const CUtensorMap* map, int x, int y, int lane) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      tma_store_2d(map, patch[turn & 1], x, y);
      bulk_commit();
    }
    ++turn;
  }
  __device__ __forceinline__ void publish_3d(const CUtensorMap* map, int x, int y, int z, int lane) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      tma_store_3d(map, patch[turn & 1], x, y, z);
      bulk_commit();
    }
    ++turn;
  }
  // `adds`: to what is there; else over it.
  __device__ __forceinline__ void publish_4d(const CUtensorMap* map, int x, int y, int z, int w,
                                             bool adds, int lane) {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      if (adds)
        tma_reduce_add_4d(map, patch[turn & 1], x, y, z, w);
      else
        tma_store_4d(map, patch[turn & 1], x, y, z, w);
      bulk_commit();
    }
    ++turn;
  }
  __device__ __forceinline__ void finish(int lane) {
    if (lane == 0) bulk_wait<0>();
  }
};
// Accumulators of one thread: acc[half][4 j' + 2 h + c] is row (lane / 4 + 8 h), column 128 half +
// 8 j' + 2 (lane % 4) + c. An epilogue with a column group of g has B's rows permuted on their way
// in, so that a thread holds g / 4 columns in a row: of group number i, column g i + (g / 4) (lane
// % 4) + 2 j + c in place of g i + 8 j + 2 (lane % 4) + c.
using Accumulators = float[2][64];

}  // namespace sonicmoe::sm90
