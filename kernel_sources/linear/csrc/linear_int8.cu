#include "linear_formats.h"
#include "linear_launch.cuh"

namespace flashrt {

cudaError_t launch_int8(const LinearArgs& args, cudaStream_t stream) {
  return launch_types<INT8Format>(args, stream);
}

}  // namespace flashrt
