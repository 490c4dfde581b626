// The sm_90a instructions that the GEMMs use, one wrapper each; no policy. Names and semantics: PTX
// ISA 8.8.
#pragma once
#include <cstdint>
#include <cuda.h>

namespace sonicmoe::sm90 {

__device__ __forceinline__ uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier
__device__ __forceinline__ void barrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(bar)), "r"(arrivals));
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(bar)) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(bar)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred P;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra "
      "DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(smem_address(bar)),
      "r"(parity)
      : "memory");
}
// The same of a whole warp. Behind a `barrier_wait` without a block barrier after it, the compiler
// takes the threads of a warp to have parted for good, and keeps nothing in uniform registers.
__device__ __forceinline__ void barrier_wait_together(uint64_t* bar, uint32_t parity) {
  uint32_t passed;
  do {
    asm volatile(
        "{\n.reg .pred P;\nmbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;\n"
        "selp.u32 %0, 1, 0, P;\n}"
        : "=r"(passed)
        : "r"(smem_address(bar)), "r"(parity)
        : "memory");
  } while (!__all_sync(~0u, passed));
}
// ---- TMA and cp.async
__device__ __forceinline__ void tma_load_2d(const CUtensorMap* map, uint64_t* bar,
                                            void* destination, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y)
      : "memory");
}
// the same box lands at the same offset, and counts at the same barrier, in every CTA of `mask`
__device__ __forceinline__ void tma_load_2d_multicast(const CUtensorMap* map, uint64_t* bar,
                                                      void* destination, int x, int y,
                                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "h"(mask), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(const CUtensorMap* map, uint64_t* bar,
                                            void* destination, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load_4d(const CUtensorMap* map, uint64_t* bar,
                                            void* destination, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%3, %4, %5, %6}], [%2];" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d_multicast(const CUtensorMap* map, uint64_t* bar,
                                                      void* destination, int x, int y, int z,
                                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "h"(mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// the same through a five-dimensional map whose dimensions 1 to 3 are taken whole
__device__ __forceinline__ void tma_load_5d_multicast(const CUtensorMap* map, uint64_t* bar,
                                                      void* destination, int x, int group,
                                                      uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::"
      "cluster [%0], [%1, {%4, %6, %6, %6, %5}], [%2], %3;" ::"r"(smem_address(destination)),
      "l"(map), "r"(smem_address(bar)), "h"(mask), "r"(x), "r"(group), "r"(0)
      : "memory");
}
__device__ __forceinline__ void tma_store_2d(const CUtensorMap* map, const void* source, int x,
                                             int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(smem_address(source)), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_store_3d(const CUtensorMap* map, const void* source, int x,
                                             int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(smem_address(source)), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// brings the box into L2
__device__ __forceinline__ void tma_prefetch_4d(const CUtensorMap* map, int x, int y, int z,
                                                int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
// adds the box to global memory, element by element
__device__ __forceinline__ void tma_reduce_add_4d(const CUtensorMap* map, const void* source, int x,
                                                  int y, int z, int w) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, "
      "%5}], [%1];" ::"l"(map),
      "r"(smem_address(source)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// writes the box to global memory
__device__ __forceinline__ void tma_store_4d(const CUtensorMap* map, const void* source, int x,
                                             int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(map),
      "r"(smem_address(source)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// read-only data, at this point of the program: the compiler would put the load off until its value
// is used. The 256 bytes around it come into L2, for a load of their other half that follows.
__device__ __forceinline__ uint4 load_early_16(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
__device__ __forceinline__ float2 load_early_8(const float* address) {
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address));
  return v;
}
__device__ __forceinline__ float load_early(const float* address) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ int4 load_early_int4(const int4* address) {
  int4 v;
  asm volatile("ld.global.nc.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void stmatrix_x4(uint32_t address, const uint32_t (&w)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}
// each loaded row is a column of the fragments
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t address, uint32_t (&w)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "r"(address)
               : "memory");
}
// each stored row is a column of the fragments
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, const uint32_t (&w)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
      : "memory");
}
__device__ __forceinline__ uint32_t bf16x2(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ void store_shared_4(uint32_t address, uint32_t a) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(a) : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t address, float a, float b) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t a;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(a) : "r"(address) : "memory");
  return a;
}
// The sum as the copy engine adds: subnormal numbers count as zeros.
__device__ __forceinline__ float add_without_subnormals(float a, float b) {
  float sum;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ void store_shared_16(uint32_t address, uint32_t a, uint32_t b,
                                                uint32_t c, uint32_t d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
__device__ __forceinline__ void barrier_arrive_remote(uint64_t* bar, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 r;\nmapa.shared::cluster.u32 r, %0, %1;\nmbarrier.arrive.shared::cluster.b64 "
      "_, [r];\n}" ::"r"(smem_address(bar)),
      "r"(cta)
      : "memory");
}
__device__ __forceinline__ void tma_prefetch_descriptor(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// 16 bytes global -> shared; zeros when !valid
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}
// The same; the 256 bytes around them come into L2, for the copy of their other half that follows.
__device__ __forceinline__ void cp_async_16_of_256(uint32_t destination, const void* source,
                                                   bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(destination),
               "l"(source), "r"(bytes)
               : "memory");
}
// 4 bytes; zeros when !valid
__device__ __forceinline__ void cp_async_4(float* destination, const float* source, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(destination)),
               "l"(source), "r"(bytes)
               : "memory");
}
// One of the arrivals that the barrier counts, as soon as all earlier copies of this thread have
// landed.
__device__ __forceinline__ void cp_async_arrive(uint64_t* bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(bar))
               : "memory");
}
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers, named barriers
template <int kRegisters>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- WGMMA
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
template <int kCount>
__device__ __forceinline__ void fence_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// K-major operand tile with 128-byte rows and the 128-byte swizzle: 8-row groups are 1024 bytes
// apart.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address) {
  uint64_t d = 0;
  d |= static_cast<uint64_t>((address & 0x3FFFF) >> 4);
  d |= static_cast<uint64_t>(1) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;
  d |= static_cast<uint64_t>(1) << 62;
  return d;
}

