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
// With clusters, 8 blocks share 1024 slots (a "super") and store their results to the first of them, which
// merges; only rows longer than that meet in the workspace, where the last block to arrive merges supers.
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

  // `rows` of a block's tile, `tokens` of the call.
  __host__ __device__ SharedLayout(int rows, int tokens, bool clusters) {
    queries = 0;
    new_keys = queries + kTileRows * kRowStride<D> * static_cast<int>(sizeof(T));
    tile_out = new_keys + tokens * kRowStride<D> * static_cast<int>(sizeof(T));
    tile_m = tile_out + kWarps * rows * kOutStride<D> * 4;
    tile_l = tile_m + kTileRows * kWarps * 4;
    gather_ml = tile_l + kTileRows * kWarps * 4;
    gather_o = gather_ml + (clusters ? kFanIn * kTileRows * 8 : 0);
    total = gather_o + (clusters ? kFanIn * rows * D * 4 : 0);
  }
};

__device__ __forceinline__ int divide(int n, Divisor divisor) {
  return divisor.value == 1 ? n : __umulhi(n, divisor.reciprocal);
}

// Which rows and slots a block works on. The grid is [blocks, G, B * row tiles].
struct Work {
  int sequence, kv_head;
  int first_row, rows;     // of the T * H / G rows of (sequence, kv_head)
  int last_token;          // newest token among them
  int length;              // slots filled before this call
  int begin, end;          // slots that some row sees
  int origin, last_split;  // splits are origin + blockIdx.x + i * gridDim.x, up to last_split

  __device__ __forceinline__ explicit Work(const AttendParams& p) {
    sequence = divide(blockIdx.z, p.tiles);
    kv_head = blockIdx.y;
    first_row = (blockIdx.z - sequence * p.tiles.value) * kTileRows;
    rows = min(kTileRows, p.tokens * static_cast<int>(p.group.value) - first_row);
    last_token = token(p, rows - 1);
    length = min(max(p.lengths[sequence], 0), p.slots);
    end = min(length + last_token + 1, p.slots);
    begin = min(max(0, length + token(p, 0) - p.window + 1), end - 1);
    origin = p.use_clusters ? begin / kSuper * kFanIn : begin / kSplit;
    last_split = (end - 1) / kSplit;
  }

