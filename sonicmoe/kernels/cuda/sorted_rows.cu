// Counts per expert of rows that already lie in expert order -> the routing metadata of K = 1, in
// one launch: slot t is row t of the caller.
//
// Every CTA scans the counts for itself, because E numbers out of L2 cost less than a second launch
// or a barrier of the grid. A row and a slot then find their expert by bisection in shared memory,
// so no array of ids is read, written or sorted.
#include "../host/border.hpp"
#include "../host/routing_places.hpp"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

constexpr int kScanThreads = 512;  // one for each expert, so also the most experts
constexpr int kItemsPerThread = 4;
constexpr int64_t kMostCtas = 2048;  // beyond, a thread takes more rows

struct SortedArguments {
  const void* counts;
  const float* probs;  // null: every probability is 1
  int32_t* expert_counts;
  int64_t* padded_offsets;
  int32_t* row_token;
  int64_t* slot_row;
  float* row_prob;
  int64_t num_tokens;
  int64_t num_rows;
  int num_experts;
  int alignment;
};

// The exclusive prefix of one value per expert, and behind the last expert the sum. Synchronises.
__device__ void scan_experts_into(int64_t* first, int64_t value, int experts) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) first[0] = 0;
  if (thread < experts) first[thread + 1] = value;
  __syncthreads();
  for (int distance = 1; distance < experts; distance *= 2) {
    const bool adds = thread >= distance && thread < experts;
    const int64_t below = adds ? first[thread + 1 - distance] : 0;
    __syncthreads();
    if (adds) first[thread + 1] += below;
    __syncthreads();
  }
}

// The expert whose part `at` lies in; experts without one are passed over. `experts` behind the end.
__device__ int expert_at(const int64_t* first, int64_t at, int experts) {
  int low = 0, high = experts;  // first[low] <= at, and first[high] > at or high is the end
  if (at >= first[experts]) return experts;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first[middle] <= at)
      low = middle;
    else
      high = middle;
  }
  return low;
}

template <typename Count>
__global__ void __launch_bounds__(kScanThreads)
    place_sorted_rows(const __grid_constant__ SortedArguments a) {
  __shared__ int64_t first_token[kScanThreads + 1];
  __shared__ int64_t first_row[kScanThreads + 1];
  const int expert = static_cast<int>(threadIdx.x);
  const bool known = expert < a.num_experts;
  const int64_t given = known ? __ldg(static_cast<const Count*>(a.counts) + expert) : 0;
  scan_experts_into(first_token, given > 0 ? given : 0, a.num_experts);
  // Counts of more rows than there are would let a GEMM gather beyond the tokens: the experts share
  // the rows that there are.
  if (known) first_token[expert + 1] = min(first_token[expert + 1], a.num_tokens);
  __syncthreads();
  const int64_t own = known ? first_token[expert + 1] - first_token[expert] : 0;
  const int64_t padded = (own + a.alignment - 1) / a.alignment * a.alignment;
  scan_experts_into(first_row, padded, a.num_experts);
  if (blockIdx.x == 0) {
    if (known) a.expert_counts[expert] = static_cast<int32_t>(own);
    if (known) a.padded_offsets[expert] = first_row[expert];
    if (expert == 0) a.padded_offsets[a.num_experts] = first_row[a.num_experts];
  }

  const int64_t stride = static_cast<int64_t>(gridDim.x) * kScanThreads;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * kScanThreads + threadIdx.x;
  for (int64_t row = begin; row < a.num_rows; row += stride) {
    const int owner = expert_at(first_row, row, a.num_experts);
    int64_t token = -1;
    if (owner < a.num_experts) {
      const int64_t at = first_token[owner] + row - first_row[owner];
      token = at < first_token[owner + 1] ? at : -1;
    }
    const float prob = a.probs != nullptr && token >= 0 ? __ldg(a.probs + token) : 1.f;
    a.row_token[row] = static_cast<int32_t>(token);
    a.row_prob[row] = token >= 0 ? prob : 0.f;
  }
  for (int64_t token = begin; token < a.num_tokens; token += stride) {
    const int owner = expert_at(first_token, token, a.num_experts);
    int64_t row = -1;
    if (owner < a.num_experts) row = first_row[owner] + token - first_token[owner];
    // A row beyond the buffers means that the counts on the host were too small.
    a.slot_row[token] = row < a.num_rows ? row : -1;
  }
}

// counts int32/int64 [E]; probs fp32 [T] or none; memory: as of `build_metadata`; rows: R.
void build_sorted(TensorView counts, Optional<TensorView> probs, TensorView memory, int64_t tokens,
                  int64_t rows, int64_t alignment, int64_t stream) {
  const int64_t experts = counts.numel();
  TVM_FFI_ICHECK(counts.ndim() == 1 && experts > 0 && experts <= kScanThreads)
      << "counts must be [experts], with 1 to " << kScanThreads << " experts";
  TVM_FFI_ICHECK(alignment > 0 && alignment <= (1 << 24)) << "alignment is " << alignment;
  TVM_FFI_ICHECK(tokens >= 0 && tokens < (int64_t(1) << 31))
      << "row_token is int32: at most 2^31 - 1 tokens";
  TVM_FFI_ICHECK(rows >= 0) << "there are " << rows << " rows";
  const DLDevice device = counts.device();
  const bool wide = is_type(counts, kDLInt, 64);
  const RoutingPlaces places(tokens, experts, rows);
  uint8_t* const base =
      aligned_16(checked_bytes(memory, "memory", device, places.bytes), "memory");
  SortedArguments a;
  a.counts = wide ? static_cast<void*>(checked_i64(counts, "counts", device, experts))
                  : checked_i32(counts, "counts", device, experts);
  a.probs = probs.has_value() ? checked_f32(probs.value(), "probs", device, tokens) : nullptr;
  a.expert_counts = reinterpret_cast<int32_t*>(base + places.expert_counts);
  a.padded_offsets = reinterpret_cast<int64_t*>(base + places.padded_offsets);
  a.row_token = reinterpret_cast<int32_t*>(base + places.row_token);
  a.slot_row = reinterpret_cast<int64_t*>(base + places.slot_row);
  a.row_prob = reinterpret_cast<float*>(base + places.row_prob);
  a.num_tokens = tokens;
  a.num_rows = rows;
  a.num_experts = static_cast<int>(experts);
  a.alignment = static_cast<int>(alignment);

  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const int64_t most = rows > tokens ? rows : tokens;
  const int64_t wanted = ceil_div(most, kScanThreads * kItemsPerThread);
  const int64_t at_least_one = wanted > 1 ? wanted : 1;
  const auto ctas = static_cast<unsigned>(at_least_one < kMostCtas ? at_least_one : kMostCtas);
  if (wide)
    place_sorted_rows<int64_t><<<ctas, kScanThreads, 0, as_stream(stream)>>>(a);
  else
    place_sorted_rows<int32_t><<<ctas, kScanThreads, 0, as_stream(stream)>>>(a);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(build_sorted, sonicmoe::build_sorted);
