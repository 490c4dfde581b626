// Rows of tokens between the GPUs of one host, through memory that every rank has mapped.
//
// A rank writes what others need into its own memory and says so; the others then read it from
// there, straight to where it belongs. Every exchange is three kernels of one stream:
//
//     send    writes rows, and of a dispatch the routing, into one half of this rank's memory
//     arrive  tells every rank, and waits until every rank has told this one; a few thread blocks,
//             because one that waits on all multiprocessors would keep other streams' kernels, for
//             which another rank may be waiting, from running
//     take    reads rows out of the memory of all ranks
//
// Exchanges alternate between two halves. Whoever begins exchange n + 2 has seen all ranks begin
// exchange n + 1, and they had taken all of exchange n before. The number of an exchange is counted
// on the device, so a graph that is replayed counts on.
//
// Which rows a rank receives is one bit for each of its tokens, 32 of them a word. Receivers and
// senders count the same bits, in the order of source ranks and of tokens, so nobody has to be told
// a place.
#include "../host/border.hpp"
#include "row_values.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kMostRanks = 8, kMostExperts = 4096;
constexpr int kThreads = 256, kWarps = kThreads / 32, kScanThreads = 512;
constexpr int kChunk = 32;  // tokens of one word
// A rank's memory begins with these: the flag that each rank writes, then what only its owner uses.
constexpr int64_t kFlagStride = 64, kState = kFlagStride * kMostRanks, kHead = 1024;
// A half begins with the number of tokens and the slots of each expert.
constexpr int64_t kCounts = 128, kBody = kCounts + kMostExperts * 4;
// Words of the host: which rank was waited for in vain, which one got too many rows, then what the
// host waits for, each with the number of the dispatch in its upper half.
enum Word { kLost, kOverflow, kRows, kTokens = kRows + kMostRanks, kSlots = kTokens + kMostRanks };
enum State { kNext, kTaken, kBlocks };

struct Peers {
  uint8_t* base[kMostRanks];  // the memory of each rank, as this one has mapped it
  int64_t half_bytes, timeout_ns;
  volatile int64_t* words;
  int ranks, rank;

  __device__ uint32_t* flag(int of, int from) const {
    return reinterpret_cast<uint32_t*>(base[of] + kFlagStride * from);
  }
  __device__ uint32_t* state() const { return reinterpret_cast<uint32_t*>(base[rank] + kState); }
  __device__ uint8_t* half(int of, uint32_t exchange) const {
    return base[of] + kHead + (exchange & 1) * half_bytes;
  }
  // Before its exchange has arrived, and behind.
  __device__ uint8_t* sending() const { return half(rank, state()[kNext]); }
  __device__ const uint8_t* arrived(int from) const { return half(from, state()[kTaken]); }
};

// Where the parts of a half lie; all ranks compute the same from the same sizes.
struct Places {
  int64_t bits, slots, rows, scales, end;
  int64_t row_bytes, scale_bytes;
  int most, chunks, topk;  // tokens of any rank

  static int64_t up(int64_t bytes) { return (bytes + 127) / 128 * 128; }
  Places(int ranks, int64_t most, int64_t topk, int64_t row_bytes, int64_t scale_bytes)
      : row_bytes(row_bytes),
        scale_bytes(scale_bytes),
        most(static_cast<int>(most)),
        chunks(static_cast<int>((most + kChunk - 1) / kChunk)),
        topk(static_cast<int>(topk)) {
    bits = kBody;
    slots = bits + up(4ll * ranks * chunks);
    rows = slots + up(8 * most * topk);
    scales = rows + up(most * row_bytes);
    end = scales + up(most * scale_bytes);
  }
};

__device__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

template <typename Unit>
__device__ Unit load_unit(const Unit* address) {
  return __ldg(address);
}

// A warp copies one row.
template <typename Unit>
__device__ void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  constexpr int kAhead = 4;  // loads of a lane that are under way together
  const int units = static_cast<int>(bytes / sizeof(Unit)), lane = threadIdx.x % 32;
  const Unit* source = reinterpret_cast<const Unit*>(from);
  Unit* target = reinterpret_cast<Unit*>(to);
  for (int first = lane; first < units; first += 32 * kAhead) {
    Unit held[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + 32 * i < units) held[i] = load_unit(source + first + 32 * i);
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (first + 32 * i < units) target[first + 32 * i] = held[i];
  }
}

