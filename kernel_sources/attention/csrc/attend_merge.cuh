// Merging partial softmax results in one fixed order, whoever computed them.
//
// A partial of a query row over some slots is (m, l, o): the largest score m in units of log2, l =
// sum of exp2(s - m), o = sum of exp2(s - m) v. Partials merge in a tree fixed by slot numbers
// alone:
//   8 tiles of 16 slots -> a split of 128;  8 splits -> a super of 1024;  all supers -> the row
// each level as M = max m_j, then sum over j in order of exp2(m_j - M) * o_j. A partial without
// live slots (m = -inf) is skipped, so that it cannot change a bit.
#pragma once

#include <cmath>

#include "ptx.cuh"

namespace flashrt {

constexpr int kFanIn = 8;  // partials per merge, on both lower levels

// Two elements of o with their row's m and l.
struct Partial {
  float m, l;
  float2 o;
};

__device__ __forceinline__ Partial empty_partial(float m) {
  return Partial{m, 0.0f, make_float2(0.0f, 0.0f)};
}

// Add one partial to `sum`, whose m is already the maximum of all that are to come.
__device__ __forceinline__ void accumulate(Partial& sum, float m, float l, float2 o) {
  if (m == -INFINITY) return;
  const float weight = exp2_fast(m - sum.m);
  sum.l = fmaf(weight, l, sum.l);
  sum.o.x = fmaf(weight, o.x, sum.o.x);
  sum.o.y = fmaf(weight, o.y, sum.o.y);
}

// Global partials come from other blocks: read them past L1.
template <bool kGlobal>
__device__ __forceinline__ float2 load_partial(const float2* pointer) {
  if constexpr (kGlobal) {
    return __ldcg(pointer);
  } else {
    return *pointer;
  }
}

// Merge partials [first, last] of kFanIn, `ml_stride` and `o_stride` float2 apart.
template <bool kGlobal>
__device__ __forceinline__ Partial merge(const float2* ml, int ml_stride, const float2* o,
                                         int o_stride, int first, int last) {
  float2 ml_of[kFanIn], o_of[kFanIn];
  float maximum = -INFINITY;
#pragma unroll
  for (int j = 0; j < kFanIn; ++j) {
    const int at =
        min(max(j, first), last);  // loads without a branch; one that is not asked for is empty
    ml_of[j] = load_partial<kGlobal>(ml + at * ml_stride);
    o_of[j] = load_partial<kGlobal>(o + at * o_stride);
    if (at != j) ml_of[j].x = -INFINITY;
    maximum = fmaxf(maximum, ml_of[j].x);
  }
  Partial sum = empty_partial(maximum);
#pragma unroll
  for (int j = 0; j < kFanIn; ++j) accumulate(sum, ml_of[j].x, ml_of[j].y, o_of[j]);
  return sum;
}

// Partials in the workspace: [part][row] and [part][row][D], rows counted over [B, T, H].
struct PartialStore {
  float2* ml;
  float2* o;
  int rows;
  int pairs;  // D / 2

  __device__ __forceinline__ void put(int part, int row, int pair, const Partial& value) const {
    const int64_t at = static_cast<int64_t>(part) * rows + row;
    o[at * pairs + pair] = value.o;
    if (pair == 0) ml[at] = make_float2(value.m, value.l);
  }
};

__device__ __forceinline__ float largest_score(const PartialStore& store, int row, int first,
                                               int last) {
  float maximum = -INFINITY;
  for (int part = first; part <= last; ++part) {
    maximum = fmaxf(maximum, __ldcg(&store.ml[static_cast<int64_t>(part) * store.rows + row]).x);
  }
  return maximum;
}

// The row from its supers [first, last], each one part.
__device__ __forceinline__ Partial merge_supers(const PartialStore& store, int row, int pair,
                                                int first, int last) {
  Partial sum = empty_partial(largest_score(store, row, first, last));
#pragma unroll 4
  for (int part = first; part <= last; ++part) {
    const int64_t at = static_cast<int64_t>(part) * store.rows + row;
    const float2 ml = __ldcg(&store.ml[at]);
    accumulate(sum, ml.x, ml.y, __ldcg(&store.o[at * store.pairs + pair]));
  }
  return sum;
}

// The row from its splits [first, last], each one part: the same tree.
__device__ __forceinline__ Partial merge_splits(const PartialStore& store, int row, int pair,
                                                int first, int last) {
  Partial sum = empty_partial(largest_score(store, row, first, last));
  for (int super = first / kFanIn; super <= last / kFanIn; ++super) {
    const int64_t at = static_cast<int64_t>(super) * kFanIn * store.rows + row;
    const Partial part =
        merge<true>(store.ml + at, store.rows, store.o + at * store.pairs + pair,
                    store.rows * store.pairs, first - super * kFanIn, last - super * kFanIn);
    accumulate(sum, part.m, part.l, part.o);
  }
  return sum;
}

}  // namespace flashrt
