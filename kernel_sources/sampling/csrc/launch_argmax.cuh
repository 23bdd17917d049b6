// Launch argmax_kernel with what becomes of each row's result.
#pragma once

#include "argmax.cuh"
#include "common/for_element.h"
#include "common/launch.h"

namespace flashrt {

template <typename Finish>
cudaError_t launch_with(ArgmaxArgs args, const Finish& finish, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  constexpr int64_t kRound = static_cast<int64_t>(kMaxSlots) * kSlotElements;
  const int64_t slot_size = (args.vocab + kRound - 1) / kRound * kSlotElements;
  args.slot_size = static_cast<int>(slot_size);
  args.num_slots = static_cast<int>((args.vocab + slot_size - 1) / slot_size);
  args.aligned = rows_aligned(args.logits, args.logit_rows, element_bytes(args.type));
  const dim3 grid(static_cast<unsigned>(args.num_rows * args.num_slots));
  const dim3 block(kThreads);
  return for_element(args.type, [&](auto element) {
    return launch(argmax_kernel<decltype(element), Finish>, grid, block, 0, stream, args, finish);
  });
}

}  // namespace flashrt
