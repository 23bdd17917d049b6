// Programmatic dependent launch, device side.
//
// Every kernel on the decode path follows four rules:
//   1. only when the caller promised that weights have no producer in flight, it may load weights
//   first;
//   2. launch_dependents() at its start;
//   3. wait_for_inputs() in every thread that touches activations, caches, workspaces or counters,
//      before the first such access;
//   4. no thread exits before its wait_for_inputs(), so that completion is transitive along a
//   chain.
// Both calls are no-ops below sm_90, where launches are fully ordered.
#pragma once

namespace flashrt {

__device__ __forceinline__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashrt
