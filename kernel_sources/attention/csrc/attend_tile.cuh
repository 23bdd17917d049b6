// One warp's share of attention: 16 consecutive slots against up to 8 query rows, on tensor cores.
//
// Keys are the 16-row operand and query rows the 8 columns, so that a column's bits do not depend
// on the other columns. Both operands of a product may be permuted alike along the summed dim; the
// orders below let every lane load 16 contiguous bytes of the host's own rows straight into its
// fragment:
//   scores   lane (r, c) holds elements 8c..8c+7 of each 32-element step of slots r and r + 8
//   output   lane (r, c) holds elements 8r..8r+7 of each 64-element step of slots 2c, 2c+1, 2c+8,
//   2c+9
// with r = lane / 4 and c = lane % 4.
#pragma once

#include <cmath>

#include "common/vec.cuh"
#include "ptx.cuh"

namespace flashrt {

constexpr int kTile = 16;     // slots a warp takes at a time
constexpr int kTileRows = 8;  // query rows of a block

template <int D>
constexpr int kSteps = (D + 31) / 32;

// Elements between query rows in shared memory: odd multiples of 64 bytes, so that 16-byte reads of
// neighbouring rows fall into different banks.
template <int D>
constexpr int kRowStride = 32 * (kSteps<D> + 1 - kSteps<D> % 2);

// Floats between output rows in shared memory.
template <int D>
constexpr int kOutStride = D + 8;

template <int D>
struct KeyTile {
  uint32_t words[2][kSteps<D>][4];
};

template <int D>
struct ValueTile {
  uint32_t words[4][D / 16];
};

// History rows of one (sequence, key head). Slots outside [first, last] are read as the nearest one
// inside, and masked later: what lies beyond the live rows is never touched.
template <typename T>
struct CacheRows {
  const T* rows;
  int64_t stride;
  int first, last;

  __device__ __forceinline__ const T* at(int slot) const {
    return rows + static_cast<int64_t>(min(max(slot, first), last)) * stride;
  }
};

template <typename T, int D>
__device__ __forceinline__ void load_keys(KeyTile<D>& tile, const CacheRows<T>& cache, int slot0,
                                          int lane) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const T* row = cache.at(slot0 + r + 8 * half) + 8 * c;
#pragma unroll
    for (int step = 0; step < kSteps<D>; ++step) {
      if (32 * (step + 1) <= D || 32 * step + 8 * c < D) {
        load_words<true>(tile.words[half][step], row + 32 * step);
      }
    }
  }
}

// Slot offset, within a tile, of a lane's n-th value row.
__device__ __forceinline__ int value_slot(int n, int lane) {
  return 2 * (lane % 4) + n % 2 + 8 * (n / 2);
}

// A lane's words of one value row, r = lane / 4. Rows of the cache are read as history, others as
// inputs.
template <typename T, int D, bool kHistory>
__device__ __forceinline__ void load_value_row(uint32_t (&words)[D / 16], const T* row, int r) {
#pragma unroll
  for (int step = 0; step < D / 64; ++step) {
    load_words<kHistory>(reinterpret_cast<uint32_t (&)[4]>(words[4 * step]),
                         row + 64 * step + 8 * r);
  }
  if constexpr (D % 64 >= 32) {
    load_words<kHistory>(reinterpret_cast<uint32_t (&)[2]>(words[D / 64 * 4]),
                         row + D / 64 * 64 + 4 * r);
  }
  if constexpr (D % 32 == 16) {
    load_words<kHistory>(reinterpret_cast<uint32_t (&)[1]>(words[D / 16 - 1]),
                         row + D - 16 + 2 * r);
  }
}

template <typename T, int D>
__device__ __forceinline__ void load_values(ValueTile<D>& tile, const CacheRows<T>& cache,
                                            int slot0, int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    load_value_row<T, D, true>(tile.words[n], cache.at(slot0 + value_slot(n, lane)), lane / 4);
  }
}

// First element of the two that word `word` holds.
template <int D>
__device__ __forceinline__ int value_element(int word, int lane) {
  const int r = lane / 4;
  if (word < D / 64 * 4) return 64 * (word / 4) + 8 * r + 2 * (word % 4);
  if (D % 64 >= 32 && word < D / 64 * 4 + 2) return D / 64 * 64 + 4 * r + 2 * (word % 2);
  return D - 16 + 2 * r;
}

template <int D>
__device__ __forceinline__ void clear(KeyTile<D>& keys, ValueTile<D>& values) {
#pragma unroll
  for (int i = 0; i < 2 * kSteps<D> * 4; ++i) (&keys.words[0][0][0])[i] = 0;
#pragma unroll
  for (int i = 0; i < 4 * (D / 16); ++i) (&values.words[0][0])[i] = 0;
}

