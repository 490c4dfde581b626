// BF16 (or, built with FP16, FP16) grouped GEMM for Hopper: C[rows of expert e] = A[rows of expert
// e] * B[e]^T, with B[e] as an [N, K] matrix whose contiguous axis may be either, so that weights
// are read where the caller has them.
//
// Tiles, ring and the way out are those of the FP8 GEMM (grouped_tiles.cuh). There are no scales:
// a k-block of 64 columns is multiplied while the next one arrives, and its stage is released one
// k-block later.
//
// An operand that is contiguous along K lies in a stage as rows of K. One that is contiguous along
// its other axis lies there as blocks of 64 columns, of 64 rows along K each; WGMMA reads both.
//
// Padding rows of a gathered A are zeros. So z, dz and y1s are finite there, which wgrad multiplies
// with zeros.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "grouped_tiles.cuh"

namespace sonicmoe::sm90 {

#ifdef FP16
using Half = __half;
__device__ __forceinline__ uint32_t half_pair(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
#else
using Half = __nv_bfloat16;
__device__ __forceinline__ uint32_t half_pair(float low, float high) { return bf16x2(low, high); }
__device__ __forceinline__ float2 floats_of(uint32_t pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
#endif

constexpr int kHalfTileK = kRowBytes / 2;                    // elements of a k-block
constexpr int kGroupRows = 64;                               // of a tile's rows, a warpgroup's
constexpr int kBlockColumns = 64;                            // of an operand that lies by columns
constexpr int kColumnBlockBytes = kHalfTileK * kRowBytes;    // one block of a stage
constexpr int kBytesHalfB = kBytesB / kCluster;              // what one CTA of a cluster loads

// How the columns of z and dz, and with them the rows of w1, follow one another.
enum class GateOrder { kNone, kHalves, kTurns };

struct alignas(1024) HalfStorage : StageMemory {};
static_assert(sizeof(HalfStorage) + 1024 <= kMostSharedBytes);

struct HalfParams : RowGroups, AdapterRows {
  const Half* a;             // [T, K], gathered through row_token; unused with a tensor map
  const int32_t* row_token;  // [R], -1 in padding rows
  int k;
  int k_of_map;  // rows of K in the first map of B; a second one has the others
};

// Whether the weights are a matrix for each expert, wherever it lies, or one tensor of all experts.
#ifdef SEPARATE_WEIGHTS
constexpr bool kSeparate = true;
constexpr int kMapsOfB = 240;  // an expert's; more are no parameter of a kernel
#else
constexpr bool kSeparate = false;
constexpr int kMapsOfB = 2;  // B, or its gate and its up rows, loaded apart or of two tensors
#endif

// A, B, outputs, z.
struct OwnHalfMaps {
  CUtensorMap a, b[kMapsOfB], c, d, z;
};
using HalfMaps = WithAdapter<OwnHalfMaps, 2>;

// Loads half number `half` of this tile's columns of B. With kSplitsColumns a tile has 128 gate
// columns, then the 128 up columns that belong to them. kSplitsDepth: K may lie in two maps.
template <bool kBByColumns, bool kSplitsColumns, bool kSplitsDepth>
__device__ __forceinline__ void load_half_of_b(const HalfParams& p, const HalfMaps& maps,
                                               uint64_t* full, uint8_t* stage,
                                               const OutputTile& tile, int half, int k,
                                               uint16_t receivers) {
  int part = kSplitsColumns ? half : 0;
  // Only dgrad of w1 contracts over gate and up. The down-projection, which shares its kernel, has
  // one map.
  if constexpr (kSplitsDepth && kBByColumns && !kSeparate) {
    part = k >= p.k_of_map;
    k -= part * p.k_of_map;
  }
  const CUtensorMap* map = &maps.b[kSeparate ? tile.expert : part];
  const int last = kSeparate ? part : tile.expert;
  const int column = kSplitsColumns ? tile.col / 2 : tile.col + half * (kTileN / 2);
  uint8_t* to = stage + half * kBytesHalfB;
  if constexpr (kBByColumns) {
#pragma unroll
    for (int i = 0; i < kTileN / 2 / kBlockColumns; ++i)
      tma_load_3d_multicast(map, full, to + i * kColumnBlockBytes, column + i * kBlockColumns, k,
                            last, receivers);
  } else {
    tma_load_3d_multicast(map, full, to, k, column, last, receivers);
  }
}

// The same of an adapter's factor.
template <bool kSplitsColumns>
__device__ __forceinline__ void load_half_of_factor(const CUtensorMap* parts, uint64_t* full,
                                                    uint8_t* stage, const OutputTile& tile,
                                                    int half, int column, uint16_t receivers) {
  const int row = kSplitsColumns ? tile.col / 2 : tile.col + half * (kTileN / 2);
  tma_load_3d_multicast(&parts[kSplitsColumns ? half : 0], full, stage + half * kBytesHalfB, column,
                        row, tile.expert, receivers);
}

// Copies 64 columns of this tile's 128 rows of A, of which each thread has 16 bytes of eight rows.
class RowGather {
 public:
  __device__ __forceinline__ RowGather(const HalfParams& p, const OutputTile& tile) : p_(p) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = tile.active ? p.row_token[tile.row + row() + 16 * i] : -1;
      valid_ |= static_cast<uint32_t>(token >= 0) << i;
      source_[i] = static_cast<uint32_t>(max(token, 0)) * (p.k / 8) + chunk();
    }
  }
  __device__ __forceinline__ void copy(uint8_t* stage, int k) const {
    const uint32_t base = smem_address(stage);
    const bool inside = k + chunk() * 8 < p_.k;  // K need not be a multiple of 64
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool read = inside && ((valid_ >> i) & 1);
      const Half* from = read ? p_.a + static_cast<int64_t>(source_[i]) * 8 + k : p_.a;
      cp_async_16_of_256(chunk_address(base, row() + 16 * i, chunk()), from, read);
    }
  }
  // 64 columns of u, which lies by rows.
  __device__ __forceinline__ void copy_adapter(uint8_t* stage, const OutputTile& tile,
                                               int column) const {
    const uint32_t base = smem_address(stage);
    const bool inside = column + chunk() * 8 < p_.width;  // which need not be a multiple of 64
    const uint8_t* from =
        p_.u + 2 * (static_cast<int64_t>(tile.row + row()) * p_.width + column + chunk() * 8);
    // Not unrolled: the producer has few registers.
#pragma unroll 1
    for (int i = 0; i < 8; ++i, from += 32 * static_cast<int64_t>(p_.width)) {
      const bool read = inside && ((valid_ >> i) & 1);
      cp_async_16_of_256(chunk_address(base, row() + 16 * i, chunk()),
                         read ? from : reinterpret_cast<const uint8_t*>(p_.a), read);
    }
  }

