// The rejection rule for a draft with probabilities q: two kernels after `draw`, which has left the
// lowest score that stays and a draw for the case that nothing is left of p - q.
//
//   total      the mass of what stays, hence p; the draft d is the token if u * q(d) < p(d)
//   residual   else the token is drawn from max(p - q, 0), which needs no normalising
#pragma once

#include "draw.cuh"

namespace flashrt {

struct Kept {
  float highest;
  float min_p_bound;
  uint32_t lowest;

  // Mass of a score, 0 when it does not stay.
  __device__ __forceinline__ uint64_t mass(float score) const {
    const float distance = exact::sub(score, highest);
    const bool stays = ordered_bits(score) >= lowest && distance >= min_p_bound;
    return stays ? exact::mass(distance) : 0;
  }
};

__global__ void __launch_bounds__(kThreads) total_kernel(const __grid_constant__ SampleArgs args) {
  using Reduce = cub::BlockReduce<uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const uint32_t sequence = row / args.places;
  const int place = row - sequence * args.places;
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  if (memory.state->phase != Phase::kTotal) return;
  const RowSettings settings = load_settings(args.settings, sequence, args.vocab);
  const GreedyStep::State step = GreedyStep{args.step}.load(sequence);
  const Kept kept{memory.state->highest, min_p_bound(settings.min_p), memory.state->lowest};

  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  uint64_t sum = 0;
  for (int i = begin + threadIdx.x; i < end; i += kThreads) sum += kept.mass(memory.scores[i]);
  sum = Reduce(scratch).Sum(sum);
  if (threadIdx.x == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(&memory.state->total),
              static_cast<unsigned long long>(sum));
  }
  if (!is_last_block(memory.counter, args.num_slots, is_last)) return;
  if (threadIdx.x != 0) return;

  const uint32_t draft_row = row - sequence;
  const int draft = static_cast<int>(args.drafts[draft_row]);
  const float q = args.draft_probs[static_cast<int64_t>(draft_row) * args.vocab + draft];
  const uint64_t total = __ldcg(&memory.state->total);
  const float p = __fdiv_rn(__ull2float_rn(kept.mass(memory.scores[draft])), __ull2float_rn(total));
  const uint32_t position = static_cast<uint32_t>(step.length + place);
  const uint4 words = random_words(settings.seed, 0, position, Purpose::kAccept);
  if (exact::mul(exact::uniform(words.x), q) < p) {
    finish_row(args, row, draft, memory, step);
  } else {
    memory.state->phase = Phase::kResidual;
  }
}

__global__ void __launch_bounds__(kThreads)
    residual_kernel(const __grid_constant__ SampleArgs args) {
  using Reduce = cub::BlockReduce<uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const uint32_t sequence = row / args.places;
  const int place = row - sequence * args.places;
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  if (memory.state->phase != Phase::kResidual) return;
  const RowSettings settings = load_settings(args.settings, sequence, args.vocab);
  const GreedyStep::State step = GreedyStep{args.step}.load(sequence);
  const Kept kept{memory.state->highest, min_p_bound(settings.min_p), memory.state->lowest};
  const float total = __ull2float_rn(memory.state->total);
  const float* probs = args.draft_probs + static_cast<int64_t>(row - sequence) * args.vocab;
  const uint32_t position = static_cast<uint32_t>(step.length + place);

  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  Best best;
  for (int i = begin + threadIdx.x; i < end; i += kThreads) {
    const float p = __fdiv_rn(__ull2float_rn(kept.mass(memory.scores[i])), total);
    const float left = exact::sub(p, probs[i]);
    if (!(left > 0.0f)) continue;
    const uint4 words = random_words(settings.seed, i / 4, position, Purpose::kResidual);
    const float noise = exact::gumbel(word_of(words, i % 4));
    best.take(exact::add(exact::log(fmaxf(left, 0x1p-126f)), noise), i);
  }
  uint64_t key = Reduce(scratch).Reduce(best.key(), cuda::maximum<uint64_t>{});
  if (threadIdx.x == 0) memory.keys[slot] = key;
  if (!is_last_block(memory.counter, args.num_slots, is_last)) return;
  key = threadIdx.x < args.num_slots ? __ldcg(&memory.keys[threadIdx.x]) : 0;
  key = Reduce(scratch).Reduce(key, cuda::maximum<uint64_t>{});
  if (threadIdx.x != 0) return;
  finish_row(args, row, key == 0 ? memory.state->chosen : index_of(key), memory, step);
}

}  // namespace flashrt
