// Drafts out of a sequence's own text, one block for each row.
//
//   text = prompt[:P], tokens[:counts]  with P = lengths + 1 - counts;  n = lengths, its last place
//   agreement[i] = sum over a < 8 of weight[a] * (text[i - 1 - a] == text[n - a]),  1 <= i <= n
//   i = the largest of those that agree most
//   drafts[j] = text[i + j mod (n + 1 - i)], or -1 when agreement[i] < weight[0]
//
// weight[a] = round(1000 * 0.7^a): the newest token alone is enough, and so are the older ones
// together, so that a copy goes on behind a replaced token or two.
#pragma once

#include "common/pdl.cuh"
#include "lookup_drafts.h"

namespace flashrt {

struct RowText {
  const int64_t* prompt;
  const int64_t* tokens;
  int prompt_length;

  __device__ __forceinline__ int64_t operator()(int place) const {
    return place < prompt_length ? prompt[place] : tokens[place - prompt_length];
  }
};

__device__ __forceinline__ uint32_t weight_of(int age) {
  constexpr uint32_t kWeights[kContext] = {kNewestWeight, 700, 490, 343, 240, 168, 118, 82};
  return kWeights[age];
}

__global__ void __launch_bounds__(kSearchThreads)
    lookup_drafts_kernel(const __grid_constant__ LookupDraftsArgs args) {
  launch_dependents();
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int last = args.lengths[row];
  const RowText text{args.prompt + row * args.prompt_stride, args.tokens + row * args.tokens_stride,
                     last + 1 - args.counts[row]};
  // The agreement in the upper half and the place in the lower one: the largest is the answer.
  __shared__ unsigned long long most;
  if (thread == 0) most = 0;
  __syncthreads();

  int64_t newest[kContext];
#pragma unroll
  for (int age = 0; age < kContext; ++age) newest[age] = age <= last ? text(last - age) : -1;
  unsigned long long mine = 0;
  for (int place = thread + 1; place <= last; place += kSearchThreads) {
    uint32_t agreement = 0;
#pragma unroll
    for (int age = 0; age < kContext; ++age) {
      if (age < place && text(place - 1 - age) == newest[age]) agreement += weight_of(age);
    }
    mine =
        max(mine, static_cast<unsigned long long>(agreement) << 32 | static_cast<uint32_t>(place));
  }
  if (mine > 0) atomicMax(&most, mine);
  __syncthreads();

  if (thread < args.num_drafts) {
    const int place = static_cast<int>(most & 0xffffffffu);
    const bool found = most >> 32 >= kNewestWeight;
    args.drafts[row * args.num_drafts + thread] =
        found ? text(place + thread % (last + 1 - place)) : -1;
  }
}

}  // namespace flashrt
