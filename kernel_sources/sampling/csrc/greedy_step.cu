#include "greedy_step.cuh"
#include "launch_argmax.cuh"

namespace flashrt {

cudaError_t launch_greedy_step(ArgmaxArgs args, GreedyStepArgs step, cudaStream_t stream) {
  return launch_with(args, GreedyStep{step}, stream);
}

}  // namespace flashrt
