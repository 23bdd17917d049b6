// Values as integer keys that order as the values do, and blocks that find out who is last.
#pragma once

#include <cstdint>

#include "sampling.h"

namespace flashrt {

inline constexpr int kThreads = 256;
static_assert(kMaxSlots <= kThreads, "the last block reads one slot's key a thread");

// Orders as the values do: negative floats have all bits flipped, the others their sign bit. No
// number reaches the key of NaN, and every number has a key above 0.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
  if (isnan(value)) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(value + 0.0f);  // -0 becomes +0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(uint32_t ordered) {
  return __uint_as_float(ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered);
}

// Neither NaN nor infinite: strictly between the keys of -inf and +inf.
__device__ __forceinline__ bool is_finite(uint32_t ordered) {
  return ordered > 0x007fffffu && ordered < 0xff800000u;
}

// Among equal values the lower index has the larger key.
__device__ __forceinline__ uint64_t key_of(uint32_t ordered, uint32_t index) {
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - index);
}

__device__ __forceinline__ uint32_t ordered_of(uint64_t key) {
  return static_cast<uint32_t>(key >> 32);
}

__device__ __forceinline__ int index_of(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}

// Count this thread's block in: 0, 1, ... `last`, where the counter is back at 0 for the next
// launch. What the thread wrote before is visible to whoever counts in later.
__device__ __forceinline__ uint32_t count_in(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// True in all threads of the last of `blocks` blocks to call it, which then sees what all threads
// of the others wrote before. `flag` is shared memory.
__device__ __forceinline__ bool is_last_block(uint32_t* counter, uint32_t blocks, bool& flag) {
  __syncthreads();
  if (threadIdx.x == 0) flag = count_in(counter, blocks - 1) == blocks - 1;
  __syncthreads();
  return flag;
}

}  // namespace flashrt