 private:
  __device__ static __forceinline__ int row() { return threadIdx.x / 8; }
  __device__ static __forceinline__ int chunk() { return threadIdx.x % 8; }
  const HalfParams& p_;
  uint32_t source_[8];  // in units of 16 bytes: 32 bits reach 64 GiB
  uint32_t valid_ = 0;
};

// `Epilogue::kZStages` stages follow a tile's k-blocks. They carry the z that the epilogue reads.
template <bool kGather, bool kBByColumns, class Epilogue>
__device__ __forceinline__ void produce_half(const HalfParams& p, const HalfMaps& maps,
                                             HalfStorage& s) {
  const int thread = threadIdx.x;
  const int k_blocks = (p.k + kHalfTileK - 1) / kHalfTileK;
  Ring ring;
  OutputTile tile{};
  const auto load_operands = [&](const CUtensorMap* map_a, int column, const auto& load_b) {
    const bool loads_a = !kGather && tile.active;
    uint64_t* full = &s.full[ring.stage];
    barrier_arrive_expect(full, !tile.active ? 0 : loads_a ? kBytesA + kBytesB : kBytesB);
    if (tile.shares_b) {
      load_b(Scheduler::rank(), (1 << kCluster) - 1);
    } else if (tile.active) {
      for (int half = 0; half < kCluster; ++half) load_b(half, 1 << Scheduler::rank());
    }
    if (loads_a) tma_load_2d(map_a, full, s.a[ring.stage], column, tile.row);
  };
  for (Scheduler scheduler(p); scheduler.next(tile);) {
    RowGather rows = kGather ? RowGather(p, tile) : RowGather(p, OutputTile{});
    for (int kb = 0; kb < k_blocks; ++kb, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      const int k = kb * kHalfTileK;
      if (thread == 0)
        load_operands(&maps.a, k, [&](int half, uint16_t receivers) {
          load_half_of_b<kBByColumns, Epilogue::kSplitsColumns, Epilogue::kSplitsDepth>(
              p, maps, full, s.b[ring.stage], tile, half, k, receivers);
        });
      if constexpr (kGather) {
        rows.copy(s.a[ring.stage], k);
        cp_async_arrive(full);
      }
    }
    if constexpr (kLowRank) {
      for (int column = 0; column < p.width; column += kAdapterColumns, ring.advance()) {
        barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
        uint64_t* full = &s.full[ring.stage];
        if (thread == 0)
          with_adapter(maps, [&](const auto& of_adapter) {
            load_operands(&of_adapter.u, column, [&](int half, uint16_t receivers) {
              load_half_of_factor<Epilogue::kSplitsColumns>(of_adapter.factor, full,
                                                            s.b[ring.stage], tile, half, column,
                                                            receivers);
            });
          });
        if constexpr (kGather) {
          rows.copy_adapter(s.a[ring.stage], tile, column);
          cp_async_arrive(full);
        }
      }
    }
    for (int i = 0; i < Epilogue::kZStages; ++i, ring.advance()) {
      barrier_wait(&s.empty[ring.stage], ring.phase ^ 1);
      uint64_t* full = &s.full[ring.stage];
      if (thread == 0) {
        barrier_arrive_expect(full, tile.active ? Epilogue::kZBytes : 0);
        if (tile.active) Epilogue::load_z(maps, full, s.b[ring.stage], tile, i);
      }
      if constexpr (kGather) cp_async_arrive(full);
    }
  }
}

