// Dispatched top-k indices -> the complete routing metadata, in one launch.
//
// S flat slots (slot = token * K + k) are cut into one contiguous chunk per CTA, a chunk into tiles
// of at most kTile slots. (1) Each CTA counts its chunk per expert. (2) One barrier over the grid,
// after which everybody reads everybody's counts: their prefix over CTAs and experts gives each CTA
// its first row of each expert. (3) Each CTA sorts its tiles by expert in shared memory and writes
// them out in runs of consecutive rows. Writing rows straight from the slots' own order would touch
// a sector of memory per slot, and with many experts more of them at a time than L2 holds.
//
// Ranks come from prefix sums, never from the order in which atomics happen, so rows are stable and
// repeatable.
//
// The grid is launched cooperatively: the driver starts all its CTAs together or none, so it cannot
// wait for a CTA that another kernel keeps out, and its barrier has no state that outlives the
// launch: any number of streams and graph replays may run at once. The scratch for counts belongs
// to the call and needs no initialisation.
// Without this macro the header includes libcu++, which takes a third of the compile time. Only the
// barrier of the grid is needed.
#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>

#include <mutex>

#include "../host/border.hpp"
#include "../host/routing_places.hpp"

// What a block may ask for: 163 KB and more on data centre GPUs since Ampere, 99 KB on the others.
#ifndef SHARED_KIB
#define SHARED_KIB 163
#endif

namespace sonicmoe {
namespace {

namespace cg = cooperative_groups;

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * 32;
// Of kThreads slots in a full tile: larger tiles give longer runs of rows and fewer barriers.
constexpr int kRounds = SHARED_KIB >= 160 ? 8 : 2;
constexpr int kTile = kThreads * kRounds;
constexpr int kSlotBits = 13;  // a staged slot: expert << kSlotBits | position in the tile
constexpr int kMaxExperts = 512;
constexpr int kMaxCtas = 256;
constexpr unsigned kFull = 0xffffffffu;
static_assert(kTile <= 1 << kSlotBits, "a tile's positions must fit kSlotBits");
static_assert(kWarps == 32, "a scan over warps uses one lane each");
static_assert(kMaxExperts < kThreads,
              "a scan over experts uses one thread each, and one more for the end");

struct Arguments {
  const void* indices;
  const float* probs;
  int32_t* expert_counts;
  int64_t* padded_offsets;
  int32_t* row_token;
  int64_t* slot_row;
  float* row_prob;
  int32_t* cta_counts;  // [E, CTAs]
  int64_t num_slots;
  int64_t num_rows;
  int64_t slots_per_cta;  // a multiple of kThreads
  int num_experts;
  int topk;
  int alignment;
};

// Dynamic shared memory. Counts of one expert lie an odd number of words apart: lanes that walk
// over warps meet no bank twice.
struct Shared {
  int64_t* padded_offsets;  // [E + 1]
  int64_t* first_row;     // [E] next row of each expert in this CTA, less the expert's start in the
                          // sorted tile
  int64_t* warp_sums;     // [warps] partial sums of a scan over experts
  int32_t* total;         // [E] rows of each expert
  int32_t* cta_count;     // [E] rows of each expert in this CTA behind its first tile
  int32_t* tile_count;    // [E] rows of each expert in the tile
  int32_t* tile_start;    // [E] its exclusive prefix
  int32_t* warp_counts;   // [warps][E | 1] rows of each expert per warp of the tile, then the
                          // exclusive prefix over warps
  uint32_t* staged_slot;  // [kTile] the tile, sorted by expert
  float* staged_prob;     // [kTile]

  __device__ Shared(char* memory, int experts) {
    padded_offsets = reinterpret_cast<int64_t*>(memory);
    first_row = padded_offsets + experts + 1;
    warp_sums = first_row + experts;
    total = reinterpret_cast<int32_t*>(warp_sums + kWarps);
    cta_count = total + experts;
    tile_count = cta_count + experts;
    tile_start = tile_count + experts;
    warp_counts = tile_start + experts;
    staged_slot = reinterpret_cast<uint32_t*>(warp_counts + kWarps * (experts | 1));
    staged_prob = reinterpret_cast<float*>(staged_slot + kTile);
  }

