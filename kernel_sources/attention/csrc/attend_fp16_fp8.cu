#include "attend_launch.cuh"

namespace flashrt {

cudaError_t attend_fp16_fp8(const AttendParams& params, cudaStream_t stream) {
  return attend_type<__half, Fp8>(params, stream);
}

}  // namespace flashrt
