// Per-token gather-and-sum of expert rows: out[t] = sum over k of w * rows[slot_row[t, k]], slots
// without a row skipped.
//
// A warp owns some columns of one token and adds its rows in slot order in fp32, product and sum
// rounded separately: the result does not depend on the launch, and equals plain tensor operations
// bit for bit.
#include "../host/border.hpp"
#include "row_values.cuh"

namespace sonicmoe {
namespace {

constexpr int kWarps = 8;
constexpr unsigned kFull = 0xffffffffu;

struct Sizes {
  int64_t rows;
  unsigned tokens;
  int width, topk;
  unsigned warps_per_token;
};

// A warp owns kVectors x 32 vectors of one token's columns: lane l of vector v holds the one at 32
// v + l.
//
// kVectors x kTogether loads of a lane are in flight together. Wide rather than deep: a token that
// has one row here, as under expert parallelism, then still has kVectors of them; and no more of
// either, because resident warps hide latency as well.
template <typename Row, typename Out, int kVec, int kVectors, int kTogether>
__global__ void __launch_bounds__(kWarps * 32,
                                  kVectors == 1 ? 6 : 7 - kVectors - (sizeof(Out) == 4))
    aggregate_rows(const Row* __restrict__ rows, const int64_t* __restrict__ slot_row,
                   const float* __restrict__ row_prob, Out* __restrict__ out, const Sizes n) {
  const int lane = threadIdx.x % 32;
  const unsigned warp = blockIdx.x * kWarps + threadIdx.x / 32;
  const unsigned token = warp / n.warps_per_token;
  if (token >= n.tokens) return;
  const int column =
      static_cast<int>((warp - token * n.warps_per_token) * (32 * kVectors) + lane) * kVec;
  const int64_t* slots = slot_row + static_cast<int64_t>(token) * n.topk;

  float sum[kVectors][kVec] = {};
  for (int first = 0; first < n.topk; first += 32) {
    const int64_t row = first + lane < n.topk ? __ldg(slots + first + lane) : -1;
    const bool valid = row >= 0 && row < n.rows;
    const float prob = valid && row_prob != nullptr ? __ldg(row_prob + row) : 1.f;
    unsigned left = __ballot_sync(kFull, valid);
    while (left != 0) {
      Packed<Row, kVec> loaded[kTogether][kVectors];
      unsigned pending = left;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int64_t from = __shfl_sync(kFull, row, __ffs(pending) - 1);
        const Row* address = rows + from * n.width + column;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          loaded[j][v].clear();
          if (pending != 0 && column + v * 32 * kVec < n.width)
            loaded[j][v].load(address + v * 32 * kVec);
        }
        pending &= pending - 1;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (left != 0) {
          const float weight = __shfl_sync(kFull, prob, __ffs(left) - 1);
          left &= left - 1;
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < kVec; ++i)
              sum[v][i] = __fadd_rn(sum[v][i], __fmul_rn(loaded[j][v].get(i), weight));
          }
        }
      }
    }
  }
  Out* target = out + static_cast<int64_t>(token) * n.width + column;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (column + v * 32 * kVec < n.width) store<Out, kVec>(target + v * 32 * kVec, sum[v]);
  }
}

struct Call {
  const void* rows;
  const int64_t* slot_row;
  const float* row_prob;
  void* out;
  Sizes n;
  cudaStream_t stream;
};