// The products of this warpgroup's 64 rows with one stage. kAByColumns: A lies by columns, a block
// for each warpgroup.
template <bool kAByColumns, bool kBByColumns>
__device__ __forceinline__ void multiply_stage(const StageMemory& s, int stage, int group,
                                               bool first, Accumulators& acc) {
  static_assert(kColumnBlockBytes == 64 * kRowBytes);  // of A, whichever way it lies
  constexpr int kSteps = kHalfTileK / 16;
  // 16 of K are 32 bytes of a row, or 16 rows.
  constexpr uint64_t kStepA = (kAByColumns ? 16 * kRowBytes : 32) >> 4,
                     kStepB = (kBByColumns ? 16 * kRowBytes : 32) >> 4;
  const uint32_t a_at = smem_address(s.a[stage]) + group * kColumnBlockBytes,
                 b_at = smem_address(s.b[stage]);
  const uint64_t a = kAByColumns ? columns_descriptor(a_at, kColumnBlockBytes)
                                 : matrix_descriptor(a_at),
                 b = kBByColumns ? columns_descriptor(b_at, kColumnBlockBytes)
                                 : matrix_descriptor(b_at);
  fence_registers(acc[0]);
  fence_registers(acc[1]);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma_m64n256k16<kAByColumns, kBByColumns>(acc[0], acc[1], a + k * kStepA, b + k * kStepB,
                                               !first || k > 0);
  wgmma_commit();
}

// All products of a tile. A stage is released when the products of the next one are under way, so
// that the tensor cores never wait for the release.
template <bool kGather, bool kAByColumns, bool kBByColumns>
__device__ __forceinline__ void multiply_tile(StageMemory& s, Ring& ring, int k_blocks, int group,
                                              int lane, Accumulators& acc) {
  int before = 0;
  for (int kb = 0; kb < k_blocks; ++kb) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    // Gathered rows were written by ordinary copies, which WGMMA sees behind this fence only. It is
    // here and not behind the copies, because there it would wait for all that are on their way.
    if constexpr (kGather) fence_async_proxy();
    multiply_stage<kAByColumns, kBByColumns>(s, ring.stage, group, kb == 0, acc);
    if (kb > 0) {
      wgmma_wait<1>();
      release(s, before, lane);
    }
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait<0>();
  fence_registers(acc[0]);
  fence_registers(acc[1]);
  if (k_blocks > 0) release(s, before, lane);
}

