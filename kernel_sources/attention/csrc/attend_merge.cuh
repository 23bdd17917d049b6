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

// Partials of one row and two elements: number i is i strides away.
struct Parts {
  const float2* el;
  const float2* o;
  int64_t el_stride, o_stride;
};

// Merge parts first..last of 2^level splits each, which lie in shared memory from 0 on, in the
// order of the tree. `ready` returns when they may be read.
template <typename Ready>
__device__ __forceinline__ Partial merge_parts(const Parts& parts, int first, int last, int level,
                                               Ready ready) {
  constexpr int kBatch = 8;
  Partial sum = empty_partial();
  for (int base = first / kBatch * kBatch; base <= last; base += kBatch) {
    const float2* el[kBatch];
    const float2* o[kBatch];
    bool is_there[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      // Loads without a branch; a part that is not there is empty.
      const int index = min(max(base + i, first), last);
      el[i] = parts.el + (index - first) * parts.el_stride;
      o[i] = parts.o + (index - first) * parts.o_stride;
      is_there[i] = index == base + i;
    }
    ready();
    Partial part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float2 el_value = *el[i];
      part[i] = Partial{is_there[i] ? el_value.x : -INFINITY, el_value.y, *o[i]};
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

// The nodes that blocks of `step` splits from `origin` on hand over, in order: the largest ones
// that lie within one block's splits. Dead splits beside first..last count as those of the first
// and the last block.
struct NodeWalk {
  int start, level;  // of the node

  __device__ __forceinline__ NodeWalk(int first, int last, int origin, int step, int last_edge)
      : start(first >> kSuperLevel << kSuperLevel),
        end_(((last >> kSuperLevel) + 1) << kSuperLevel),
        step_(step),
        first_(first),
        last_edge_(last_edge),
        last_(last) {
    edge_ = after(origin);
    find_level();
  }
  __device__ __forceinline__ bool done() const { return start >= end_; }
  __device__ __forceinline__ bool is_live() const {
    return start <= last_ && start + (1 << level) > first_;
  }
  __device__ __forceinline__ void next() {
    start += 1 << level;
    if (start >= edge_) edge_ = after(edge_);
    find_level();
  }

 private:
  // Where the block that begins at `edge` ends.
  __device__ __forceinline__ int after(int edge) const {
    return edge >= last_edge_ || edge + step_ > last_ ? end_ : edge + step_;
  }
  __device__ __forceinline__ void find_level() {
    const int room = max(edge_ - start, 1);
    level = min(__ffs(start | kFanIn) - 1, 31 - __clz(room));
  }
  int end_, step_, first_, last_edge_, last_, edge_;  // `edge_`: where the block of `start` ends
};

// Some nodes in order; what is not there is empty.
template <int N>
struct Nodes {
  int starts[N], levels[N];  // a level above kSuperLevel: beyond the last
  Partial parts[N];

  __device__ __forceinline__ void load(const Parts& stored, NodeWalk& walk) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      starts[i] = walk.start;
      levels[i] = walk.done() ? kSuperLevel + 1 : walk.level;
      parts[i] = empty_partial();
      if (!walk.done() && walk.is_live()) {
        const float2 el = __ldcg(stored.el + starts[i] * stored.el_stride);
        parts[i] = Partial{el.x, el.y, __ldcg(stored.o + starts[i] * stored.o_stride)};
      }
      if (!walk.done()) walk.next();
    }
  }
  // Into `sum`, the supers so far, and what of the next one `waiting` has: left children by level.
  __device__ __forceinline__ void merge(Partial& sum, Partial (&waiting)[kSuperLevel]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bool rises = levels[i] <= kSuperLevel;
#pragma unroll
      for (int level = 0; level < kSuperLevel; ++level) {
        if (!rises || level < levels[i]) continue;
        if (starts[i] >> level & 1) {
          parts[i] = combine(waiting[level], parts[i]);
          waiting[level] = empty_partial();
        } else {
          waiting[level] = parts[i];
          rises = false;
        }
      }
      if (rises) sum = combine(sum, parts[i]);
    }
  }
};

// Merge stored nodes, each at the number of its first split, in the order of the tree. They come
// from other blocks and are read past L1, some before those in front of them are merged.
__device__ __forceinline__ Partial merge_nodes(const Parts& stored, NodeWalk walk) {
  Partial sum = empty_partial();
  Partial waiting[kSuperLevel] = {sum, sum, sum};
  Nodes<8> nodes, next;
  nodes.load(stored, walk);
  while (true) {
    const bool more = !walk.done();
    if (more) next.load(stored, walk);
    nodes.merge(sum, waiting);
    if (!more) return sum;
    nodes = next;
  }
}

}  // namespace flashrt