  static constexpr size_t bytes(int experts) {
    return (2 * experts + 1 + kWarps) * sizeof(int64_t) +
           (4 * experts + kWarps * (experts | 1) + 2 * kTile) * sizeof(int32_t);
  }
};

static_assert(Shared::bytes(kMaxExperts) <= SHARED_KIB * 1024,
              "a block cannot have this much shared memory");

// A tile in registers. Each warp owns `rounds` x 32 consecutive slots; lane l of round u holds one
// of them.
struct SlotTile {
  int64_t begin;        // first slot of the tile
  int size;             // slots in it
  int rounds;           // of kThreads slots
  int expert[kRounds];  // -1: nothing to route
  int rank[kRounds];    // among the warp's slots of that expert
  float prob[kRounds];

  __device__ int position(int u) const {
    return (threadIdx.x / 32 * rounds + u) * 32 + threadIdx.x % 32;
  }

  template <typename Id>
  __device__ void load_experts(const Arguments& a, int64_t first, int64_t end) {
    begin = first;
    size = static_cast<int>(min(end - first, static_cast<int64_t>(kTile)));
    rounds = (size + kThreads - 1) / kThreads;
    const Id* __restrict__ indices = static_cast<const Id*>(a.indices) + first;
#pragma unroll
    for (int u = 0; u < kRounds; ++u) {
      const bool inside = u < rounds && position(u) < size;
      const Id id = inside ? __ldg(indices + position(u)) : Id(-1);
      expert[u] = id >= 0 && id < Id(a.num_experts) ? static_cast<int>(id) : -1;
    }
  }

