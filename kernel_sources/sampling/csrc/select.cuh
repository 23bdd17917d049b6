// A threshold among the undecided scores of a row: by digits of eight bits of their keys, from the
// highest down, each with a histogram of the candidates' weights. Exact, whatever the scores.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cuda/functional>

#include "adjust.cuh"
#include "row_memory.cuh"

namespace flashrt {

// The undecided scores of a row. The first kCached of them lie in shared memory.
struct Candidates {
  static constexpr int kCached = 4096;
  struct Cache {
    uint32_t key[kCached];
    uint32_t index[kCached];
  };

  const RowMemory& memory;
  Cache& cache;
  uint32_t size;

  __device__ __forceinline__ uint32_t index(uint32_t i) const {
    return i < kCached ? cache.index[i] : __ldcg(&memory.list[i]);
  }
  __device__ __forceinline__ uint32_t key(uint32_t i) const {
    return i < kCached ? cache.key[i] : ordered_bits(__ldcg(&memory.scores[index(i)]));
  }
  __device__ __forceinline__ void fill() {
    for (uint32_t i = threadIdx.x; i < min(size, static_cast<uint32_t>(kCached)); i += kThreads) {
      const uint32_t index = __ldcg(&memory.list[i]);
      cache.index[i] = index;
      cache.key[i] = ordered_bits(__ldcg(&memory.scores[index]));
    }
    __syncthreads();
  }
};

struct SelectScratch {
  union {
    typename cub::BlockReduce<uint32_t, kThreads>::TempStorage reduce;
    typename cub::BlockReduce<uint64_t, kThreads>::TempStorage reduce_mass;
    typename cub::BlockScan<uint64_t, kThreads>::TempStorage scan;
  };
  uint32_t count[256];
  unsigned long long weight[256];
  uint32_t low, high;
  uint64_t before;
  int digit;
};

// The highest key t in [low, high] for which `before` and the weights of all candidates with keys
// in [t, high] sum to at least `target`; the highest key of all when `before` alone does, and the
// lowest when all together do not. The same in every thread.
//
// takes(key, bin): whether a candidate counts; weigh(key): its weight.
template <typename Takes, typename Weigh>
__device__ uint32_t select_key(const Candidates& candidates, uint64_t before, double target,
                               const Takes& takes, const Weigh& weigh, SelectScratch& scratch) {
  using Reduce = cub::BlockReduce<uint32_t, kThreads>;
  using Scan = cub::BlockScan<uint64_t, kThreads>;
  uint32_t low = 0xffffffffu, high = 0;
  for (uint32_t i = threadIdx.x; i < candidates.size; i += kThreads) {
    const uint32_t key = candidates.key(i);
    if (!takes(key)) continue;
    low = min(low, key);
    high = max(high, key);
  }
  low = Reduce(scratch.reduce).Reduce(low, cuda::minimum<uint32_t>{});
  __syncthreads();
  high = Reduce(scratch.reduce).Reduce(high, cuda::maximum<uint32_t>{});
  if (threadIdx.x == 0) {
    scratch.low = low;
    scratch.high = high;
  }
  __syncthreads();
  low = scratch.low;
  high = scratch.high;
  while (low < high) {
    const int shift = max(0, 24 - __clz(high - low));  // digits of the range: at most 256
    scratch.count[threadIdx.x] = 0;
    scratch.weight[threadIdx.x] = 0;
    if (threadIdx.x == 0) scratch.digit = -1;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < candidates.size; i += kThreads) {
      const uint32_t key = candidates.key(i);
      if (key < low || key > high || !takes(key)) continue;
      const uint32_t digit = (key - low) >> shift;
      atomicAdd(&scratch.count[digit], 1u);
      atomicAdd(&scratch.weight[digit], static_cast<unsigned long long>(weigh(key)));
    }
    __syncthreads();
    const int digit = 255 - threadIdx.x;  // descending
    const bool any = scratch.count[digit] > 0;
    const uint64_t weight = scratch.weight[digit];
    uint64_t sum;
    Scan(scratch.scan).InclusiveSum(weight, sum);
    sum += before;
    // The largest digit that reaches the target, or else the smallest that holds anything.
    if (any && static_cast<double>(sum) >= target) atomicMax(&scratch.digit, digit);
    __syncthreads();
    if (scratch.digit < 0) return low;
    if (digit == scratch.digit) scratch.before = sum - weight;
    __syncthreads();
    low += static_cast<uint32_t>(scratch.digit) << shift;
    high = min(high, low + ((1u << shift) - 1));
    before = scratch.before;
    __syncthreads();
  }
  return low;
}

// Key of the lowest score that top-k and top-p leave.
__device__ inline uint32_t lowest_kept(const Candidates& candidates, const RowSettings& settings,
                                       SelectScratch& scratch) {
  const RowState& state = *candidates.memory.state;
  const float highest = state.highest;
  const int bin_k = state.bin_k, first_p = state.first_bin_p, last_p = state.last_bin_p;
  const auto bin = [&](uint32_t key) {
    return bin_of(value_of(key), highest, settings.temperature);
  };
  const auto mass = [&](uint32_t key) { return exact::mass(exact::sub(value_of(key), highest)); };
  uint32_t lowest = 0;
  uint64_t total = state.total;
  if (bin_k < kBins) {
    const auto takes = [&](uint32_t key) { return bin(key) == bin_k; };
    const auto one = [](uint32_t) { return uint64_t{1}; };
    lowest = select_key(candidates, state.count_before_k, settings.top_k, takes, one, scratch);
    if (settings.top_p < 1.0f) {
      uint64_t sum = 0;
      for (uint32_t i = threadIdx.x; i < candidates.size; i += kThreads) {
        const uint32_t key = candidates.key(i);
        if (key >= lowest && takes(key)) sum += mass(key);
      }
      sum = cub::BlockReduce<uint64_t, kThreads>(scratch.reduce_mass).Sum(sum);
      if (threadIdx.x == 0) scratch.before = sum;
      __syncthreads();
      total = state.mass_before_k + scratch.before;
      __syncthreads();
    }
  }
  if (first_p < kBins) {
    const double target = static_cast<double>(settings.top_p) * static_cast<double>(total);
    const auto takes = [&](uint32_t key) {
      const int place = bin(key);
      return key >= lowest && place >= first_p && place <= last_p;
    };
    lowest = select_key(candidates, state.mass_before_p, target, takes, mass, scratch);
  }
  return lowest;
}

}  // namespace flashrt
