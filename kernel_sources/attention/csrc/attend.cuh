// Fused decode attention: q/k norm, rotary, append to a static cache, split-KV attention.
//
// For sequence b and token t at position p = lengths[b] + t:
//   q' = rotary(norm(q)), k' = rotary(norm(k)); cache[b, g, p] = k', v
//   out = softmax(cap(scaling q' . K)) V over slots (p - window, p], cap(s) = soft_cap tanh(s /
//   soft_cap)
//
// Blocks of a (sequence, key head) share its live slots in splits of 128, each for up to 32 of its
// query rows, so that a group's query heads and a call's tokens read the cache once. A block
// streams its splits through a ring in shared memory that is always full: warps score 16 slots
// each, meet, and weight 16 elements of the values each. Splits, products and merges are tied to
// slot numbers alone: the bits of a row do not depend on B, T, its place, S or the number of
// blocks. This call's keys and values are used as the cache stores them, wherever they come from. A
// token at or past slot S is not stored; its output is meaningless.
//
// Where all of them can be resident at once (choose_cluster), a cluster of 2, 4 or 8 blocks takes a
// (sequence, key head): blocks store up to 8 results to the first of them, and that merges.
// Otherwise results meet in the workspace, where the last block to arrive merges them. All forms
// give the same bits.
#pragma once

#include "attend_block.cuh"

namespace flashrt {

template <typename T, typename C, int D>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ AttendParams p) {
  launch_dependents();
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ ByteBarrier gathered;
  const bool first_of_cluster = p.use_clusters && blockIdx.x == 0;
  if (p.use_clusters) {
    if (first_of_cluster && threadIdx.x == 0) gathered.init();
    __syncwarp();
    cluster_start();
  }
  if (!p.history_static) wait_for_inputs();

  // A block without splits leaves at once, for the memory that it holds keeps others out. The
  // blocks that have some wait for inputs, so the grid still completes after the one before it.
  const Work work(p);
  if (work.own >= work.own_end) return;
  AttendBlock<T, C, D> block{p,
                             work,
                             p.layout,
                             shared,
                             gathered,
                             static_cast<int>(threadIdx.x % 32),
                             static_cast<int>(threadIdx.x / 32)};
  Ring<C, D> ring(p, work, shared);
  ring.fill(0);
  block.load_scales();
  block.prepare_places();
  if (work.gathers) cluster_wait();  // all blocks have started
  block.prepare();
  __syncthreads();

  for (int split = work.own; split < work.own_end; ++split) {
    const int done = 2 * (split - work.own), buffer = split % 2;
    const unsigned char* keys = ring.take();
    __syncwarp();
    block.score(split, keys, buffer);
    if (ring.is_shallow()) {
      __syncwarp();
      ring.fill(done + 1);
    }
    const unsigned char* values = ring.take();
    __syncthreads();
    if (!ring.is_shallow()) ring.fill(done + 1);
    block.add_values(split, values, buffer);
    if (ring.is_shallow() && split + 1 < work.own_end) {
      __syncthreads();
      ring.fill(done + 2);
    }
  }
  block.append();
  if (work.first == work.last) return;
  if (!work.gathers) {
    block.merge_parts();
  } else if (first_of_cluster) {
    block.gather();
  }
}

}  // namespace flashrt
