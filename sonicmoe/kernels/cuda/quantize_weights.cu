// The user's expert weights, where they lie, to E4M3 in both memory orders, one scale per 128 x 128
// block.
//
// A matrix is worked on in the order the user has it ("straight") and leaves a second time
// transposed ("flipped"). Which of the two is native depends on the layout; native w1 interleaves
// gate and up, so a tile of a split-half matrix is read from two places. CTAs are persistent: when
// nothing changed, the whole launch ends after one load per CTA.
#include <tvm/ffi/optional.h>

#include <algorithm>

#include "../host/border.hpp"
#include "byte_tile.cuh"
#include "quantize.cuh"
#include "weight_layout.cuh"
#include "weight_tiles.cuh"

namespace sonicmoe {
namespace {

using tvm::ffi::Optional;

// The maximum over the CTA's threads, in all of them. One barrier; the caller puts another before
// the next call.
template <int kThreads>
__device__ __forceinline__ float amax_of_cta(float amax, float (&warps)[kThreads / 32]) {
  amax = amax_of_lanes<32>(amax);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = amax;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) amax = fmaxf(amax, warps[warp]);
  return amax;
}

__device__ __forceinline__ void store_scale(const Projection<float>& m, const WeightTile& tile,
                                            float scale_inv) {
  const uint32_t tile_rows = m.tiles_per_matrix / m.tile_columns, row = tile.row / kTile,
                 column = tile.column / kTile;
  const uint32_t base = tile.matrix * m.tiles_per_matrix;
  if (m.straight != nullptr) m.straight_scale[base + row * m.tile_columns + column] = scale_inv;
  if (m.flipped != nullptr) m.flipped_scale[base + column * tile_rows + row] = scale_inv;
}

template <typename T>
constexpr int kCtasPerSm = sizeof(T) == 2 ? 3 : 1;

// state: [0] != 0 if the weights changed, [1] how many CTAs are done; both are 0 again after a
// launch that did the work.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kCtasPerSm<T>)
    quantize_tiles(const __grid_constant__ Work<float> work, int32_t* state, const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kThreads = Lane<T>::kThreads;
  __shared__ ByteTile flipped;
  __shared__ float warps[kThreads / 32];
  const Lane<T> at;
  Vector16<T> values[4][2];
  WeightTile tile = tile_at(work, blockIdx.x);
  {
    const Projection<float>& m = tile.down ? work.down : work.up;
    load_tile(values, m, tile, address_of(m, tile));
  }
  for (uint32_t index = blockIdx.x; index < work.tiles;) {
    index += gridDim.x;
    const bool more = index < work.tiles;
    const WeightTile next = tile_at(work, more ? index : 0);
    const Projection<float> &m = tile.down ? work.down : work.up,
                     &next_m = next.down ? work.down : work.up;
    const int64_t next_address = address_of(next_m, next);  // long before it is used

    float amax = 0.f;
#pragma unroll
    for (int j = 0; j < 4; ++j) amax = values[j][1].amax(values[j][0].amax(amax));
    const BlockScale scale = block_scale(amax_of_cta<kThreads>(amax, warps));
    if (threadIdx.x == 0) store_scale(m, tile, scale.scale_inv);
    const float multipliers[2] = {scale.multiplier, scale.multiplier};
    const Codes<T> codes(values, multipliers, m.column_half != 0);

    if (more) load_tile(values, next_m, next, next_address);  // flies while this tile is stored

    const int64_t matrix = static_cast<int64_t>(tile.matrix) * m.rows * m.columns;
    const int rows = m.rows - tile.row, columns = m.columns - tile.column;
    if (m.straight != nullptr) {
      const int64_t row = tile.row + at.quad * 4;
      codes.store(m.straight + matrix + row * m.columns + tile.column, m.columns,
                  rows - at.quad * 4, columns);
    }
    codes.put(flipped);
    __syncthreads();
    if (m.flipped != nullptr) {
      flipped.store<kThreads>(
          m.flipped + matrix + static_cast<int64_t>(tile.column) * m.rows + tile.row, m.rows,
          columns, rows);
    }
    tile = next;
  }
  // The last CTA to come here knows that every other one has read the state.
  if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == static_cast<int32_t>(gridDim.x) - 1)
    state[0] = state[1] = 0;
}

Output<float> output_of(const TensorView& codes, const TensorView& scale, const char* name,
                 DLDevice device, int64_t experts, int64_t rows, int64_t columns) {
  uint8_t* data = checked<uint8_t>(codes, name, static_cast<DLDataTypeCode>(codes.dtype().code), 8,
                                   device, experts * rows * columns);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " must start on a 16-byte boundary";
  return {data, checked_f32(scale, name, device,
                            experts * ceil_div(rows, kTile) * ceil_div(columns, kTile))};
}

