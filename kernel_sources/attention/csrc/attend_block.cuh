// The steps of a block of attend, in the order in which attend_kernel takes them.
#pragma once

#include "attend_ring.cuh"
#include "common/pdl.cuh"

namespace flashrt {

// Whether this block is the last of `arrivals` to have written its parts; true at most once, and
// the counter is zero again then.
__device__ __forceinline__ bool arrive_last(int* counter, int arrivals) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    last = add_in_order(counter, 1) == arrivals - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

template <typename T, typename C, int D>
struct AttendBlock {
  using Operand = typename OperandOf<T, C>::Type;
  static constexpr int kGroups = kWarps / kDimBlocks<D> > 0 ? kWarps / kDimBlocks<D> : 1;

  const AttendParams& p;
  const Work& work;
  const SharedOffsets& layout;
  unsigned char* shared;
  ByteBarrier& gathered;
  int lane, warp;
  float score_scale, key_scale, value_scale;  // a cache without scales has scales of 1

  template <typename U>
  __device__ __forceinline__ U* at(int offset) const {
    return reinterpret_cast<U*>(shared + offset);
  }
  // Scales of an FP8 cache: part of its history.
  __device__ __forceinline__ void load_scales() {
    score_scale = p.scaling;
    key_scale = value_scale = 1.0f;
    if constexpr (kIsFp8<C>) {
      key_scale = p.k_scale[p.k_scale_stride * work.kv_head];
      score_scale *= key_scale;
      value_scale = p.v_scale[p.v_scale_stride * work.kv_head];
    }
  }
  // New tokens of this block's rows that have a slot.
  __device__ __forceinline__ int new_slots() const {
    return min(work.last_token + 1, p.slots - work.length);
  }
  // Row of the keys or values of `slot`: of a ring slot, or this call's own.
  __device__ __forceinline__ const unsigned char* row_of(int slot, const unsigned char* ring_slot,
                                                         int new_rows) const {
    const unsigned token = slot - work.length;
    return token < static_cast<unsigned>(new_slots())
               ? shared + new_rows + token * kRowBytes<D>
               : ring_slot + slot % kSplit * kCacheRowBytes<C, D>;
  }

  // Rows of the tile that threads look up.
  __device__ __forceinline__ void prepare_places() const {
    const int row = threadIdx.x;
    if (row < p.row_tiles * kTileRows) {
      at<int>(layout.row_position)[row] = work.position(p, row);
      if (row < work.rows) at<int>(layout.row_out)[row] = work.out_row(p, row);
    }
  }

  // The block's query rows, new keys and new values in shared memory. Weights and tables come
  // before the wait if they may. A warp asks for its next row before it works on one.
  __device__ __forceinline__ void prepare() const {
    constexpr int N = kRowElements<D>;
    if (!(p.history_static && (p.table_rows > 0 || p.rows.rotary_dim == 0))) wait_for_inputs();
    const int jobs = work.rows + work.last_token + 1;
    Input<N> input{nullptr};
#pragma unroll 1
    for (int index = warp - kWarps; index < jobs; index += kWarps) {
      Input<N> next;
      next.source = nullptr;
      const bool is_first = index < 0;
      if (index + kWarps < jobs) {
        load_input(next, index + kWarps, is_first);
      } else if (is_first) {
        wait_for_inputs();
      }
      if (input.source != nullptr) prepare_row(input, index);
      input = next;
    }
  }

  // A row on its way to prepare_row, with what it needs.
  template <int N>
  struct Input {
    const T* source;  // null: nothing to do
    NormScope<T> scope;
    int token;
    bool is_key;
    RowFactors<N> factors;
    float x[N];
    uint4 value;
  };

