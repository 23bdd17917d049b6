// The PTX that attention needs: tensor-core product, 8x8 transpose, exp2, clusters.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashrt {

// c[16, 8] += a[16, 16] * b[16, 8] in fp32. Lane (r = lane / 4, c = lane % 4) holds
//   a: {row r, k 2c..2c+1}, {row r + 8, same k}, {row r, k + 8}, {row r + 8, k + 8}
//   b: {k 2c..2c+1, column r}, {k + 8, column r}
//   c: {row r, columns 2c, 2c+1}, {row r + 8, same columns}
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                            uint32_t a3, uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_16x8x16<__nv_bfloat16>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                           uint32_t a2, uint32_t a3, uint32_t b0,
                                                           uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_16x8x16<__half>(float (&c)[4], uint32_t a0, uint32_t a1,
                                                    uint32_t a2, uint32_t a3, uint32_t b0,
                                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two ones of type T in one word.
template <typename T>
inline constexpr uint32_t kOnes2 = 0;
template <>
inline constexpr uint32_t kOnes2<__nv_bfloat16> = 0x3f803f80u;
template <>
inline constexpr uint32_t kOnes2<__half> = 0x3c003c00u;

// Transpose an 8x8 matrix of 16-bit elements: lane holds {row lane/4, columns 2(lane%4)..+1}.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// 2^x to 2 ulp; 0 at -inf.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Loads of cache rows: read once, never written while the kernel runs. `volatile` keeps them where they
// are written, before the wait.
__device__ __forceinline__ void load_words(uint32_t (&w)[4], const void* pointer) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
               : "l"(pointer));
}
__device__ __forceinline__ void load_words(uint32_t (&w)[2], const void* pointer) {
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(w[0]), "=r"(w[1])
               : "l"(pointer));
}
__device__ __forceinline__ void load_words(uint32_t (&w)[1], const void* pointer) {
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(pointer));
}

// Cluster-wide barrier in two halves. A thread that has exited counts as arrived.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Store two floats to the same shared-memory address in block `rank` of the cluster.
__device__ __forceinline__ void store_to_rank(const float2* address, int rank, float2 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(remote)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(rank));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(remote), "f"(value.x), "f"(value.y)
               : "memory");
#endif
}

}  // namespace flashrt