Output<float> output_of(const Optional<TensorView>& codes, const Optional<TensorView>& scale,
                 const char* name, DLDevice device, int64_t experts, int64_t rows,
                 int64_t columns) {
  TVM_FFI_ICHECK(codes.has_value() == scale.has_value())
      << name << " needs both codes and scales, or neither";
  if (!codes.has_value()) return {nullptr, nullptr};
  return output_of(codes.value(), scale.value(), name, device, experts, rows, columns);
}

Projection<float> projection_of(const int64_t* addresses, const Output<float>& forward,
                                const Output<float>& dgrad, const Layout& layout, int64_t rows,
                                int64_t columns, int64_t half) {
  const Output<float>& straight = layout.transposed ? dgrad : forward;
  const Output<float>& flipped = layout.transposed ? forward : dgrad;
  return projection_of(addresses, straight, flipped, layout.transposed, rows, columns, half);
}

template <typename T>
void launch_tiles(const Work<float>& work, int32_t* state, bool force, int device, cudaStream_t stream) {
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const unsigned ctas = std::min<unsigned>(work.tiles, sms * kCtasPerSm<T>);
  quantize_tiles<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(work, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Quantise all weights if `force` or state[0] != 0, else do nothing; decided on the device.
// Afterwards state[0] is 0.
//
// w1 e4m3 [E, N1, H] (rows gate_0, up_0, gate_1, ... of split halves), w2 [E, H, I]; w1_dgrad [E,
// H, N1] and w2_dgrad [E, I, H] are their transposes, or None. Scales fp32, one per 128 x 128
// block. The rest: see `check_weights`.
void quantize_weights(TensorView addresses, TensorView w1, TensorView w1_scale, TensorView w2,
                      TensorView w2_scale, Optional<TensorView> w1_dgrad,
                      Optional<TensorView> w1_dgrad_scale, Optional<TensorView> w2_dgrad,
                      Optional<TensorView> w2_dgrad_scale, bool transposed, bool split_half,
                      tvm::ffi::String dtype, TensorView state, bool force, int64_t stream) {
  TVM_FFI_ICHECK(w1.ndim() == 3 && w2.ndim() == 3) << "w1 must be [E, N1, H], w2 [E, H, I]";
  const Layout layout(addresses, w1.size(1), w1.size(2), w2.size(2), transposed, split_half, dtype);
  TVM_FFI_ICHECK(w1.size(0) == layout.experts && w2.size(0) == layout.experts &&
                 w2.size(1) == layout.hidden)
      << "w1, w2 and the addresses are of different experts or sizes";
  const DLDevice device = addresses.device();
  const int64_t experts = layout.experts, n1 = layout.n1, hidden = layout.hidden,
                inner = layout.intermediate;
  const Output<float> forward1 = output_of(w1, w1_scale, "w1", device, experts, n1, hidden);
  const Output<float> forward2 = output_of(w2, w2_scale, "w2", device, experts, hidden, inner);
  const Output<float> dgrad1 =
      output_of(w1_dgrad, w1_dgrad_scale, "w1_dgrad", device, experts, hidden, n1);
  const Output<float> dgrad2 =
      output_of(w2_dgrad, w2_dgrad_scale, "w2_dgrad", device, experts, inner, hidden);
  Work<float> work{projection_of(layout.addresses, forward1, dgrad1, layout, layout.up_rows(),
                          layout.up_columns(), split_half ? inner : 0),
            projection_of(layout.down_addresses(), forward2, dgrad2, layout, layout.down_rows(),
                          layout.down_columns(), 0),
            0, 0};
  const int64_t up = experts * work.up.tiles_per_matrix,
                all = up + experts * work.down.tiles_per_matrix;
  TVM_FFI_ICHECK(all < (int64_t(1) << 31)) << all << " tiles exceed one launch";
  work.up_tiles = static_cast<uint32_t>(up), work.tiles = static_cast<uint32_t>(all);
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  if (layout.element == ElementType::kBfloat16)
    return launch_tiles<__nv_bfloat16>(work, flags, force, device.device_id, as_stream(stream));
  if (layout.element == ElementType::kFloat16)
    return launch_tiles<__half>(work, flags, force, device.device_id, as_stream(stream));
  launch_tiles<float>(work, flags, force, device.device_id, as_stream(stream));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_weights, sonicmoe::quantize_weights);
