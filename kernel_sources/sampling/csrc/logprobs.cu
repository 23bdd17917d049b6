#include "common/launch.h"
#include "logprobs.cuh"

namespace flashrt {

cudaError_t launch_logprobs(LogprobsArgs args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  args.num_slots = (args.vocab + kSlotElements - 1) / kSlotElements;
  args.aligned = rows_aligned(args.logits, args.logit_rows, sizeof(float));
  const dim3 grid(static_cast<unsigned>(args.num_rows * args.num_slots));
  return launch(logprobs_kernel, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace flashrt
