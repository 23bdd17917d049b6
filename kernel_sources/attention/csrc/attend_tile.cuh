// Products of one warp on tensor cores.
//
//   scores  16 slots against 8 query rows: keys are the 16-row operand, query rows the 8 columns
//   output  16 elements of the values of 128 slots against the weights of 8 query rows
//
// so that a query row is a column of either product and its bits do not depend on other rows.
// With an FP8 cache, the four elements that a lane gets of a 16-byte piece of a key are columns 2c,
// 2c + 1, 2c + 8 and 2c + 9 of one product; neighbours among the elements of a value are rows r and
// r + 8.
#pragma once

#include <cmath>

#include "attend_cache.cuh"
#include "attend_merge.cuh"

namespace flashrt {

constexpr int kTile = 16;     // slots whose scores a warp computes
constexpr int kTileRows = 8;  // query rows of a product
constexpr int kWarps = 8;
constexpr int kSplit = kTile * kWarps;

constexpr int kWeightRowBytes = 2 * kSplit + 16;

template <int D>
struct KeyTile {
  uint32_t words[D / 16][4];
};

// Where a lane's row of a 16x16 operand starts: rows 0-7, 8-15, and the same of the next 8 columns.
__device__ __forceinline__ int operand_row(int lane) { return lane % 16; }
__device__ __forceinline__ int operand_byte(int lane) { return lane / 16 * 16; }

// `row`: the lane's of 16 slots, by operand_row and operand_byte.
template <typename C, int D>
__device__ __forceinline__ void load_keys(KeyTile<D>& keys, const unsigned char* row) {
  if constexpr (!kIsFp8<C>) {
#pragma unroll
    for (int step = 0; step < D / 16; ++step) load_matrices(keys.words[step], row + 32 * step);
  } else {
#pragma unroll
    for (int step = 0; step < D / 16; step += 2) {
      uint32_t fours[4];  // of an odd last step, half is not used
      load_matrices(fours, row + 16 * step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (step + i / 2 >= D / 16) continue;
        auto& words = keys.words[step + i / 2];
        widen_halves(words[i % 2], words[i % 2 + 2], fours[i]);
      }
    }
  }
}

// scores[0..3] = q . k of {slot r, rows 2c, 2c+1}, {slot r + 8, the same rows} for lane (r, c) =
// (lane / 4, lane % 4). `queries` is the first of 8 rows.
template <typename T, int D>
__device__ __forceinline__ void multiply_keys(float (&scores)[4], const KeyTile<D>& keys,
                                              const unsigned char* queries, int lane) {
  const unsigned char* row = queries + lane % 8 * kRowBytes<D> + lane / 8 * 16;
  float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < D / 16; step += 2) {
    uint32_t q[4];  // of an odd last step, half is not used
    load_matrices(q, row + 32 * step);
    const auto& k = keys.words[step];
    mma_16x8x16<T>(scores, k[0], k[1], k[2], k[3], q[0], q[1]);
    if (step + 1 < D / 16) {
      const auto& next = keys.words[step + 1];
      mma_16x8x16<T>(odd, next[0], next[1], next[2], next[3], q[2], q[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] += odd[i];
}

// Slots that the queries of a lane's columns see: (position - window, position]; none at position
// -1.
struct Columns {
  int position[2];
  int window;
  float scaling[2];  // of q . k, in units of log2 without a soft cap
  float soft_cap;    // 0 without

  // Products to scores in units of log2.
  __device__ __forceinline__ void scale(float (&products)[4]) const {
    if (soft_cap == 0.0f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[i] *= scaling[i % 2];
    } else {
      constexpr float kLog2e = 1.4426950408889634f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products[i] =
            soft_cap * kLog2e * tanh_fast(__fdividef(products[i] * scaling[i % 2], soft_cap));
      }
    }
  }
  __device__ __forceinline__ bool sees(int column, int slot) const {
    return slot <= position[column] && slot > position[column] - window;
  }
};

// Weights exp2(s - e) of a tile, rounded to T: word i of lane (r, c) is {row r, slots 2c + 8i, +
// 1}. Per row 2c and 2c + 1, the reference e (the largest score, rounded) and the sum.
struct TileWeights {
  uint32_t words[2];
  float e[2];
  float sum[2];
};

template <typename T>
__device__ __forceinline__ TileWeights soften(float (&scores)[4], const Columns& columns, int slot0,
                                              int lane) {
  columns.scale(scores);
  TileWeights result;
  float p[4];
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    float s[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int slot = slot0 + lane / 4 + 8 * half;
      s[half] = columns.sees(column, slot) ? scores[2 * half + column] : -INFINITY;
    }
    float maximum = fmaxf(s[0], s[1]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, offset));
    }
    result.e[column] = rintf(maximum);
    const float reference = maximum == -INFINITY ? 0.0f : result.e[column];
    p[column] = exp2_fast(s[0] - reference);
    p[2 + column] = exp2_fast(s[1] - reference);
  }
  alignas(4) const T low[2] = {from_float<T>(p[0]), from_float<T>(p[1])};
  alignas(4) const T high[2] = {from_float<T>(p[2]), from_float<T>(p[3])};
  result.words[0] = transpose_8x8(*reinterpret_cast<const uint32_t*>(low));
  result.words[1] = transpose_8x8(*reinterpret_cast<const uint32_t*>(high));
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  constexpr uint32_t ones = kOnes2<T>;
  mma_16x8x16<T>(sums, ones, ones, ones, ones, result.words[0], result.words[1]);
  result.sum[0] = sums[0];
  result.sum[1] = sums[1];
  return result;
}

