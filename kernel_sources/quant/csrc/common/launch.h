// Kernel launch with programmatic dependent launch allowed, for kernels that follow the rules of
// pdl.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>

namespace flashrt {

// Launch on `stream`; the kernel may start before its predecessor ends wherever the device knows
// how (compute capability 9.0 and later). Returns the launch's error, never synchronises.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  int device = 0;
  int major = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute dependent_launch{};
  dependent_launch.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent_launch.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &dependent_launch;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Args>(args))...);
}

}  // namespace flashrt
