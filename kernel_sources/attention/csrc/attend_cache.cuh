// What a cache stores: elements of T as they are, or FP8 (e4m3) times a scale.
//
// FP8 elements are widened exactly, four a word, where an operand of a product is made of them:
// keys to T, values to fp16, in which weights are then, too. Four neighbours come out as two pairs,
// elements 0 and 2 and elements 1 and 3; products are laid out for that. A bf16 key comes out
// 2^-120 times its value, so that no multiplication is needed; queries are 2^60 times theirs, and
// scores 2^-60.
#pragma once

#include <cuda_fp8.h>

#include "common/vec.cuh"

namespace flashrt {

struct Fp8 {
  __nv_fp8_storage_t bits;
};

template <typename C>
inline constexpr bool kIsFp8 = false;
template <>
inline constexpr bool kIsFp8<Fp8> = true;

// Type of the weights that multiply values, and what queries and scores are multiplied by.
template <typename T, typename C>
struct CacheFormat {
  using Weight = T;
  static constexpr float kQueryFactor = 1.0f, kScoreFactor = 1.0f;
};
template <>
struct CacheFormat<__half, Fp8> {
  using Weight = __half;
  static constexpr float kQueryFactor = 1.0f, kScoreFactor = 1.0f;
};
template <>
struct CacheFormat<__nv_bfloat16, Fp8> {
  using Weight = __half;
  static constexpr float kQueryFactor = 1152921504606846976.0f, kScoreFactor = kQueryFactor;
};

// Round to nearest even, saturate at 448.
__device__ __forceinline__ Fp8 to_fp8(float value) {
  return Fp8{__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)};
}

// Elements 0 and 2, and 1 and 3, of a word of four. NaN keys of a bf16 call become finite.
template <typename T>
__device__ __forceinline__ void widen(uint32_t& even, uint32_t& odd, uint32_t four);
template <>
__device__ __forceinline__ void widen<__nv_bfloat16>(uint32_t& even, uint32_t& odd, uint32_t four) {
  even = ((four << 4) & 0x07f007f0u) | ((four << 8) & 0x80008000u);
  odd = ((four >> 4) & 0x07f007f0u) | (four & 0x80008000u);
}
template <>
__device__ __forceinline__ void widen<__half>(uint32_t& even, uint32_t& odd, uint32_t four) {
  const uint32_t sorted = __byte_perm(four, 0, 0x3120);
  const __half2_raw pairs[2] = {
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(sorted), __NV_E4M3),
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(sorted >> 16), __NV_E4M3)};
  even = static_cast<uint32_t>(pairs[0].y) << 16 | pairs[0].x;
  odd = static_cast<uint32_t>(pairs[1].y) << 16 | pairs[1].x;
}

// Where an element of a query lies in its row, so that a lane gets those that it multiplies with
// the pairs that `widen` makes of its four: elements 4c and 4c + 2, 4c + 1 and 4c + 3 of each 16.
__device__ __forceinline__ int query_place(int element) {
  const int in_four = element % 4;
  return element / 16 * 16 + element % 16 / 4 * 2 + in_four / 2 + in_four % 2 * 8;
}

// Bytes from row to row in shared memory: 16 more than a row, so that 8 rows' 16-byte pieces fall
// into different banks.
template <typename C, int D>
constexpr int kCacheRowBytes = D * static_cast<int>(sizeof(C)) + 16;
// Of queries, and of this call's keys and values, before and after they are rounded.
template <int D>
constexpr int kRowBytes = 2 * D + 16;

}  // namespace flashrt