  template <int N>
  __device__ __forceinline__ void load_input(Input<N>& input, int index, bool is_first) const {
    const RowJob<T> job(p, work, index);
    input.source = job.source;
    if (job.source != nullptr) {
      input.scope = job.scope;
      input.token = job.token;
      input.is_key = job.is_key;
      load_factors<T, N>(input.factors, p.rows, job.weight, p.cos, p.sin, job.table_offset, D,
                         lane);
    }
    if (is_first) wait_for_inputs();
    if (job.source == nullptr) return;
    load_row<T, N>(input.x, job.source, D, lane);
    if (job.is_key && lane < D / 8) {
      const T* row = static_cast<const T*>(p.v) + work.sequence * p.v_strides[0] +
                     job.token * p.v_strides[1] + work.kv_head * p.v_strides[2];
      input.value = reinterpret_cast<const uint4*>(row)[lane];
    }
  }

  template <int N>
  __device__ __forceinline__ void prepare_row(Input<N>& input, int index) const {
    const bool has_norm = (input.is_key ? p.k_weight : p.q_weight) != nullptr;
    const float mean = has_norm ? mean_square<T, N>(input.x, input.scope, D, lane) : 0.0f;
    T* row = at<T>(input.is_key ? layout.new_keys + input.token * kRowBytes<D>
                                : layout.queries + index * kRowBytes<D>);
    norm_rotate_row<T, N>(row, input.x, has_norm, mean, input.factors, p.rows, D, lane);
    const int value_row = layout.new_values + input.token * kRowBytes<D>;
    if constexpr (kIsFp8<C>) {
      __syncwarp();  // the row is free
      if (input.is_key) {
        store_new(input, row, value_row);
      } else {
        store_query(input, index);
      }
    } else if (input.is_key && lane < D / 8) {
      at<uint4>(value_row)[lane] = input.value;
    }
  }

  // A query for an FP8 cache, over its row of T.
  template <int N>
  __device__ __forceinline__ void store_query(const Input<N>& input, int index) const {
    float x[N], largest = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      x[i] = row_element(i, lane) < D ? to_float(from_float<T>(input.x[i])) : 0.0f;
      largest = fmaxf(largest, fabsf(x[i]));
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const QueryScale scale(largest);
    auto* row = at<Operand>(layout.queries + index * kRowBytes<D>);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const int element = row_element(i, lane);
      if (element < D) row[query_place(element)] = from_float<Operand>(x[i] * scale.factor);
    }
    if (lane == 0) at<float>(layout.row_inverse)[index] = scale.inverse;
  }