// Replace the keys of slots [length, length + tokens) by this call's own, prepared in shared
// memory.
template <typename T, int D>
__device__ __forceinline__ void insert_keys(KeyTile<D>& keys, const T* new_keys, int slot0,
                                            int length, int tokens, int lane) {
  const int r = lane / 4, c = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = slot0 + r + 8 * half - length;
    if (token < 0 || token >= tokens) continue;
    const T* row = new_keys + token * kRowStride<D> + 8 * c;
#pragma unroll
    for (int step = 0; step < kSteps<D>; ++step) {
      if (32 * (step + 1) <= D || 32 * step + 8 * c < D) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + 32 * step);
        keys.words[half][step][0] = words.x;
        keys.words[half][step][1] = words.y;
        keys.words[half][step][2] = words.z;
        keys.words[half][step][3] = words.w;
      }
    }
  }
}

// The same for values, from this call's own input.
template <typename T, int D>
__device__ __forceinline__ void insert_values(ValueTile<D>& values, const T* new_values,
                                              int64_t stride, int slot0, int length, int tokens,
                                              int lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int token = slot0 + value_slot(n, lane) - length;
    if (token < 0 || token >= tokens) continue;
    load_value_row<T, D, false>(values.words[n], new_values + token * stride, lane / 4);
  }
}

// scores[0..3] = q . k of {slot r, rows 2c, 2c+1}, {slot r + 8, the same rows}.
template <typename T, int D>
__device__ __forceinline__ void multiply_keys(float (&scores)[4], const KeyTile<D>& keys,
                                              const T* queries, int lane) {
  const T* row = queries + (lane / 4) * kRowStride<D> + 8 * (lane % 4);
  float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kSteps<D>; ++step) {
    const uint4 q = *reinterpret_cast<const uint4*>(row + 32 * step);
    const auto& k0 = keys.words[0][step];
    const auto& k1 = keys.words[1][step];
    mma_16x8x16<T>(scores, k0[0], k1[0], k0[1], k1[1], q.x, q.y);
    mma_16x8x16<T>(odd, k0[2], k1[2], k0[3], k1[3], q.z, q.w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] += odd[i];
}

// Slots that the queries of a lane's columns see: (position - window, position]; none at position
// -1.
struct Columns {
  int position[2];
  int window;
  float scaling;   // of q . k, in units of log2 without a soft cap
  float soft_cap;  // 0 without

  // Products to scores in units of log2.
  __device__ __forceinline__ void scale(float (&products)[4]) const {
    if (soft_cap == 0.0f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[i] *= scaling;
    } else {
      constexpr float kLog2e = 1.4426950408889634f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        products[i] = soft_cap * kLog2e * tanh_fast(__fdividef(products[i] * scaling, soft_cap));
      }
    }
  }
  __device__ __forceinline__ bool sees(int column, int slot) const {
    return slot <= position[column] && slot > position[column] - window;
  }
};

// Weights exp2(s - max) of a tile, rounded to T and laid out as the value product's columns, and
// per row (columns 2c and 2c + 1) their maximum and sum.
struct TileWeights {
  uint32_t words[2];
  float maximum[2];
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
    result.maximum[column] = maximum;
    const float reference = maximum == -INFINITY ? 0.0f : maximum;
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

// {element e row 2c, e row 2c + 1, e + 1 row 2c, e + 1 row 2c + 1} of the two elements word `word`
// holds.
template <typename T, int D>
__device__ __forceinline__ void multiply_word(float (&o)[4], const ValueTile<D>& values, int word,
                                              const TileWeights& weights) {
  const uint32_t v0 = values.words[0][word], v1 = values.words[1][word];
  const uint32_t v2 = values.words[2][word], v3 = values.words[3][word];
  o[0] = o[1] = o[2] = o[3] = 0.0f;
  mma_16x8x16<T>(o, __byte_perm(v0, v1, 0x5410), __byte_perm(v0, v1, 0x7632),
                 __byte_perm(v2, v3, 0x5410), __byte_perm(v2, v3, 0x7632), weights.words[0],
                 weights.words[1]);
}

// out[row][d] = sum over the tile's slots of weight * value, for an even number of rows that covers
// `rows`, into shared memory.
template <typename T, int D>
__device__ __forceinline__ void multiply_values(float* out, const ValueTile<D>& values,
                                                const TileWeights& weights, int rows, int lane) {
  const int row = 2 * (lane % 4);
  const bool stores = row < rows;
  float* first = out + row * kOutStride<D>;
#pragma unroll
  for (int word = 0; word + 1 < D / 16; word += 2) {
    float low[4], high[4];
    multiply_word<T, D>(low, values, word, weights);
    multiply_word<T, D>(high, values, word + 1, weights);
    float* at = first + value_element<D>(word, lane);
    store_shared_if(stores, at, make_float4(low[0], low[2], high[0], high[2]));
    store_shared_if(stores, at + kOutStride<D>, make_float4(low[1], low[3], high[1], high[3]));
  }
  if constexpr (D / 16 % 2 == 1) {
    float o[4];
    multiply_word<T, D>(o, values, D / 16 - 1, weights);
    float* at = first + value_element<D>(D / 16 - 1, lane);
    store_shared_if(stores, at, make_float2(o[0], o[2]));
    store_shared_if(stores, at + kOutStride<D>, make_float2(o[1], o[3]));
  }
}

}  // namespace flashrt
