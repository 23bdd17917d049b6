// 16-byte vectors of bf16, fp16 or fp32 and their exact conversion to fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashrt {

// Elements of type T in one 16-byte access.
template <typename T>
inline constexpr int kVec = 16 / static_cast<int>(sizeof(T));

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Round to nearest even into T.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Unpack one 32-bit word of two 16-bit elements; element 0 is the low half.
template <typename T>
__device__ __forceinline__ float2 unpack2(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// Unpack 16 bytes into kVec<T> floats.
template <typename T>
__device__ __forceinline__ void unpack(const uint4& packed, float (&values)[kVec<T>]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      values[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = unpack2<T>(words[i]);
      values[2 * i] = pair.x;
      values[2 * i + 1] = pair.y;
    }
  }
}

// Round kVec<T> floats into 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&values)[kVec<T>]) {
  alignas(16) T elements[kVec<T>];
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) elements[i] = from_float<T>(values[i]);
  return *reinterpret_cast<const uint4*>(elements);
}

// Read 16 bytes that are used once and not written while the kernel runs: no allocation in L1.
__device__ __forceinline__ uint4 load_streaming(const void* pointer) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(pointer));
  return value;
}

}  // namespace flashrt
