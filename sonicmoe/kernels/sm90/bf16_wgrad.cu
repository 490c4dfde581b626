// Entry point of the BF16 weight-gradient GEMM.
#include "bf16_wgrad.cuh"
#include "bf16_launch.hpp"
#include "fetched_sums.hpp"
#include "wgrad_destination.hpp"

namespace sonicmoe {
namespace {

struct Launch {
  sm90::HalfWgradParams params;
  CUtensorMap rows;
  int64_t multiprocessors;
  DLDevice device;
  int64_t stream;
};

// Experts [first, last); maps: of C, one for all experts, or from `maps[first]` on one for each.
template <bool kTransposed, int kMaps>
void launch_wgrad(const Launch& launch, int64_t first, int64_t last, const CUtensorMap* maps_of_c,
                  const WgradDestinationObj& destination) {
  sm90::WgradMaps<kMaps> maps;
  maps.b = launch.rows;
  sm90::HalfWgradParams p = launch.params;
  p.first_expert = static_cast<int>(first);
  p.last_expert = static_cast<int>(last);
  if constexpr (kMaps > 1) {
    std::copy(maps_of_c + first, maps_of_c + last, maps.c);
    for (int64_t e = first; e < last; ++e)
      p.skipped[(e - first) / 32] |= uint32_t(!destination.is_wanted(e)) << (e - first) % 32;
  } else {
    maps.c[0] = *maps_of_c;
  }
  const auto kernel =
      fetches_sums(p.output, p.rows, destination.experts(), kRowsToFetchHalf, launch.device)
          ? sm90::bf16_wgrad<kTransposed, true, kMaps>
          : sm90::bf16_wgrad<kTransposed, false, kMaps>;
  launch_persistent(kernel, launch.multiprocessors, launch.device, launch.stream, maps, p);
}

template <bool kTransposed>
void launch_all(const Launch& launch, const WgradDestinationObj& destination) {
  const int64_t experts = destination.experts();
  const CUtensorMap* maps = destination.maps().data();
  if (destination.has_one_map()) {
    launch_wgrad<kTransposed, 1>(launch, 0, experts, maps, destination);
    return;
  }
  for (int64_t first = 0; first < experts; first += sm90::kManyMaps)
    launch_wgrad<kTransposed, sm90::kManyMaps>(
        launch, first, std::min<int64_t>(first + sm90::kManyMaps, experts), maps, destination);
}

// The sums over an expert's rows of rows[r]^T tokens[row_token[r]] (tokens_first: of its transpose)
// go where `destination` says: added in fp32, or written in fp32 or bf16, with zeros for an expert
// without rows. tokens [T, H]; rows [R, W] in expert order. The destination's matrices are [W, H],
// or [H, W] with tokens_first; one in two parts has the first and the last half of W as parts.
// counts int32 [E]: rows of an expert behind these are padding. An expert whose gradient nobody
// wants is not computed. multiprocessors: how many at most; 0: all.
void wgrad(TensorView tokens, TensorView rows, bool tokens_first, TensorView row_token,
           TensorView padded_offsets, TensorView counts, WgradDestination destination,
           int64_t multiprocessors, int64_t stream) {
  if (!destination->is_wanted()) return;
  TVM_FFI_ICHECK(tokens.ndim() == 2 && rows.ndim() == 2) << "tokens and rows must be matrices";
  const DLDevice device = tokens.device();
  const int64_t experts = destination->experts(), hidden = tokens.size(1), width = rows.size(1),
                count = rows.size(0);
  const auto [m, n] = tokens_first ? std::pair(hidden, width) : std::pair(width, hidden);
  TVM_FFI_ICHECK(destination->m == m && destination->n == n)
      << "gradients are [" << destination->m << ", " << destination->n << "], and these operands "
      << "make [" << m << ", " << n << "]";
  TVM_FFI_ICHECK(hidden % 8 == 0 && width % 8 == 0) << "needed: columns in multiples of 8";
  TVM_FFI_CHECK(count > 0 || destination->output == sm90::WgradOutput::kAddF32, ValueError)
      << "R is 0; needed: rows, or zeros written by the caller";
  if (count == 0) return;
  Launch launch{};
  sm90::HalfWgradParams& p = launch.params;
  p.tokens = checked_half(tokens, "tokens", device, tokens.numel());
  p.row_token = aligned_16(checked_i32(row_token, "row_token", device, count), "row_token");
  p.padded_offsets = checked_i64(padded_offsets, "padded_offsets", device, experts + 1);
  p.counts = checked_i32(counts, "counts", device, experts);
  p.rows = count;
  p.m = static_cast<int>(hidden);
  p.parts = destination->split ? 2 : 1;
  p.n = static_cast<int>(width / p.parts);
  p.output = destination->output;
  const void* data = checked_half(rows, "rows", device, rows.numel());
  launch.rows = matrix_map(data, count, width, sm90::kHalfTileK, 2);
  launch.multiprocessors = multiprocessors, launch.device = device, launch.stream = stream;
  const bool transposed = tokens_first == destination->swapped();
  TVM_FFI_CHECK(transposed || !destination->split, ValueError)
      << "a gradient in two parts must be contiguous along the tokens' columns";
  transposed ? launch_all<true>(launch, *destination.get())
             : launch_all<false>(launch, *destination.get());
}

WgradDestination wgrad_destination(int64_t m, int64_t n, bool split,
                                   tvm::ffi::Array<int64_t> places, int64_t output) {
  return WgradDestination(tvm::ffi::make_object<WgradDestinationObj>(m, n, split, places, output));
}

}  // namespace
}  // namespace sonicmoe

TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgrad, sonicmoe::wgrad);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgrad_destination, sonicmoe::wgrad_destination);