  __device__ void load_probs(const Arguments& a) {
#pragma unroll
    for (int u = 0; u < kRounds; ++u)
      prob[u] = expert[u] >= 0 ? __ldg(a.probs + begin + position(u)) : 0.f;
  }
};

__device__ unsigned lanes_below(int lane) { return (1u << lane) - 1u; }

template <typename T>
__device__ T warp_inclusive_sum(T value, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T below = __shfl_up_sync(kFull, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// Lanes that hold the same expert, by its bits: a match instruction takes longer the more experts a
// warp holds. `bits` cover num_experts, so that -1 (no expert) differs from every expert in bit
// `bits`.
__device__ unsigned same_expert(int expert, int bits) {
  unsigned peers = kFull;
  for (int bit = 0; bit <= bits; ++bit) {
    const bool set = expert >> bit & 1;
    const unsigned ones = __ballot_sync(kFull, set);
    peers &= set ? ones : ~ones;
  }
  return peers;
}

// Exclusive prefix of one value per thread of the CTA; `sums` is scratch for one value per warp.
// Synchronises.
template <typename T>
__device__ T cta_exclusive_sum(T value, int64_t* sums, int warp, int lane) {
  const T inclusive = warp_inclusive_sum(value, lane);
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  const T warps = warp_inclusive_sum(static_cast<T>(sums[lane]), lane);
  const T before = __shfl_sync(kFull, warps, (warp + 31) % 32);
  __syncthreads();
  return inclusive - value + (warp == 0 ? T(0) : before);
}

// Per expert, in shared memory. One lane per distinct expert adds; integer sums, so the order of
// additions cannot show.
__device__ void count(const Shared& s, const SlotTile& tile, int bits, int lane) {
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    if (u >= tile.rounds) break;
    const int expert = tile.expert[u];
    const unsigned peers = same_expert(expert, bits);
    if (expert >= 0 && (peers & lanes_below(lane)) == 0)
      atomicAdd(s.cta_count + expert, __popc(peers));
  }
}

// Rank every slot within its warp, then turn the warps' counts into their exclusive prefix.
// Synchronises.
__device__ void rank(const Arguments& a, const Shared& s, SlotTile& tile, int warp, int lane) {
  const int stride = a.num_experts | 1, bits = 32 - __clz(a.num_experts - 1);
  int32_t* counts = s.warp_counts + warp * stride;
  for (int expert = lane; expert < a.num_experts; expert += 32) counts[expert] = 0;
  __syncwarp();
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    if (u >= tile.rounds) break;
    const int expert = tile.expert[u];
    const unsigned peers = same_expert(expert, bits);
    const int among = __popc(peers & lanes_below(lane));
    const int before = expert >= 0 ? counts[expert] : 0;
    __syncwarp();
    if (expert >= 0 && among == 0) counts[expert] = before + __popc(peers);
    __syncwarp();
    tile.rank[u] = before + among;
  }
  __syncthreads();
  for (int expert = warp; expert < a.num_experts; expert += kWarps) {
    int32_t* mine = s.warp_counts + lane * stride + expert;
    const int own = *mine;
    const int inclusive = warp_inclusive_sum(own, lane);
    *mine = inclusive - own;
    if (lane == 31) s.tile_count[expert] = inclusive;
  }
  __syncthreads();
}

// After the barrier: every expert's total, and how many of its rows belong to the CTAs before this
// one.
__device__ void sum_ctas(const Arguments& a, const Shared& s, int warp, int lane) {
  constexpr int kTogether = 4;  // experts whose loads are in flight together
  const int ctas = gridDim.x;
  for (int first = warp; first < a.num_experts; first += kWarps * kTogether) {
    int total[kTogether] = {}, before[kTogether] = {};
    for (int cta = lane; cta < ctas; cta += 32) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int expert = first + j * kWarps;
        const int counted = expert < a.num_experts
                                ? __ldcg(a.cta_counts + static_cast<int64_t>(expert) * ctas + cta)
                                : 0;
        total[j] += counted;
        before[j] += cta < static_cast<int>(blockIdx.x) ? counted : 0;
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int expert = first + j * kWarps;
      const int sum = __reduce_add_sync(kFull, total[j]);
      const int sum_before = __reduce_add_sync(kFull, before[j]);
      if (lane == 0 && expert < a.num_experts) {
        s.total[expert] = sum;
        s.first_row[expert] = sum_before;
      }
    }
  }
}

// Row offsets of the experts; the first CTA writes the per-expert outputs. Synchronises.
__device__ void scan_experts(const Arguments& a, const Shared& s, int warp, int lane) {
  const int expert = threadIdx.x;
  const bool known = expert < a.num_experts;
  const int64_t own = known ? s.total[expert] : 0;
  const int64_t padded = (own + a.alignment - 1) / a.alignment * a.alignment;
  const int64_t padded_offset = cta_exclusive_sum(padded, s.warp_sums, warp, lane);
  if (known) s.first_row[expert] += padded_offset;
  if (expert <= a.num_experts) s.padded_offsets[expert] = padded_offset;
  if (blockIdx.x == 0) {
    if (known) a.expert_counts[expert] = static_cast<int32_t>(own);
    if (expert <= a.num_experts) a.padded_offsets[expert] = padded_offset;
  }
  __syncthreads();
}

// Write a ranked tile: slots in their own order, rows in the tile's order by expert. Synchronises.
__device__ void write_tile(const Arguments& a, const Shared& s, const SlotTile& tile, int warp,
                           int lane) {
  const int thread = threadIdx.x;
  const bool known = thread < a.num_experts;
  const int rows_of_mine = known ? s.tile_count[thread] : 0;
  const int start = cta_exclusive_sum(rows_of_mine, s.warp_sums, warp, lane);
  if (known) {
    s.tile_start[thread] = start;
    s.first_row[thread] -= start;
  }
  __syncthreads();
  const int32_t* before = s.warp_counts + warp * (a.num_experts | 1);
#pragma unroll
  for (int u = 0; u < kRounds; ++u) {
    const int at = tile.position(u);
    if (u >= tile.rounds || at >= tile.size) break;
    const int expert = tile.expert[u];
    int64_t row = -1;
    if (expert >= 0) {
      const int sorted = s.tile_start[expert] + before[expert] + tile.rank[u];
      s.staged_slot[sorted] =
          static_cast<uint32_t>(expert) << kSlotBits | static_cast<uint32_t>(at);
      s.staged_prob[sorted] = tile.prob[u];
      row = s.first_row[expert] + sorted;
    }
    // A row beyond the buffers means the caller's counts were too small: drop the slot, never write
    // out of bounds.
    a.slot_row[tile.begin + at] = row < a.num_rows ? row : -1;
  }
  __syncthreads();
  const int last = a.num_experts - 1;
  const int valid = s.tile_start[last] + s.tile_count[last];
  const int64_t token = tile.begin / a.topk;
  const unsigned rest = static_cast<unsigned>(tile.begin - token * a.topk);
  for (int sorted = thread; sorted < valid; sorted += kThreads) {
    const uint32_t staged = s.staged_slot[sorted];
    const unsigned at = staged & ((1u << kSlotBits) - 1u);
    const int64_t row = s.first_row[staged >> kSlotBits] + sorted;
    if (row < a.num_rows) {
      a.row_token[row] = static_cast<int32_t>(token + (rest + at) / static_cast<unsigned>(a.topk));
      a.row_prob[row] = s.staged_prob[sorted];
    }
  }
  __syncthreads();
  if (known) s.first_row[thread] += start + rows_of_mine;
}

__device__ void write_padding_row(const Arguments& a, int64_t row) {
  a.row_token[row] = -1;
  a.row_prob[row] = 0.f;
}

// Rows that no slot fills: the end of each expert's rows, and everything behind the last expert.
__device__ void write_padding(const Arguments& a, const Shared& s, int warp, int lane) {
  for (int expert = blockIdx.x + gridDim.x * warp; expert < a.num_experts;
       expert += gridDim.x * kWarps) {
    const int64_t end = min(s.padded_offsets[expert + 1], a.num_rows);
    for (int64_t row = s.padded_offsets[expert] + s.total[expert] + lane; row < end; row += 32)
      write_padding_row(a, row);
  }
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t tail =
      s.padded_offsets[a.num_experts] + static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t row = tail; row < a.num_rows; row += threads) write_padding_row(a, row);
}