template <typename Unit>
__device__ void clear_row(uint8_t* to, int64_t bytes) {
  const int units = static_cast<int>(bytes / sizeof(Unit));
  for (int i = threadIdx.x % 32; i < units; i += 32) reinterpret_cast<Unit*>(to)[i] = Unit{};
}

// Rows of values or codes, and the scales of codes, where `Places::scale_bytes` says that there are
// any.
struct Rows {
  uint8_t *rows, *scales;

  static __device__ Rows in(const uint8_t* half, const Places& p) {
    uint8_t* const base = const_cast<uint8_t*>(half);
    return {base + p.rows, base + p.scales};
  }
  template <typename Unit>
  __device__ void copy(int64_t to, const Rows& source, int64_t from, const Places& p) const {
    copy_row<Unit>(rows + to * p.row_bytes, source.rows + from * p.row_bytes, p.row_bytes);
    if (p.scale_bytes != 0)
      copy_row<uint32_t>(scales + to * p.scale_bytes, source.scales + from * p.scale_bytes,
                         p.scale_bytes);
  }
};

__device__ bool in_range(int64_t id, int experts) { return id >= 0 && id < experts; }

struct Dispatch {
  Rows own;
  const int64_t* ids;
  const float* weights;
  int32_t* plan;  // [W, W * chunks + 1]: how many rows of a rank come before each word, and all
  int64_t tokens, capacity, slot_capacity, sequence;
  int experts;
  bool counts;  // whether anybody asks for the slots of experts
};

// A thread block has the tokens of one word.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    send_tokens(const __grid_constant__ Peers g, const __grid_constant__ Places p,
                const __grid_constant__ Dispatch d) {
  __shared__ uint32_t bits[kMostRanks];
  uint8_t* const half = g.sending();
  if (blockIdx.x == 0 && threadIdx.x == 0)
    *reinterpret_cast<int32_t*>(half) = static_cast<int32_t>(d.tokens);
  if (d.tokens > p.most) return;  // there is no room, of which the number tells all ranks
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kChunk;
  const int held = static_cast<int>(min(static_cast<int64_t>(kChunk), d.tokens - first));
  if (threadIdx.x < kMostRanks) bits[threadIdx.x] = 0;
  __syncthreads();
  int32_t* const slots = reinterpret_cast<int32_t*>(half + p.slots) + first * 2 * p.topk;
  for (int i = threadIdx.x; i < held * p.topk; i += kThreads) {
    const int token = i / p.topk;
    const int64_t id = __ldg(d.ids + first * p.topk + i);
    int32_t* const slot = slots + token * p.topk + i;  // 2 K words a token
    const bool known = in_range(id, d.experts);
    slot[0] = known ? static_cast<int32_t>(id) : -1;
    slot[p.topk] = __float_as_int(__ldg(d.weights + first * p.topk + i));
    if (!known) continue;
    atomicOr(bits + id / (d.experts / g.ranks), 1u << token);
    if (d.counts) atomicAdd(reinterpret_cast<int32_t*>(half + kCounts) + id, 1);
  }
  __syncthreads();
  uint32_t others = 0;
  for (int rank = 0; rank < g.ranks; ++rank)
    if (rank != g.rank) others |= bits[rank];
  if (threadIdx.x < g.ranks)
    reinterpret_cast<uint32_t*>(half + p.bits)[threadIdx.x * p.chunks + blockIdx.x] =
        bits[threadIdx.x];
  const Rows staged = Rows::in(half, p);
  for (int token = threadIdx.x / 32; token < held; token += kWarps)
    if (others >> token & 1) staged.copy<Unit>(first + token, d.own, first + token, p);
}

constexpr int64_t kToldWithin = 3'000'000'000;  // nanoseconds

