// Host side of attend: grid, shared memory and launch for every head dim.
#pragma once

#include "attend.cuh"
#include "common/launch.h"

namespace flashrt {

constexpr int kMaxSharedWithoutOptIn = 48 * 1024;

// Launch in clusters of `cluster_blocks` (1: none), dependent launch allowed where the device knows how.
inline cudaError_t launch_attend(void (*kernel)(AttendParams), const AttendParams& params, dim3 grid,
                                 int cluster_blocks, int shared_bytes, bool dependent,
                                 cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  int count = 0;
  if (dependent) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster_blocks;
    attributes[count].val.clusterDim.y = 1;
    attributes[count++].val.clusterDim.z = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params);
}

struct DeviceLimits {
  int major, multiprocessors, max_shared;

  cudaError_t read() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    return cudaDeviceGetAttribute(&max_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
};

template <typename T, int D>
cudaError_t attend_dim(AttendParams params, cudaStream_t stream) {
  DeviceLimits device{};
  cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  cudaFuncAttributes function{};
  error = cudaFuncGetAttributes(&function, attend_kernel<T, D>);
  if (error != cudaSuccess) return error;

  const int rows = params.tokens * (params.heads / params.kv_heads);
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  const int lanes = params.batch * params.kv_heads * tiles;
  if (lanes > kCounters) return cudaErrorInvalidValue;
  const int resident = device.multiprocessors * (D <= 128 ? 2 : 1);
  const int tile_rows = rows < kTileRows ? rows : kTileRows;

  // Code from PTX older than sm_90 has no clusters, on whatever device it runs.
  bool clusters = params.use_clusters && device.major >= 9 && function.ptxVersion >= 90;
  int blocks = 0, shared_bytes = 0;
  if (clusters) {
    const int supers = (params.slots + kSuper - 1) / kSuper;
    const int share = resident / kFanIn / lanes;
    blocks = kFanIn * (share < 1 ? 1 : share < supers ? share : supers);
    const int buffers = blocks * kSplit >= params.slots ? 1 : 2;
    shared_bytes = SharedLayout<T, D>(tile_rows, params.tokens, buffers).total;
    clusters = shared_bytes <= device.max_shared - static_cast<int>(function.sharedSizeBytes);
  }
  if (!clusters) {
    const int splits = (params.slots + kSplit - 1) / kSplit;
    const int share = resident / lanes;
    blocks = share < 1 ? 1 : share < splits ? share : splits;
    shared_bytes = SharedLayout<T, D>(tile_rows, params.tokens, 0).total;
  }
  params.use_clusters = clusters;
  if (shared_bytes + static_cast<int>(function.sharedSizeBytes) > kMaxSharedWithoutOptIn) {
    error = cudaFuncSetAttribute(attend_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return launch_attend(attend_kernel<T, D>, params, dim3(blocks, lanes), clusters ? kFanIn : 1,
                       shared_bytes, device.major >= 9, stream);
}

template <typename T>
cudaError_t attend_type(const AttendParams& params, cudaStream_t stream) {
  switch (params.dim) {
    case 64:
      return attend_dim<T, 64>(params, stream);
    case 80:
      return attend_dim<T, 80>(params, stream);
    case 96:
      return attend_dim<T, 96>(params, stream);
    case 128:
      return attend_dim<T, 128>(params, stream);
    case 192:
      return attend_dim<T, 192>(params, stream);
    case 256:
      return attend_dim<T, 256>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flashrt
