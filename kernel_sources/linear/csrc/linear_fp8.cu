#include "linear_formats.h"
#include "linear_launch.cuh"

namespace flashrt {

cudaError_t launch_fp8(const LinearArgs& args, cudaStream_t stream) {
  return launch_types<FP8Format>(args, stream);
}

}  // namespace flashrt