// Tells all ranks that this one has sent, and waits for them. Ends the program where one does not
// come: what would be computed next is wrong, and nobody may keep it.
__device__ uint32_t wait_for_all(const Peers& g) {
  const uint32_t exchange = g.state()[kNext];
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < g.ranks) {
    if (blockIdx.x == 0) {
      __threadfence_system();
      store_release(g.flag(peer, g.rank), exchange + 1);
    }
    const int64_t begin = nanoseconds();
    while (static_cast<int32_t>(load_acquire(g.flag(g.rank, peer)) - (exchange + 1)) < 0) {
      if (nanoseconds() - begin > g.timeout_ns) {
        g.words[kLost] = peer + 1;
        __threadfence_system();
        // The host sees that word within a second, and says whom it waited for. Behind a trap the
        // process may end before anything of Python runs.
        while (nanoseconds() - begin < g.timeout_ns + kToldWithin) __nanosleep(1000000);
        asm volatile("trap;");
      }
      __nanosleep(20);
    }
  }
  __syncthreads();
  return exchange;
}

// The last block to come here counts the exchange: then nobody reads the old number any more.
__device__ void end_wait(const Peers& g, uint32_t exchange) {
  __syncthreads();
  uint32_t* const state = g.state();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(reinterpret_cast<int*>(state + kBlocks), 1) + 1 != static_cast<int>(gridDim.x))
    return;
  state[kBlocks] = 0;
  state[kTaken] = exchange;
  state[kNext] = exchange + 1;
}

// Slots of the other half are those of an exchange that all ranks have taken.
__device__ void clear_other_half(const Peers& g, uint32_t exchange) {
  int32_t* const counts = reinterpret_cast<int32_t*>(g.half(g.rank, exchange + 1) + kCounts);
  for (int i = threadIdx.x; i < kMostExperts; i += blockDim.x) counts[i] = 0;
}

__global__ void __launch_bounds__(kScanThreads) arrive(const __grid_constant__ Peers g) {
  const uint32_t exchange = wait_for_all(g);
  clear_other_half(g, exchange);
  end_wait(g, exchange);
}

__device__ void tell(const Peers& g, int word, int64_t sequence, int64_t value) {
  g.words[word] = sequence << 32 | value;
}

// The slots of the experts of rank `owner`, of all sources: their sum is in `sum`.
__device__ void count_slots(const Peers& g, const Dispatch& d, int owner, uint32_t exchange,
                            int* sum) {
  const int local = d.experts / g.ranks;
  for (int expert = threadIdx.x; expert < local; expert += kScanThreads) {
    int count = 0;
    for (int source = 0; source < g.ranks; ++source)
      count += __ldcv(reinterpret_cast<const int32_t*>(g.half(source, exchange) + kCounts) +
                      owner * local + expert);
    if (owner == g.rank && d.sequence != 0) tell(g, kSlots + expert, d.sequence, count);
    atomicAdd(sum, count);
  }
}

