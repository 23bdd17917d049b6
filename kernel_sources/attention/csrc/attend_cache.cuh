// What a cache stores: elements of T as they are, or FP8 (e4m3) times a scale.
//
// FP8 elements are widened exactly to fp16, four a word, where an operand of a product is made of
// them; the other operand is fp16, too. Weights are at most sqrt(2). A query's row is multiplied by
// the power of two that brings its largest element to 1024 or just above: elements 2^24 times
// smaller than that are rounded, others exact. Its scores are divided by it.
#pragma once

#include "common/fp8.cuh"
#include "common/vec.cuh"

namespace flashrt {

struct Fp8 {
  __nv_fp8_storage_t bits;
};

template <typename C>
inline constexpr bool kIsFp8 = false;
template <>
inline constexpr bool kIsFp8<Fp8> = true;

// Type of the operands of products.
template <typename T, typename C>
struct OperandOf {
  using Type = T;
};
template <typename T>
struct OperandOf<T, Fp8> {
  using Type = __half;
};

// As a cache stores it.
__device__ __forceinline__ Fp8 scaled_to_fp8(float value, float scale) {
  return Fp8{to_fp8(value, scale)};
}

__device__ __forceinline__ uint32_t widen_pair(uint32_t two) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return static_cast<uint32_t>(pair.y) << 16 | pair.x;
}
// Elements 0 and 1, and 2 and 3, of a word of four.
__device__ __forceinline__ void widen_halves(uint32_t& first, uint32_t& second, uint32_t four) {
  first = widen_pair(four);
  second = widen_pair(four >> 16);
}
// Elements 0 and 2, and 1 and 3.
__device__ __forceinline__ void widen_alternate(uint32_t& even, uint32_t& odd, uint32_t four) {
  widen_halves(even, odd, __byte_perm(four, 0, 0x3120));
}

// Where an element of a query lies in its row, so that a lane gets those that it multiplies with
// its four of a key: elements 4c and 4c + 1, and 4c + 2 and 4c + 3, of each 16.
__device__ __forceinline__ int query_place(int element) {
  return element / 16 * 16 + element % 16 / 4 * 2 + element % 2 + element % 4 / 2 * 8;
}

// The power of two for a row whose largest magnitude this is.
struct QueryScale {
  float factor, inverse;

  __device__ __forceinline__ explicit QueryScale(float largest) {
    constexpr int kLargest = 10;  // 2^10
    const int exponent = max(__float_as_int(largest) >> 23, kLargest + 1);
    factor = __int_as_float((254 + kLargest - exponent) << 23);
    inverse = __int_as_float((exponent - kLargest) << 23);
  }
};

// Bytes from row to row in shared memory: 16 more than a row, so that 8 rows' 16-byte pieces fall
// into different banks.
template <typename C, int D>
constexpr int kCacheRowBytes = D * static_cast<int>(sizeof(C)) + 16;
// Of queries, and of this call's keys and values, before and after they are rounded.
template <int D>
constexpr int kRowBytes = 2 * D + 16;

}  // namespace flashrt
