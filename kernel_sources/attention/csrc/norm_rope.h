// q/k norm and rotary of any number of tokens; arithmetic as in rows.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/element_type.h"
#include "rows_settings.h"

namespace flashrt {

constexpr int kMaxRowDim = 512;

// Strides count elements of B, T and heads; the last dim is contiguous. Outputs are contiguous.
struct NormRopeParams {
  const void* q;    // [B, T, H, D], D even and at most kMaxRowDim
  const void* k;    // [B, T, G, D]
  const void* cos;  // [B, T, R], null without rotary
  const void* sin;
  const void* q_weight;  // [D] or [H * D], null without norm
  const void* k_weight;
  void* q_out;
  void* k_out;
  int64_t q_strides[3];
  int64_t k_strides[3];
  int64_t table_strides[2];
  int64_t batch, tokens;
  int heads, kv_heads, dim;
  RowSettings rows;
};

cudaError_t norm_rope(const NormRopeParams& params, ElementType type, cudaStream_t stream);

}  // namespace flashrt
