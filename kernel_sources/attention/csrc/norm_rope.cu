// One block a token; its warps take the token's query and key heads in turn.
#include "common/for_element.h"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "norm_rope.h"
#include "rows.cuh"

namespace flashrt {
namespace {

constexpr int kWarps = 8;

template <typename T, int N>
__global__ void __launch_bounds__(32 * kWarps)
    norm_rope_kernel(const __grid_constant__ NormRopeParams p) {
  launch_dependents();
  wait_for_inputs();
  __shared__ __align__(16) T scratch[kWarps][32 * N];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t token = blockIdx.x, b = token / p.tokens, t = token % p.tokens;
  const int64_t table_offset = b * p.table_strides[0] + t * p.table_strides[1];
  float q_mean = -1.0f, k_mean = -1.0f;  // over all heads, once known

  for (int job = warp; job < p.heads + p.kv_heads; job += kWarps) {
    const bool is_key = job >= p.heads;
    const int head = is_key ? job - p.heads : job;
    const int heads = is_key ? p.kv_heads : p.heads;
    const int64_t* strides = is_key ? p.k_strides : p.q_strides;
    const T* first = static_cast<const T*>(is_key ? p.k : p.q) + b * strides[0] + t * strides[1];
    const T* weight = static_cast<const T*>(is_key ? p.k_weight : p.q_weight);
    const bool has_norm = weight != nullptr;
    if (has_norm && p.rows.over_all) weight += head * p.dim;

    RowFactors<N> factors;
    load_factors<T, N>(factors, p.rows, weight, p.cos, p.sin, table_offset, p.dim, lane);
    float x[N];
    load_row<T, N>(x, first + head * strides[2], p.dim, lane);
    float mean = 0.0f;
    if (has_norm && !p.rows.over_all) {
      mean = mean_square<T, N>(x, NormScope<T>{nullptr, 0, 1, 1.0f / static_cast<float>(p.dim)},
                               p.dim, lane);
    } else if (has_norm) {
      mean = is_key ? k_mean : q_mean;
      if (mean < 0.0f) {
        const NormScope<T> all{first, strides[2], heads, 1.0f / static_cast<float>(heads * p.dim)};
        mean = mean_square<T, N>(x, all, p.dim, lane);
      }
      (is_key ? k_mean : q_mean) = mean;
    }
    norm_rotate_row<T, N>(scratch[warp], x, has_norm, mean, factors, p.rows, p.dim, lane);
    store_row<T, N>(static_cast<T*>(is_key ? p.k_out : p.q_out) + (token * heads + head) * p.dim, x,
                    p.dim, lane);
    __syncwarp();
  }
}

template <typename T>
cudaError_t launch_type(const NormRopeParams& params, cudaStream_t stream) {
  const int64_t tokens = params.batch * params.tokens;
  if (tokens == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(tokens)), block(32 * kWarps);
  if (params.dim <= 64) return launch(norm_rope_kernel<T, 2>, grid, block, 0, stream, params);
  if (params.dim <= 128) return launch(norm_rope_kernel<T, 4>, grid, block, 0, stream, params);
  if (params.dim <= 256) return launch(norm_rope_kernel<T, 8>, grid, block, 0, stream, params);
  if (params.dim <= kMaxRowDim)
    return launch(norm_rope_kernel<T, 16>, grid, block, 0, stream, params);
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t norm_rope(const NormRopeParams& params, ElementType type, cudaStream_t stream) {
  return for_element(type,
                     [&](auto element) { return launch_type<decltype(element)>(params, stream); });
}

}  // namespace flashrt