  __device__ __forceinline__ bool live(int first_slot, int slots) const {
    return first_slot < end && first_slot + slots > begin;
  }
  // Whether this block takes the split of `slot`.
  __device__ __forceinline__ bool owns(const AttendParams& p, int slot) const {
    const int index = slot / kSplit - origin;
    const int turn = divide(index, p.step);
    return index >= 0 && index - turn * static_cast<int>(gridDim.x) == static_cast<int>(blockIdx.x);
  }
  __device__ __forceinline__ int token(const AttendParams& p, int row) const {
    return divide(first_row + row, p.group);
  }
  __device__ __forceinline__ int head(const AttendParams& p, int row) const {
    const int group = p.group.value;
    return kv_head * group + first_row + row - token(p, row) * group;
  }
  // Position of a query row, as a slot of the cache; -1 for the unused rows of a tile.
  __device__ __forceinline__ int position(const AttendParams& p, int row) const {
    return row < rows ? min(length + token(p, row), p.slots - 1) : -1;
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
    token = is_key ? job - work.rows : work.token(p, job);
    if (token > work.last_token) return;
    const int slot = work.length + token;
    if (is_key && (slot >= p.slots || !work.owns(p, slot))) return;
    const int head = is_key ? work.kv_head : work.head(p, job);
    const int heads = is_key ? p.kv_heads : p.heads;
    const int64_t* strides = is_key ? p.k_strides : p.q_strides;
    const T* first = static_cast<const T*>(is_key ? p.k : p.q) + work.sequence * strides[0] +
                     token * strides[1];
    source = first + head * strides[2];
    weight = static_cast<const T*>(is_key ? p.k_weight : p.q_weight);
    if (weight != nullptr && p.rows.over_all) weight += head * p.dim;
    scope = NormScope<T>{p.rows.over_all ? first : source, strides[2], p.rows.over_all ? heads : 1,
                         is_key ? p.k_inverse_count : p.q_inverse_count};
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

// The parts of a block's work that outlive one split.
template <typename T, int D>
struct Attend {
  const AttendParams& p;
  const Work& work;
  const SharedLayout<T, D> layout;
  unsigned char* shared;
  const int* out_rows;  // row of `out` of each row of the tile
  int lane, warp;

  template <typename U>
  __device__ __forceinline__ U* at(int offset) const {
    return reinterpret_cast<U*>(shared + offset);
  }
  __device__ __forceinline__ CacheRows<T> history(const void* cache, const int64_t (&strides)[3]) const {
    const T* rows = static_cast<const T*>(cache) + work.sequence * strides[0] + work.kv_head * strides[1];
    return CacheRows<T>{rows, strides[2], work.begin, min(work.length, p.slots) - 1};
  }
  __device__ __forceinline__ bool has_history(int slot0) const {
    return slot0 < work.length && slot0 + kTile > work.begin && work.begin < work.length;
  }
  __device__ __forceinline__ bool has_new(int slot0) const {
    return work.live(slot0, kTile) && slot0 + kTile > work.length;
  }
  __device__ __forceinline__ int new_slots() const {
    return min(work.last_token + 1, p.slots - work.length);
  }

  __device__ __forceinline__ void load_new_values(ValueTile<D>& values, int slot0) const {
    const T* rows = static_cast<const T*>(p.v) + work.sequence * p.v_strides[0] +
                    work.kv_head * p.v_strides[2];
    insert_values<T, D>(values, rows, p.v_strides[1], slot0, work.length, new_slots(), lane);
  }

  // The block's query rows and new keys, prepared in shared memory; a new key goes to the cache from the one
  // block that owns its slot and its first query row. Weights and tables come before the wait if they may.
  __device__ __forceinline__ void prepare(ValueTile<D>& values, int slot0) const {
    constexpr int N = kRowElements<D>;
    if (!(p.history_static && (p.table_rows > 0 || p.rows.rotary_dim == 0))) wait_for_inputs();
    const int jobs = work.rows + work.last_token + 1;
    int index = warp;
    do {
      const RowJob<T> job(p, work, index);
      RowFactors<N> factors;
      if (job.source != nullptr) {
        load_factors<T, N>(factors, p.rows, job.weight, p.cos, p.sin, job.table_offset, D, lane);
      }
      if (index == warp) {
        wait_for_inputs();
        if (has_new(slot0)) load_new_values(values, slot0);
      }
      if (job.source != nullptr) {
        float x[N];
        load_row<T, N>(x, job.source, D, lane);
        const bool has_norm = job.weight != nullptr;
        const float mean = has_norm ? mean_square<T, N>(x, job.scope, D, lane) : 0.0f;
        T* row = job.is_key ? at<T>(layout.new_keys) + job.token * kRowStride<D>
                            : at<T>(layout.queries) + index * kRowStride<D>;
        if (D % 32 != 0 && lane < 8) *reinterpret_cast<uint32_t*>(row + D + 2 * lane) = 0;
        norm_rotate_row<T, N>(row, x, has_norm, mean, factors, p.rows, D, lane);
        const int first_row = job.token * static_cast<int>(p.group.value) - work.first_row;
        if (job.is_key && first_row >= 0 && first_row < kTileRows) {
          append_row<T, D>(p, work, job.token, row, lane);
        }
      }
      index += kWarps;
    } while (index < jobs);
  }

  // This warp's tile: m, l and o of each row into shared memory. The next tile's rows are asked for as soon
  // as this one's are used.
  __device__ __forceinline__ void tile(KeyTile<D>& keys, ValueTile<D>& values, const Columns& columns,
                                       int slot0, int next_slot0) const {
    const bool live = work.live(slot0, kTile);
    float products[4];
    if (live) {
      if (has_new(slot0)) {
        insert_keys<T, D>(keys, at<T>(layout.new_keys), slot0, work.length, new_slots(), lane);
      }
      multiply_keys<T, D>(products, keys, at<T>(layout.queries), lane);
    }
    if (has_history(next_slot0)) {
      load_keys<T, D>(keys, history(p.k_cache, p.k_cache_strides), next_slot0, lane);
    }
    TileWeights weights;
    weights.maximum[0] = weights.maximum[1] = -INFINITY;
    weights.sum[0] = weights.sum[1] = 0.0f;
    if (live) {
      weights = soften<T>(products, columns, slot0, lane);
      float* out = at<float>(layout.tile_out) + warp * p.tile_rows * kOutStride<D>;
      multiply_values<T, D>(out, values, weights, work.rows, lane);
    }
    if (lane < 4) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const int entry = (2 * lane + column) * kWarps + warp;
        at<float>(layout.tile_m)[entry] = weights.maximum[column];
        at<float>(layout.tile_l)[entry] = weights.sum[column];
      }
    }
    if (has_history(next_slot0)) {
      load_values<T, D>(values, history(p.v_cache, p.v_cache_strides), next_slot0, lane);
    }
    if (has_new(next_slot0)) load_new_values(values, next_slot0);
  }