// Block r counts the rows of rank r, of which every rank needs to know those that it sent, and the
// host of every rank how many there are.
__global__ void __launch_bounds__(kScanThreads)
    arrive_with_tokens(const __grid_constant__ Peers g, const __grid_constant__ Places p,
                       const __grid_constant__ Dispatch d) {
  __shared__ int tokens[kMostRanks];
  __shared__ int running[kScanThreads];
  __shared__ int slots;
  const uint32_t exchange = wait_for_all(g);
  const int thread = static_cast<int>(threadIdx.x), owner = static_cast<int>(blockIdx.x);
  if (owner == 0) clear_other_half(g, exchange);
  if (thread == 0) slots = 0;
  if (thread < g.ranks) {
    const int sent = __ldcv(reinterpret_cast<const int32_t*>(g.half(thread, exchange)));
    if (owner == 0 && d.sequence != 0) tell(g, kTokens + thread, d.sequence, sent);
    tokens[thread] = sent <= p.most ? sent : 0;
  }
  __syncthreads();
  const int words = g.ranks * p.chunks, each = (words + kScanThreads - 1) / kScanThreads;
  const auto rows_at = [&](int word) {
    const int source = word / p.chunks, chunk = word - source * p.chunks;
    if (word >= words || chunk * kChunk >= tokens[source]) return 0;
    const uint8_t* const half = g.half(source, exchange);
    return __popc(__ldcv(reinterpret_cast<const uint32_t*>(half + p.bits) + owner * p.chunks +
                         chunk));
  };
  int32_t* const plan = d.plan + static_cast<int64_t>(owner) * (words + 1);
  constexpr int kTogether = 4;
  for (int first = thread; first < words; first += kTogether * kScanThreads) {
    int rows[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) rows[i] = rows_at(first + i * kScanThreads);
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (first + i * kScanThreads < words) plan[first + i * kScanThreads] = rows[i];
  }
  __syncthreads();
  const int begin = min(thread * each, words), end = min(begin + each, words);
  int own = 0;
  for (int word = begin; word < end; ++word) own += plan[word];
  running[thread] = own;
  __syncthreads();
  for (int distance = 1; distance < kScanThreads; distance *= 2) {
    const int below = thread >= distance ? running[thread - distance] : 0;
    __syncthreads();
    running[thread] += below;
    __syncthreads();
  }
  int before = running[thread] - own;
  for (int word = begin; word < end; ++word) {
    const int rows = plan[word];
    plan[word] = before;
    before += rows;
  }
  if (d.counts) count_slots(g, d, owner, exchange, &slots);
  __syncthreads();
  if (thread == 0) {
    const int rows = running[kScanThreads - 1];
    plan[words] = rows;
    if (d.sequence != 0) tell(g, kRows + owner, d.sequence, rows);
    // Every rank sees it of every rank, and so all of them raise.
    const bool fits = rows <= d.capacity && slots <= d.slot_capacity;
    if (d.sequence == 0 && !fits)
      g.words[kOverflow] = static_cast<int64_t>(owner + 1) << 32 | (d.counts ? slots : rows);
  }
  end_wait(g, exchange);
}

struct Taken {
  Rows out;
  int64_t rows;
  int64_t* ids;
  float* weights;
  int32_t* sources;  // source rank * most tokens + token, -1 where there is no row
  int32_t* places;   // [T, W]: the row of each own token on each rank, -1 where none is
};

__device__ int32_t place_of(const int32_t* plan, uint32_t bits, int token, int64_t capacity) {
  const int32_t row = *plan + __popc(bits & ((1u << token) - 1));
  return (bits >> token & 1) && row < capacity ? row : -1;
}

// A thread block takes what one word of one rank has for this one.
template <typename Unit>
__global__ void __launch_bounds__(kThreads, 3)
    take_tokens(const __grid_constant__ Peers g, const __grid_constant__ Places p,
                const __grid_constant__ Dispatch d, const __grid_constant__ Taken t) {
  const int source = static_cast<int>(blockIdx.x) / p.chunks;
  const int chunk = static_cast<int>(blockIdx.x) - source * p.chunks;
  const int words = g.ranks * p.chunks, lane = threadIdx.x % 32, local = d.experts / g.ranks;
  const uint8_t* const half = g.arrived(source);
  const int sent = __ldg(reinterpret_cast<const int32_t*>(half));
  const uint32_t* const bits = reinterpret_cast<const uint32_t*>(half + p.bits) + chunk;
  const int32_t* const slots = reinterpret_cast<const int32_t*>(half + p.slots);
  const Rows from = source == g.rank ? d.own : Rows::in(half, p);
  const int first = chunk * kChunk, last = min(first + kChunk, sent);
  for (int token = first + threadIdx.x / 32; token < last; token += kWarps) {
    if (source == g.rank && lane < g.ranks)
      t.places[static_cast<int64_t>(token) * g.ranks + lane] =
          place_of(d.plan + static_cast<int64_t>(lane) * (words + 1) + blockIdx.x,
                   __ldg(bits + lane * p.chunks), token - first, d.capacity);
    const int64_t row =
        place_of(d.plan + static_cast<int64_t>(g.rank) * (words + 1) + blockIdx.x,
                 __ldg(bits + g.rank * p.chunks), token - first, d.capacity);
    if (row < 0) continue;
    t.out.copy<Unit>(row, from, token, p);
    if (lane == 0) t.sources[row] = source * p.most + token;
    for (int k = lane; k < p.topk; k += 32) {
      const int32_t* const slot = slots + static_cast<int64_t>(token) * 2 * p.topk + k;
      const int32_t id = __ldg(slot) - g.rank * local;
      const bool here = __ldg(slot) >= 0 && in_range(id, local);
      t.ids[row * p.topk + k] = here ? id : -1;
      t.weights[row * p.topk + k] = here ? __int_as_float(__ldg(slot + p.topk)) : 0.f;
    }
  }
  // Rows that nobody fills belong to no expert.
  const int64_t filled = d.plan[static_cast<int64_t>(g.rank) * (words + 1) + words];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t row = filled + static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
       row < t.rows; row += stride) {
    if (lane == 0) t.sources[row] = -1;
    for (int k = lane; k < p.topk; k += 32) {
      t.ids[row * p.topk + k] = -1;
      t.weights[row * p.topk + k] = 0.f;
    }
  }
}

