#include "attend_launch.cuh"

namespace flashrt {

cudaError_t attend_fp16(const AttendParams& params, cudaStream_t stream) {
  return attend_type<__half, __half>(params, stream);
}

}  // namespace flashrt