template <typename Row, typename Out, int kVec, int kVectors, int kTogether>
void launch(const Call& call) {
  Sizes n = call.n;
  n.warps_per_token = static_cast<unsigned>(ceil_div(n.width, 32 * kVectors * kVec));
  const int64_t blocks = ceil_div(static_cast<int64_t>(n.tokens) * n.warps_per_token, kWarps);
  TVM_FFI_ICHECK(blocks * kWarps < (int64_t(1) << 32))
      << n.tokens << " tokens of " << n.width << " columns exceed one launch";
  aggregate_rows<Row, Out, kVec, kVectors, kTogether>
      <<<static_cast<unsigned>(blocks), kWarps * 32, 0, call.stream>>>(
          static_cast<const Row*>(call.rows), call.slot_row, call.row_prob,
          static_cast<Out*>(call.out), n);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

template <typename Row, typename Out>
void launch_widest(const Call& call) {
  constexpr int kVec = 16 / sizeof(Row);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(call.rows) | reinterpret_cast<uintptr_t>(call.out)) % 16 == 0;
  if (call.n.width % kVec != 0 || !aligned) {
    launch<Row, Out, 1, 1, 4>(call);
  } else if (ceil_div(call.n.width, 32 * kVec) % 3 == 0) {
    launch<Row, Out, kVec, 3, 2>(call);
  } else {
    launch<Row, Out, kVec, 4, 2>(call);
  }
}

// Rows and results of one dtype, or one of them fp32.
template <typename Row>
void launch_half(const TensorView& out, const Call& call) {
  is_type(out, kDLFloat, 32) ? launch_widest<Row, float>(call) : launch_widest<Row, Row>(call);
}

void launch_float(const TensorView& out, const Call& call) {
  if (is_type(out, kDLBfloat, 16)) return launch_widest<float, __nv_bfloat16>(call);
  if (is_type(out, kDLFloat, 16)) return launch_widest<float, __half>(call);
  launch_widest<float, float>(call);
}

void* checked_values(const TensorView& tensor, const char* name, DLDevice device) {
  const bool half = is_type(tensor, kDLBfloat, 16) || is_type(tensor, kDLFloat, 16);
  TVM_FFI_ICHECK(half || is_type(tensor, kDLFloat, 32))
      << name << " must be bfloat16, float16 or float32";
  const DLDataType dtype = tensor.dtype();
  return checked<void>(tensor, name, static_cast<DLDataTypeCode>(dtype.code), dtype.bits, device,
                       0);
}

// rows [R, H]; slot_row int64 [T, K]; row_prob fp32 [R], read only when `weighted`; out [T, H],
// every element written.
void aggregate(TensorView rows, TensorView slot_row, TensorView row_prob, TensorView out,
               bool weighted, int64_t stream) {
  TVM_FFI_ICHECK(rows.ndim() == 2 && out.ndim() == 2 && slot_row.ndim() == 2)
      << "rows, out and slot_row must be matrices";
  TVM_FFI_ICHECK(rows.size(1) == out.size(1))
      << "rows have " << rows.size(1) << " columns, out has " << out.size(1);
  TVM_FFI_ICHECK(slot_row.size(0) == out.size(0))
      << "slot_row is for " << slot_row.size(0) << " tokens, out for " << out.size(0);
  const DLDevice device = rows.device();
  const void* rows_data = checked_values(rows, "rows", device);
  void* out_data = checked_values(out, "out", device);
  const int64_t* slot_row_data = checked_i64(slot_row, "slot_row", device, 0);
  const float* prob_data =
      weighted ? checked_f32(row_prob, "row_prob", device, rows.size(0)) : nullptr;
  TVM_FFI_ICHECK(out.size(0) < (int64_t(1) << 31) && out.size(1) < (1 << 30))
      << "out has " << out.size(0) << " x " << out.size(1) << " elements";
  const Sizes n{rows.size(0), static_cast<unsigned>(out.size(0)), static_cast<int>(out.size(1)),
                static_cast<int>(slot_row.size(1)), 0};
  if (n.tokens == 0 || n.width == 0) return;
  const DLDataType from = rows.dtype(), to = out.dtype();
  TVM_FFI_ICHECK(from.bits == 32 || to.bits == 32 || from.code == to.code)
      << "rows and out are two different 16-bit types";
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  const Call call{rows_data, slot_row_data, prob_data, out_data, n, as_stream(stream)};
  if (is_type(rows, kDLFloat, 32)) return launch_float(out, call);
  is_type(rows, kDLBfloat, 16) ? launch_half<__nv_bfloat16>(out, call)
                               : launch_half<__half>(out, call);
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(aggregate_rows, sonicmoe::aggregate);
