// Fused decode attention: q/k norm, rotary, append to a static cache, split-KV attention.
//
// For sequence b and token t at position p = lengths[b] + t:
//   q' = rotary(norm(q)), k' = rotary(norm(k)); cache[b, g, p] = k', v
//   out = softmax(cap(scaling q' . K)) V over slots (p - window, p], cap(s) = soft_cap tanh(s /
//   soft_cap)
//
// A block takes 128 slots of one (sequence, key head) for up to 8 of its query rows, so that a
// group's query heads read the cache once. Slots, warps and merges are tied to slot numbers alone:
// the bits of a row do not depend on B, T, its place, S or the number of blocks. This call's keys
// and values are used as the cache stores them, wherever they come from. A token at or past slot S
// is not stored; its output is meaningless.
//
// With clusters, 8 blocks share 1024 slots (a "super") and store their results to the first of
// them, which merges; only rows longer than that meet in the workspace, where the last block to
// arrive merges supers. Without clusters all partials meet in the workspace. Both give the same
// bits.
#pragma once

#include "attend_block.cuh"

namespace flashrt {

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ AttendParams p) {
  launch_dependents();
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int out_rows[kTileRows];
  __shared__ ByteBarrier gathered;
  const bool first_of_cluster = p.use_clusters && blockIdx.x % kFanIn == 0;
  if (p.use_clusters) {
    if (first_of_cluster && threadIdx.x == 0) gathered.init();
    __syncwarp();
    cluster_start();
  }
  if (!p.history_static) wait_for_inputs();

  const Work work(p);
  const int step = gridDim.x;
  int split = work.origin + blockIdx.x;
  // Blocks of a cluster stay while it has slots, and the first always merges.
  const bool stays = p.use_clusters ? split / kFanIn * kFanIn <= work.last_split &&
                                          (first_of_cluster || split + step <= work.last_split)
                                    : split <= work.last_split;
  // A block without slots may go before its wait, and make room: others of this grid wait.
  if (!stays && !work.live(split * kSplit, kSplit)) return;
  const bool only_part = p.use_clusters ? work.begin / kSuper == (work.end - 1) / kSuper
                                        : work.begin / kSplit == work.last_split;
  const AttendBlock<T, D> block{p,
                                work,
                                SharedLayout<T, D>(p.tile_rows, p.tokens, p.use_clusters),
                                shared,
                                out_rows,
                                gathered,
                                only_part,
                                static_cast<int>(threadIdx.x % 32),
                                static_cast<int>(threadIdx.x / 32)};

  KeyTile<D> keys;
  ValueTile<D> values;
  clear(keys, values);
  int slot0 = split * kSplit + block.warp * kTile;
  if (block.has_history(slot0)) {
    load_keys<T, D>(keys, block.history(p.k_cache, p.k_cache_strides), slot0, block.lane);
    load_values<T, D>(values, block.history(p.v_cache, p.v_cache_strides), slot0, block.lane);
  }
  if (threadIdx.x < work.rows) {
    const int row = threadIdx.x;
    out_rows[row] = (work.sequence * p.tokens + work.token(p, row)) * p.heads + work.head(p, row);
  }
  const int column = 2 * (block.lane % 4);
  const Columns columns{
      {work.position(p, column), work.position(p, column + 1)}, p.window, p.scaling, p.soft_cap};
  if (p.use_clusters) cluster_wait();  // all blocks have started
  block.prepare(values, slot0);
  __syncthreads();

  for (int round = 0;; ++round) {
    block.tile(keys, values, columns, slot0, slot0 + step * kSplit);
    if (p.use_clusters && round > 0) cluster_wait();  // the first block is done with the last round
    if (work.live(split * kSplit, kSplit)) {
      __syncthreads();
      block.hand_over(split);
    }
    if (first_of_cluster) block.gather(split, round);

    const int next_split = split + step;  // of a cluster, its first one decides for all blocks
    if ((p.use_clusters ? next_split / kFanIn * kFanIn : next_split) > work.last_split) break;
    if (p.use_clusters) cluster_arrive();
    __syncthreads();  // tile_out, tile_m and tile_l are free again
    split += step;
    slot0 += step * kSplit;
  }
  if (!only_part && (!p.use_clusters || first_of_cluster)) block.merge_parts();
}

}  // namespace flashrt
