// The PTX that attention needs: tensor-core product, loads of its operands, asynchronous copies,
// exp2, counters, clusters.
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

// Load four 8x8 matrices of 16-bit elements from shared memory. Lane l gives the address of row l %
// 8 of matrix l / 8 (16 bytes), and gets {row lane/4, columns 2(lane%4)..+1} of each; transposed,
// {column lane/4, rows 2(lane%4)..+1}.
__device__ __forceinline__ void load_matrices(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// Asynchronous copies of 16 bytes from global to shared memory, in groups that complete in order.
// With `bytes` 0 nothing is read and zeros are written.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Wait until at most `pending` of this thread's groups are on their way.
__device__ __forceinline__ void wait_copies(int pending) {
  switch (pending) {
    case 0:
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      break;
    case 1:
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      break;
    case 2:
      asm volatile("cp.async.wait_group 2;" ::: "memory");
      break;
    case 3:
      asm volatile("cp.async.wait_group 3;" ::: "memory");
      break;
    case 4:
      asm volatile("cp.async.wait_group 4;" ::: "memory");
      break;
    default:
      asm volatile("cp.async.wait_group 5;" ::: "memory");
  }
}

// Two elements of type T in one word, both multiplied by a power of two.
template <typename T>
__device__ __forceinline__ uint32_t scale_pair(uint32_t pair, float power);
template <>
__device__ __forceinline__ uint32_t scale_pair<__nv_bfloat16>(uint32_t pair, float power) {
  const __nv_bfloat162 scaled =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), __float2bfloat162_rn(power));
  return *reinterpret_cast<const uint32_t*>(&scaled);
}
template <>
__device__ __forceinline__ uint32_t scale_pair<__half>(uint32_t pair, float power) {
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&pair), __float2half2_rn(power));
  return *reinterpret_cast<const uint32_t*>(&scaled);
}

// Add to a counter that orders memory: what this block wrote before is seen by the block that reads
// its own result after.
__device__ __forceinline__ int add_in_order(int* counter, int value) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(value)
               : "memory");
  return before;
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
