// Fused decode attention; see attend.cuh for the contract.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "rows_settings.h"

namespace flashrt {

// Strides count elements; the last dim of every tensor is contiguous.
struct AttendParams {
  const void* q;  // [B, T, H, D]
  const void* k;  // [B, T, G, D]
  const void* v;
  void* k_cache;  // [B, G, S, D]
  void* v_cache;
  const int* lengths;   // [B]
  const void* cos;      // [P, R] by slot, or [B, T, R]
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
  int batch, tokens, heads, kv_heads, slots, dim;
  int window;      // 0 without
  float scaling;
  float soft_cap;  // 0 without
  bool history_static;
  bool use_clusters;  // filled in by the launcher
  RowSettings rows;
};

// Bytes of a workspace, for any number of key/value heads. It starts zeroed and leaves zeroed counters.
int64_t attend_workspace_bytes(int batch, int tokens, int heads, int dim, int slots);

cudaError_t attend_bf16(const AttendParams& params, cudaStream_t stream);
cudaError_t attend_fp16(const AttendParams& params, cudaStream_t stream);

}  // namespace flashrt
