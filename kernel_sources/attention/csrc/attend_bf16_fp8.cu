#include "attend_launch.cuh"

namespace flashrt {

cudaError_t attend_bf16_fp8(const AttendParams& params, cudaStream_t stream) {
  return attend_type<__nv_bfloat16, Fp8>(params, stream);
}

}  // namespace flashrt
