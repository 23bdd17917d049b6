// One head row by one warp: y = rotary(norm(x)).
//
//   norm    x * rsqrt(mean(x^2) + eps) * w          mean over the row, or over all heads of the
//   token rotary  y[i] = x[i] cos[i] + partner(i) sin[i]  over the first `rotary_dim` elements;
//           partner is -x[i + R/2] / x[i - R/2] (half-split) or -x[i + 1] / x[i - 1] (interleaved)
//
// fp32 arithmetic, rounded to T after the norm and after the rotary, as hosts do.
// Lane l holds elements 2l + 64j and the one after; D is even.
#pragma once

#include "common/vec.cuh"
#include "rows_settings.h"

namespace flashrt {

// Elements a lane holds of a row of D.
template <int D>
inline constexpr int kRowElements = 2 * ((D + 63) / 64);

// What a row needs besides the row itself.
template <int N>
struct RowFactors {
  float weight[N];
  float cos[N];
  float sin[N];
};

template <typename T>
__device__ __forceinline__ float2 load_pair(const T* pointer) {
  if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const float2*>(pointer);
  } else {
    return unpack2<T>(*reinterpret_cast<const uint32_t*>(pointer));
  }
}

template <typename T>
__device__ __forceinline__ void store_pair(T* pointer, float x, float y) {
  if constexpr (sizeof(T) == 4) {
    *reinterpret_cast<float2*>(pointer) = make_float2(x, y);
  } else {
    alignas(4) const T pair[2] = {from_float<T>(x), from_float<T>(y)};
    *reinterpret_cast<uint32_t*>(pointer) = *reinterpret_cast<const uint32_t*>(pair);
  }
}

// Element i of a lane.
__device__ __forceinline__ int row_element(int i, int lane) {
  return 2 * lane + 64 * (i / 2) + i % 2;
}

// cos and sin of type U from `offset` on; 1 and 0 beyond the rotary. All loads come before their
// uses.
template <typename U, int N>
__device__ __forceinline__ void load_turns(RowFactors<N>& factors, const void* cos, const void* sin,
                                           int64_t offset, int rotary_dim, int lane) {
  const U* cosines = static_cast<const U*>(cos) + offset;
  const U* sines = static_cast<const U*>(sin) + offset;
  U raw[2][N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int element = row_element(i, lane);
    raw[0][i] = from_float<U>(1.0f);
    raw[1][i] = from_float<U>(0.0f);
    if (element < rotary_dim) {
      raw[0][i] = cosines[element];
      raw[1][i] = sines[element];
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    factors.cos[i] = to_float(raw[0][i]);
    factors.sin[i] = to_float(raw[1][i]);
  }
}

// `weight` may be null (no norm); `table_offset` is the element offset of this token's cos and sin.
template <typename T, int N>
__device__ __forceinline__ void load_factors(RowFactors<N>& factors, const RowSettings& settings,
                                             const T* weight, const void* cos, const void* sin,
                                             int64_t table_offset, int dim, int lane) {
  T weights[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    weights[i] = from_float<T>(0.0f);
    if (weight != nullptr && row_element(i, lane) < dim) weights[i] = weight[row_element(i, lane)];
  }
  if (settings.rotary_dim > 0 && settings.tables_fp32) {
    load_turns<float, N>(factors, cos, sin, table_offset, settings.rotary_dim, lane);
  } else if (settings.rotary_dim > 0) {
    load_turns<T, N>(factors, cos, sin, table_offset, settings.rotary_dim, lane);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    factors.weight[i] = to_float(weights[i]) + (settings.zero_centered ? 1.0f : 0.0f);
  }
}

__device__ __forceinline__ float sum_over_warp(float sum) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return sum;
}

// Where the mean of squares comes from: the row itself (heads = 1), or `heads` rows from `first`
// on, `head_stride` elements apart.
template <typename T>
struct NormScope {
  const T* first;
  int64_t head_stride;
  int heads;
  float inverse_count;  // 1 / (heads * dim)
};

// Load elements of `source` into registers; out of `dim` they are 0.
template <typename T, int N>
__device__ __forceinline__ void load_row(float (&x)[N], const T* source, int dim, int lane) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const int element = 2 * lane + 64 * j;
    const float2 pair = element < dim ? load_pair<T>(source + element) : make_float2(0.0f, 0.0f);
    x[2 * j] = pair.x;
    x[2 * j + 1] = pair.y;
  }
}

// mean(x^2) over the rows of `scope`, in the same order for the same rows; every lane gets it.
template <typename T, int N>
__device__ __forceinline__ float mean_square(const float (&x)[N], const NormScope<T>& scope,
                                             int dim, int lane) {
  float sum = 0.0f;
  if (scope.heads == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) sum = fmaf(x[i], x[i], sum);
  } else {
    for (int head = 0; head < scope.heads; ++head) {
      float other[N];
      load_row<T, N>(other, scope.first + head * scope.head_stride, dim, lane);
#pragma unroll
      for (int i = 0; i < N; ++i) sum = fmaf(other[i], other[i], sum);
    }
  }
  return sum_over_warp(sum) * scope.inverse_count;
}

template <typename T, int N>
__device__ __forceinline__ void store_row(T* row, const float (&x)[N], int dim, int lane) {
#pragma unroll
  for (int j = 0; j < N / 2; ++j) {
    const int element = 2 * lane + 64 * j;
    if (element < dim) store_pair<T>(row + element, x[2 * j], x[2 * j + 1]);
  }
}

// y of the row x into `row`: shared memory of this warp alone, visible to it after __syncwarp().
// `mean` is mean(x^2) of a row with a norm.
template <typename T, int N>
__device__ __forceinline__ void norm_rotate_row(T* row, float (&x)[N], bool has_norm, float mean,
                                                const RowFactors<N>& factors,
                                                const RowSettings& settings, int dim, int lane) {
  if (has_norm) {
    const float inverse_rms = rsqrtf(mean + settings.eps);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = to_float(from_float<T>(x[i] * inverse_rms * factors.weight[i]));
    }
  }
  const int half = settings.rotary_dim / 2;
  if (settings.rotary_dim == 32 * N && !settings.interleaved && (N == 2 || N % 4 == 0)) {
    // Partners are in the same lane, or in that half a warp away.
    float turned[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float partner = N == 2 ? __shfl_xor_sync(0xffffffffu, x[i], 16) : x[(i + N / 2) % N];
      const bool first = N == 2 ? lane < 16 : i < N / 2;
      turned[i] = fmaf(x[i], factors.cos[i], (first ? -partner : partner) * factors.sin[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = turned[i];
    store_row<T, N>(row, x, dim, lane);
    return;
  }
  store_row<T, N>(row, x, dim, lane);
  if (settings.rotary_dim == 0) return;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int element = row_element(i, lane);
    // Reads without a branch; elements beyond the rotary read themselves and stay.
    const bool turns = element < settings.rotary_dim;
    const bool first = settings.interleaved ? i % 2 == 0 : element < half;
    const int distance = settings.interleaved ? 1 : half;
    const int at = !turns ? min(element, dim - 1) : first ? element + distance : element - distance;
    const float partner = to_float(row[at]);
    const float turned = fmaf(x[i], factors.cos[i], (first ? -partner : partner) * factors.sin[i]);
    x[i] = turns ? turned : x[i];
  }
  __syncwarp();
  store_row<T, N>(row, x, dim, lane);
}

}  // namespace flashrt
