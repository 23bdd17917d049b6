// The first kernel of a draw: scores of every row, and the token of those rows that need no more.
//
//   greedy                 the largest score, as argmax
//   no thresholds          the largest of score / temperature + Gumbel noise
//   anything else          score / temperature to the workspace, with the largest
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cuda/functional>

#include "adjust.cuh"
#include "common/pdl.cuh"
#include "finish.cuh"

namespace flashrt {

// Whether a row with a draft is to be decided by the rejection rule.
__device__ __forceinline__ bool by_rejection(const SampleArgs& args, uint32_t row,
                                             uint32_t sequence, int place) {
  if (args.draft_probs == nullptr || place == args.places - 1) return false;
  const int64_t draft = args.drafts[row - sequence];
  return draft >= 0 && draft < args.vocab;
}

// Largest key among this thread's scores of one round of kSlotElements; `store` keeps the scores.
template <typename Value>
__device__ __forceinline__ void score_round(const SampleArgs& args, const float* logits,
                                            uint32_t sequence, int place, int start, int end,
                                            const RowSettings& settings, const SlotPatch& patch,
                                            PatchFlags flags, const RoundChunks& packed,
                                            const Value& use) {
#pragma unroll
  for (int load = 0; load < 2; ++load) {
    const int chunk = start / 4 + load * kThreads + threadIdx.x;
    const int count = chunk_count<float>(chunk, end);
    if (count <= 0) continue;
    float scores[4];
    unpack<float>(packed.chunk[load], scores);
    int occurrences[4] = {};
    if (settings.penalised) load_occurrences(args, sequence, place, chunk, occurrences);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int local = chunk * 4 + i - start;
      if (flags.bias) scores[i] = exact::add(scores[i], patch.bias[local]);
      if (settings.penalised) scores[i] = penalise(scores[i], occurrences[i], settings);
      if (flags.bans && !(patch.allowed[local / 32] >> (local % 32) & 1)) scores[i] = -INFINITY;
    }
    use(chunk, count, scores);
  }
}

struct Best {
  uint32_t ordered = 0;
  int index = 0;

  __device__ __forceinline__ void take(float value, int at) {
    const uint32_t key = ordered_bits(value);
    if (key > ordered) {  // indices ascend, so the first of equals stays
      ordered = key;
      index = at;
    }
  }
  __device__ __forceinline__ uint64_t key() const {
    return ordered == 0 ? 0 : key_of(ordered, index);
  }
};

// Three blocks a multiprocessor: with the registers of four it spills.
__global__ void __launch_bounds__(kThreads, 3)
    score_kernel(const __grid_constant__ SampleArgs args) {
  using Reduce = cub::BlockReduce<uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ SlotPatch patch;
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();

  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  const uint32_t sequence = row / args.places;
  const int place = row - sequence * args.places;
  const float* logits = args.logits + row_offset(args.logit_rows, row);
  const RowMemory memory = row_memory(args.workspace, args.vocab, row);
  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  // On their way while state and settings are read.
  RoundChunks packed = load_round(logits, begin, end, args.vocab, args.aligned);
  const GreedyStep::State state = GreedyStep{args.step}.load(sequence);
  const RowSettings settings = load_settings(args.settings, sequence, args.vocab);
  if (state.finished || state.count >= min(state.max_new, args.step.capacity)) {
    if (slot == 0 && threadIdx.x == 0) skip_row(args, row, memory);
    return;
  }
  const bool thresholds = settings.top_k > 0 || settings.top_p < 1.0f || settings.min_p > 0.0f;
  const bool direct = settings.greedy || !(thresholds || by_rejection(args, row, sequence, place));
  if (!direct) {
    for (int bin = slot * kThreads + threadIdx.x; bin < kBins; bin += args.num_slots * kThreads) {
      memory.bin_count[bin] = 0;
      memory.bin_mass[bin] = 0;
    }
  }

  const bool ban_eos = state.count + place < settings.min_new && args.step.num_eos > 0;
  Best best;
  for (int start = begin; start < end; start += kSlotElements) {
    const PatchFlags flags = gather_patch(args, row, sequence, ban_eos, start, patch);
    const auto use = [&](int chunk, int count, float (&scores)[4]) {
      uint4 words = {};
      if (direct && !settings.greedy) {
        const uint32_t position = static_cast<uint32_t>(state.length + place);
        words = random_words(settings.seed, chunk, position, Purpose::kDraw);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!settings.greedy) scores[i] = __fdiv_rn(scores[i], settings.temperature);
        float value = scores[i];
        if (direct && !settings.greedy) {
          value = exact::add(value, exact::gumbel(word_of(words, i)));
        }
        if (i < count) best.take(value, chunk * 4 + i);
      }
      if (!direct) {
        *reinterpret_cast<float4*>(memory.scores + chunk * 4) =
            make_float4(scores[0], scores[1], scores[2], scores[3]);
      }
    };
    score_round(args, logits, sequence, place, start, end, settings, patch, flags, packed, use);
    packed = load_round(logits, start + kSlotElements, end, args.vocab, args.aligned);
  }
  uint64_t key = Reduce(scratch).Reduce(best.key(), cuda::maximum<uint64_t>{});
  if (threadIdx.x == 0) memory.keys[slot] = key;
  if (!is_last_block(memory.counter, args.num_slots, is_last)) return;

  key = threadIdx.x < args.num_slots ? __ldcg(&memory.keys[threadIdx.x]) : 0;
  key = Reduce(scratch).Reduce(key, cuda::maximum<uint64_t>{});
  if (threadIdx.x != 0) return;
  if (direct || !is_finite(ordered_of(key))) {
    finish_row(args, row, index_of(key), memory, state);
    return;
  }
  RowState& result = *memory.state;
  result.highest = value_of(ordered_of(key));
  result.phase = settings.top_k > 0 || settings.top_p < 1.0f ? Phase::kThreshold : Phase::kDraw;
  result.list_size = 0;
  result.total = 0;
  result.lowest = 0;
  result.bin_k = result.first_bin_p = result.last_bin_p = kBins;
}

}  // namespace flashrt
