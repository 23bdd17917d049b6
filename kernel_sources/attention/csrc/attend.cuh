// Fused decode attention: q/k norm, rotary, append to a static cache, split-KV attention.
//
// For sequence b and token t at position p = lengths[b] + t:
//   q' = rotary(norm(q)), k' = rotary(norm(k)); cache[b, g, p] = k', v
//   out = softmax(cap(scaling q' . K)) V over slots (p - window, p], cap(s) = soft_cap tanh(s / soft_cap)
//
// A block takes 128 slots of one (sequence, key head) for up to 8 of its query rows, so that a group's
// query heads read the cache once. Slots, warps and merges are tied to slot numbers alone: the bits of a
// row do not depend on B, T, its place, S or the number of blocks. This call's keys and values are used as
// the cache stores them, wherever they come from. A token at or past slot S is not stored; its output is
// meaningless.
//
// With clusters, 8 blocks share 1024 slots (a "super") and the first merges them through distributed shared
// memory; only rows longer than that meet in the workspace, where the last block to arrive merges supers.
// Without clusters all partials meet in the workspace. Both give the same bits.
#pragma once

#include "attend.h"
#include "attend_merge.cuh"
#include "attend_tile.cuh"
#include "common/pdl.cuh"
#include "rows.cuh"

namespace flashrt {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplit = kTile * kWarps;
constexpr int kSuper = kSplit * kFanIn;
static_assert(kWarps == kFanIn, "tiles of a split merge like splits of a super");

// A workspace starts with counters, one per (sequence, key head, row tile): a fixed number, so that calls
// of different sizes can share it. PartialStore follows.
constexpr int kCounters = 4096;
constexpr int kCounterBytes = 4 * kCounters;

__host__ __device__ inline int64_t store_ml_bytes(int64_t rows, int slots) {
  return ((slots + kSplit - 1) / kSplit * rows * 8 + 255) / 256 * 256;
}

// Shared memory of a block, in bytes from its start.
template <typename T, int D>
struct SharedLayout {
  int queries, new_keys, tile_out, tile_m, tile_l, gather_ml, gather_o, total;
  int gather_pairs;  // float2 per (buffer, rank) of gather_o

  __host__ __device__ SharedLayout(int rows, int tokens, int gather_buffers) {
    gather_pairs = rows * D / 2;
    queries = 0;
    new_keys = queries + kTileRows * kRowStride<D> * static_cast<int>(sizeof(T));
    tile_out = new_keys + tokens * kRowStride<D> * static_cast<int>(sizeof(T));
    tile_m = tile_out + kWarps * rows * kOutStride<D> * 4;
    tile_l = tile_m + kTileRows * kWarps * 4;
    gather_ml = tile_l + kTileRows * kWarps * 4;
    gather_o = gather_ml + gather_buffers * kFanIn * kTileRows * 8;
    total = gather_o + gather_buffers * kFanIn * gather_pairs * 8;
  }
};

// Which rows and slots a block works on.
struct Work {
  int sequence, kv_head, group;
  int first_row, rows;      // of the T * group rows of (sequence, kv_head)
  int last_token;           // newest token among them
  int length;               // cached before this call
  int begin, end;           // slots that some row sees
  int origin, last_split;   // splits are origin + blockIdx.x + i * gridDim.x, up to last_split

  __device__ __forceinline__ Work(const AttendParams& p, int length_of_sequence) {
    group = p.heads / p.kv_heads;
    const int tiles = (p.tokens * group + kTileRows - 1) / kTileRows;
    const int tile = blockIdx.y % tiles;
    kv_head = blockIdx.y / tiles % p.kv_heads;
    sequence = blockIdx.y / tiles / p.kv_heads;
    first_row = tile * kTileRows;
    rows = min(kTileRows, p.tokens * group - first_row);
    last_token = (first_row + rows - 1) / group;
    length = min(max(length_of_sequence, 0), p.slots);
    end = min(length + last_token + 1, p.slots);
    begin = p.window == 0 ? 0 : max(0, length + first_row / group - p.window + 1);
    begin = min(begin, end - 1);
    origin = p.use_clusters ? begin / kSuper * kFanIn : begin / kSplit;
    last_split = (end - 1) / kSplit;
  }

