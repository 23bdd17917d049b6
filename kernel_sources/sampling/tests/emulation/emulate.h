// Runs the device code of draws and log-probabilities on a CPU: blocks one after another in random
// order, every thread of a block a fiber, in rising or falling order between barriers. Included
// before any other file of the library. Floating point must not be contracted.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __shared__
#define __CUDACC__ 1
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // one block runs at a time

using std::isnan;
using std::max;
using std::min;

namespace emulate {

extern int thread;
extern unsigned block;

void barrier();
bool any(bool value);                   // a barrier; whether any thread of the block said true
uint32_t warp_maximum(uint32_t value);  // of the 32 threads of a warp, which all call it
void run(unsigned blocks, int threads, const std::function<void()>& kernel);

struct ThreadIndex {
  struct {
    operator unsigned() const { return thread; }
  } x;
};
struct BlockIndex {
  struct {
    operator unsigned() const { return block; }
  } x;
};

template <typename To, typename From>
To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

}  // namespace emulate

inline emulate::ThreadIndex threadIdx;
inline emulate::BlockIndex blockIdx;

inline void __syncthreads() { emulate::barrier(); }
inline int __syncthreads_or(int value) { return emulate::any(value != 0); }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) { return emulate::warp_maximum(value); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint2float_rn(uint32_t value) { return static_cast<float>(value); }
inline float __ull2float_rn(uint64_t value) { return static_cast<float>(value); }
inline uint64_t __float2ull_rz(float value) { return static_cast<uint64_t>(value); }
inline uint32_t __float_as_uint(float value) { return emulate::bit_cast<uint32_t>(value); }
inline int __float_as_int(float value) { return emulate::bit_cast<int>(value); }
inline float __uint_as_float(uint32_t value) { return emulate::bit_cast<float>(value); }
inline float __int_as_float(int value) { return emulate::bit_cast<float>(value); }
inline int __clz(uint32_t value) { return value == 0 ? 32 : __builtin_clz(value); }

template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T, typename U>
T atomicAdd(T* address, U value) {
  const T before = *address;
  *address += value;
  return before;
}
template <typename T, typename U>
T atomicAnd(T* address, U value) {
  const T before = *address;
  *address &= value;
  return before;
}
template <typename T, typename U>
T atomicMax(T* address, U value) {
  const T before = *address;
  *address = max(before, static_cast<T>(value));
  return before;
}
