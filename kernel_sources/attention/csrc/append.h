// Copy keys and values of new tokens into a static cache, or round them into one of FP8.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/element_type.h"

namespace flashrt {

// Strides count elements; the last dim of every tensor is contiguous.
struct AppendParams {
  const void* k;  // [B, T, G, D]
  const void* v;
  void* k_cache;  // [B, G, S, D]
  void* v_cache;
  const float* k_scale;  // of an FP8 cache: [G], or [1] with a stride of 0
  const float* v_scale;
  int k_scale_stride, v_scale_stride;
  const int* lengths;  // [B]: token t goes to slot lengths[b] + t, and nowhere past slot S - 1
  int64_t k_strides[3];
  int64_t v_strides[3];
  int64_t k_cache_strides[3];
  int64_t v_cache_strides[3];
  int64_t batch, tokens;
  int kv_heads, slots, dim;
};

// `element_bytes` is 2 or 4; `vectors` when every row of every tensor is whole 16-byte vectors.
cudaError_t append(const AppendParams& params, int element_bytes, bool vectors,
                   cudaStream_t stream);
// Into an FP8 (e4m3) cache: k / k_scale to nearest even, saturated at 448, and v alike.
cudaError_t append_fp8(const AppendParams& params, ElementType type, cudaStream_t stream);

}  // namespace flashrt