// e, l and weights of a split for row lane / 4 of a tile, from its 8 tiles of slots.
struct SplitWeights {
  float e, l;
  uint32_t words[kWarps][2];
};

// `e` and `l` are the row's 8 values, `weights` the first of 8 rows.
template <typename T>
__device__ __forceinline__ void load_split_weights(SplitWeights& split, const float* e,
                                                   const float* l, const unsigned char* weights,
                                                   int lane) {
  alignas(16) float e_of[kWarps], l_of[kWarps];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    reinterpret_cast<float4*>(e_of)[half] = reinterpret_cast<const float4*>(e)[half];
    reinterpret_cast<float4*>(l_of)[half] = reinterpret_cast<const float4*>(l)[half];
  }
  const unsigned char* row = weights + lane % 8 * kWeightRowBytes + lane / 8 * 16;
#pragma unroll
  for (int pair = 0; pair < kWarps / 2; ++pair) {
    load_matrices(reinterpret_cast<uint32_t (&)[4]>(split.words[2 * pair]), row + 64 * pair);
  }
  split.e = -INFINITY;
  split.l = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kWarps; ++tile) split.e = fmaxf(split.e, e_of[tile]);
#pragma unroll
  for (int tile = 0; tile < kWarps; ++tile) {
    const float power = power_of_two(e_of[tile] - split.e);
    split.l = fmaf(l_of[tile], power, split.l);
    split.words[tile][0] = scale_pair<T>(split.words[tile][0], power);
    split.words[tile][1] = scale_pair<T>(split.words[tile][1], power);
  }
}

// Where a lane's rows of the values start: slots kValueSlots apart, and byte of a block's first
// one.
template <typename C>
constexpr int kValueSlots = kIsFp8<C> ? 32 : 16;
template <typename C>
__device__ __forceinline__ int value_slot(int lane) {
  return kIsFp8<C> ? lane : lane % 8 + lane / 16 * 8;
}
template <typename C>
__device__ __forceinline__ int value_byte(int lane) {
  return kIsFp8<C> ? 0 : lane / 8 % 2 * 16;
}

// Transposed operands for one product each, of 16 elements of the values of a split. `row(i)` is
// the lane's row i.
template <typename C, typename Row>
__device__ __forceinline__ void load_values(uint32_t (&values)[kWarps][4], Row row) {
#pragma unroll
  for (int i = 0; i < kSplit / kValueSlots<C>; ++i) {
    if constexpr (!kIsFp8<C>) {
      load_matrices_transposed(values[i], row(i));
    } else {
      uint32_t fours[4];
      load_matrices_transposed(fours, row(i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        auto& words = values[2 * i + j / 2];
        widen_alternate(words[j % 2 * 2], words[j % 2 * 2 + 1], fours[j]);
      }
    }
  }
}

// Elements of `pair`, of the 8 of a block: as products leave them, in rows r and r + 8.
template <typename C>
__device__ __forceinline__ int first_of_pair(int pair) {
  return kIsFp8<C> ? 2 * pair : pair / 8 * 16 + pair % 8;
}

// o[0..3] = {element r, rows 2c, 2c+1}, {element r + 8, the same rows}, of 16 elements of the
// values of a split. `values` holds, per tile of 16 slots, the transposed operand.
template <typename T>
__device__ __forceinline__ void multiply_values(float (&o)[4], const uint32_t (&values)[kWarps][4],
                                                const SplitWeights& split) {
  float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) o[i] = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kWarps; ++tile) {
    const auto& v = values[tile];
    mma_16x8x16<T>(tile % 2 ? odd : o, v[0], v[1], v[2], v[3], split.words[tile][0],
                   split.words[tile][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) o[i] += odd[i];
}

}  // namespace flashrt
