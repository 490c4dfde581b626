// The numbers on which kernels, passes and Python must agree. Each is defined here and nowhere
// else: kernels assert that their tiles have these sizes, and the modules export what Python needs.
#pragma once

#include <cstdint>

namespace sonicmoe {

constexpr int kRowAlignment = 128;  // rows to which routing pads an expert: those of a GEMM's tile
constexpr int kScaleBlock = 128;    // elements of a row, or rows and columns, that share a scale
constexpr int kGateUpBlock = 256;   // of interleaved gate and up (rows of w1, columns of dz) that
                                    // share a scale: 128 of each
constexpr int kDprobColumns = 256;  // columns of dy1 that dgated adds up before it writes a partial
                                    // sum of dprobs: those of its tile

}  // namespace sonicmoe