// The stages of an adapter.
template <bool kGather>
__device__ __forceinline__ void add_adapter(const AdapterRows& p, StageMemory& s, Ring& ring,
                                            int group, int lane, Accumulators& acc) {
  for (int column = 0; column < p.width; column += kAdapterColumns) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    if constexpr (kGather) fence_async_proxy();
    const uint32_t a = smem_address(s.a[ring.stage]) + group * kColumnBlockBytes;
    multiply_adapter(matrix_descriptor(a), matrix_descriptor(smem_address(s.b[ring.stage])),
                     p.width - column, acc);
    release(s, ring.stage, lane);
    ring.advance();
  }
}

// The stages of a tile that this CTA does not compute.
__device__ __forceinline__ void pass_stages(StageMemory& s, Ring& ring, int stages, int lane) {
  for (int i = 0; i < stages; ++i, ring.advance()) {
    barrier_wait(&s.full[ring.stage], ring.phase);
    release(s, ring.stage, lane);
  }
}

template <bool kGather, bool kBByColumns, class Epilogue>
__device__ __forceinline__ void consume_half(const HalfParams& p,
                                             const typename Epilogue::Params& e,
                                             const HalfMaps& maps, HalfStorage& s) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int k_blocks = (p.k + kHalfTileK - 1) / kHalfTileK;
  Ring ring;
  OutputTile tile;
  Epilogue epilogue(p, e, maps, s, group * 4 + warp, lane);
  for (Scheduler scheduler(p); scheduler.next(tile);) {
    if (!tile.active) {
      pass_stages(s, ring, k_blocks + adapter_stages(p) + Epilogue::kZStages, lane);
      continue;
    }
    Accumulators acc;
    if constexpr (kLowRank) {  // else its products seem to need the sums while others still run
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[0][i] = acc[1][i] = 0.f;
    }
    multiply_tile<kGather, false, kBByColumns>(s, ring, k_blocks, group, lane, acc);
    if constexpr (kLowRank) add_adapter<kGather>(p, s, ring, group, lane, acc);
    epilogue.store(acc, tile, ring);
  }
  epilogue.finish();
}

template <class Storage = HalfStorage>
__device__ __forceinline__ Storage& half_storage() {
  extern __shared__ uint8_t raw[];
  return *reinterpret_cast<Storage*>((reinterpret_cast<uintptr_t>(raw) + 1023) & ~uintptr_t(1023));
}

__device__ __forceinline__ void init_half_storage(HalfStorage& s, int gathering_threads) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], gathering_threads + 1);
      barrier_init(&s.empty[i], kConsumerWarps * kCluster);
    }
    barrier_init_fence();
  }
  cluster_sync();
}

template <bool kGather, bool kBByColumns, class Epilogue>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    bf16_grouped_gemm(const __grid_constant__ HalfMaps maps, const __grid_constant__ HalfParams p,
                      const __grid_constant__ typename Epilogue::Params e) {
  static_assert(sizeof(maps) + sizeof(p) + sizeof(e) <= 32764);  // of one launch
  HalfStorage& s = half_storage();
  init_half_storage(s, kGather ? kProducerThreads : 0);
  if (threadIdx.x < kProducerThreads) {
    registers_lower<40>();
    if (kGather || threadIdx.x < 32) produce_half<kGather, kBByColumns, Epilogue>(p, maps, s);
  } else {
    registers_raise<232>();
    consume_half<kGather, kBByColumns, Epilogue>(p, e, maps, s);
  }
  cluster_sync();  // a CTA that left could not take its peer's last arrivals
}

}  // namespace sonicmoe::sm90