// The same rows' gradients along the routes of a dispatch.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    send_again(const __grid_constant__ Peers g, const __grid_constant__ Places p, Rows own,
               const int32_t* places, int64_t tokens) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  bool leaves = false;
  for (int rank = 0; rank < g.ranks; ++rank)
    leaves |= rank != g.rank && __ldg(places + token * g.ranks + rank) >= 0;
  if (leaves) Rows::in(g.sending(), p).copy<Unit>(token, own, token, p);
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    take_again(const __grid_constant__ Peers g, const __grid_constant__ Places p, Rows own,
               Rows out, const int32_t* sources, int64_t rows) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int32_t source = __ldg(sources + row);
  if (source < 0) {
    clear_row<Unit>(out.rows + row * p.row_bytes, p.row_bytes);
    if (p.scale_bytes != 0) clear_row<uint32_t>(out.scales + row * p.scale_bytes, p.scale_bytes);
    return;
  }
  const int rank = source / p.most;
  const Rows from = rank == g.rank ? own : Rows::in(g.arrived(rank), p);
  out.copy<Unit>(row, from, source - rank * p.most, p);
}

// The way back: rows of experts' outputs, and fp32 weights of each slot, which lie where scales
// would.
template <typename Unit>
__global__ void __launch_bounds__(kThreads)
    send_back(const __grid_constant__ Peers g, const __grid_constant__ Places p, Rows own,
              const int32_t* sources, int64_t rows, int most_tokens) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int32_t source = __ldg(sources + row);
  if (source < 0 || source / most_tokens == g.rank) return;
  Rows::in(g.sending(), p).copy<Unit>(row, own, row, p);
}

// A warp sums the rows of one token in rank order, as `aggregate_rows` does.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads)
    sum_back(const __grid_constant__ Peers g, const __grid_constant__ Places p, Rows own, T* out,
             float* weights, const int64_t* ids, int experts, const int32_t* places,
             int64_t tokens) {
  constexpr int kVectors = 4;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (token >= tokens) return;
  const int lane = threadIdx.x % 32, width = static_cast<int>(p.row_bytes / sizeof(T));
  const int32_t* const of_ranks = places + token * g.ranks;
  const auto from = [&](int rank) {
    return rank == g.rank ? own : Rows::in(g.arrived(rank), p);
  };
  for (int first = lane * kVec; first < width; first += 32 * kVectors * kVec) {
    float sum[kVectors][kVec] = {};
    for (int rank = 0; rank < g.ranks; ++rank) {
      const int64_t row = __ldg(of_ranks + rank);
      if (row < 0) continue;
      const T* const source = reinterpret_cast<const T*>(from(rank).rows) + row * width + first;
      Packed<T, kVec> loaded[kVectors];
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (first + v * 32 * kVec < width) loaded[v].load(source + v * 32 * kVec);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (first + v * 32 * kVec >= width) continue;
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[v][i] = __fadd_rn(sum[v][i], loaded[v].get(i));
      }
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v)
      if (first + v * 32 * kVec < width)
        store<T, kVec>(out + token * width + first + v * 32 * kVec, sum[v]);
  }
  // A slot has a weight from the rank of its expert alone; what others hold there means nothing.
  for (int k = lane; k < p.topk; k += 32) {
    const int64_t id = __ldg(ids + token * p.topk + k);
    const int rank = in_range(id, experts) ? static_cast<int>(id / (experts / g.ranks)) : 0;
    const int64_t row = in_range(id, experts) ? __ldg(of_ranks + rank) : -1;
    weights[token * p.topk + k] =
        row < 0 ? 0.f
                : __fadd_rn(0.f, __ldg(reinterpret_cast<const float*>(from(rank).scales) +
                                       row * p.topk + k));
  }
}

