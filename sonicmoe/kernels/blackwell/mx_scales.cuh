// Scales of MXFP8: one byte (UE8M0, the exponent of a power of two) for 32 codes of the contraction.
//
// Tensor cores read them in atoms of 512 bytes, 128 rows x 4 blocks of 32: the byte of row m and
// block k lies at 16 (m % 32) + 4 (m / 32) + k. In a matrix of 32 x 32 blocks the byte does not
// depend on m % 32, so an atom is 16 bytes written 32 times, and the atom of the transposed matrix
// is the transpose of those 16 bytes. Equals quant/reference.py with power-of-two scales, bit for
// bit.
#pragma once

#include "../cuda/byte_tile.cuh"
#include "../cuda/quantize.cuh"

namespace sonicmoe {
namespace {

constexpr int kMxBlock = 32;
constexpr int kBlocks = kTile / kMxBlock;  // of a tile, which is an atom, along each axis
constexpr int kAtomBytes = kTile * kBlocks;
constexpr int kAtomThreads = kAtomBytes / 16;  // 16 bytes each

struct MxScale {
  uint8_t byte;
  float multiplier;
};

// amax >= 0, not NaN. The quotient is normal, so adding the mask to its bits rounds it up to a power
// of two. An infinite amax gives the byte of NaN and multiplier 0, as in `block_scale`.
__device__ __forceinline__ MxScale mx_scale(float amax) {
  const float quotient = __fdiv_rn(fmaxf(amax, kAmaxFloor), kE4m3Max);
  const uint32_t exponent = (__float_as_uint(quotient) + 0x7fffffu) >> 23;
  const uint32_t inverse = exponent == 0xffu ? 0u : (254u - exponent) << 23;
  return {static_cast<uint8_t>(exponent), __uint_as_float(inverse)};
}

// The scales of a tile: [rows / 32][columns / 32], and transposed.
struct alignas(16) TileScales {
  uint8_t by_rows[kBlocks * kBlocks], by_columns[kBlocks * kBlocks];

  __device__ __forceinline__ void put(int row_block, int column_block, uint8_t byte) {
    by_rows[row_block * kBlocks + column_block] = byte;
    by_columns[column_block * kBlocks + row_block] = byte;
  }
  // Both atoms of the tile, where they are wanted: contracted along the columns, and along the rows.
  // The first 2 x 32 threads of the CTA write them.
  __device__ __forceinline__ void store(uint8_t* along_columns, uint8_t* along_rows) const {
    const int part = threadIdx.x % kAtomThreads;
    uint8_t* atom = threadIdx.x < kAtomThreads ? along_columns : along_rows;
    if (threadIdx.x >= 2 * kAtomThreads || atom == nullptr) return;
    const uint8_t* from = threadIdx.x < kAtomThreads ? by_rows : by_columns;
    *reinterpret_cast<uint4*>(atom + 16 * part) = *reinterpret_cast<const uint4*>(from);
  }
};

}  // namespace
}  // namespace sonicmoe
