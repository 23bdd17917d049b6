// The steps of a block of attend, in the order in which attend_kernel takes them.
#pragma once

#include "attend_work.cuh"
#include "common/pdl.cuh"

namespace flashrt {

// Whether this block is the last of `arrivals` to have written its partials; true at most once, and
// the counter is zero again then.
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
struct AttendBlock {
  const AttendParams& p;
  const Work& work;
  const SharedLayout<T, D> layout;
  unsigned char* shared;
  const int* out_rows;  // row of `out` of each row of the tile
  ByteBarrier& gathered;
  bool only_part;  // the row's slots are one split, or with clusters one super
  int lane, warp;

  template <typename U>
  __device__ __forceinline__ U* at(int offset) const {
    return reinterpret_cast<U*>(shared + offset);
  }
  __device__ __forceinline__ CacheRows<T> history(const void* cache,
                                                  const int64_t (&strides)[3]) const {
    const T* rows =
        static_cast<const T*>(cache) + work.sequence * strides[0] + work.kv_head * strides[1];
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
    const T* rows =
        static_cast<const T*>(p.v) + work.sequence * p.v_strides[0] + work.kv_head * p.v_strides[2];
    insert_values<T, D>(values, rows, p.v_strides[1], slot0, work.length, new_slots(), lane);
  }

  // The block's query rows and new keys, prepared in shared memory; a new key goes to the cache
  // from the one block that owns its slot and its first query row. Weights and tables come before
  // the wait if they may.
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

  // This warp's tile: m, l and o of each row into shared memory. The next tile's rows are asked for
  // as soon as this one's are used.
  __device__ __forceinline__ void tile(KeyTile<D>& keys, ValueTile<D>& values,
                                       const Columns& columns, int slot0, int next_slot0) const {
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
    return PartialStore{reinterpret_cast<float2*>(p.partial_ml),
                        reinterpret_cast<float2*>(p.partial_o), p.partial_rows, D / 2};
  }

  // Call `function(row, pair)` for every pair of elements of the tile, once over the block's
  // threads.
  template <typename Function>
  __device__ __forceinline__ void each_pair(Function function) const {
    for (int i = threadIdx.x; i < work.rows * (D / 2); i += kThreads)
      function(i / (D / 2), i % (D / 2));
  }

  // The split's rows to the first block of the cluster, to the workspace, or to `out`.
  __device__ __forceinline__ void hand_over(int split) const {
    each_pair([&](int row, int pair) {
      const Partial sum = merge_tiles(row, pair);
      if (p.use_clusters) {
        const int part = split % kFanIn * p.tile_rows + row;
        gathered.store_to_first(at<float2>(layout.gather_o) + part * (D / 2) + pair, sum.o);
        if (pair == 0) {
          gathered.store_to_first(at<float2>(layout.gather_ml) + part, make_float2(sum.m, sum.l));
        }
      } else if (only_part) {
        write_out(out_rows[row], pair, sum);
      } else {
        store().put(split, out_rows[row], pair, sum);
      }
    });
  }

  // In the first block of a cluster, `split` being its own: the super's rows from all its splits.
  __device__ __forceinline__ void gather(int split, int round) const {
    const int first = max(work.begin / kSplit - split, 0);
    const int last = min(work.last_split - split, kFanIn - 1);
    if (threadIdx.x == 0) gathered.arrive_expecting((last - first + 1) * work.rows * (D * 4 + 8));
    gathered.wait(round % 2);
    each_pair([&](int row, int pair) {
      const Partial sum = merge<false>(at<float2>(layout.gather_ml) + row, p.tile_rows,
                                       at<float2>(layout.gather_o) + row * (D / 2) + pair,
                                       p.tile_rows * (D / 2), first, last);
      if (only_part) {
        Partial total = empty_partial(sum.m);
        accumulate(total, sum.m, sum.l, sum.o);
        write_out(out_rows[row], pair, total);
      } else {
        store().put(split / kFanIn, out_rows[row], pair, sum);
      }
    });
  }

  // Several parts: the last block to get here merges them.
  __device__ __forceinline__ void merge_parts() const {
    const int first_super = work.begin / kSuper, last_super = (work.end - 1) / kSuper;
    const int step = gridDim.x;
    const int arrivals = p.use_clusters ? min(step / kFanIn, last_super - first_super + 1)
                                        : min(step, work.last_split - work.origin + 1);
    const int counter = blockIdx.z * gridDim.y + blockIdx.y;
    if (!arrive_last(static_cast<int*>(p.workspace) + counter, arrivals)) return;
    each_pair([&](int row, int pair) {
      const int out_row = out_rows[row];
      const Partial total =
          p.use_clusters
              ? merge_supers(store(), out_row, pair, first_super, last_super)
              : merge_splits(store(), out_row, pair, work.begin / kSplit, work.last_split);
      write_out(out_row, pair, total);
    });
  }
};

}  // namespace flashrt
