// Random words, logarithm and exponential with the same bits on every processor: the operations
// of torch-ext/sampling/noise.py, in the same order, each rounded to nearest by itself. Plain `*`
// and `+` would let the compiler fuse them, hence the intrinsics.
//
// Sources: Salmon, Moraes, Dror and Shaw 2011 (Philox 4x32-10); Moshier's Cephes library, logf and
// expf (the coefficients).
#pragma once

#include <cstdint>

namespace flashrt {

// What the third word of the counter says the bits are for.
enum class Purpose : uint32_t { kDraw = 0, kAccept = 1, kResidual = 2 };

// The four words of counter (group, position, purpose, 0) under the key `seed`: those of the
// logits 4 * group to 4 * group + 3.
__device__ __forceinline__ uint4 random_words(uint64_t seed, uint32_t group, uint32_t position,
                                              Purpose purpose) {
  uint32_t k0 = static_cast<uint32_t>(seed);
  uint32_t k1 = static_cast<uint32_t>(seed >> 32);
  uint4 c = {group, position, static_cast<uint32_t>(purpose), 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(c.x) * 0xd2511f53u;
    const uint64_t product1 = static_cast<uint64_t>(c.z) * 0xcd9e8d57u;
    c = {static_cast<uint32_t>(product1 >> 32) ^ c.y ^ k0, static_cast<uint32_t>(product1),
         static_cast<uint32_t>(product0 >> 32) ^ c.w ^ k1, static_cast<uint32_t>(product0)};
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return c;
}

namespace exact {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }

inline constexpr float kLn2High = 0.693359375f;  // 9 bits; the sum of both is ln 2
inline constexpr float kLn2Low = -2.12194440e-4f;

// x = 2^exponent * (1 + f), 1 + f in [sqrt(1/2), sqrt(2)).
__device__ __forceinline__ void split(float x, float& exponent, float& f) {
  const int bits = __float_as_int(x);
  const int e = (bits - 0x3f3504f3) >> 23;
  exponent = static_cast<float>(e);
  f = sub(__int_as_float(bits - static_cast<int>(static_cast<uint32_t>(e) << 23)), 1.0f);
}

__device__ __forceinline__ float log_of(float exponent, float f) {
  const float square = mul(f, f);
  float y = 7.0376836292e-2f;
  y = add(mul(y, f), -1.1514610310e-1f);
  y = add(mul(y, f), 1.1676998740e-1f);
  y = add(mul(y, f), -1.2420140846e-1f);
  y = add(mul(y, f), 1.4249322787e-1f);
  y = add(mul(y, f), -1.6668057665e-1f);
  y = add(mul(y, f), 2.0000714765e-1f);
  y = add(mul(y, f), -2.4999993993e-1f);
  y = add(mul(y, f), 3.3333331174e-1f);
  y = mul(mul(y, f), square);
  y = sub(add(y, mul(exponent, kLn2Low)), mul(square, 0.5f));
  return add(add(f, y), mul(exponent, kLn2High));
}

// Natural logarithm of a positive normal number.
__device__ __forceinline__ float log(float x) {
  float exponent, f;
  split(x, exponent, f);
  return log_of(exponent, f);
}

// (bits + 1/2) / 2^32, at most 1 - 2^-24.
__device__ __forceinline__ float uniform(uint32_t bits) {
  return fminf(mul(add(__uint2float_rn(bits), 0.5f), 0x1p-32f), 1.0f - 0x1p-24f);
}

// -log(-log(1 - uniform(bits))).
__device__ __forceinline__ float gumbel(uint32_t bits) {
  const float w = uniform(bits);
  float exponent, f;
  split(sub(1.0f, w), exponent, f);
  if (w < 0.2890625f) {  // 74/256: 1 - w is above sqrt(1/2), and -w keeps all its bits
    exponent = 0.0f;
    f = -w;
  }
  return -log(-log_of(exponent, f));
}

// floor(exp(x) * 2^40), for x <= 0.
__device__ __forceinline__ uint64_t mass(float x) {
  if (!(x > -28.5f)) return 0;
  const float n = floorf(add(mul(x, 1.44269504088896341f), 0.5f));
  const float r = sub(sub(x, mul(n, kLn2High)), mul(n, kLn2Low));
  float y = 1.9875691500e-4f;
  y = add(mul(y, r), 1.3981999507e-3f);
  y = add(mul(y, r), 8.3334519073e-3f);
  y = add(mul(y, r), 4.1665795894e-2f);
  y = add(mul(y, r), 1.6666665459e-1f);
  y = add(mul(y, r), 5.0000001201e-1f);
  y = add(add(mul(y, mul(r, r)), r), 1.0f);
  const float scale = __int_as_float((static_cast<int>(n) + 40 + 127) << 23);  // 2^(n + 40)
  return __float2ull_rz(mul(y, scale));
}

}  // namespace exact

__device__ __forceinline__ uint32_t word_of(const uint4& words, int index) {
  return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

}  // namespace flashrt
