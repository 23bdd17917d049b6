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

// Load 4, 2 or 1 aligned words. History is read once and never written while the kernel runs, and
// `volatile` keeps its loads where they are written, before the wait; other rows are inputs of this
// call.
template <bool kHistory>
__device__ __forceinline__ void load_words(uint32_t (&w)[4], const void* pointer) {
  if constexpr (kHistory) {
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(pointer));
  } else {
    const uint4 words = *static_cast<const uint4*>(pointer);
    w[0] = words.x, w[1] = words.y, w[2] = words.z, w[3] = words.w;
  }
}
template <bool kHistory>
__device__ __forceinline__ void load_words(uint32_t (&w)[2], const void* pointer) {
  if constexpr (kHistory) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1])
                 : "l"(pointer));
  } else {
    const uint2 words = *static_cast<const uint2*>(pointer);
    w[0] = words.x, w[1] = words.y;
  }
}
template <bool kHistory>
__device__ __forceinline__ void load_words(uint32_t (&w)[1], const void* pointer) {
  if constexpr (kHistory) {
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(pointer));
  } else {
    w[0] = *static_cast<const uint32_t*>(pointer);
  }
}

// Store to shared memory without a branch.
__device__ __forceinline__ void store_shared_if(bool condition, float* pointer, float4 value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "@p st.shared.v4.f32 [%1], {%2, %3, %4, %5};\n"
      "}" ::"r"(static_cast<int>(condition)),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))), "f"(value.x), "f"(value.y),
      "f"(value.z), "f"(value.w)
      : "memory");
}
__device__ __forceinline__ void store_shared_if(bool condition, float* pointer, float2 value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.s32 p, %0, 0;\n"
      "@p st.shared.v2.f32 [%1], {%2, %3};\n"
      "}" ::"r"(static_cast<int>(condition)),
      "r"(static_cast<uint32_t>(__cvta_generic_to_shared(pointer))), "f"(value.x), "f"(value.y)
      : "memory");
}

// 1 - 2 / (1 + e^2x), to 2e-7.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.0f - __fdividef(2.0f, exp2_fast(x * 2.885390081777927f) + 1.0f);
}

// Cluster-wide barrier in two halves. A thread that has exited counts as arrived. `cluster_start`
// arrives without ordering memory: it only says that this block runs.
__device__ __forceinline__ void cluster_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
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

// A barrier in shared memory that completes when one thread has called arrive_expecting() and as
// many bytes have been stored by store_to_first(); then the next phase begins. Phases alternate
// parity, from 0.
class ByteBarrier {
 public:
  // By one thread, before its cluster_start().
  __device__ __forceinline__ void init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address()) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void arrive_expecting(int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()),
                 "r"(bytes)
                 : "memory");
#endif
  }
  __device__ __forceinline__ void wait(int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(address()),
        "r"(parity)
        : "memory");
#endif
  }
  // Store two floats to the same address in the first block of the cluster, counted by its barrier.
  __device__ __forceinline__ void store_to_first(const float2* target, float2 value) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b32 data, barrier;\n"
        "mapa.shared::cluster.u32 data, %0, 0;\n"
        "mapa.shared::cluster.u32 barrier, %1, 0;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [data], {%2, %3}, "
        "[barrier];\n"
        "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(target))),
        "r"(address()), "f"(value.x), "f"(value.y)
        : "memory");
#endif
  }

 private:
  __device__ __forceinline__ uint32_t address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&state_));
  }
  uint64_t state_;
};

}  // namespace flashrt
