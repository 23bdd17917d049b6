// Merging partial softmax results in one fixed order, whoever computed them.
//
// A partial of a query row over some slots is (e, l, o): a reference e in units of log2, an
// integer, l = sum of exp2(s - e), o = sum of exp2(s - e) v; e = -inf without live slots. Partials
// merge in a tree fixed by slot numbers alone:
//   splits of 128 slots -> pairs -> quads -> a super of 1024;  supers, in order -> the row
// References are integers, so that bringing partials to a common one is exact.
#pragma once

#include <cmath>

#include "ptx.cuh"

namespace flashrt {

constexpr int kFanIn = 8;       // splits of a super
constexpr int kSuperLevel = 3;  // log2 of it

// 2^d of an integer d <= 0, and 0 below 2^-126 or if d is NaN (the difference of two empty
// partials).
__device__ __forceinline__ float power_of_two(float d) {
  const float biased = fmaxf(d, -127.0f) + 12583039.0f;  // 1.5 * 2^23 + 127: the exponent, low bits
  return __int_as_float(__float_as_int(biased) << 23);
}

// Two elements of o with their row's e and l.
struct Partial {
  float e, l;
  float2 o;
};

__device__ __forceinline__ Partial empty_partial() {
  return Partial{-INFINITY, 0.0f, make_float2(0.0f, 0.0f)};
}

__device__ __forceinline__ float weighted_sum(float a, float weight_a, float b, float weight_b) {
  return fmaf(a, weight_a, b * weight_b);
}

// What two neighbours weigh in their sum.
struct Weights {
  float e, left, right;

  __device__ __forceinline__ Weights(float e_left, float e_right) {
    e = fmaxf(e_left, e_right);
    left = power_of_two(e_left - e);
    right = power_of_two(e_right - e);
  }
};

__device__ __forceinline__ Partial combine(const Partial& left, const Partial& right) {
  const Weights w(left.e, right.e);
  return Partial{w.e, weighted_sum(left.l, w.left, right.l, w.right),
                 make_float2(weighted_sum(left.o.x, w.left, right.o.x, w.right),
                             weighted_sum(left.o.y, w.left, right.o.y, w.right))};
}

// Partials of one row and two elements: part `first + i` is i strides away.
struct Parts {
  const float2* el;
  const float2* o;
  int64_t el_stride, o_stride;
  int first, last;
};

// Merge parts of 2^level splits each, in the order of the tree. `ready` returns when parts may be
// read. Parts in global memory come from other blocks and are read past L1.
template <bool kGlobal, typename Ready>
__device__ __forceinline__ Partial merge(const Parts& parts, int level, Ready ready) {
  constexpr int kBatch = 8;
  Partial sum = empty_partial();
  for (int base = parts.first / kBatch * kBatch; base <= parts.last; base += kBatch) {
    const float2* el[kBatch];
    const float2* o[kBatch];
    bool is_there[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // Loads without a branch; a part that is not there is empty.
      const int index = min(max(base + i, parts.first), parts.last);
      el[i] = parts.el + (index - parts.first) * parts.el_stride;
      o[i] = parts.o + (index - parts.first) * parts.o_stride;
      is_there[i] = index == base + i;
    }
    ready();
    Partial part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float2 el_value = kGlobal ? __ldcg(el[i]) : *el[i];
      part[i] =
          Partial{is_there[i] ? el_value.x : -INFINITY, el_value.y, kGlobal ? __ldcg(o[i]) : *o[i]};
    }
#pragma unroll
    for (int step = 1; step < kBatch; step *= 2) {
      if (step << level >= kFanIn) continue;
#pragma unroll
      for (int i = 0; i < kBatch; i += 2 * step) part[i] = combine(part[i], part[i + step]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if ((i << level) % kFanIn == 0) sum = combine(sum, part[i]);
    }
  }
  return sum;
}

}  // namespace flashrt
