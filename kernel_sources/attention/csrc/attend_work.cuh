// What a block of attend works on: sizes, shared memory, rows, slots, and the preparation of one
// row.
#pragma once

#include <algorithm>

#include "attend.h"
#include "attend_tile.cuh"
#include "rows.cuh"

namespace flashrt {

constexpr int kThreads = 32 * kWarps;
constexpr int kMaxRows = 32;   // query rows of a block
constexpr int kMaxTokens = 8;  // of a call, all sequences together

// A workspace starts with counters, one per (sequence, key head, row tile): a fixed number, so that
// calls of different sizes can share it. PartialStore follows.
constexpr int kCounters = 4096;
constexpr int kCounterBytes = 4 * kCounters;

__host__ __device__ inline int64_t store_el_bytes(int64_t rows, int slots) {
  return ((slots + kSplit - 1) / kSplit * rows * 8 + 255) / 256 * 256;
}

// Sums of 16 elements for 8 rows: a product's output, by a warp.
template <int D>
constexpr int kDimBlocks = D / 16;
constexpr int kSumBytes = 32 * 16;

// Shared memory of a block, in bytes from its start. Slots of the ring hold the keys or the values
// of a split.
template <typename C, int D>
struct SharedLayout : SharedOffsets {
  static constexpr int kSlotBytes = kSplit * kCacheRowBytes<C, D>;

  // `gather_rows`: rows of a block, 0 without clusters.
  SharedLayout(int ring_slots, int levels, int row_tiles, int tokens, int gather_rows) {
    const int rows = row_tiles * kTileRows;
    sums = ring_slots * kSlotBytes;
    sums_el = sums + levels * row_tiles * kDimBlocks<D> * kSumBytes;
    const int sums_end = sums_el + levels * kWarps * rows * 8;
    gather_el = sums_end;
    gather_o = gather_el + kFanIn * gather_rows * 8;
    queries = gather_o + kFanIn * gather_rows * D * 4;
    new_keys = queries + rows * kRowBytes<D>;
    new_values = new_keys + tokens * kRowBytes<D>;
    weights = new_values + tokens * kRowBytes<D>;
    tile_e = weights + 2 * rows * kWeightRowBytes;
    tile_l = tile_e + 2 * rows * kWarps * 4;
    row_out = tile_l + 2 * rows * kWarps * 4;
    row_position = row_out + rows * 4;
    row_inverse = row_position + rows * 4;
    total = row_inverse + (kIsFp8<C> ? rows * 4 : 0);
  }
};

__device__ __forceinline__ int divide(int n, Divisor divisor) {
  return divisor.value == 1 ? n : __umulhi(n, divisor.reciprocal);
}

// Splits that each of `blocks` blocks takes of `splits`: 1, 2, 4 or a multiple of 8, so that a
// block has whole pairs, quads or supers. The last block takes what is left, which may be one more:
// the newest split is rarely full.
__host__ __device__ inline int splits_per_block(int rounded_up) {
  return rounded_up <= 2   ? (rounded_up < 1 ? 1 : rounded_up)
         : rounded_up <= 4 ? 4
                           : (rounded_up + kFanIn - 1) / kFanIn * kFanIn;
}

// Splits that can be live at once for one (sequence, key head): `window` 0 without.
inline int most_splits(int slots, int window, int tokens) {
  const int splits = (slots + kSplit - 1) / kSplit;
  if (window == 0 || window >= slots) return splits;
  return std::min(splits, (window + tokens - 3 + kSplit) / kSplit + 1);
}

// Blocks of the cluster that each of `lanes` (sequence, key head, row tile) gets, at most `most`; 1
// where blocks that meet in the workspace are faster. `places`: blocks that certainly are resident
// at once, as all of them must be. With much more than two splits a block, or a super altogether,
// all multiprocessors are wanted, which clusters cannot fill.
inline int choose_cluster(int splits, int lanes, int places, int most) {
  int blocks = most;
  while (blocks > 1 && lanes * blocks > places) blocks /= 2;
  return splits <= std::max(kFanIn, 2 * blocks) ? blocks : 1;
}

// Which rows and slots a block works on. The grid is [cluster, G, lanes * clusters].
struct Work {
  int sequence, kv_head, lane_index;
  int first_row, rows;  // of the T * H / G rows of (sequence, kv_head)
  int last_token;       // newest token among them
  int length;           // slots filled before this call
  int begin, end;       // slots that some row sees
  int first, last;      // splits with such slots
  int step, level;      // splits per block; those of a part, as a power of two
  int own, own_end;     // this block's splits
  bool gathers;         // the first block of the cluster merges

  __device__ __forceinline__ explicit Work(const AttendParams& p) {
    const int cluster = divide(blockIdx.z, p.lanes);
    const int lane = blockIdx.z - cluster * p.lanes.value;
    const int block = cluster * gridDim.x + blockIdx.x;
    sequence = divide(lane, p.tiles);
    kv_head = blockIdx.y;
    lane_index = lane * gridDim.y + kv_head;
    first_row = (lane - sequence * p.tiles.value) * kMaxRows;
    rows = min(kMaxRows, p.tokens * static_cast<int>(p.group.value) - first_row);
    last_token = token(p, rows - 1);
    length = min(max(p.lengths[sequence], 0), p.slots);
    end = min(length + last_token + 1, p.slots);
    begin = min(max(0, length + token(p, 0) - p.window + 1), end - 1);
    first = begin / kSplit;
    last = (end - 1) / kSplit;
    const int splits = last - first + 1, blocks = p.blocks.value;
    step = splits_per_block(divide(splits - 2 + blocks, p.blocks));
    level = step >= kFanIn ? kSuperLevel : step / 2;
    gathers = p.use_clusters && parts() <= kFanIn;
    const int origin = first >> level << level;
    own = max(first, origin + block * step);
    own_end = min(block == blocks - 1 ? last : origin + block * step + step - 1, last) + 1;
  }

  // Merges of 2^level splits that the blocks hand over.
  __device__ __forceinline__ int parts() const { return (last >> level) - (first >> level) + 1; }
  // Blocks that have splits.
  __device__ __forceinline__ int active_blocks(const AttendParams& p) const {
    const int origin = first >> level << level;
    return min(static_cast<int>(p.blocks.value), (last - origin) / step + 1);
  }
  // Whether this block takes the split of `slot`.
  __device__ __forceinline__ bool owns(int slot) const {
    return slot / kSplit >= own && slot / kSplit < own_end;
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
  // Row of `out`.
  __device__ __forceinline__ int out_row(const AttendParams& p, int row) const {
    return (sequence * p.tokens + token(p, row)) * p.heads + head(p, row);
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
    if (is_key && (slot >= p.slots || !work.owns(slot))) return;
    const int head = is_key ? work.kv_head : work.head(p, job);
    const int heads = is_key ? p.kv_heads : p.heads;
    const int64_t* strides = is_key ? p.k_strides : p.q_strides;
    const T* first =
        static_cast<const T*>(is_key ? p.k : p.q) + work.sequence * strides[0] + token * strides[1];
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

}  // namespace flashrt
