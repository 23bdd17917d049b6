// The numbers of NVFP4: E2M1 codes, their place in a word of the decode layout, and the E5M3 image
// of an E4M3 block scale. The layout is described in torch-ext/quant/tiles.py.
#pragma once

#include <cstdint>

namespace flashrt {

inline constexpr int kBlock = 16;  // elements of K that share a scale
inline constexpr float kE2M1Max = 6.0f;
inline constexpr int kTileRows = 16;
inline constexpr int kTileColumns = 256;
inline constexpr int kTileBytes = 2304;
inline constexpr int kTileCodeBytes = 2048;
inline constexpr int kTileWords = kTileCodeBytes / 4;

// Nearest E2M1, ties to even, at most +-6: sign at bit 3. The values are 0, 0.5, 1, 1.5, 2, 3,
// 4, 6.
__device__ __forceinline__ uint32_t to_e2m1(float value) {
  const float size = fabsf(value);
  const uint32_t code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) +
                        (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return code | __float_as_uint(value) >> 31 << 3;
}

// Bits of an fp32 with the sign and magnitude of a code in its sign, low exponent and high mantissa
// bits: 2^-126 times the value, a subnormal fp32 for 0.5.
__device__ __forceinline__ float tiny_e2m1(uint32_t code) {
  return __uint_as_float((code & 8) << 28 | (code & 7) << 22);
}

__device__ __forceinline__ float from_e2m1(uint32_t code) {
  return tiny_e2m1(code) * 8.50705917302346159e37f;  // 2^126
}

// A word of the decode layout from eight codes, the code of e0 in the low nibble.
__device__ __forceinline__ uint32_t word_of_codes(uint32_t codes) {
  uint32_t word = 0;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const uint32_t c = codes >> (4 * high);  // the code of slot i is at bits 8 * i
    const uint32_t c0 = c & 15, c1 = c >> 8 & 15, c2 = c >> 16 & 15, c3 = c >> 24 & 15;
    const uint32_t half = (c0 >> 3) << 15 | (c0 & 7) << 9 | (c1 >> 3) << 12 | (c1 & 7) << 6 |
                          (c2 >> 3) << 14 | (c2 & 7) << 3 | (c3 >> 3) << 13 | (c3 & 7);
    word |= half << (16 * high);
  }
  return word;
}

__device__ __forceinline__ uint32_t codes_of_word(uint32_t word) {
  uint32_t codes = 0;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const uint32_t h = word >> (16 * high) & 0xffffu;
    const uint32_t c0 = (h >> 15 & 1) << 3 | (h >> 9 & 7);
    const uint32_t c1 = (h >> 12 & 1) << 3 | (h >> 6 & 7);
    const uint32_t c2 = (h >> 14 & 1) << 3 | (h >> 3 & 7);
    const uint32_t c3 = (h >> 13 & 1) << 3 | (h & 7);
    codes |= (c0 | c1 << 8 | c2 << 16 | c3 << 24) << (4 * high);
  }
  return codes;
}

// 2^-126 times the eight values of a word, by masks and shifts into an fp32.
__device__ __forceinline__ void tiny_values_of_word(uint32_t word, float (&values)[8]) {
  constexpr uint32_t kSign = 0x80000000u, kMagnitude = 0x01c00000u;
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const uint32_t half = high ? word : word << 16;
    values[high] = __uint_as_float((half & kSign) | (half >> 3 & kMagnitude));
    values[2 + high] = __uint_as_float((half << 3 & kSign) | (half & kMagnitude));
    values[4 + high] = __uint_as_float((half << 1 & kSign) | (half << 3 & kMagnitude));
    values[6 + high] = __uint_as_float((half << 2 & kSign) | (half << 6 & kMagnitude));
  }
}

// E4M3 (not negative, not NaN) to its E5M3 image: (field << 3) | mantissa, field = 22 + exponent.
__device__ __forceinline__ uint32_t e5m3_of_e4m3(uint32_t byte) {
  if (byte >= 8) return byte + (15 << 3);  // normal: the exponent's bias grows from 7 to 22
  if (byte == 0) return 0;
  const uint32_t lead = byte >= 4 ? 2 : byte >= 2 ? 1 : 0;  // byte * 2^-9, normalised
  return (13 + lead) << 3 | (byte << (3 - lead) & 7);
}

__device__ __forceinline__ uint32_t e4m3_of_e5m3(uint32_t image) {
  if (image >= 16 << 3) return image - (15 << 3);
  if (image == 0) return 0;
  return (8 | (image & 7)) >> (16 - (image >> 3));
}

__device__ __forceinline__ float from_e5m3(uint32_t image) {
  return image == 0 ? 0.0f : __uint_as_float((image >> 3) + 105 << 23 | (image & 7) << 20);
}

}  // namespace flashrt
