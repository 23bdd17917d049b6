#include "layer_norm.cuh"

namespace flashrt {

cudaError_t launch_layer_norm(NormArgs args, cudaStream_t stream) {
  return launch_norm(
      args,
      [](auto element, auto chunks) -> void (*)(NormArgs) {
        using T = decltype(element);
        if constexpr (chunks() == kLongRow) {
          return layer_norm_long_kernel<T>;
        } else {
          return layer_norm_kernel<T, chunks()>;
        }
      },
      stream);
}

}  // namespace flashrt
