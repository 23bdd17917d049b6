// The second kernel of a draw: in which bins the thresholds of top-k and top-p lie.
//
// A histogram of the row, with the number and, for top-p, the mass of the scores of each bin. Bins
// above a threshold's bin stay and those below go; only its own scores remain to be looked at.
// Where both are on, top-p depends on the mass that top-k leaves, which is only known between two
// bounds, so its threshold may lie in one of a few bins.
#pragma once

#include <cub/block/block_scan.cuh>

#include "adjust.cuh"
#include "common/pdl.cuh"
#include "row_memory.cuh"

namespace flashrt {

// Masses have up to 41 bits. A round adds at most kSlotElements = 2^11 halves of 20 and 21 bits,
// so sums of halves stay below 2^32.
struct SlotHistogram {
  uint32_t count[kBins];
  uint32_t mass_low[kBins];
  uint32_t mass_high[kBins];
};

__device__ __forceinline__ void clear(SlotHistogram& histogram) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    histogram.count[bin] = histogram.mass_low[bin] = histogram.mass_high[bin] = 0;
  }
  __syncthreads();
}

// Add a round of scores to a clear histogram, and that to the row's.
__device__ __forceinline__ void add_round(const RowMemory& memory, const RowSettings& settings,
                                          int start, int end, const RoundChunks& packed,
                                          SlotHistogram& histogram) {
  const float highest = memory.state->highest;
  const bool has_mass = settings.top_p < 1.0f;
#pragma unroll
  for (int load = 0; load < 2; ++load) {
    const int chunk = start / 4 + load * kThreads + threadIdx.x;
    const int count = chunk_count<float>(chunk, end);
    if (count <= 0) continue;
    float scores[4];
    unpack<float>(packed.chunk[load], scores);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= count || scores[i] == -INFINITY) continue;
      const int bin = bin_of(scores[i], highest, settings.temperature);
      atomicAdd(&histogram.count[bin], 1u);
      if (!has_mass) continue;
      const uint64_t mass = exact::mass(exact::sub(scores[i], highest));
      if (mass == 0) continue;
      atomicAdd(&histogram.mass_low[bin], static_cast<uint32_t>(mass & 0xfffffu));
      atomicAdd(&histogram.mass_high[bin], static_cast<uint32_t>(mass >> 20));
    }
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (histogram.count[bin] == 0) continue;
    atomicAdd(&memory.bin_count[bin], histogram.count[bin]);
    const uint64_t mass =
        histogram.mass_low[bin] + (static_cast<uint64_t>(histogram.mass_high[bin]) << 20);
    if (mass != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&memory.bin_mass[bin]),
                static_cast<unsigned long long>(mass));
    }
  }
  __syncthreads();
}

// The block reads the whole histogram, kBins / kThreads bins a thread, and sets the bins of the
// thresholds in the row's state.
__device__ __forceinline__ void find_bins(const RowMemory& memory, const RowSettings& settings) {
  constexpr int kEach = kBins / kThreads;
  using ScanCount = cub::BlockScan<uint32_t, kThreads>;
  using ScanMass = cub::BlockScan<uint64_t, kThreads>;
  __shared__ union {
    typename ScanCount::TempStorage count;
    typename ScanMass::TempStorage mass;
  } scratch;
  __shared__ int bin_k;
  __shared__ uint64_t least, most;  // bounds of the mass that top-k leaves
  const int first = threadIdx.x * kEach;
  uint32_t counts[kEach];
  uint64_t masses[kEach];
  uint32_t count_before = 0;
  uint64_t mass_before = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    counts[i] = __ldcg(&memory.bin_count[first + i]);
    masses[i] = __ldcg(&memory.bin_mass[first + i]);
    count_before += counts[i];
    mass_before += masses[i];
  }
  uint64_t all = 0;
  ScanCount(scratch.count).ExclusiveSum(count_before, count_before);
  __syncthreads();
  ScanMass(scratch.mass).ExclusiveSum(mass_before, mass_before, all);

  RowState& state = *memory.state;
  if (threadIdx.x == 0) {
    bin_k = kBins;
    least = most = all;
  }
  __syncthreads();
  if (settings.top_k > 0) {
    const uint32_t target = settings.top_k;
    uint32_t before = count_before;
    uint64_t mass = mass_before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (before < target && before + counts[i] >= target) {
        bin_k = first + i;
        least = mass;
        most = mass + masses[i];
        state.bin_k = first + i;
        state.count_before_k = before;
        state.mass_before_k = mass;
      }
      before += counts[i];
      mass += masses[i];
    }
  }
  __syncthreads();
  if (settings.top_p < 1.0f) {
    const double lowest = static_cast<double>(settings.top_p) * static_cast<double>(least);
    const double highest = static_cast<double>(settings.top_p) * static_cast<double>(most);
    uint64_t mass = mass_before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const bool start = first + i == 0;
      const double before = static_cast<double>(mass);
      const double after = static_cast<double>(mass + masses[i]);
      if ((start || before < lowest) && after >= lowest) {
        state.first_bin_p = first + i;
        state.mass_before_p = mass;
      }
      if ((start || before < highest) && after >= highest) {
        state.last_bin_p = min(first + i, bin_k);
      }
      mass += masses[i];
    }
  }
  if (threadIdx.x == 0) {
    state.total = all;
    state.phase = Phase::kDraw;
  }
}

__global__ void __launch_bounds__(kThreads)
    threshold_kernel(const __grid_constant__ SampleArgs args) {
  __shared__ SlotHistogram histogram;
  __shared__ bool is_last;
  launch_dependents();
  clear(histogram);
  wait_for_inputs();
  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  // On their way while state and settings are read.
  RoundChunks packed = load_round(memory.scores, begin, end, args.vocab, true);
  const RowSettings settings = load_settings(args.settings, row / args.places, args.vocab);
  if (memory.state->phase != Phase::kThreshold) return;
  add_round(memory, settings, begin, end, packed, histogram);
  for (int start = begin + kSlotElements; start < end; start += kSlotElements) {
    clear(histogram);
    packed = load_round(memory.scores, start, end, args.vocab, true);
    add_round(memory, settings, start, end, packed, histogram);
  }
  if (is_last_block(memory.counter, args.num_slots, is_last)) {
    find_bins(memory, settings);
  }
}

}  // namespace flashrt
