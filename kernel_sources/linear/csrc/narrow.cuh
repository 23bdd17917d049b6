// x' in fp16, for products with packed weights.
#pragma once

#include "common/vec.cuh"
#include "slice.cuh"

namespace flashrt {

// Per warp and row: the factor that undoes narrow_rows.
struct RowFactors {
  float values[kMaxRows][kMaxWarps];
};

// How a warp's part of a row of x' turns from bf16 into fp16: scaled by a power of two that brings
// its largest element to [2^14, 2^15). Elements below 2^-29 of that keep fewer bits than bf16 has,
// at an error of 2^-40 of the largest: nothing else is rounded.
struct Narrowing {
  uint32_t largest = 0;  // magnitudes of two bf16
  float factor = 0.0f;

  __device__ __forceinline__ void see(const uint4& words) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(words.x & kMagnitude, words.y & kMagnitude),
                                         __vmaxu2(words.z & kMagnitude, words.w & kMagnitude)));
  }

  // All lanes of the warp have seen their columns of row `m`.
  __device__ __forceinline__ void choose(RowFactors& factors, int m) {
    constexpr int kMantissaBits = 7;
    constexpr uint32_t kLeast = 15;  // keeps both factors normal
    const uint32_t most = __reduce_max_sync(0xffffffffu, max(largest & 0xffffu, largest >> 16));
    const uint32_t exponent = max(most >> kMantissaBits, kLeast);
    factor = __uint_as_float((268u - exponent) << 23);
    if (threadIdx.x % 32 == 0)
      factors.values[m][threadIdx.x / 32] = __uint_as_float((exponent - 14u) << 23);
  }

  __device__ __forceinline__ uint4 apply(const uint4& words) const {
    float values[kVectorElements];
    unpack<__nv_bfloat16>(words, values);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] *= factor;
    return pack<__half>(values);
  }
};

// Narrow a warp's columns of x' in shared memory.
template <int kRows, typename Format>
__device__ __forceinline__ void narrow_rows(const Slice<kRows, Format>& slice,
                                            RowFactors& factors) {
#pragma unroll 1
  for (int m = 0; m < kRows; ++m) {
    Narrowing narrowing;
#pragma unroll 2
    for (int pass = 0; pass < slice.passes; ++pass) narrowing.see(slice.at(m, pass));
    narrowing.choose(factors, m);
#pragma unroll 2
    for (int pass = 0; pass < slice.passes; ++pass)
      slice.at(m, pass) = narrowing.apply(slice.at(m, pass));
  }
}

}  // namespace flashrt