// ---- The host's side ----

// int64 on the host: W, own rank, bytes of a half, nanoseconds, the host's words, then W addresses.
Peers peers_of(const TensorView& table) {
  const auto* at = static_cast<const int64_t*>(table.data_ptr());
  Peers g{};
  g.ranks = static_cast<int>(at[0]);
  g.rank = static_cast<int>(at[1]);
  g.half_bytes = at[2];
  g.timeout_ns = at[3];
  g.words = reinterpret_cast<volatile int64_t*>(at[4]);
  TVM_FFI_ICHECK(g.ranks > 0 && g.ranks <= kMostRanks) << g.ranks << " ranks";
  for (int rank = 0; rank < g.ranks; ++rank)
    g.base[rank] = reinterpret_cast<uint8_t*>(at[5 + rank]);
  return g;
}

int64_t row_bytes(const TensorView& rows) { return rows.size(1) * rows.dtype().bits / 8; }

void* checked_any(const TensorView& tensor, const char* name, DLDevice device) {
  const DLDataType dtype = tensor.dtype();
  return checked<void>(tensor, name, static_cast<DLDataTypeCode>(dtype.code), dtype.bits, device,
                       0);
}

Rows checked_rows(const TensorView& rows, const Optional<TensorView>& scales, DLDevice device) {
  TVM_FFI_ICHECK(rows.ndim() == 2) << "rows must be a matrix";
  return {static_cast<uint8_t*>(checked_any(rows, "rows", device)),
          scales.has_value() ? static_cast<uint8_t*>(checked_any(scales.value(), "scales", device))
                             : nullptr};
}

Places places_of(const Peers& g, int64_t most, int64_t topk, const TensorView& rows,
                 const Optional<TensorView>& scales) {
  const int64_t scale_bytes = scales.has_value() ? row_bytes(scales.value()) : 0;
  const Places p(g.ranks, most, topk, row_bytes(rows), scale_bytes);
  TVM_FFI_ICHECK(p.end <= g.half_bytes) << "the exchange needs " << p.end << " bytes of "
                                        << g.half_bytes;
  TVM_FFI_ICHECK(most > 0 && most * g.ranks < (int64_t(1) << 31)) << "most tokens are " << most;
  return p;
}

// The widest unit in which rows of both tensors can be copied.
template <typename Call>
void in_units(const Rows& one, const Rows& other, int64_t bytes, Call call) {
  const uintptr_t any = reinterpret_cast<uintptr_t>(one.rows) |
                        reinterpret_cast<uintptr_t>(other.rows) | static_cast<uintptr_t>(bytes);
  if (any % 16 == 0) return call(uint4{});
  any % 4 == 0 ? call(uint32_t{}) : call(uint8_t{});
}

unsigned blocks_for(int64_t warps) {
  return static_cast<unsigned>(warps > kWarps ? ceil_div(warps, kWarps) : 1);
}

void check_launch() { TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError()); }

// Bytes of a half for `most` rows of any rank.
int64_t half_bytes(int64_t ranks, int64_t most, int64_t topk, int64_t row_bytes,
                   int64_t scale_bytes) {
  return Places(static_cast<int>(ranks), most, topk, row_bytes, scale_bytes).end;
}

