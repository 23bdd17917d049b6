// Asynchronous copies from global to shared memory, in groups that complete in order.
#pragma once

#include <cstdint>

namespace flashrt {

// Copy 16 bytes, or write 16 zero bytes when `bytes` is 0.
__device__ __forceinline__ void copy_async(void* shared, const void* global, int bytes) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(global),
               "r"(bytes)
               : "memory");
}
// The same for 4 bytes.
__device__ __forceinline__ void copy_async_word(void* shared, const void* global, int bytes) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(global),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashrt
