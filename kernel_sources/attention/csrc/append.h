// Copy keys and values of new tokens into a static cache.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashrt {

// Strides count elements; the last dim of every tensor is contiguous.
struct AppendParams {
  const void* k;  // [B, T, G, D]
  const void* v;
  void* k_cache;  // [B, G, S, D]
  void* v_cache;
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

}  // namespace flashrt
