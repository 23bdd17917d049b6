// The third kernel of a draw: the token of a row with thresholds.
//
// Every block draws among the scores that certainly stay, and lists those of undecided bins; the
// last block decides these and draws among all. A draw is the largest of score plus Gumbel noise,
// so it can be made in parts.
#pragma once

#include "common/pdl.cuh"
#include "score.cuh"
#include "select.cuh"

namespace flashrt {

// Draws among scores of one row.
struct Draw {
  uint64_t seed;
  uint32_t position;
  float highest;
  float min_p_bound;  // lowest distance below the highest score, a negative number or -inf
  Best best;

  __device__ __forceinline__ bool likely(float score) const {
    return exact::sub(score, highest) >= min_p_bound;
  }
  __device__ __forceinline__ void take(float score, uint32_t index, uint32_t word) {
    const uint32_t key = ordered_bits(exact::add(score, exact::gumbel(word)));
    // Candidates come in any order: the lower index of equals.
    if (key > best.ordered || (key == best.ordered && static_cast<int>(index) < best.index)) {
      best.ordered = key;
      best.index = index;
    }
  }
  __device__ __forceinline__ void take(float score, uint32_t index) {
    const uint4 words = random_words(seed, index / 4, position, Purpose::kDraw);
    take(score, index, word_of(words, index % 4));
  }
};

// min-p as a bound on the difference of scores: log(min_p), at most 0; -inf when it is off.
__device__ __forceinline__ float min_p_bound(float min_p) {
  if (min_p == 0.0f) return -INFINITY;
  return fminf(exact::log(fmaxf(min_p, 0x1p-126f)), 0.0f);
}

enum class Fate { kGoes, kStays, kOpen };

__device__ __forceinline__ Fate fate_of(int bin, const RowState& state) {
  if (bin == state.bin_k || (bin >= state.first_bin_p && bin <= state.last_bin_p)) {
    return Fate::kOpen;
  }
  return bin < state.bin_k && bin < state.first_bin_p ? Fate::kStays : Fate::kGoes;
}

// Scores of one round: the certain ones are drawn among, the open ones appended to the list.
__device__ __forceinline__ void draw_round(const RowMemory& memory, const RowState& state,
                                           float temperature, int start, int end,
                                           const RoundChunks& packed, Draw& draw,
                                           uint32_t& list_start, uint32_t& list_count) {
  if (threadIdx.x == 0) list_count = 0;
  __syncthreads();
  uint32_t offsets[8];
  uint32_t open = 0;  // a bit for each score of this thread
#pragma unroll
  for (int load = 0; load < 2; ++load) {
    const int chunk = start / 4 + load * kThreads + threadIdx.x;
    const int count = chunk_count<float>(chunk, end);
    if (count <= 0) continue;
    float scores[4];
    unpack<float>(packed.chunk[load], scores);
    bool stays[4];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      stays[i] = false;
      if (i >= count || scores[i] == -INFINITY) continue;
      const Fate fate = fate_of(bin_of(scores[i], draw.highest, temperature), state);
      stays[i] = fate == Fate::kStays && draw.likely(scores[i]);
      any |= stays[i];
      if (fate != Fate::kOpen) continue;
      open |= 1u << (load * 4 + i);
      offsets[load * 4 + i] = atomicAdd(&list_count, 1u);
    }
    if (!any) continue;
    const uint4 words = random_words(draw.seed, chunk, draw.position, Purpose::kDraw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (stays[i]) draw.take(scores[i], chunk * 4 + i, word_of(words, i));
    }
  }
  __syncthreads();
  if (list_count == 0) return;
  if (threadIdx.x == 0) list_start = atomicAdd(&memory.state->list_size, list_count);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (!(open >> i & 1)) continue;
    const int chunk = start / 4 + i / 4 * kThreads + threadIdx.x;
    memory.list[list_start + offsets[i]] = chunk * 4 + i % 4;
  }
}

__global__ void __launch_bounds__(kThreads) draw_kernel(const __grid_constant__ SampleArgs args) {
  using Reduce = cub::BlockReduce<uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage reduce_scratch;
  __shared__ SelectScratch scratch;
  __shared__ Candidates::Cache cache;
  __shared__ uint32_t list_start, list_count;
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const uint32_t sequence = row / args.places;
  const int place = row - sequence * args.places;
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  // On their way while state and settings are read.
  RoundChunks packed = load_round(memory.scores, begin, end, args.vocab, true);
  const RowSettings settings = load_settings(args.settings, sequence, args.vocab);
  const GreedyStep::State step = GreedyStep{args.step}.load(sequence);
  const RowState state = *memory.state;
  if (state.phase != Phase::kDraw) return;
  Draw draw{settings.seed, static_cast<uint32_t>(step.length + place), state.highest,
            min_p_bound(settings.min_p)};
  for (int start = begin; start < end; start += kSlotElements) {
    draw_round(memory, state, settings.temperature, start, end, packed, draw, list_start,
               list_count);
    packed = load_round(memory.scores, start + kSlotElements, end, args.vocab, true);
  }
  uint64_t key = Reduce(reduce_scratch).Reduce(draw.best.key(), cuda::maximum<uint64_t>{});
  if (threadIdx.x == 0) memory.keys[slot] = key;
  if (!is_last_block(memory.counter, args.num_slots, is_last)) return;

  Candidates candidates{memory, cache, __ldcg(&memory.state->list_size)};
  candidates.fill();
  const uint32_t lowest = lowest_kept(candidates, settings, scratch);
  draw.best = {};
  for (uint32_t i = threadIdx.x; i < candidates.size; i += kThreads) {
    const uint32_t ordered = candidates.key(i);
    const float score = value_of(ordered);
    if (ordered >= lowest && draw.likely(score)) draw.take(score, candidates.index(i));
  }
  key = draw.best.key();
  if (threadIdx.x < args.num_slots) key = max(key, __ldcg(&memory.keys[threadIdx.x]));
  key = Reduce(reduce_scratch).Reduce(key, cuda::maximum<uint64_t>{});
  if (threadIdx.x != 0) return;
  if (by_rejection(args, row, sequence, place)) {
    memory.state->lowest = lowest;
    memory.state->chosen = index_of(key);
    memory.state->total = 0;
    memory.state->phase = Phase::kTotal;
  } else {
    finish_row(args, row, index_of(key), memory, step);
  }
}

}  // namespace flashrt
