// How weights are stored, and how a lane turns 16 bytes of them into operands of products. Every
// stored value is exact in both bf16 and fp16, so nothing is rounded between W and the sums.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "layout.cuh"

namespace flashrt {

template <typename T>
inline constexpr bool kIsBF16 = std::is_same_v<T, __nv_bfloat16>;

// c += a @ b for a 16x16 tile of W, rows lane / 4 and lane / 4 + 8, and 16 elements of 8 rows of x,
// row lane / 4.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kIsBF16<T>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// a * b + c on two fp16 elements with one rounding.
__device__ __forceinline__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
inline constexpr uint32_t kMinusZeros = 0x80008000u;

// What the operands of products are: packed weights become fp16, which every processor converts to
// in the fewest operations, and x follows them: see narrow_rows in prologue.cuh.
template <typename T, typename Format>
using Operand = std::conditional_t<Format::kBits == 16, T, __half>;

// bf16 or fp16 as they are.
struct PlainFormat {
  static constexpr int kBits = 16;
  static constexpr int kSegments = 2;
  static constexpr bool kTiled = false;
  static constexpr int kWordPairs = 1;    // operand pairs in a 32-bit word
  static constexpr float kFactor = 1.0f;  // on every sum
};

// E4M3, four in a word.
struct FP8Format {
  static constexpr int kBits = 8;
  static constexpr int kSegments = 2;
  static constexpr bool kTiled = false;
  static constexpr int kWordPairs = 2;
  static constexpr float kFactor = 1.0f;

  __device__ static void decode(uint32_t word, uint32_t (&pairs)[kWordPairs], uint32_t,
                                const Plan&) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(word));
#else
    // The bits below the sign move one place down; the exponent's bias is 15 instead of 7.
#pragma unroll
    for (int i = 0; i < kWordPairs; ++i) {
      const uint32_t high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
      pairs[i] = (high & kMinusZeros) | ((high >> 1) & 0x3f803f80u);
      pairs[i] = fma2(pairs[i], 0x5c005c00u, kMinusZeros);  // 2^8
    }
#endif
  }
};

// Two's complement, four in a word.
struct INT8Format {
  static constexpr int kBits = 8;
  static constexpr int kSegments = 2;
  static constexpr bool kTiled = false;
  static constexpr int kWordPairs = 2;
  static constexpr float kFactor = 1.0f;

  __device__ static void decode(uint32_t word, uint32_t (&pairs)[kWordPairs], uint32_t,
                                const Plan&) {
    const uint32_t biased = word ^ 0x80808080u;  // value + 128, below the exponent of 1024
#pragma unroll
    for (int i = 0; i < kWordPairs; ++i) {
      const uint32_t value = __byte_perm(biased, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
      pairs[i] = fma2(value, 0x3c003c00u, 0xe480e480u);  // - 1152
    }
  }
};

// E2M1 in blocks of 16 along K with E4M3 scales, in tiles of 16 rows and 256 columns:
//   [segment][half][lane] 16 bytes of codes, then [lane][half] 4 scales, one a block.
// The codes' bits lie in a word so that left shifts bring them to where fp16 has them.
struct NVFP4Format {
  static constexpr int kBits = 4;
  static constexpr int kSegments =
      4;  // a turn is two tiles: most of what it costs beside decoding is per turn
  static constexpr bool kTiled = true;
  static constexpr int kWordPairs = 4;
  static constexpr int kCodeBytes = 2048;
  static constexpr int kTileBytes = kCodeBytes + 256;
  static constexpr float kFactor = 128.0f;  // codes are 2^-14 of their values, scales 2^7 of theirs

  // Scale `block` of four in both halves.
  __device__ static uint32_t scale(uint32_t bytes, int block) {
    const uint32_t pair = (block % 2 == 0 ? bytes << 7 : bytes >> 1) & 0x7f807f80u;
    return __byte_perm(pair, 0, block < 2 ? 0x1010 : 0x3232);
  }

  __device__ static void decode(uint32_t word, uint32_t (&pairs)[kWordPairs], uint32_t scale,
                                const Plan& plan) {
    constexpr uint32_t kMagnitude = 0x0e000e00u;
    constexpr uint32_t kPlace = kMagnitude | kMinusZeros;
    pairs[0] = word & kPlace;
    // Products with what the compiler cannot take for shifts: the integer pipe has its hands full,
    // that of multiplications has not.
    pairs[1] = (word * plan.eight) & kPlace;
    pairs[2] = ((word * plan.two) & kMinusZeros) | ((word * plan.sixty_four) & kMagnitude);
    pairs[3] =
        ((word * plan.four) & kMinusZeros) | ((word * plan.five_hundred_twelve) & kMagnitude);
#pragma unroll
    for (int i = 0; i < kWordPairs; ++i) pairs[i] = fma2(pairs[i], scale, kMinusZeros);
  }
};

// One segment: 16 bytes of each of the two rows of W and the elements of the row of x that a lane
// holds. `scales` are the segment's in `lower` and `upper`, if the format has any.
template <typename T, typename Format>
__device__ __forceinline__ void multiply_segment(float (&c)[4], const uint4& lower,
                                                 const uint4& upper,
                                                 const uint4 (&x)[kPieces<Format>],
                                                 uint32_t lower_scales, uint32_t upper_scales,
                                                 int segment, const Plan& plan) {
  const uint32_t low_words[4] = {lower.x, lower.y, lower.z, lower.w};
  const uint32_t high_words[4] = {upper.x, upper.y, upper.z, upper.w};
  if constexpr (Format::kWordPairs == 1) {
    multiply<T>(c, lower.x, upper.x, lower.y, upper.y, x[0].x, x[0].y);
    multiply<T>(c, lower.z, upper.z, lower.w, upper.w, x[0].z, x[0].w);
  } else {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      uint32_t low_scale = 0;
      uint32_t high_scale = 0;
      if constexpr (Format::kTiled) {
        low_scale = Format::scale(lower_scales, 2 * (segment % 2) + word / 2);
        high_scale = Format::scale(upper_scales, 2 * (segment % 2) + word / 2);
      }
      uint32_t low[Format::kWordPairs];
      uint32_t high[Format::kWordPairs];
      Format::decode(low_words[word], low, low_scale, plan);
      Format::decode(high_words[word], high, high_scale, plan);
#pragma unroll
      for (int pair = 0; pair < Format::kWordPairs; pair += 2) {
        const int place = word * Format::kWordPairs + pair;  // of x, in pairs
        const uint4& piece = x[place / 4];
        multiply<__half>(c, low[pair], high[pair], low[pair + 1], high[pair + 1],
                         place % 4 == 0 ? piece.x : piece.z, place % 4 == 0 ? piece.y : piece.w);
      }
    }
  }
}

}  // namespace flashrt