  __device__ __forceinline__ bool live(int first_slot, int slots) const {
    return first_slot < end && first_slot + slots > begin;
  }
  // Whether this block takes the split of `slot`.
  __device__ __forceinline__ bool owns(int slot) const {
    const int index = slot / kSplit - origin;
    return index >= 0 && index % static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
  }
  __device__ __forceinline__ int token(int row) const { return (first_row + row) / group; }
  __device__ __forceinline__ int head(int row) const {
    return kv_head * group + (first_row + row) % group;
  }
  // Live slots of a query row; none for the unused rows of a tile.
  __device__ __forceinline__ RowRange range(const AttendParams& p, int row) const {
    if (row >= rows) return RowRange{0, -1};
    const int position = length + token(row);
    const int first = p.window == 0 ? 0 : max(0, position - p.window + 1);
    return RowRange{first, min(position, p.slots - 1)};
  }
};

// A row that a warp prepares: one of the block's query rows, or a new key of this block's splits.
template <typename T>
struct RowJob {
  const T* source;  // null: nothing to do
  const T* weight;
  NormScope<T> scope;
  int64_t table_offset;
  int token;
  bool is_key;

  __device__ __forceinline__ RowJob(const AttendParams& p, const Work& work, int job) {
    source = nullptr;
    is_key = job >= work.rows;
    token = is_key ? job - work.rows : work.token(job);
    if (token > work.last_token) return;
    const int slot = work.length + token;
    if (is_key && (slot >= p.slots || !work.owns(slot))) return;
    const int head = is_key ? work.kv_head : work.head(job);
    const int heads = is_key ? p.kv_heads : p.heads;
    const int64_t* strides = is_key ? p.k_strides : p.q_strides;
    const T* first = static_cast<const T*>(is_key ? p.k : p.q) + work.sequence * strides[0] +
                     token * strides[1];
    source = first + head * strides[2];
    weight = static_cast<const T*>(is_key ? p.k_weight : p.q_weight);
    if (weight != nullptr && p.rows.over_all) weight += head * p.dim;
    scope = p.rows.over_all ? NormScope<T>{first, strides[2], heads} : NormScope<T>{source, 0, 1};
    table_offset = p.table_rows > 0
                       ? min(slot, p.table_rows - 1) * p.table_strides[0]
                       : work.sequence * p.table_strides[0] + token * p.table_strides[1];
  }
};

// Write the new key (in shared memory, this warp's own) and value of a token to the cache.
template <typename T, int D>
__device__ __forceinline__ void append_row(const AttendParams& p, const Work& work, int token,
                                           const T* new_key, int lane) {
  const int64_t slot = work.length + token;
  const T* value = static_cast<const T*>(p.v) + work.sequence * p.v_strides[0] +
                   token * p.v_strides[1] + work.kv_head * p.v_strides[2];
  T* k_row = static_cast<T*>(p.k_cache) + work.sequence * p.k_cache_strides[0] +
             work.kv_head * p.k_cache_strides[1] + slot * p.k_cache_strides[2];
  T* v_row = static_cast<T*>(p.v_cache) + work.sequence * p.v_cache_strides[0] +
             work.kv_head * p.v_cache_strides[1] + slot * p.v_cache_strides[2];
#pragma unroll
  for (int element = 2 * lane; element < D; element += 64) {
    *reinterpret_cast<uint32_t*>(k_row + element) =
        *reinterpret_cast<const uint32_t*>(new_key + element);
    *reinterpret_cast<uint32_t*>(v_row + element) =
        *reinterpret_cast<const uint32_t*>(value + element);
  }
}

// Prepare the block's query rows and new keys in shared memory; the one block that owns a token's slot and
// its first query row appends it. `factors` hold those of job `warp` if `loaded`.
template <typename T, int D, int N>
__device__ __forceinline__ void prepare_rows(const AttendParams& p, const Work& work, T* queries,
                                             T* new_keys, RowFactors<N>& factors, bool loaded, int warp,
                                             int lane) {
  const int jobs = work.rows + work.last_token + 1;
  for (int index = warp; index < jobs; index += kWarps) {
    const RowJob<T> job(p, work, index);
    if (job.source == nullptr) continue;
    if (!loaded || index != warp) {
      load_factors<T, N>(factors, p.rows, job.weight, p.cos, p.sin, job.table_offset, D, lane);
    }
    T* row = job.is_key ? new_keys + job.token * kRowStride<D> : queries + index * kRowStride<D>;
    if (D % 32 != 0 && lane < 8) *reinterpret_cast<uint32_t*>(row + D + 2 * lane) = 0;
    const bool has_norm = job.weight != nullptr;
    float x[N];
    load_row<T, N>(x, job.source, D, lane);
    const float mean = has_norm ? mean_square<T, N>(x, job.scope, D, lane) : 0.0f;
    norm_rotate_row<T, N>(row, x, has_norm, mean, factors, p.rows, D, lane);
    if (job.is_key && work.first_row <= job.token * work.group &&
        job.token * work.group < work.first_row + kTileRows) {
      append_row<T, D>(p, work, job.token, row, lane);
    }
  }
}

// Whether this block is the last of `arrivals` to have written its partials; true at most once, and the
// counter is zero again then.
__device__ __forceinline__ bool arrive_last(int* counter, int arrivals) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1) == arrivals - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

