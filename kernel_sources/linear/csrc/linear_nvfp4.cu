#include "linear_formats.h"
#include "linear_launch.cuh"

namespace flashrt {

cudaError_t launch_nvfp4(const LinearArgs& args, cudaStream_t stream) {
  return launch_types<NVFP4Format>(args, stream);
}

}  // namespace flashrt
