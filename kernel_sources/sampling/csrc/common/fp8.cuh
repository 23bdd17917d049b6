// FP8 E4M3: the scale of a row and rounding to nearest even that saturates at 448. The same
// arithmetic as common/python/fp8.py, in every bit.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "common/vec.cuh"

namespace flashrt {

// The largest magnitude is a maximum of bit patterns without their sign, in any order: they are
// ordered as the values are, infinity above every finite one and NaN above that.
__device__ __forceinline__ uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

// magnitude / largest, at least the smallest normal; 1 for 0 and NaN for what is not finite.
__device__ __forceinline__ float scale_of_magnitude(uint32_t bits, float largest) {
  if (bits >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
  if (bits == 0) return 1.0f;
  return fmaxf(__fdiv_rn(__uint_as_float(bits), largest), 1.17549435e-38f);  // 2^-126
}

// value / scale to the nearest E4M3; NaN is 0x7f.
__device__ __forceinline__ uint8_t to_fp8(float value, float scale) {
  return __nv_cvt_float_to_fp8(__fdiv_rn(value, scale), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float from_fp8(uint8_t byte) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(byte, __NV_E4M3);  // exact
  return __half2float(__half(half));
}

// The largest magnitude bits of one chunk of a row; elements past the end are zero.
template <typename T>
__device__ __forceinline__ uint32_t magnitude_of_chunk(const uint4& packed) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) largest = max(largest, magnitude_bits(values[i]));
  return largest;
}

// Write a row's elements [index * N, (index + 1) * N) of one byte each, those inside `dim`.
// `aligned` promises that the row starts on a multiple of N bytes.
template <int N>
__device__ __forceinline__ void store_bytes(uint8_t* row, int index, int dim, bool aligned,
                                            const uint8_t (&bytes)[N]) {
  uint8_t* target = row + static_cast<int64_t>(index) * N;
  const int count = dim - index * N;
  if (aligned && count >= N) {
    uint32_t words[N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      words[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 |
                 static_cast<uint32_t>(bytes[4 * i + 3]) << 24;
    }
    if constexpr (N == 8) {
      *reinterpret_cast<uint2*>(target) = make_uint2(words[0], words[1]);
    } else {
      *reinterpret_cast<uint32_t*>(target) = words[0];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) target[i] = bytes[i];
  }
}

// Write one chunk of a row as E4M3.
template <typename T>
__device__ __forceinline__ void store_fp8_chunk(uint8_t* row, int index, int dim, bool aligned,
                                                const uint4& packed, float scale) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  uint8_t bytes[kVec<T>];
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) bytes[i] = to_fp8(values[i], scale);
  store_bytes(row, index, dim, aligned, bytes);
}

}  // namespace flashrt
