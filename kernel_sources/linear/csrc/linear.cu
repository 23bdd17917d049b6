// Hands a call to the kernels of its format.
#include "linear_formats.h"

namespace flashrt {

cudaError_t launch_linear(const LinearArgs& args, cudaStream_t stream) {
  if (args.m < 1 || args.m > kMaxRows || args.k < 1) return cudaErrorInvalidValue;
  switch (args.format) {
    case WeightFormat::kPlain:
      return launch_plain(args, stream);
    case WeightFormat::kFP8:
      return launch_fp8(args, stream);
    case WeightFormat::kINT8:
      return launch_int8(args, stream);
    case WeightFormat::kNVFP4:
      return launch_nvfp4(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace flashrt
