// out[i, :] = scale * table[ids[i], :], one block a row; an id outside the table writes NaN.
#include <cmath>

#include "common/for_element.h"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "common/vec.cuh"
#include "linear.h"

namespace flashrt {
namespace {

constexpr int kEmbeddingThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kEmbeddingThreads)
    embedding_kernel(const int64_t* ids, const T* table, int64_t table_stride, T* out,
                     int64_t vocab, int d, float scale) {
  launch_dependents();
  wait_for_inputs();
  const int64_t id = __ldcg(reinterpret_cast<const long long*>(ids) + blockIdx.x);
  const bool inside = id >= 0 && id < vocab;
  const T* source = table + (inside ? id : 0) * table_stride;
  T* target = out + static_cast<int64_t>(blockIdx.x) * d;
  for (int i = threadIdx.x; i < d; i += kEmbeddingThreads) {
    target[i] = from_float<T>(inside ? to_float(source[i]) * scale : nanf(""));
  }
}

template <typename T>
cudaError_t launch_rows(const int64_t* ids, const void* table, int64_t table_stride, void* out,
                        int64_t num_ids, int64_t vocab, int d, float scale, cudaStream_t stream) {
  return launch(embedding_kernel<T>, dim3(static_cast<unsigned>(num_ids)), dim3(kEmbeddingThreads),
                0, stream, ids, static_cast<const T*>(table), table_stride, static_cast<T*>(out),
                vocab, d, scale);
}

}  // namespace

cudaError_t launch_embedding(const int64_t* ids, const void* table, int64_t table_stride, void* out,
                             int64_t num_ids, int64_t vocab, int d, float scale, ElementType type,
                             bool /*weights_static*/, cudaStream_t stream) {
  return for_element(type, [&](auto element) {
    return launch_rows<decltype(element)>(ids, table, table_stride, out, num_ids, vocab, d, scale,
                                          stream);
  });
}

}  // namespace flashrt