template <typename Id>
__global__ void __launch_bounds__(kThreads, 1) build_metadata(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(16) char memory[];
  const Shared s(memory, a.num_experts);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int bits = 32 - __clz(a.num_experts - 1);
  const int64_t begin = min(blockIdx.x * a.slots_per_cta, a.num_slots);
  const int64_t end = min(begin + a.slots_per_cta, a.num_slots);

  // The first tile is ranked before the barrier and kept: inputs of one tile per CTA are read once.
  SlotTile tile;
  tile.load_experts<Id>(a, begin, end);
  tile.load_probs(a);
  if (threadIdx.x < a.num_experts) s.cta_count[threadIdx.x] = 0;
  rank(a, s, tile, warp, lane);
  for (int64_t first = begin + kTile; first < end; first += kTile) {
    SlotTile ahead;
    ahead.load_experts<Id>(a, first, end);
    count(s, ahead, bits, lane);
  }
  __syncthreads();
  if (threadIdx.x < a.num_experts) {
    const int64_t at = static_cast<int64_t>(threadIdx.x) * gridDim.x + blockIdx.x;
    a.cta_counts[at] = s.tile_count[threadIdx.x] + s.cta_count[threadIdx.x];
  }
  cg::this_grid().sync();

  sum_ctas(a, s, warp, lane);
  __syncthreads();
  scan_experts(a, s, warp, lane);
  write_tile(a, s, tile, warp, lane);
  for (int64_t first = begin + kTile; first < end; first += kTile) {
    tile.load_experts<Id>(a, first, end);
    tile.load_probs(a);
    rank(a, s, tile, warp, lane);
    write_tile(a, s, tile, warp, lane);
  }
  write_padding(a, s, warp, lane);
}

// ---- launch ----

using Kernel = void (*)(Arguments);

// CTAs of a cooperative grid that are resident together, at most one per multiprocessor; also
// raises the kernels' limit of dynamic shared memory.
int measure_resident_ctas(int device) {
  int sms = 0, per_sm = 0;
  const int bytes = static_cast<int>(Shared::bytes(kMaxExperts));
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  for (const Kernel kernel : {build_metadata<int32_t>, build_metadata<int64_t>}) {
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    TVM_FFI_CHECK_CUDA_ERROR(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, bytes));
    TVM_FFI_ICHECK(per_sm > 0) << "a multiprocessor of this device cannot hold " << kThreads
                               << " threads with " << bytes << " bytes of shared memory";
  }
  return sms < kMaxCtas ? sms : kMaxCtas;
}

