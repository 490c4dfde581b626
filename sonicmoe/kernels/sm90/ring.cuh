// A place in a ring of stages, and how often the ring has been passed, as barriers count it.
#pragma once

namespace sonicmoe::sm90 {

template <int kCount>
struct RingOf {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      phase ^= 1;
    }
  }
  // By up to kCount stages.
  __device__ __forceinline__ void advance(int stages) {
    stage += stages;
    if (stage >= kCount) {
      stage -= kCount;
      phase ^= 1;
    }
  }
};

}  // namespace sonicmoe::sm90
