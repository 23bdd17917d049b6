// Host side of attend: grid, shared memory and launch for every head dim.
#pragma once

#include <limits>

#include "attend.cuh"

namespace flashrt {

constexpr int kMaxSharedWithoutOptIn = 48 * 1024;

// Launch in clusters of `cluster_blocks` (1: none), dependent launch allowed where the device knows
// how.
inline cudaError_t launch_attend(void (*kernel)(AttendParams), const AttendParams& params,
                                 dim3 grid, int cluster_blocks, int shared_bytes, bool dependent,
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

  const int group = params.heads / params.kv_heads;
  const int rows = params.tokens * group;
  const int tiles = (rows + kTileRows - 1) / kTileRows;
  const int lanes = params.batch * params.kv_heads * tiles;
  if (lanes > kCounters) return cudaErrorInvalidValue;
  const int resident = device.multiprocessors * (D <= 128 ? 2 : 1);
  const int tile_rows = rows < kTileRows ? (rows + 1) / 2 * 2 : kTileRows;  // stored by pairs

  // Code from PTX older than sm_90 has no clusters, on whatever device it runs.
  const int cluster_bytes = SharedLayout<T, D>(tile_rows, params.tokens, true).total;
  const bool clusters =
      params.use_clusters && device.major >= 9 && function.ptxVersion >= 90 &&
      cluster_bytes + static_cast<int>(function.sharedSizeBytes) <= device.max_shared;
  const int shared_bytes =
      clusters ? cluster_bytes : SharedLayout<T, D>(tile_rows, params.tokens, false).total;
  const int unit = clusters ? kFanIn : 1;  // blocks that a split of the slots takes at least
  const int units = (params.slots + kSplit * unit - 1) / (kSplit * unit);
  const int share = resident / unit / lanes;
  const int blocks = unit * (share < 1 ? 1 : share < units ? share : units);
  params.use_clusters = clusters;
  params.group = Divisor(group);
  params.tiles = Divisor(tiles);
  params.step = Divisor(blocks);
  params.tile_rows = tile_rows;
  const bool over_all = params.rows.over_all;
  params.q_inverse_count = 1.0f / static_cast<float>((over_all ? params.heads : 1) * D);
  params.k_inverse_count = 1.0f / static_cast<float>((over_all ? params.kv_heads : 1) * D);
  params.partial_rows = params.batch * params.tokens * params.heads;
  unsigned char* partials = static_cast<unsigned char*>(params.workspace) + kCounterBytes;
  params.partial_ml = reinterpret_cast<float*>(partials);
  params.partial_o =
      reinterpret_cast<float*>(partials + store_ml_bytes(params.partial_rows, params.slots));
  if (params.window == 0) params.window = std::numeric_limits<int>::max();
  if (params.soft_cap == 0.0f) params.scaling *= 1.4426950408889634f;  // scores in units of log2
  if (shared_bytes + static_cast<int>(function.sharedSizeBytes) > kMaxSharedWithoutOptIn) {
    error = cudaFuncSetAttribute(attend_kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 shared_bytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(blocks, params.kv_heads, params.batch * tiles);
  return launch_attend(attend_kernel<T, D>, params, grid, unit, shared_bytes, device.major >= 9,
                       stream);
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
