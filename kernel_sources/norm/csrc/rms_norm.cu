#include "rms_norm.cuh"

namespace flashrt {

cudaError_t launch_rms_norm(NormArgs args, cudaStream_t stream) {
  return launch_norm(
      args,
      [](auto element, auto chunks) -> void (*)(NormArgs) {
        using T = decltype(element);
        if constexpr (chunks() == kLongRow) {
          return rms_norm_long_kernel<T>;
        } else {
          return rms_norm_kernel<T, chunks()>;
        }
      },
      stream);
}

}  // namespace flashrt
