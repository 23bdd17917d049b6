// One warp a row: its key, then its value.
#include "append.h"
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

// `bytes` of an element of the tensors; rows are copied in units of Unit.
template <typename Unit>
__global__ void __launch_bounds__(32 * kWarps)
    append_kernel(const __grid_constant__ AppendParams p, int bytes) {
  launch_dependents();
  wait_for_inputs();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= p.batch * p.tokens * p.kv_heads) return;
  const int64_t g = row % p.kv_heads, t = row / p.kv_heads % p.tokens,
                b = row / p.kv_heads / p.tokens;
  const int64_t slot = max(p.lengths[b], 0) + t;
  if (slot >= p.slots) return;
  const auto source = [&](const void* base, const int64_t (&s)[3]) {
    return static_cast<const char*>(base) + (b * s[0] + t * s[1] + g * s[2]) * bytes;
  };
  const auto target = [&](void* base, const int64_t (&s)[3]) {
    return static_cast<char*>(base) + (b * s[0] + g * s[1] + slot * s[2]) * bytes;
  };
  const int units = p.dim * bytes / static_cast<int>(sizeof(Unit)), lane = threadIdx.x % 32;
  copy_row<Unit>(target(p.k_cache, p.k_cache_strides), source(p.k, p.k_strides), units, lane);
  copy_row<Unit>(target(p.v_cache, p.v_cache_strides), source(p.v, p.v_strides), units, lane);
}

}  // namespace

cudaError_t append(const AppendParams& params, int element_bytes, bool vectors,
                   cudaStream_t stream) {
  const int64_t rows = params.batch * params.tokens * params.kv_heads;
  if (rows == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps)), block(32 * kWarps);
  if (vectors) return launch(append_kernel<uint4>, grid, block, 0, stream, params, element_bytes);
  if (element_bytes == 4) {
    return launch(append_kernel<uint32_t>, grid, block, 0, stream, params, element_bytes);
  }
  return launch(append_kernel<uint16_t>, grid, block, 0, stream, params, element_bytes);
}

}  // namespace flashrt
