// The user's expert weights, where they lie, to E4M3 in both memory orders. w1 has one scale per
// 256 rows (128 of gate and 128 of up) and 128 columns of its native order, w2 one per 128 x 128.
//
// A matrix is worked on in the order the user has it ("straight") and leaves a second time
// transposed ("flipped"). Which of the two is native depends on the layout; native w1 interleaves
// gate and up, so a tile of a split-half matrix is read from two places. A CTA takes two tiles at a
// time, neighbours along N1: in w1 they share a scale. CTAs are persistent: when nothing changed,
// the whole launch ends after one load per CTA.
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

static_assert(kGateUpBlock == 2 * kTile, "two tiles share a scale of w1");

// The maxima of two tiles over the CTA's threads, in all of them. One barrier; the caller puts
// another before the next call.
template <int kThreads>
__device__ __forceinline__ void amax_of_cta(float (&amax)[2], float2 (&warps)[kThreads / 32]) {
#pragma unroll
  for (int t = 0; t < 2; ++t) amax[t] = amax_of_lanes<32>(amax[t]);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = make_float2(amax[0], amax[1]);
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    amax[0] = fmaxf(amax[0], warps[warp].x);
    amax[1] = fmaxf(amax[1], warps[warp].y);
  }
}

// The tiles of all matrices in twos, `tiles_per_matrix` of a projection being its number of twos.
struct Pairs {
  Work<float> work;
  bool along_rows;  // of the user's matrices: N1 is there
};

struct TilePair {
  bool down;
  uint32_t matrix, row, column;  // in pairs along the one axis, in tiles along the other
};

__device__ __forceinline__ TilePair pair_at(const Work<float>& work, uint32_t index) {
  const WeightTile at = tile_at(work, index);
  return {at.down, at.matrix, static_cast<uint32_t>(at.row / kTile),
          static_cast<uint32_t>(at.column / kTile)};
}

// Tile `t` of the pair. The second may lie behind the matrix: it is read as zeros then and not
// stored.
__device__ __forceinline__ WeightTile tile_of(const TilePair& pair, bool along_rows, int t) {
  const int row = pair.row, column = pair.column;
  return {pair.down, pair.matrix, (along_rows ? 2 * row + t : row) * kTile,
          (along_rows ? column : 2 * column + t) * kTile};
}

// w1 has a scale for a pair, w2 one for each of its tiles.
__device__ __forceinline__ void store_scale(const Projection<float>& m, const TilePair& pair,
                                            bool along_rows, int t, float scale_inv) {
  const uint32_t pair_rows = m.tiles_per_matrix / m.tile_columns;
  uint32_t rows = pair_rows, columns = m.tile_columns, row = pair.row, column = pair.column;
  if (pair.down && along_rows) {
    rows = (m.rows + kTile - 1) / kTile, row = 2 * row + t;
  } else if (pair.down) {
    columns = (m.columns + kTile - 1) / kTile, column = 2 * column + t;
  }
  if (row >= rows || column >= columns) return;
  const uint32_t base = pair.matrix * rows * columns;
  if (m.straight != nullptr) m.straight_scale[base + row * columns + column] = scale_inv;
  if (m.flipped != nullptr) m.flipped_scale[base + column * rows + row] = scale_inv;
}

template <typename T>
constexpr int kCtasPerSm = sizeof(T) == 2 ? 2 : 1;

