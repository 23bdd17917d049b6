#include "linear_formats.h"
#include "linear_launch.cuh"

namespace flashrt {

cudaError_t launch_plain(const LinearArgs& args, cudaStream_t stream) {
  return launch_types<PlainFormat>(args, stream);
}

}  // namespace flashrt
