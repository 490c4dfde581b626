// Where the tensors of a routing lie in the one memory that its builder fills: five allocations
// would take the host longer than the launch.
#pragma once

#include <cstdint>

namespace sonicmoe {

// Bytes from the beginning of the memory, in the order of `RoutingMetadata.TENSOR_FIELDS`; then how
// many there are in all.
struct RoutingPlaces {
  int64_t bytes = 0, expert_counts, padded_offsets, row_token, slot_row, row_prob;

  RoutingPlaces(int64_t slots, int64_t experts, int64_t rows)
      : expert_counts(take(experts, sizeof(int32_t))),
        padded_offsets(take(experts + 1, sizeof(int64_t))),
        row_token(take(rows, sizeof(int32_t))),
        slot_row(take(slots, sizeof(int64_t))),
        row_prob(take(rows, sizeof(float))) {}

 private:
  int64_t take(int64_t count, int64_t size) {
    constexpr int64_t kAlignment = 128;
    const int64_t first = bytes;
    bytes += (count * size + kAlignment - 1) / kAlignment * kAlignment;
    return first;
  }
};

}  // namespace sonicmoe