// state: [0] != 0 if the weights changed, [1] how many CTAs are done; both are 0 again after a
// launch that did the work.
template <typename T>
__global__ void __launch_bounds__(Lane<T>::kThreads, kCtasPerSm<T>)
    quantize_tiles(const __grid_constant__ Pairs pairs, int32_t* state, const bool force) {
  if (!force && *static_cast<volatile int32_t*>(state) == 0) return;
  constexpr int kThreads = Lane<T>::kThreads;
  __shared__ ByteTile flipped[2];
  __shared__ float2 warps[kThreads / 32];
  const Work<float>& work = pairs.work;
  const Lane<T> at;
  Vector16<T> values[2][4][2];
  TilePair pair = pair_at(work, blockIdx.x);
  {
    const Projection<float>& m = pair.down ? work.down : work.up;
    const WeightTile first = tile_of(pair, pairs.along_rows, 0);
    const Beginning begin = beginning_of<T>(m, first);
    load_tile(values[0], m, first, begin);
    load_tile(values[1], m, tile_of(pair, pairs.along_rows, 1), begin);
  }
  for (uint32_t index = blockIdx.x; index < work.tiles;) {
    index += gridDim.x;
    const bool more = index < work.tiles;
    const TilePair next = pair_at(work, more ? index : 0);
    const Projection<float>&m = pair.down ? work.down : work.up,
          &next_m = next.down ? work.down : work.up;
    const Beginning next_begin =
        beginning_of<T>(next_m, tile_of(next, pairs.along_rows, 0));  // long before it is used

    float amax[2] = {0.f, 0.f};
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j) amax[t] = values[t][j][1].amax(values[t][j][0].amax(amax[t]));
    amax_of_cta<kThreads>(amax, warps);
    if (!pair.down) amax[0] = amax[1] = fmaxf(amax[0], amax[1]);
    const BlockScale scale[2] = {block_scale(amax[0]), block_scale(amax[1])};
    if (threadIdx.x == 0) store_scale(m, pair, pairs.along_rows, 0, scale[0].scale_inv);
    if (threadIdx.x == 0 && pair.down)
      store_scale(m, pair, pairs.along_rows, 1, scale[1].scale_inv);
    const float multipliers[2][2] = {{scale[0].multiplier, scale[0].multiplier},
                                     {scale[1].multiplier, scale[1].multiplier}};
    const Codes<T> codes[2] = {{values[0], multipliers[0], m.column_half != 0},
                               {values[1], multipliers[1], m.column_half != 0}};

    if (more) {  // fly while these tiles are stored
#pragma unroll
      for (int t = 0; t < 2; ++t)
        load_tile(values[t], next_m, tile_of(next, pairs.along_rows, t), next_begin);
    }

    const int64_t matrix = static_cast<int64_t>(pair.matrix) * m.rows * m.columns;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const WeightTile tile = tile_of(pair, pairs.along_rows, t);
      if (m.straight != nullptr) {
        const int64_t row = tile.row + at.quad * 4;
        codes[t].store(m.straight + matrix + row * m.columns + tile.column, m.columns,
                       m.rows - tile.row - at.quad * 4, m.columns - tile.column);
      }
      if (m.flipped != nullptr) codes[t].put(flipped[t]);
    }
    __syncthreads();  // also where nothing was put: `warps` is written again
    if (m.flipped != nullptr) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const WeightTile tile = tile_of(pair, pairs.along_rows, t);
        flipped[t].store<kThreads>(
            m.flipped + matrix + static_cast<int64_t>(tile.column) * m.rows + tile.row, m.rows,
            m.columns - tile.column, m.rows - tile.row);
      }
    }
    pair = next;
  }
  // The last CTA to come here knows that every other one has read the state.
  if (threadIdx.x == 0 && atomicAdd(state + 1, 1) == static_cast<int32_t>(gridDim.x) - 1)
    state[0] = state[1] = 0;
}

Output<float> output_of(const TensorView& codes, const TensorView& scale, const char* name,
                        DLDevice device, int64_t experts, int64_t rows, int64_t columns,
                        int64_t scales) {
  uint8_t* data = checked<uint8_t>(codes, name, static_cast<DLDataTypeCode>(codes.dtype().code), 8,
                                   device, experts * rows * columns);
  TVM_FFI_ICHECK(reinterpret_cast<uintptr_t>(data) % 16 == 0)
      << name << " must start on a 16-byte boundary";
  return {data, checked_f32(scale, name, device, experts * scales)};
}

Output<float> output_of(const Optional<TensorView>& codes, const Optional<TensorView>& scale,
                        const char* name, DLDevice device, int64_t experts, int64_t rows,
                        int64_t columns, int64_t scales) {
  TVM_FFI_ICHECK(codes.has_value() == scale.has_value())
      << name << " needs both codes and scales, or neither";
  if (!codes.has_value()) return {nullptr, nullptr};
  return output_of(codes.value(), scale.value(), name, device, experts, rows, columns, scales);
}

// With its tiles in pairs along the axis that has N1 in the user's w1: `tile_columns` and
// `tiles_per_matrix` count pairs.
Projection<float> projection_of(const int64_t* addresses, const Output<float>& forward,
                                const Output<float>& dgrad, const Layout& layout, int64_t rows,
                                int64_t columns, int64_t half) {
  const Output<float>& straight = layout.transposed ? dgrad : forward;
  const Output<float>& flipped = layout.transposed ? forward : dgrad;
  Projection<float> m =
      projection_of(addresses, straight, flipped, layout.transposed, rows, columns, half);
  const int64_t pair_rows = ceil_div(rows, layout.transposed ? kTile : 2 * kTile),
                pair_columns = ceil_div(columns, layout.transposed ? 2 * kTile : kTile);
  m.tile_columns = static_cast<uint32_t>(pair_columns);
  m.tiles_per_matrix = static_cast<uint32_t>(pair_rows * pair_columns);
  return m;
}