Dispatch dispatch_of(const Peers& g, const Rows& own, const TensorView& ids,
                     const TensorView& weights, const TensorView& plan, int64_t capacity,
                     int64_t slot_capacity, int64_t sequence, int64_t experts) {
  const DLDevice device = ids.device();
  TVM_FFI_ICHECK(experts > 0 && experts <= kMostExperts && experts % g.ranks == 0)
      << experts << " experts of " << g.ranks << " ranks";
  Dispatch d{};
  d.own = own;
  d.ids = checked_i64(ids, "topk_idx", device, 0);
  d.weights = checked_f32(weights, "topk_weights", device, ids.numel());
  d.plan = checked_i32(plan, "plan", device, 0);
  d.tokens = ids.size(0);
  d.capacity = capacity;
  d.slot_capacity = slot_capacity;
  d.sequence = sequence;
  d.experts = static_cast<int>(experts);
  d.counts = sequence != 0 || slot_capacity < (int64_t(1) << 31);
  return d;
}

// The tokens of this rank, and when all ranks have sent theirs, how many come. sequence: 0 where
// the host does not wait for the counts; capacity, slot_capacity: rows and slots that any rank may
// get then. plan int32 [W * (W * chunks + 1)].
void send(TensorView table, TensorView rows, Optional<TensorView> scales, TensorView ids,
          TensorView weights, TensorView plan, int64_t most, int64_t experts, int64_t capacity,
          int64_t slot_capacity, int64_t sequence, int64_t stream) {
  const Peers g = peers_of(table);
  const Rows own = checked_rows(rows, scales, ids.device());
  const Places p = places_of(g, most, ids.size(1), rows, scales);
  TVM_FFI_ICHECK(plan.numel() == g.ranks * (int64_t(g.ranks) * p.chunks + 1))
      << "plan has " << plan.numel() << " elements";
  TVM_FFI_ICHECK(rows.size(0) == ids.size(0)) << "rows and ids of different tokens";
  const Dispatch d =
      dispatch_of(g, own, ids, weights, plan, capacity, slot_capacity, sequence, experts);
  tvm::ffi::CUDADeviceGuard guard(ids.device().device_id);
  const auto blocks = static_cast<unsigned>(d.tokens > kChunk ? ceil_div(d.tokens, kChunk) : 1);
  in_units(own, own, p.row_bytes, [&](auto unit) {
    send_tokens<decltype(unit)><<<blocks, kThreads, 0, as_stream(stream)>>>(g, p, d);
  });
  check_launch();
  arrive_with_tokens<<<static_cast<unsigned>(g.ranks), kScanThreads, 0, as_stream(stream)>>>(g, p,
                                                                                           d);
  check_launch();
}

// What arrived: rows and scales as they were sent, ids int64 and weights fp32 [R, K], sources int32
// [R], places int32 [T, W]. The other arguments are those of `send`.
void take(TensorView table, TensorView rows, Optional<TensorView> scales, TensorView topk_idx,
          TensorView topk_weights, TensorView plan, int64_t most, int64_t experts, int64_t capacity,
          TensorView out, Optional<TensorView> out_scales, TensorView ids, TensorView weights,
          TensorView sources, TensorView places, int64_t stream) {
  const Peers g = peers_of(table);
  const DLDevice device = topk_idx.device();
  const int64_t received = out.size(0), topk = topk_idx.size(1);
  const Rows own = checked_rows(rows, scales, device);
  const Places p = places_of(g, most, topk, rows, scales);
  const Dispatch d = dispatch_of(g, own, topk_idx, topk_weights, plan, capacity, 0, 0, experts);
  const Taken t{checked_rows(out, out_scales, device), received,
                checked_i64(ids, "ids", device, received * topk),
                checked_f32(weights, "weights", device, received * topk),
                checked_i32(sources, "sources", device, received),
                checked_i32(places, "places", device, rows.size(0) * g.ranks)};
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  in_units(own, t.out, p.row_bytes, [&](auto unit) {
    take_tokens<decltype(unit)><<<static_cast<unsigned>(g.ranks * p.chunks), kThreads, 0,
                                 as_stream(stream)>>>(g, p, d, t);
  });
  check_launch();
}

