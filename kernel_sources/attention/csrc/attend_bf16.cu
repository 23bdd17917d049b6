#include "attend_launch.cuh"

namespace flashrt {

int64_t attend_workspace_bytes(int batch, int tokens, int heads, int dim, int slots) {
  const int64_t rows = static_cast<int64_t>(batch) * tokens * heads;
  const int64_t splits = (slots + kSplit - 1) / kSplit;
  return kCounterBytes + store_el_bytes(rows, slots) + splits * rows * dim * 4;
}

cudaError_t attend_bf16(const AttendParams& params, cudaStream_t stream) {
  return attend_type<__nv_bfloat16, __nv_bfloat16>(params, stream);
}

}  // namespace flashrt
