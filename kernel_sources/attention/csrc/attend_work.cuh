// What a block of attend works on: sizes, shared memory, rows, slots, and the preparation of one
// row.
#pragma once

#include "attend.h"
#include "attend_merge.cuh"
#include "attend_tile.cuh"
#include "rows.cuh"

namespace flashrt {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kSplit = kTile * kWarps;
constexpr int kSuper = kSplit * kFanIn;
static_assert(kWarps == kFanIn, "tiles of a split merge like splits of a super");

// A workspace starts with counters, one per (sequence, key head, row tile): a fixed number, so that
// calls of different sizes can share it. PartialStore follows.
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

}  // namespace flashrt
