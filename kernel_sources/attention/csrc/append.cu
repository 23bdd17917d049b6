// One warp a row: its key, then its value.
#include "append.h"
#include "attend_cache.cuh"
#include "common/for_element.h"
#include "common/launch.h"
#include "common/pdl.cuh"

namespace flashrt {
namespace {

constexpr int kWarps = 8;

template <typename Unit>
__device__ __forceinline__ void copy_row(void* to, const void* from, int units, int lane) {
  for (int i = lane; i < units; i += 32) {
    static_cast<Unit*>(to)[i] = static_cast<const Unit*>(from)[i];
  }
}

// The row that this warp copies: token t of sequence b, key head g, to `slot`.
struct Row {
  int64_t b, t, g, slot;
  bool exists;

  __device__ __forceinline__ explicit Row(const AppendParams& p) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    g = row % p.kv_heads;
    t = row / p.kv_heads % p.tokens;
    b = row / p.kv_heads / p.tokens;
    exists = row < p.batch * p.tokens * p.kv_heads;
    slot = exists ? max(p.lengths[b], 0) + t : 0;
    exists = exists && slot < p.slots;
  }
  // Offsets in elements.
  __device__ __forceinline__ int64_t source(const int64_t (&s)[3]) const {
    return b * s[0] + t * s[1] + g * s[2];
  }
  __device__ __forceinline__ int64_t target(const int64_t (&s)[3]) const {
    return b * s[0] + g * s[1] + slot * s[2];
  }
};

// `bytes` of an element of the tensors; rows are copied in units of Unit.
template <typename Unit>
__global__ void __launch_bounds__(32 * kWarps)
    append_kernel(const __grid_constant__ AppendParams p, int bytes) {
  launch_dependents();
  wait_for_inputs();
  const Row row(p);
  if (!row.exists) return;
  const int units = p.dim * bytes / static_cast<int>(sizeof(Unit)), lane = threadIdx.x % 32;
  copy_row<Unit>(static_cast<char*>(p.k_cache) + row.target(p.k_cache_strides) * bytes,
                 static_cast<const char*>(p.k) + row.source(p.k_strides) * bytes, units, lane);
  copy_row<Unit>(static_cast<char*>(p.v_cache) + row.target(p.v_cache_strides) * bytes,
                 static_cast<const char*>(p.v) + row.source(p.v_strides) * bytes, units, lane);
}

template <typename T>
__device__ __forceinline__ void round_row(void* cache, int64_t target, const void* from,
                                          int64_t source, float scale, int dim, int lane) {
  for (int i = lane; i < dim; i += 32) {
    const float value = to_float(static_cast<const T*>(from)[source + i]);
    static_cast<Fp8*>(cache)[target + i] = scaled_to_fp8(value, scale);
  }
}

template <typename T>
__global__ void __launch_bounds__(32 * kWarps)
    append_fp8_kernel(const __grid_constant__ AppendParams p) {
  launch_dependents();
  wait_for_inputs();
  const Row row(p);
  if (!row.exists) return;
  const int lane = threadIdx.x % 32;
  round_row<T>(p.k_cache, row.target(p.k_cache_strides), p.k, row.source(p.k_strides),
               p.k_scale[row.g * p.k_scale_stride], p.dim, lane);
  round_row<T>(p.v_cache, row.target(p.v_cache_strides), p.v, row.source(p.v_strides),
               p.v_scale[row.g * p.v_scale_stride], p.dim, lane);
}

dim3 grid_of(int64_t rows) { return dim3(static_cast<unsigned>((rows + kWarps - 1) / kWarps)); }

}  // namespace

cudaError_t append(const AppendParams& params, int element_bytes, bool vectors,
                   cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * params.kv_heads;
  if (rows == 0) return cudaSuccess;
  const dim3 grid = grid_of(rows), block(32 * kWarps);
  if (vectors) return launch(append_kernel<uint4>, grid, block, 0, stream, params, element_bytes);
  if (element_bytes == 4) {
    return launch(append_kernel<uint32_t>, grid, block, 0, stream, params, element_bytes);
  }
  return launch(append_kernel<uint16_t>, grid, block, 0, stream, params, element_bytes);
}

cudaError_t append_fp8(const AppendParams& params, ElementType type, cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * params.kv_heads;
  if (rows == 0) return cudaSuccess;
  const dim3 grid = grid_of(rows), block(32 * kWarps);
  return for_element(type, [&](auto element) {
    return launch(append_fp8_kernel<decltype(element)>, grid, block, 0, stream, params);
  });
}

}  // namespace flashrt