template <typename T>
void launch_tiles(const Pairs& pairs, int32_t* state, bool force, int device, cudaStream_t stream) {
  int sms = 0;
  TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  const unsigned ctas = std::min<unsigned>(pairs.work.tiles, sms * kCtasPerSm<T>);
  quantize_tiles<T><<<ctas, Lane<T>::kThreads, 0, stream>>>(pairs, state, force);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// Quantise all weights if `force` or state[0] != 0, else do nothing; decided on the device.
// Afterwards state[0] is 0.
//
// w1 e4m3 [E, N1, H] (rows gate_0, up_0, gate_1, ... of split halves), w2 [E, H, I]; w1_dgrad [E,
// H, N1] and w2_dgrad [E, I, H] are their transposes, or None. Scales fp32: of w1 [E, ceil(N1 /
// 256), ceil(H / 128)], of w2 one per 128 x 128 block, and their transposes. The rest: see
// `check_weights`.
void quantize_weights(TensorView addresses, TensorView w1, TensorView w1_scale, TensorView w2,
                      TensorView w2_scale, Optional<TensorView> w1_dgrad,
                      Optional<TensorView> w1_dgrad_scale, Optional<TensorView> w2_dgrad,
                      Optional<TensorView> w2_dgrad_scale, bool transposed, bool split_half,
                      bool apart, tvm::ffi::String dtype, TensorView state, bool force,
                      int64_t stream) {
  TVM_FFI_ICHECK(w1.ndim() == 3 && w2.ndim() == 3) << "w1 must be [E, N1, H], w2 [E, H, I]";
  const Layout layout(addresses, w1.size(1), w1.size(2), w2.size(2), transposed, split_half, apart,
                      dtype);
  TVM_FFI_ICHECK(w1.size(0) == layout.experts && w2.size(0) == layout.experts &&
                 w2.size(1) == layout.hidden)
      << "w1, w2 and the addresses are of different experts or sizes";
  const DLDevice device = addresses.device();
  const int64_t experts = layout.experts, n1 = layout.n1, hidden = layout.hidden,
                inner = layout.intermediate;
  const int64_t scales1 = ceil_div(n1, kGateUpBlock) * ceil_div(hidden, kTile),
                scales2 = ceil_div(hidden, kTile) * ceil_div(inner, kTile);
  const Output<float> forward1 =
      output_of(w1, w1_scale, "w1", device, experts, n1, hidden, scales1);
  const Output<float> forward2 =
      output_of(w2, w2_scale, "w2", device, experts, hidden, inner, scales2);
  const Output<float> dgrad1 =
      output_of(w1_dgrad, w1_dgrad_scale, "w1_dgrad", device, experts, hidden, n1, scales1);
  const Output<float> dgrad2 =
      output_of(w2_dgrad, w2_dgrad_scale, "w2_dgrad", device, experts, inner, hidden, scales2);
  Pairs pairs{{projection_of(layout.addresses, forward1, dgrad1, layout, layout.up_rows(),
                             layout.up_columns(), split_half ? inner : 0),
               projection_of(layout.down_addresses(), forward2, dgrad2, layout, layout.down_rows(),
                             layout.down_columns(), 0),
               0, 0},
              !transposed};
  Work<float>& work = pairs.work;
  const int64_t up = experts * work.up.tiles_per_matrix,
                all = up + experts * work.down.tiles_per_matrix;
  TVM_FFI_ICHECK(all < (int64_t(1) << 30)) << all << " pairs of tiles exceed one launch";
  work.up.second = layout.second();
  work.up_tiles = static_cast<uint32_t>(up), work.tiles = static_cast<uint32_t>(all);
  int32_t* flags = checked_i32(state, "state", device, 2);
  tvm::ffi::CUDADeviceGuard guard(device.device_id);
  if (layout.element == ElementType::kBfloat16)
    return launch_tiles<__nv_bfloat16>(pairs, flags, force, device.device_id, as_stream(stream));
  if (layout.element == ElementType::kFloat16)
    return launch_tiles<__half>(pairs, flags, force, device.device_id, as_stream(stream));
  launch_tiles<float>(pairs, flags, force, device.device_id, as_stream(stream));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(quantize_weights, sonicmoe::quantize_weights);