  // Two elements of a row of the split, from its tiles.
  __device__ __forceinline__ Partial merge_tiles(int row, int pair) const {
    alignas(16) float m[kWarps], l[kWarps];
    float maximum = -INFINITY;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reinterpret_cast<float4*>(m)[half] = at<float4>(layout.tile_m)[2 * row + half];
      reinterpret_cast<float4*>(l)[half] = at<float4>(layout.tile_l)[2 * row + half];
    }
#pragma unroll
    for (int tile = 0; tile < kWarps; ++tile) maximum = fmaxf(maximum, m[tile]);
    Partial sum = empty_partial(maximum);
    const float* o = at<float>(layout.tile_out) + row * kOutStride<D> + 2 * pair;
#pragma unroll
    for (int tile = 0; tile < kWarps; ++tile) {
      accumulate(sum, m[tile], l[tile],
                 *reinterpret_cast<const float2*>(o + tile * p.tile_rows * kOutStride<D>));
    }
    return sum;
  }

  __device__ __forceinline__ void write_out(int row, int pair, const Partial& sum) const {
    const float inverse = sum.l == 0.0f ? 0.0f : __fdividef(1.0f, sum.l);
    store_pair<T>(static_cast<T*>(p.out) + static_cast<int64_t>(row) * D + 2 * pair,
                  sum.o.x * inverse, sum.o.y * inverse);
  }

  __device__ __forceinline__ PartialStore store() const {
    return PartialStore{reinterpret_cast<float2*>(p.partial_ml), reinterpret_cast<float2*>(p.partial_o),
                        p.partial_rows, D / 2};
  }

  // Call `function(row, pair)` for every pair of elements of the tile, once over the block's threads.
  template <typename Function>
  __device__ __forceinline__ void each_pair(Function function) const {
    for (int i = threadIdx.x; i < work.rows * (D / 2); i += kThreads) function(i / (D / 2), i % (D / 2));
  }
};

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
  if (!stays && !work.live(split * kSplit, kSplit)) {
    wait_for_inputs();
    return;
  }
  const Attend<T, D> block{p,
                           work,
                           SharedLayout<T, D>(p.tile_rows, p.tokens, p.use_clusters),
                           shared,
                           out_rows,
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
  const Columns columns{{work.position(p, column), work.position(p, column + 1)},
                        p.window, p.scaling, p.soft_cap};
  const PartialStore store = block.store();
  const int first_super = work.begin / kSuper, last_super = (work.end - 1) / kSuper;
  const bool only_part = p.use_clusters ? first_super == last_super
                                        : work.begin / kSplit == work.last_split;
  if (p.use_clusters) cluster_wait();  // all blocks have started
  block.prepare(values, slot0);
  __syncthreads();

  for (int round = 0;; ++round) {
    const bool live = work.live(split * kSplit, kSplit);
    block.tile(keys, values, columns, slot0, slot0 + step * kSplit);
    if (p.use_clusters && round > 0) cluster_wait();  // the first block is done with the last round
    if (live) {
      __syncthreads();
      block.each_pair([&](int row, int pair) {
        const Partial sum = block.merge_tiles(row, pair);
        if (p.use_clusters) {
          const int part = split % kFanIn * p.tile_rows + row;
          gathered.store_to_first(block.template at<float2>(block.layout.gather_o) + part * (D / 2) + pair,
                                  sum.o);
          if (pair == 0) {
            gathered.store_to_first(block.template at<float2>(block.layout.gather_ml) + part,
                                    make_float2(sum.m, sum.l));
          }
        } else if (only_part) {
          block.write_out(out_rows[row], pair, sum);
        } else {
          store.put(split, out_rows[row], pair, sum);
        }
      });
    }

    const bool more = p.use_clusters ? (split + step) / kFanIn <= last_super
                                     : split + step <= work.last_split;
    if (first_of_cluster) {
      const int first = max(work.begin / kSplit - split, 0), last = min(work.last_split - split, kFanIn - 1);
      if (threadIdx.x == 0) gathered.arrive_expecting((last - first + 1) * work.rows * (D * 4 + 8));
      gathered.wait(round % 2);
      block.each_pair([&](int row, int pair) {
        const Partial sum = merge<false>(
            block.template at<float2>(block.layout.gather_ml) + row, p.tile_rows,
            block.template at<float2>(block.layout.gather_o) + row * (D / 2) + pair,
            p.tile_rows * (D / 2), first, last);
        if (only_part) {
          Partial total = empty_partial(sum.m);
          accumulate(total, sum.m, sum.l, sum.o);
          block.write_out(out_rows[row], pair, total);
        } else {
          store.put(split / kFanIn, out_rows[row], pair, sum);
        }
      });
    }
    if (!more) break;
    if (p.use_clusters) cluster_arrive();
    __syncthreads();  // tile_out, tile_m and tile_l are free again
    split += step;
    slot0 += step * kSplit;
  }
  if (only_part || (p.use_clusters && !first_of_cluster)) return;

  // Several parts: the last block to get here merges them.
  const int arrivals = p.use_clusters ? min(step / kFanIn, last_super - first_super + 1)
                                      : min(step, work.last_split - work.origin + 1);
  const int counter = blockIdx.z * gridDim.y + blockIdx.y;
  if (!arrive_last(static_cast<int*>(p.workspace) + counter, arrivals)) return;
  block.each_pair([&](int row, int pair) {
    const int out_row = out_rows[row];
    const Partial total =
        p.use_clusters ? merge_supers(store, out_row, pair, first_super, last_super)
                       : merge_splits(store, out_row, pair, work.begin / kSplit, work.last_split);
    block.write_out(out_row, pair, total);
  });
}

}  // namespace flashrt