int resident_ctas(int device) {
  constexpr int kDevices = 64;
  static int ctas[kDevices];
  static std::once_flag once[kDevices];
  TVM_FFI_ICHECK(device >= 0 && device < kDevices)
      << "device ordinal " << device << " is beyond " << kDevices;
  std::call_once(once[device], [device] { ctas[device] = measure_resident_ctas(device); });
  return ctas[device];
}

// One CTA per kThreads slots, because more CTAs of fewer slots only add counts for everybody to
// read. A CTA fills a multiprocessor, and a cooperative grid starts when all its CTAs have one. A grid
// of 128 waited 2 ms for a reduce-scatter of FSDP2 that held 24 of 132 (docs/lab/fsdp2.md), so a grid
// takes half of the multiprocessors at most, unless `forced` sets its size.
int64_t choose_ctas(int64_t num_slots, int64_t forced, int64_t resident) {
  const int64_t most = forced > 0 ? resident : (resident + 1) / 2;
  const int64_t wanted = forced > 0 ? forced : ceil_div(num_slots, kThreads);
  return wanted < 1 ? 1 : (wanted < most ? wanted : most);
}

// How many bytes the counts of all CTAs take: of as many CTAs as a grid may have.
int64_t scratch_bytes(int64_t slots, int64_t experts, int64_t forced_ctas) {
  return experts * choose_ctas(slots, forced_ctas, kMaxCtas) * int64_t{sizeof(int32_t)};
}

// indices int32/int64 [T, K]; memory: bytes for the tensors that sonicmoe.routing.metadata documents,
// where `RoutingPlaces` says, and behind them `scratch_bytes`; rows: R; forced_ctas > 0 sets the size
// of the grid (for measurements).
void build(TensorView indices, TensorView probs, TensorView memory, int64_t rows,
           int64_t num_experts, int64_t alignment, int64_t forced_ctas, int64_t stream) {
  TVM_FFI_ICHECK(indices.ndim() == 2) << "indices must be [tokens, topk]";
  TVM_FFI_ICHECK(num_experts > 0 && num_experts <= kMaxExperts)
      << "num_experts is " << num_experts << "; at most " << kMaxExperts;
  TVM_FFI_ICHECK(alignment > 0 && alignment <= (1 << 24)) << "alignment is " << alignment;
  TVM_FFI_ICHECK(indices.size(0) < (int64_t(1) << 31))
      << "row_token is int32: at most 2^31 - 1 tokens";
  const DLDevice device = indices.device();
  const bool wide = is_type(indices, kDLInt, 64);
  const int64_t slots = indices.numel();
  TVM_FFI_ICHECK(rows >= 0) << "there are " << rows << " rows";
  const RoutingPlaces places(slots, num_experts, rows);
  const int64_t bytes = places.bytes + scratch_bytes(slots, num_experts, forced_ctas);
  uint8_t* const base = aligned_16(checked_bytes(memory, "memory", device, bytes), "memory");
  Arguments a;
  a.indices = wide ? static_cast<void*>(checked_i64(indices, "indices", device, 0))
                   : checked_i32(indices, "indices", device, 0);
  a.probs = checked_f32(probs, "probs", device, slots);
  a.expert_counts = reinterpret_cast<int32_t*>(base + places.expert_counts);
  a.padded_offsets = reinterpret_cast<int64_t*>(base + places.padded_offsets);
  a.row_token = reinterpret_cast<int32_t*>(base + places.row_token);
  a.slot_row = reinterpret_cast<int64_t*>(base + places.slot_row);
  a.row_prob = reinterpret_cast<float*>(base + places.row_prob);
  a.cta_counts = reinterpret_cast<int32_t*>(base + places.bytes);
  a.num_slots = slots;
  a.num_rows = rows;
  a.num_experts = static_cast<int>(num_experts);
  a.topk = static_cast<int>(indices.size(1) > 0 ? indices.size(1) : 1);
  a.alignment = static_cast<int>(alignment);

  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int64_t ctas = choose_ctas(slots, forced_ctas, resident_ctas(device.device_id));
  a.slots_per_cta = ceil_div(ceil_div(slots, ctas), kThreads) * kThreads;
  cudaLaunchAttribute cooperative = {};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = ::dim3(static_cast<unsigned>(ctas));
  config.blockDim = ::dim3(kThreads);
  config.dynamicSmemBytes = Shared::bytes(a.num_experts);
  config.stream = as_stream(stream);
  config.attrs = &cooperative;
  config.numAttrs = 1;
  TVM_FFI_CHECK_CUDA_ERROR(
      cudaLaunchKernelEx(&config, wide ? build_metadata<int64_t> : build_metadata<int32_t>, a));
}