// Rows [T, .] along the routes of a dispatch -> out [R, .], zeros where there is no row.
void again(TensorView table, TensorView rows, Optional<TensorView> scales, TensorView places,
           TensorView sources, int64_t most, TensorView out, Optional<TensorView> out_scales,
           int64_t stream) {
  const Peers g = peers_of(table);
  const DLDevice device = sources.device();
  const Rows own = checked_rows(rows, scales, device), to = checked_rows(out, out_scales, device);
  const Places p = places_of(g, most, 0, rows, scales);
  const int64_t tokens = rows.size(0), received = out.size(0);
  const int32_t* there = checked_i32(places, "places", device, tokens * g.ranks);
  const int32_t* come = checked_i32(sources, "sources", device, received);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  in_units(own, to, p.row_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    send_again<Unit>
        <<<blocks_for(tokens), kThreads, 0, as_stream(stream)>>>(g, p, own, there, tokens);
    arrive<<<1, kScanThreads, 0, as_stream(stream)>>>(g);
    take_again<Unit>
        <<<blocks_for(received), kThreads, 0, as_stream(stream)>>>(g, p, own, to, come, received);
  });
  check_launch();
}

template <typename T>
void launch_sum(const Peers& g, const Places& p, const Rows& own, void* out, float* weights,
                const int64_t* ids, int experts, const int32_t* places, int64_t tokens,
                cudaStream_t stream) {
  constexpr int kVec = 16 / sizeof(T);
  T* const to = static_cast<T*>(out);
  const uintptr_t any = reinterpret_cast<uintptr_t>(own.rows) | reinterpret_cast<uintptr_t>(out) |
                        static_cast<uintptr_t>(p.row_bytes);
  if (any % 16 == 0)
    sum_back<T, kVec><<<blocks_for(tokens), kThreads, 0, stream>>>(g, p, own, to, weights, ids,
                                                                  experts, places, tokens);
  else
    sum_back<T, 1><<<blocks_for(tokens), kThreads, 0, stream>>>(g, p, own, to, weights, ids,
                                                               experts, places, tokens);
}

// Rows [R, H] and fp32 weights [R, K] or none back to their tokens -> sums [T, H] and [T, K].
// topk_idx int64 [T, K]: of the dispatch, as is most_tokens; most: rows of any rank.
void back(TensorView table, TensorView rows, Optional<TensorView> weights, TensorView topk_idx,
          int64_t experts, TensorView places, TensorView sources, int64_t most_tokens, int64_t most,
          TensorView out, Optional<TensorView> out_weights, int64_t stream) {
  const Peers g = peers_of(table);
  const DLDevice device = sources.device();
  const Rows own = checked_rows(rows, weights, device);
  Places p = places_of(g, most, 0, rows, weights);
  p.topk = static_cast<int>(p.scale_bytes / 4);
  const int64_t tokens = out.size(0), received = rows.size(0);
  const int32_t* there = checked_i32(places, "places", device, tokens * g.ranks);
  const int32_t* come = checked_i32(sources, "sources", device, received);
  void* const to = checked_any(out, "out", device);
  float* const sums =
      weights.has_value()
          ? checked_f32(out_weights.value(), "out_weights", device, tokens * p.topk)
          : nullptr;
  const int64_t* ids = checked_i64(topk_idx, "topk_idx", device, tokens * p.topk);
  const int all = static_cast<int>(experts);
  TVM_FFI_ICHECK(out.size(1) == rows.size(1) && received <= most) << "rows and out do not fit";
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t on = as_stream(stream);
  in_units(own, own, p.row_bytes, [&](auto unit) {
    send_back<decltype(unit)><<<blocks_for(received), kThreads, 0, on>>>(
        g, p, own, come, received, static_cast<int>(most_tokens));
  });
  arrive<<<1, kScanThreads, 0, on>>>(g);
  if (is_type(rows, kDLBfloat, 16))
    launch_sum<__nv_bfloat16>(g, p, own, to, sums, ids, all, there, tokens, on);
  else if (is_type(rows, kDLFloat, 16))
    launch_sum<__half>(g, p, own, to, sums, ids, all, there, tokens, on);
  else
    launch_sum<float>(g, p, own, checked_f32(out, "out", device, 0), sums, ids, all, there, tokens,
                      on);
  check_launch();
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(half_bytes, sonicmoe::half_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(send, sonicmoe::send);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(take, sonicmoe::take);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(again, sonicmoe::again);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(back, sonicmoe::back);