template <typename T, int D>
__global__ void __launch_bounds__(kThreads, D <= 128 ? 2 : 1)
    attend_kernel(const __grid_constant__ AttendParams p) {
  launch_dependents();
  if (p.use_clusters) cluster_arrive();  // first phase: every block of the cluster has started
  if (!p.history_static) wait_for_inputs();

  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ int out_rows[kTileRows];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Work work(p, p.lengths[blockIdx.y / (gridDim.y / p.batch)]);
  const int step = gridDim.x;
  int split = work.origin + blockIdx.x;
  // Blocks of a cluster stay while the cluster has slots, and the first always merges.
  const bool cluster_works = p.use_clusters && split / kFanIn * kFanIn <= work.last_split &&
                             (blockIdx.x % kFanIn == 0 || split + step <= work.last_split);
  if (!cluster_works && !(split <= work.last_split && work.live(split * kSplit, kSplit))) {
    if (p.history_static) wait_for_inputs();
    return;
  }

  const int tile_rows = min(kTileRows, p.tokens * work.group);
  const int gather_buffers = !p.use_clusters ? 0 : step * kSplit >= p.slots ? 1 : 2;
  const SharedLayout<T, D> layout(tile_rows, p.tokens, gather_buffers);
  T* queries = reinterpret_cast<T*>(shared + layout.queries);
  T* new_keys = reinterpret_cast<T*>(shared + layout.new_keys);
  float* tile_out = reinterpret_cast<float*>(shared + layout.tile_out);
  float* tile_m = reinterpret_cast<float*>(shared + layout.tile_m);
  float* tile_l = reinterpret_cast<float*>(shared + layout.tile_l);
  float2* gather_ml = reinterpret_cast<float2*>(shared + layout.gather_ml);
  float2* gather_o = reinterpret_cast<float2*>(shared + layout.gather_o);

  const int history_end = min(work.length, p.slots);
  const CacheRows<T> k_rows{static_cast<const T*>(p.k_cache) +
                                work.sequence * p.k_cache_strides[0] +
                                work.kv_head * p.k_cache_strides[1],
                            p.k_cache_strides[2], work.begin, history_end - 1};
  const CacheRows<T> v_rows{static_cast<const T*>(p.v_cache) +
                                work.sequence * p.v_cache_strides[0] +
                                work.kv_head * p.v_cache_strides[1],
                            p.v_cache_strides[2], work.begin, history_end - 1};
  const auto has_history = [&](int slot0) {
    return slot0 < history_end && slot0 + kTile > work.begin && work.begin < history_end;
  };
  const int new_slots = min(work.last_token + 1, p.slots - work.length);
  const auto has_new = [&](int slot0) {
    return slot0 < work.end && slot0 + kTile > work.begin && slot0 + kTile > work.length;
  };

  // Everything that does not depend on the previous kernel.
  KeyTile<D> keys;
  ValueTile<D> values;
  clear(keys, values);
  int slot0 = split * kSplit + warp * kTile;
  if (has_history(slot0)) {
    load_keys<T, D>(keys, k_rows, slot0, lane);
    load_values<T, D>(values, v_rows, slot0, lane);
  }
  constexpr int N = kRowElements<D>;
  RowFactors<N> factors;
  const bool factors_static = p.history_static && (p.table_rows > 0 || p.rows.rotary_dim == 0);
  if (factors_static) {
    const RowJob<T> job(p, work, warp);
    if (job.source != nullptr) {
      load_factors<T, N>(factors, p.rows, job.weight, p.cos, p.sin, job.table_offset, D, lane);
    }
  }
  if (threadIdx.x < work.rows) {
    const int row = threadIdx.x;
    out_rows[row] = (work.sequence * p.tokens + work.token(row)) * p.heads + work.head(row);
  }
  const RowRange ranges[2] = {work.range(p, 2 * (lane % 4)), work.range(p, 2 * (lane % 4) + 1)};
  const ScoreScale scale{p.soft_cap == 0.0f ? p.scaling * 1.4426950408889634f : p.scaling, p.soft_cap};
  const T* new_values = static_cast<const T*>(p.v) + work.sequence * p.v_strides[0] +
                        work.kv_head * p.v_strides[2];
  const int64_t all_rows = static_cast<int64_t>(p.batch) * p.tokens * p.heads;
  unsigned char* workspace = static_cast<unsigned char*>(p.workspace);
  const PartialStore store{
      reinterpret_cast<float2*>(workspace + kCounterBytes),
      reinterpret_cast<float2*>(workspace + kCounterBytes + store_ml_bytes(all_rows, p.slots)),
      all_rows, D / 2};
  const int pairs = work.rows * (D / 2);
  T* out = static_cast<T*>(p.out);
  const auto write_out = [&](int row, int pair, const Partial& sum) {
    const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;
    store_pair<T>(out + static_cast<int64_t>(row) * D + 2 * pair, sum.o.x * inverse,
                  sum.o.y * inverse);
  };

  if (p.history_static) wait_for_inputs();
  if (has_new(slot0)) {
    insert_values<T, D>(values, new_values, p.v_strides[1], slot0, work.length, new_slots, lane);
  }
  prepare_rows<T, D, N>(p, work, queries, new_keys, factors, factors_static, warp, lane);
  __syncthreads();

  const int first_super = work.begin / kSuper, last_super = (work.end - 1) / kSuper;
  for (int round = 0;; ++round) {
    const bool live = work.live(split * kSplit, kSplit);
    const bool tile_live = work.live(slot0, kTile);
    const int next_slot0 = slot0 + step * kSplit;
    float scores[4];
    if (tile_live) {
      if (has_new(slot0)) insert_keys<T, D>(keys, new_keys, slot0, work.length, new_slots, lane);
      multiply_keys<T, D>(scores, keys, queries, lane);
    }
    if (has_history(next_slot0)) load_keys<T, D>(keys, k_rows, next_slot0, lane);
    if (live) {
      TileWeights weights;
      weights.maximum[0] = weights.maximum[1] = -INFINITY;
      weights.sum[0] = weights.sum[1] = 0.0f;
      if (tile_live) {
        weights = soften<T>(scores, ranges, scale, slot0, lane);
        multiply_values<T, D>(tile_out + warp * tile_rows * kOutStride<D>, values, weights, work.rows,
                              lane);
      }
      if (lane < 4) {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
          tile_m[(2 * lane + column) * kWarps + warp] = weights.maximum[column];
          tile_l[(2 * lane + column) * kWarps + warp] = weights.sum[column];
        }
      }
    }
    if (has_history(next_slot0)) load_values<T, D>(values, v_rows, next_slot0, lane);
    if (has_new(next_slot0)) {
      insert_values<T, D>(values, new_values, p.v_strides[1], next_slot0, work.length, new_slots, lane);
    }

    if (round == 0 && p.use_clusters) cluster_wait();
    const int buffer = gather_buffers == 2 ? round % 2 : 0;
    const bool only_part = p.use_clusters ? first_super == last_super
                                          : work.begin / kSplit == work.last_split;
    if (live) {
      __syncthreads();
      for (int at = threadIdx.x; at < pairs; at += kThreads) {
        const int row = at / (D / 2), pair = at % (D / 2);
        alignas(16) float m[kWarps], l[kWarps];
        float maximum = -INFINITY;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          reinterpret_cast<float4*>(m)[half] = reinterpret_cast<float4*>(tile_m)[2 * row + half];
          reinterpret_cast<float4*>(l)[half] = reinterpret_cast<float4*>(tile_l)[2 * row + half];
        }
#pragma unroll
        for (int tile = 0; tile < kWarps; ++tile) maximum = fmaxf(maximum, m[tile]);
        Partial sum = empty_partial(maximum);
#pragma unroll
        for (int tile = 0; tile < kWarps; ++tile) {
          const float* o = tile_out + (tile * tile_rows + row) * kOutStride<D> + 2 * pair;
          accumulate(sum, m[tile], l[tile], *reinterpret_cast<const float2*>(o));
        }
        if (p.use_clusters) {
          const int rank = buffer * kFanIn + split % kFanIn;
          store_to_rank(gather_o + rank * layout.gather_pairs + at, 0, sum.o);
          if (pair == 0) {
            store_to_rank(gather_ml + rank * kTileRows + row, 0, make_float2(sum.m, sum.l));
          }
        } else if (only_part) {
          write_out(out_rows[row], pair, sum);
        } else {
          store.put(split, out_rows[row], pair, sum);
        }
      }
    }

    const bool more = p.use_clusters ? (split + step) / kFanIn <= last_super
                                     : split + step <= work.last_split;
    if (p.use_clusters) {
      cluster_arrive();
      if (blockIdx.x % kFanIn == 0) {
        cluster_wait();
        const int super = split / kFanIn;
        const int first = work.begin / kSplit - split, last = work.last_split - split;
        for (int at = threadIdx.x; at < pairs; at += kThreads) {
          const int row = at / (D / 2), pair = at % (D / 2);
          const Partial sum = merge<false>(
              gather_ml + buffer * kFanIn * kTileRows + row, kTileRows,
              gather_o + buffer * kFanIn * layout.gather_pairs + at, layout.gather_pairs, first, last);
          if (only_part) {
            Partial total = empty_partial(sum.m);
            accumulate(total, sum.m, sum.l, sum.o);
            write_out(out_rows[row], pair, total);
          } else {
            store.put(super, out_rows[row], pair, sum);
          }
        }
      } else if (more) {
        cluster_wait();
      }
    } else if (more) {
      __syncthreads();  // tile_out and tile_m are free again
    }
    if (!more) {
      if (only_part || (p.use_clusters && blockIdx.x % kFanIn != 0)) return;
      break;
    }
    split += step;
    slot0 = next_slot0;
  }

  // Several parts: the last block to get here merges them.
  const int blocks = p.use_clusters ? min(step / kFanIn, last_super - first_super + 1)
                                    : min(step, work.last_split - work.origin + 1);
  if (!arrive_last(static_cast<int*>(p.workspace) + blockIdx.y, blocks)) return;
  for (int at = threadIdx.x; at < pairs; at += kThreads) {
    const int row = out_rows[at / (D / 2)], pair = at % (D / 2);
    const Partial total =
        p.use_clusters ? merge_supers(store, row, pair, first_super, last_super)
                       : merge_splits(store, row, pair, work.begin / kSplit, work.last_split);
    write_out(row, pair, total);
  }
}

}  // namespace flashrt
