// One launcher for each format of weights, each in a file of its own.
#pragma once

#include "linear.h"

namespace flashrt {

cudaError_t launch_plain(const LinearArgs& args, cudaStream_t stream);
cudaError_t launch_fp8(const LinearArgs& args, cudaStream_t stream);
cudaError_t launch_int8(const LinearArgs& args, cudaStream_t stream);
cudaError_t launch_nvfp4(const LinearArgs& args, cudaStream_t stream);

}  // namespace flashrt
