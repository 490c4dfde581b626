// A 128 x 128 tile of bytes that goes into shared memory by rows and comes out by columns, 16 bytes
// at a time, without bank conflicts.
#pragma once

#include <cstdint>

#include "../numbers.hpp"

namespace sonicmoe {

constexpr int kTile = kScaleBlock;

// Column c takes 32 words; word q of it holds rows 4q .. 4q+3. The words of a column are permuted
// in groups of four (one 16-byte access), by a value that differs between the eight lanes that
// write eight columns 4, 8 or 16 apart.
struct alignas(16) ByteTile {
  uint32_t word[kTile * kTile / 4];

  static __device__ __forceinline__ int swizzle(int column) {
    return ((column >> 2) ^ (column >> 5)) & 7;
  }

  // Four rows 4 quad + i of four columns: byte k of `row_i` belongs to column + k; column is a
  // multiple of 4.
  __device__ __forceinline__ void put(int column, int quad, uint32_t row0, uint32_t row1,
                                      uint32_t row2, uint32_t row3) {
    uint32_t* target = word + column * (kTile / 4) + (quad ^ (swizzle(column) << 2));
    const uint32_t low01 = __byte_perm(row0, row1, 0x5140),
                   high01 = __byte_perm(row0, row1, 0x7362);
    const uint32_t low23 = __byte_perm(row2, row3, 0x5140),
                   high23 = __byte_perm(row2, row3, 0x7362);
    target[0 * (kTile / 4)] = __byte_perm(low01, low23, 0x5410);
    target[1 * (kTile / 4)] = __byte_perm(low01, low23, 0x7632);
    target[2 * (kTile / 4)] = __byte_perm(high01, high23, 0x5410);
    target[3 * (kTile / 4)] = __byte_perm(high01, high23, 0x7632);
  }

  // Column c, rows [0, rows) to target + c * stride, for c < columns; rows and stride are multiples
  // of 16. Every thread must come.
  template <int kThreads>
  __device__ __forceinline__ void store(uint8_t* target, int64_t stride, int columns,
                                        int rows) const {
    constexpr int kChunks = kTile / 16;
#pragma unroll
    for (int first = 0; first < kTile; first += kThreads / kChunks) {
      const int column = first + threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      if (column < columns && chunk * 16 < rows) {
        const uint4 bytes =
            reinterpret_cast<const uint4*>(word)[column * kChunks + (chunk ^ swizzle(column))];
        *reinterpret_cast<uint4*>(target + column * stride + chunk * 16) = bytes;
      }
    }
  }
};

}  // namespace sonicmoe
