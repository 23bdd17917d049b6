// What a greedy decode step does once a row's argmax is known. For a row that is not finished:
//
//   tokens[counts] = next_id = argmax;  counts += 1;  lengths += 1
//   finished = argmax is one of eos, or counts reached max_new or the capacity of tokens
//
// A finished row gets next_id = pad_id and nothing else changes. A row without room for the token
// becomes finished and gets pad_id.
#pragma once

#include "sampling.h"

namespace flashrt {

struct GreedyStep {
  struct State {
    int count;
    int length;
    int max_new;
    bool finished;
  };

  GreedyStepArgs args;

  __device__ State load(uint32_t row) const {
    return {args.counts[row], args.lengths[row], args.max_new[row], args.finished[row]};
  }

  __device__ void store(uint32_t row, int index, const State& state) const {
    const int limit = min(state.max_new, args.capacity);
    if (state.finished || state.count >= limit) {
      args.finished[row] = true;
      args.next_ids[row] = args.pad_id;
      return;
    }
    bool stops = state.count + 1 >= limit;
    const int64_t* eos = args.eos + row * args.eos_stride;
    for (int i = 0; i < args.num_eos; ++i) stops |= eos[i] == index;
    args.tokens[row * args.tokens_stride + state.count] = index;
    args.next_ids[row] = index;
    args.counts[row] = state.count + 1;
    args.lengths[row] = state.length + 1;
    args.finished[row] = stops;
  }
};

}  // namespace flashrt