// An operand tile whose contiguous axis is M or N: blocks of 64 columns, `next` bytes apart, each of
// 128-byte rows along K with the 128-byte swizzle. 8 rows are 1024 bytes apart.
__device__ __forceinline__ uint64_t columns_descriptor(uint32_t address, uint32_t next) {
  uint64_t d = 0;
  d |= static_cast<uint64_t>((address & 0x3FFFF) >> 4);
  d |= static_cast<uint64_t>(next >> 4) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;
  d |= static_cast<uint64_t>(1) << 62;
  return d;
}

// Where 16 bytes, number `chunk` of a row of 128, lie under that swizzle.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int row, int chunk) {
  return tile + row * 128 + ((chunk ^ (row & 7)) << 4);
}

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R64(i) R16(i), R16(i + 16), R16(i + 32), R16(i + 48)
#define H4(i) "+f"(h[i]), "+f"(h[i + 1]), "+f"(h[i + 2]), "+f"(h[i + 3])
#define H16(i) H4(i), H4(i + 4), H4(i + 8), H4(i + 12)
#define H64(i) H16(i), H16(i + 16), H16(i + 32), H16(i + 48)

// D[64,32] (+)= A[64,32] B[32,32]^T
__device__ __forceinline__ void wgmma_m64n32k32(float (&d)[16], uint64_t a, uint64_t b,
                                                int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1;\n}"
      : R16(0)
      : "l"(a), "l"(b), "r"(accumulate));
}
// D[64,128] (+)= A[64,32] B[128,32]^T
__device__ __forceinline__ void wgmma_m64n128k32(float (&d)[64], uint64_t a, uint64_t b,
                                                 int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}"
      : R64(0)
      : "l"(a), "l"(b), "r"(accumulate));
}
// D[64,256] (+)= A[64,32] B[256,32]^T; the first 128 columns in `low`
__device__ __forceinline__ void wgmma_m64n256k32(float (&low)[64], float (&high)[64], uint64_t a,
                                                 uint64_t b, int accumulate) {
  float (&d)[64] = low, (&h)[64] = high;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1;\n}"
      : R64(0), H64(0)
      : "l"(a), "l"(b), "r"(accumulate));
}
// D[64,256] (+)= A[64,16] B[256,16]^T of 16-bit values; the first 128 columns in `low`. kAByColumns,
// kBByColumns: the operand's contiguous axis is M or N, else K.
#ifdef FP16
#define SONICMOE_HALF_TYPE "f16.f16"
#else
#define SONICMOE_HALF_TYPE "bf16.bf16"
#endif
template <bool kAByColumns, bool kBByColumns>
__device__ __forceinline__ void wgmma_m64n256k16(float (&low)[64], float (&high)[64], uint64_t a,
                                                 uint64_t b, int accumulate) {
  float (&d)[64] = low, (&h)[64] = high;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." SONICMOE_HALF_TYPE " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, %131, %132;\n}"
      : R64(0), H64(0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(kAByColumns)), "n"(int(kBByColumns)));
}
#undef SONICMOE_HALF_TYPE
#undef R64
#undef R16
#undef R4
#undef H64
#undef H16
#undef H4

// ---- approximate arithmetic
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Unlike fminf and fmaxf these hand a NaN on.
__device__ __forceinline__ float at_most(float x, float bound) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}
__device__ __forceinline__ float at_least(float x, float bound) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(bound));
  return r;
}

}  // namespace sonicmoe::sm90
