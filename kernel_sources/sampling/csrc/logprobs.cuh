// log-softmax of the chosen token and of the top_n highest ones, in one kernel.
//
// logits [rows, vocab] fp32. A block takes kSlotElements of a row: their maximum m_s, the sum of
// exp(x - m_s) and the top_n highest as keys; the last block of the row joins the slots in their
// order, so the bits depend on vocab and the row alone. A NaN is the highest of all.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cuda/functional>

#include "common/chunk.cuh"
#include "common/pdl.cuh"
#include "row_memory.cuh"

namespace flashrt {

inline constexpr int kMaxLogprobSlots = 2048;  // of kSlotElements: 2^22 logits
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kWarpElements = kSlotElements / kThreads;

// The row's part of the workspace, laid over its scores and list: at least 8 bytes a logit, and 256
// in all, hold 8 + 8 * kMaxTop bytes a slot.
struct SlotResults {
  uint64_t* top;  // [num_slots, top_n], highest first, 0 where there are no more
  uint32_t* highest;
  float* sum;
};

__device__ __forceinline__ SlotResults slot_results(const LogprobsArgs& args,
                                                    const RowMemory& memory) {
  SlotResults results;
  results.top = reinterpret_cast<uint64_t*>(memory.scores);
  results.highest = reinterpret_cast<uint32_t*>(results.top + args.num_slots * args.top_n);
  results.sum = reinterpret_cast<float*>(results.highest + args.num_slots);
  return results;
}

__device__ __forceinline__ uint64_t warp_max(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t most = __reduce_max_sync(0xffffffffu, high);
  const uint32_t low = high == most ? static_cast<uint32_t>(key) : 0;
  return static_cast<uint64_t>(most) << 32 | __reduce_max_sync(0xffffffffu, low);
}

template <int N>
__device__ __forceinline__ uint64_t max_of(const uint64_t (&keys)[N]) {
  uint64_t most = keys[0];
#pragma unroll
  for (int i = 1; i < N; ++i) most = max(most, keys[i]);
  return most;
}

// exp(value - highest), 0 for -inf also when that is the highest.
__device__ __forceinline__ float exp_below(float value, float highest) {
  return value == -INFINITY ? 0.0f : expf(value - highest);
}

// Sum over the block, the same in every thread.
__device__ __forceinline__ float block_sum(float value) {
  using Reduce = cub::BlockReduce<float, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ float result;
  value = Reduce(scratch).Sum(value);
  if (threadIdx.x == 0) result = value;
  __syncthreads();
  return result;
}

__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  using Reduce = cub::BlockReduce<uint32_t, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ uint32_t result;
  value = Reduce(scratch).Reduce(value, cuda::maximum<uint32_t>{});
  if (threadIdx.x == 0) result = value;
  __syncthreads();
  return result;
}

// The `count` highest keys of a block, in order, to `top`: of each warp first, then of all warps.
__device__ __forceinline__ void highest_of_slot(uint64_t (&keys)[kWarpElements], int count,
                                                uint64_t* top) {
  __shared__ uint64_t lists[kWarps][kMaxTop + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t mine = max_of(keys);
  for (int i = 0; i < count; ++i) {
    const uint64_t most = warp_max(mine);
    if (lane == 0) lists[warp][i] = most;
    if (mine != most) continue;
#pragma unroll
    for (uint64_t& key : keys) key = key == most ? 0 : key;
    mine = max_of(keys);
  }
  if (lane == 0) lists[warp][count] = 0;
  __syncthreads();
  if (warp != 0) return;
  int place = 0;
  for (int i = 0; i < count; ++i) {
    mine = lane < kWarps ? lists[lane][place] : 0;
    const uint64_t most = warp_max(mine);
    if (lane == 0) top[i] = most;
    if (mine == most && most != 0) ++place;
  }
}

// One warp joins the lists of all slots: the top_n highest keys, in order, to `emit(i, key)`.
template <typename Emit>
__device__ __forceinline__ void join_slots(const LogprobsArgs& args, const uint64_t* top,
                                           const Emit& emit) {
  __shared__ uint64_t heads[kMaxLogprobSlots];
  __shared__ uint8_t places[kMaxLogprobSlots];
  const int lane = threadIdx.x;
  if (args.top_n == 0) return;
  uint64_t mine = 0;
  for (int slot = lane; slot < args.num_slots; slot += 32) {
    heads[slot] = __ldcg(&top[slot * args.top_n]);
    places[slot] = 0;
    mine = max(mine, heads[slot]);
  }
  for (int i = 0; i < args.top_n; ++i) {
    const uint64_t most = warp_max(mine);
    if (lane == 0) emit(i, most);
    if (mine != most) continue;
    mine = 0;
    for (int slot = lane; slot < args.num_slots; slot += 32) {
      if (heads[slot] == most) {
        const int next = ++places[slot];
        heads[slot] = next < args.top_n ? __ldcg(&top[slot * args.top_n + next]) : 0;
      }
      mine = max(mine, heads[slot]);
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    logprobs_kernel(const __grid_constant__ LogprobsArgs args) {
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const float* logits = args.logits + row_offset(args.logit_rows, row);
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  const SlotResults results = slot_results(args, memory);

  float values[kWarpElements];
  uint64_t keys[kWarpElements];
#pragma unroll
  for (int load = 0; load < kWarpElements / 4; ++load) {
    const int chunk = slot * (kSlotElements / 4) + load * kThreads + threadIdx.x;
    const int count = chunk_count<float>(chunk, args.vocab);
    float four[4] = {};
    if (count > 0) unpack<float>(load_chunk(logits, chunk, args.vocab, args.aligned), four);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[load * 4 + i] = i < count ? four[i] : -INFINITY;
      keys[load * 4 + i] = i < count ? key_of(ordered_bits(four[i]), chunk * 4 + i) : 0;
    }
  }
  const uint32_t slot_highest = block_max(ordered_of(max_of(keys)));
  float sum = 0.0f;
#pragma unroll
  for (float value : values) sum += exp_below(value, value_of(slot_highest));
  sum = block_sum(sum);
  if (threadIdx.x == 0) {
    results.highest[slot] = slot_highest;
    results.sum[slot] = sum;
  }
  if (args.top_n > 0) highest_of_slot(keys, args.top_n, results.top + slot * args.top_n);
  if (!is_last_block(memory.counter, args.num_slots, is_last)) return;

  uint32_t ordered = 0;
  for (int i = threadIdx.x; i < args.num_slots; i += kThreads) {
    ordered = max(ordered, __ldcg(&results.highest[i]));
  }
  const float highest = value_of(block_max(ordered));
  sum = 0.0f;
  for (int i = threadIdx.x; i < args.num_slots; i += kThreads) {
    sum += __ldcg(&results.sum[i]) * exp_below(value_of(__ldcg(&results.highest[i])), highest);
  }
  const float log_sum = logf(block_sum(sum));
  const auto logprob = [&](float logit) { return logit - highest - log_sum; };
  if (threadIdx.x == 32) {
    const int64_t id = args.ids[row];
    const bool inside = id >= 0 && id < args.vocab;
    args.chosen[row] = inside ? logprob(logits[id]) : -INFINITY;
  }
  if (threadIdx.x >= 32) return;
  join_slots(args, results.top, [&](int i, uint64_t key) {
    const int64_t place = static_cast<int64_t>(row) * args.top_n + i;
    args.top_ids[place] = index_of(key);
    args.top[place] = logprob(value_of(ordered_of(key)));
  });
}

}  // namespace flashrt
