// Fused decode attention; see attend.cuh for the contract.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rows_settings.h"

namespace flashrt {

// Division of small numbers by one that the host knows: exact while n * divisor < 2^32.
struct Divisor {
  uint32_t value, reciprocal;

  Divisor() = default;
  explicit Divisor(int divisor)
      : value(static_cast<uint32_t>(divisor)),
        reciprocal(static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor)) {}
};

// Parts of a block's shared memory, in bytes from its start; see SharedLayout.
struct SharedOffsets {
  int sums, sums_el, gather_el, gather_o, queries, new_keys, new_values, weights, tile_e, tile_l;
  int row_out, row_position, row_inverse, total;
};

// Strides count elements; the last dim of every tensor is contiguous. Rows of q, k and out start on
// multiples of two elements, rows of v and the caches on 16-byte boundaries.
constexpr int kMostClusterBlocks = 8;

struct AttendParams {
  const void* q;  // [B, T, H, D]
  const void* k;  // [B, T, G, D]
  const void* v;
  void* k_cache;  // [B, G, S, D]
  void* v_cache;
  const float* k_scale;  // of an FP8 cache: [G], or [1] with a stride of 0; else null
  const float* v_scale;
  const int* lengths;  // [B]
  const void* cos;     // [P, R] by slot, or [B, T, R]
  const void* sin;
  const void* q_weight;  // [D] or [H * D], null without norm
  const void* k_weight;  // [D] or [G * D]
  void* workspace;       // AttendWorkspace
  void* out;             // [B, T, H, D], contiguous
  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t k_cache_strides[3];
  int64_t v_cache_strides[3];
  int64_t table_strides[2];  // of B and T; {row stride, 0} of a table by slot
  int table_rows;            // P of a table by slot, else 0
  int k_scale_stride, v_scale_stride;
  int batch, tokens, heads, kv_heads, slots, dim;
  int window;  // 0 without
  float scaling;
  float soft_cap;  // 0 without
  bool history_static;
  // The launcher's choice is at most this; 0 leaves it to itself.
  int max_cluster;  // blocks of a cluster: 8, 4, 2, or 1 for none
  int max_crowd;    // blocks per multiprocessor: 1 or 2
  int max_ring;     // slots of the ring in shared memory
  RowSettings rows;
  // Filled in by the launcher.
  bool use_clusters;
  Divisor group;   // H / G
  Divisor tiles;   // of 32 rows, for the T * H / G rows of a key head
  Divisor lanes;   // batch * tiles: blocks of one place along the slots, per key head
  Divisor blocks;  // that share the slots of one (sequence, key head, row tile)
  int row_tiles;   // of 8 rows, in a block
  int ring_slots;  // of the ring in shared memory
  int levels;      // that a block may have to merge its splits
  SharedOffsets layout;
  float* partial_el;  // parts of the workspace
  float* partial_o;
  int partial_rows;                        // B * T * H
  float q_inverse_count, k_inverse_count;  // 1 / elements that a norm's mean runs over
};

// Bytes of a workspace, for any number of key/value heads. It starts zeroed and leaves zeroed
// counters.
int64_t attend_workspace_bytes(int batch, int tokens, int heads, int dim, int slots);

cudaError_t attend_bf16(const AttendParams& params, cudaStream_t stream);
cudaError_t attend_fp16(const AttendParams& params, cudaStream_t stream);
// With an FP8 (e4m3) cache: a cached element is its scale times what is stored.
cudaError_t attend_bf16_fp8(const AttendParams& params, cudaStream_t stream);
cudaError_t attend_fp16_fp8(const AttendParams& params, cudaStream_t stream);

}  // namespace flashrt