  // A new key and value as an FP8 cache stores them. The key lies over its row of T.
  template <int N>
  __device__ __forceinline__ void store_new(const Input<N>& input, T* key_row,
                                            int value_row) const {
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      const int element = 2 * lane + 64 * j;
      if (element >= D) continue;
      auto* pair = reinterpret_cast<Fp8*>(key_row) + element;
      for (int i = 0; i < 2; ++i) {
        pair[i] = scaled_to_fp8(to_float(from_float<T>(input.x[2 * j + i])), key_scale);
      }
    }
    if (lane >= D / 8) return;
    float values[8];
    unpack<T>(input.value, values);
    Fp8* value = at<Fp8>(value_row) + 8 * lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) value[i] = scaled_to_fp8(values[i], value_scale);
  }

  // New keys and values to the cache, from the one block that owns a slot and its first query row.
  // They are in shared memory.
  __device__ __forceinline__ void append() const {
    constexpr int kPieces = D * static_cast<int>(sizeof(C)) / 16;
    const int new_rows = new_slots();
#pragma unroll 1
    for (int token = warp; token < new_rows; token += kWarps) {
      const int first_row = token * static_cast<int>(p.group.value) - work.first_row;
      const int64_t slot = work.length + token;
      if (first_row < 0 || first_row >= kMaxRows || !work.owns(slot) || lane >= kPieces) continue;
      C* key = static_cast<C*>(p.k_cache) + work.sequence * p.k_cache_strides[0] +
               work.kv_head * p.k_cache_strides[1] + slot * p.k_cache_strides[2];
      C* value = static_cast<C*>(p.v_cache) + work.sequence * p.v_cache_strides[0] +
                 work.kv_head * p.v_cache_strides[1] + slot * p.v_cache_strides[2];
      reinterpret_cast<uint4*>(key)[lane] = at<uint4>(layout.new_keys + token * kRowBytes<D>)[lane];
      reinterpret_cast<uint4*>(value)[lane] =
          at<uint4>(layout.new_values + token * kRowBytes<D>)[lane];
    }
  }

  // This warp's tile of a split: weights, e and l of every row into shared memory.
  __device__ __forceinline__ void score(int split, const unsigned char* ring_slot,
                                        int buffer) const {
    const int slot0 = split * kSplit + warp * kTile, rows = p.row_tiles * kTileRows;
    KeyTile<D> keys;
    load_keys<C, D>(
        keys, row_of(slot0 + operand_row(lane), ring_slot, layout.new_keys) + operand_byte(lane));
    const int column = 2 * (lane % 4);
#pragma unroll 1
    for (int tile = 0; tile < p.row_tiles; ++tile) {
      const int row0 = tile * kTileRows;
      float scores[4];
      multiply_keys<Operand, D>(scores, keys, shared + layout.queries + row0 * kRowBytes<D>, lane);
      const int2 position = at<int2>(layout.row_position)[(row0 + column) / 2];
      Columns columns{{position.x, position.y}, p.window, {score_scale, score_scale}, p.soft_cap};
      if constexpr (kIsFp8<C>) {
        const float2 inverse = at<float2>(layout.row_inverse)[(row0 + column) / 2];
        columns.scaling[0] *= inverse.x;
        columns.scaling[1] *= inverse.y;
      }
      const TileWeights weights = soften<Operand>(scores, columns, slot0, lane);
      const int row = buffer * rows + row0 + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        at<uint32_t>(layout.weights + row * kWeightRowBytes)[warp * 8 + half * 4 + lane % 4] =
            weights.words[half];
      }
      if (lane < 4) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int entry = (buffer * rows + row0 + column + i) * kWarps + warp;
          at<float>(layout.tile_e)[entry] = weights.e[i];
          at<float>(layout.tile_l)[entry] = weights.sum[i];
        }
      }
    }
  }

  // This warp's elements of a split: values weighted, merged with the splits before, and handed
  // over where a part is complete.
  __device__ __forceinline__ void add_values(int split, const unsigned char* ring_slot,
                                             int buffer) const {
    if (kDimBlocks<D> < kWarps && warp >= kDimBlocks<D> * kGroups) return;
    constexpr int kSlots = kValueSlots<C>;
    const int slot = value_slot<C>(lane), byte = value_byte<C>(lane);
    const unsigned char* old_row = ring_slot + slot * kCacheRowBytes<C, D> + byte;
    // New tokens are fewer than the slots between a lane's rows: at most one of them is new.
    static_assert(kMaxTokens <= kSlots);
    const int new_slot = work.length - split * kSplit - slot + kSlots - 1;
    const int token = kSlots - 1 - (new_slot & (kSlots - 1));
    const int new_index = token < new_slots() ? new_slot >> (kSlots == 32 ? 5 : 4) : -1;
    const unsigned char* new_row = shared + layout.new_values + token * kRowBytes<D> + byte;
    const int rows = p.row_tiles * kTileRows;
#pragma unroll 1
    for (int block = warp % kDimBlocks<D>; block < kDimBlocks<D>; block += kWarps) {
      uint32_t values[kWarps][4];
      load_values<C>(values, [&](int i) {
        const unsigned char* row =
            i == new_index ? new_row : old_row + i * kSlots * kCacheRowBytes<C, D>;
        return row + 16 * static_cast<int>(sizeof(C)) * block;
      });
#pragma unroll 1
      for (int tile = warp / kDimBlocks<D>; tile < p.row_tiles; tile += kGroups) {
        const int row0 = buffer * rows + tile * kTileRows, row = row0 + lane / 4;
        SplitWeights weights;
        load_split_weights<Operand>(weights, at<float>(layout.tile_e) + row * kWarps,
                                    at<float>(layout.tile_l) + row * kWarps,
                                    shared + layout.weights + row0 * kWeightRowBytes, lane);
        float o[4];
        multiply_values<Operand>(o, values, weights);
        merge_up(split, block, tile, weights.e, weights.l, o);
      }
      if (kDimBlocks<D> <= kWarps) break;
    }
  }

  // e and l of row lane / 4, o as multiply_values leaves it: merge with the neighbours that are
  // there, as far up the tree as a part goes.
  __device__ __forceinline__ void merge_up(int split, int block, int tile, float e, float l,
                                           float (&o)[4]) const {
    const int rows = p.row_tiles * kTileRows, jobs = p.row_tiles * kDimBlocks<D>;
    float4* sums = at<float4>(layout.sums) + (tile * kDimBlocks<D> + block) * 32 + lane;
    float2* sums_el =
        at<float2>(layout.sums_el) + warp * p.levels * rows + tile * kTileRows + lane / 4;
    int level = 0;
    for (; level < work.level; ++level) {
      const int start = split >> level << level;
      if (split >> level & 1) {
        if (start <= work.own) continue;  // nothing is left of it
        const float2 left_el = sums_el[level * rows];
        const float4 left = sums[level * jobs * 32];
        const Weights w(left_el.x, e);
        e = w.e;
        l = weighted_sum(left_el.y, w.left, l, w.right);
        const float2 lefts = of_columns(w.left), rights = of_columns(w.right);
        o[0] = weighted_sum(left.x, lefts.x, o[0], rights.x);
        o[1] = weighted_sum(left.y, lefts.y, o[1], rights.y);
        o[2] = weighted_sum(left.z, lefts.x, o[2], rights.x);
        o[3] = weighted_sum(left.w, lefts.y, o[3], rights.y);
      } else if (split + 1 < work.own_end) {
        sums[level * jobs * 32] = make_float4(o[0], o[1], o[2], o[3]);
        sums_el[level * rows] = make_float2(e, l);
        return;
      }
    }
    hand_over(split, block, tile, e, l, o);
  }

  // A number that every lane has for row lane / 4, for rows 2c and 2c + 1.
  __device__ __forceinline__ float2 of_columns(float value) const {
    const int from = lane % 4 * 8;
    return make_float2(__shfl_sync(0xffffffffu, value, from),
                       __shfl_sync(0xffffffffu, value, from + 4));
  }

  // A part of a tile's rows to `out`, to the first block of the cluster, or to the workspace.
  __device__ __forceinline__ void hand_over(int split, int block, int tile, float e, float l,
                                            const float (&o)[4]) const {
    const int row0 = tile * kTileRows, column = row0 + 2 * (lane % 4);
    const int pair = block * 8 + lane / 4;
    const float2 first = make_float2(o[0], o[2]), second = make_float2(o[1], o[3]);
    if (work.first == work.last) {
      const float2 l_of = of_columns(l);
      write_pair(column, pair, first, l_of.x, 4);
      write_pair(column + 1, pair, second, l_of.y, 4);
      return;
    }
    const bool has_el = block == 0 && lane % 4 == 0 && row0 + lane / 4 < work.rows;
    const float2 el = make_float2(e, l);
    if (work.gathers) {
      const int part = (split >> work.level) - (work.first >> work.level);
      float2* parts = at<float2>(layout.gather_o) + part * work.rows * (D / 2);
      if (column < work.rows) gathered.store_to_first(parts + column * (D / 2) + pair, first);
      if (column + 1 < work.rows) {
        gathered.store_to_first(parts + (column + 1) * (D / 2) + pair, second);
      }
      float2* parts_el = at<float2>(layout.gather_el) + part * work.rows;
      if (has_el) gathered.store_to_first(parts_el + row0 + lane / 4, el);
      return;
    }
    const int* out_rows = at<int>(layout.row_out);
    const int64_t part = static_cast<int64_t>(split >> work.level) * p.partial_rows;
    float2* parts = reinterpret_cast<float2*>(p.partial_o) + part * (D / 2) + pair;
    if (column < work.rows) parts[out_rows[column] * (D / 2)] = first;
    if (column + 1 < work.rows) parts[out_rows[column + 1] * (D / 2)] = second;
    if (has_el) reinterpret_cast<float2*>(p.partial_el)[part + out_rows[row0 + lane / 4]] = el;
  }

  // Pair `pair` of a row (first_of_pair) to `out`; the lane `distance` away has the neighbouring
  // pair. All lanes call.
  __device__ __forceinline__ void write_pair(int row, int pair, float2 o, float l,
                                             int distance) const {
    const float inverse = l == 0.0f ? 0.0f : __fdividef(value_scale, l);
    float2 two = make_float2(o.x * inverse, o.y * inverse);
    int element = first_of_pair<C>(pair);
    if constexpr (!kIsFp8<C>) {  // elements 8 apart: swap one with the neighbour
      const bool odd = pair % 2 == 1;
      const float other = __shfl_xor_sync(0xffffffffu, odd ? two.x : two.y, distance);
      two = odd ? make_float2(other, two.y) : make_float2(two.x, other);
      element += odd ? 7 : 0;
    }
    if (row >= work.rows) return;
    store_pair<T>(
        static_cast<T*>(p.out) + static_cast<int64_t>(at<int>(layout.row_out)[row]) * D + element,
        two.x, two.y);
  }

  // Every pair of elements, once over the block's threads, from `parts(row, pair)` of 2^level
  // splits.
  template <bool kGlobal, typename Function, typename Ready>
  __device__ __forceinline__ void write_merged(int level, Function parts, Ready ready) const {
    const int pairs = work.rows * (D / 2);
    for (int i = threadIdx.x; i - lane < pairs; i += kThreads) {
      const int row = i / (D / 2), pair = i % (D / 2);
      Partial sum = empty_partial();
      if (i < pairs) sum = merge<kGlobal>(parts(row, pair), level, ready);
      write_pair(row, pair, sum.o, sum.l, 1);
    }
  }

  // In the first block of a cluster: the rows from all parts of its blocks.
  __device__ __forceinline__ void gather() const {
    if (threadIdx.x == 0) gathered.arrive_expecting(work.parts() * work.rows * (D * 4 + 8));
    write_merged<false>(
        work.level,
        [&](int row, int pair) {
          return Parts{at<float2>(layout.gather_el) + row,
                       at<float2>(layout.gather_o) + row * (D / 2) + pair,
                       work.rows,
                       work.rows * (D / 2),
                       work.first >> work.level,
                       work.last >> work.level};
        },
        [&] { gathered.wait(0); });
  }

  // Parts in the workspace: the last block to get here merges them.
  __device__ __forceinline__ void merge_parts() const {
    int* counter = static_cast<int*>(p.workspace) + work.lane_index;
    if (!arrive_last(counter, work.active_blocks(p))) return;
    const int first = work.first >> work.level, last = work.last >> work.level;
    write_merged<true>(
        work.level,
        [&](int row, int pair) {
          const int64_t at_first =
              static_cast<int64_t>(first) * p.partial_rows + at<int>(layout.row_out)[row];
          return Parts{reinterpret_cast<const float2*>(p.partial_el) + at_first,
                       reinterpret_cast<const float2*>(p.partial_o) + at_first * (D / 2) + pair,
                       p.partial_rows,
                       static_cast<int64_t>(p.partial_rows) * (D / 2),
                       first,
                       last};
        },
        [] {});
  }
};

}  // namespace flashrt
