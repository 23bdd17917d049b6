// The end of a row: its token is known.
//
// A plain step appends it (greedy_step.cuh). With drafts the last of a sequence's places to be
// known appends the tokens of all places up to the first that differs from its draft or stops.
#pragma once

#include "greedy_step.cuh"
#include "row_memory.cuh"

namespace flashrt {

__device__ __forceinline__ void count_token(const Settings& settings, uint32_t sequence,
                                            int index) {
  if (settings.occurrences != nullptr) {
    settings.occurrences[sequence * settings.occurrences_stride + index] += 2;
  }
}

__device__ inline void accept(const SampleArgs& args, uint32_t sequence) {
  const GreedyStepArgs& step = args.step;
  const int limit = min(step.max_new[sequence], step.capacity);
  const int length = step.lengths[sequence];
  int count = step.counts[sequence];
  const int64_t* eos = step.eos + sequence * step.eos_stride;
  const int64_t* drafts = args.drafts + static_cast<int64_t>(sequence) * (args.places - 1);
  int place = 0;
  int64_t id;
  bool stops;
  do {
    const uint32_t row = sequence * args.places + place;
    const RowMemory memory = row_memory(args.workspace, args.vocab, row);
    id = __ldcg(&memory.state->chosen);
    step.tokens[sequence * step.tokens_stride + count] = id;
    count_token(args.settings, sequence, static_cast<int>(id));
    ++count;
    stops = count >= limit;
    for (int i = 0; i < step.num_eos; ++i) stops |= eos[i] == id;
    ++place;
  } while (!stops && place < args.places && drafts[place - 1] == id);
  step.next_ids[sequence] = id;
  step.counts[sequence] = count;
  step.lengths[sequence] = length + place;
  step.finished[sequence] = stops;
  args.accepted[sequence] = place;
}

// One thread of the last block of a row.
__device__ __forceinline__ void finish_row(const SampleArgs& args, uint32_t row, int index,
                                           const RowMemory& memory,
                                           const GreedyStep::State& state) {
  memory.state->phase = Phase::kDone;
  if (args.accepted == nullptr) {
    GreedyStep{args.step}.store(row, index, state);
    count_token(args.settings, row, index);
    return;
  }
  const uint32_t sequence = row / args.places;
  memory.state->chosen = index;
  uint32_t* counter = row_memory(args.workspace, args.vocab, sequence * args.places).place_counter;
  const uint32_t last = args.places - 1;
  if (count_in(counter, last) == last) accept(args, sequence);
}

// One thread of a row whose sequence may not go on.
__device__ __forceinline__ void skip_row(const SampleArgs& args, uint32_t row,
                                         const RowMemory& memory) {
  memory.state->phase = Phase::kDone;
  const uint32_t sequence = row / args.places;
  if (row != sequence * args.places) return;
  args.step.finished[sequence] = true;
  args.step.next_ids[sequence] = args.step.pad_id;
  if (args.accepted != nullptr) args.accepted[sequence] = 0;
}

}  // namespace flashrt