// ---- values of slots and rows ----

constexpr int kGatherThreads = 256;
constexpr int kGatherPerThread = 4;

// out[i] = from[index[i]], or 0 where index[i] is none of `limit`.
__global__ void __launch_bounds__(kGatherThreads)
    gather_or_zero(const int64_t* __restrict__ index, const float* __restrict__ from,
                   float* __restrict__ out, int64_t n, int64_t limit) {
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * (kGatherThreads * kGatherPerThread) + threadIdx.x;
  int64_t source[kGatherPerThread];
#pragma unroll
  for (int i = 0; i < kGatherPerThread; ++i) {
    const int64_t at = first + i * kGatherThreads;
    source[i] = at < n ? __ldg(index + at) : -1;
  }
#pragma unroll
  for (int i = 0; i < kGatherPerThread; ++i) {
    const int64_t at = first + i * kGatherThreads;
    const float value = source[i] >= 0 && source[i] < limit ? __ldg(from + source[i]) : 0.f;
    if (at < n) out[at] = value;
  }
}

void gather(TensorView index, TensorView from, TensorView out, int64_t stream) {
  const DLDevice device = index.device();
  const int64_t n = index.numel();
  const int64_t* index_data = checked_i64(index, "index", device, n);
  const float* from_data = checked_f32(from, "from", device, 0);
  float* out_data = checked_f32(out, "out", device, n);
  if (n == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int64_t blocks = ceil_div(n, kGatherThreads * kGatherPerThread);
  gather_or_zero<<<static_cast<unsigned>(blocks), kGatherThreads, 0, as_stream(stream)>>>(
      index_data, from_data, out_data, n, from.numel());
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// out[i] = from[0][index[i]] + from[1][index[i]] + ..., in this order, or 0 where index[i] is none
// of `limit`.
__global__ void __launch_bounds__(kGatherThreads)
    sum_or_zero(const int64_t* __restrict__ index, const float* __restrict__ from,
                float* __restrict__ out, int64_t n, int64_t limit, int64_t parts) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x;
  if (at >= n) return;
  const int64_t source = __ldg(index + at);
  float sum = 0.f;
  if (source >= 0 && source < limit) {
    sum = __ldg(from + source);
    for (int64_t part = 1; part < parts; ++part) sum += __ldg(from + part * limit + source);
  }
  out[at] = sum;
}

// from fp32 [parts, limit]
void gather_sums(TensorView index, TensorView from, TensorView out, int64_t stream) {
  const DLDevice device = index.device();
  const int64_t n = index.numel();
  const int64_t* index_data = checked_i64(index, "index", device, n);
  TVM_FFI_ICHECK(from.ndim() == 2 && from.size(0) > 0)
      << "from must be [parts, rows], with at least one part";
  const float* from_data = checked_f32(from, "from", device, 0);
  float* out_data = checked_f32(out, "out", device, n);
  if (n == 0) return;
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int64_t blocks = ceil_div(n, kGatherThreads);
  sum_or_zero<<<static_cast<unsigned>(blocks), kGatherThreads, 0, as_stream(stream)>>>(
      index_data, from_data, out_data, n, from.size(1), from.size(0));
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// The fields of `RoutingPlaces`, the number of all bytes last.
tvm::ffi::Shape metadata_places(int64_t slots, int64_t experts, int64_t rows) {
  const RoutingPlaces p(slots, experts, rows);
  return {p.expert_counts, p.padded_offsets, p.row_token, p.slot_row, p.row_prob, p.bytes};
}

int64_t max_experts() { return kMaxExperts; }

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_metadata, sonicmoe::build);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(metadata_places, sonicmoe::metadata_places);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gather_or_zero, sonicmoe::gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sum_or_zero, sonicmoe::gather_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scratch_bytes, sonicmoe::scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(max_experts, sonicmoe::max_experts);
