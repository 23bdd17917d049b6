// Host side of attend: grid, shared memory and launch for every head dim.
#pragma once

#include <algorithm>
#include <limits>
#include <utility>

#include "attend.cuh"

namespace flashrt {

constexpr int kMaxSharedWithoutOptIn = 48 * 1024;
constexpr int kReservedShared = 1024;  // that the system takes of a block's shared memory
constexpr int kStaticShared = 64;      // at most, of attend_kernel
constexpr int kRingSlots = 4;

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
  int major, multiprocessors, block_shared, multiprocessor_shared;

  cudaError_t read() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const std::pair<int*, cudaDeviceAttr> wanted[] = {
        {&major, cudaDevAttrComputeCapabilityMajor},
        {&multiprocessors, cudaDevAttrMultiProcessorCount},
        {&block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {&multiprocessor_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
    };
    for (const auto& [value, attribute] : wanted) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
    }
    return error;
  }
};

// How attend's blocks are laid out, for one kind of launch.
template <typename C, int D>
struct Plan {
  int unit, units;  // blocks of a cluster, or 1; units per key head and row tile
  int ring_slots, levels, shared_bytes;
  SharedOffsets layout;
  bool fits;
  bool waits;  // the grid needs two blocks on a multiprocessor, and they do not fit

  // Without clusters: one block cannot work on a long cache as fast as it comes.
  static int most_blocks(const DeviceLimits& device, const AttendParams& p) {
    const int crowd = p.max_crowd > 0 ? p.max_crowd : 2;
    return device.multiprocessors * (D <= 128 ? crowd : 1);
  }

  Plan(const DeviceLimits& device, const AttendParams& p, int row_tiles, int lanes, int cluster) {
    const int rows = std::min(p.tokens * (p.heads / p.kv_heads), kMaxRows);
    const int splits = most_splits(p.slots, p.window, p.tokens);
    const bool clusters = cluster > 1;
    unit = cluster;
    units = clusters ? 1 : std::max(1, std::min(most_blocks(device, p) / lanes, splits));
    const int blocks = units * unit;
    const int step = splits_per_block((splits - 2 + blocks) / blocks);
    levels = step >= kFanIn ? kSuperLevel : step / 2;
    // Half a multiprocessor's memory where the grid needs two blocks on one, and for clusters,
    // which are not on all multiprocessors and find one sooner.
    const int half =
        std::min(device.block_shared, device.multiprocessor_shared / 2 - kReservedShared);
    const bool is_crowded = blocks * lanes > device.multiprocessors;
    const int limit = is_crowded || clusters ? half : device.block_shared;
    ring_slots = std::min(p.max_ring > 0 ? p.max_ring : kRingSlots,
                          2 * (splits <= blocks ? 1 : std::min(splits, 2 * step)));
    do {
      layout = SharedLayout<C, D>(ring_slots, levels, row_tiles, p.tokens, clusters ? rows : 0);
      shared_bytes = layout.total;
    } while (shared_bytes + kStaticShared > (ring_slots > 2 ? limit : device.block_shared) &&
             --ring_slots > 0);
    fits = ring_slots > 0;
    waits = is_crowded && shared_bytes + kStaticShared > half;
  }
};

template <typename T, typename C, int D>
cudaError_t attend_dim(AttendParams params, cudaStream_t stream) {
  DeviceLimits device{};
  cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  cudaFuncAttributes function{};
  error = cudaFuncGetAttributes(&function, attend_kernel<T, C, D>);
  if (error != cudaSuccess) return error;

  const int group = params.heads / params.kv_heads;
  const int rows = params.tokens * group;
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int lanes = params.batch * params.kv_heads * tiles;
  if (lanes > kCounters) return cudaErrorInvalidValue;
  params.row_tiles = (std::min(rows, kMaxRows) + kTileRows - 1) / kTileRows;
  // Code from PTX older than sm_90 has no clusters, on whatever device it runs.
  const bool has_clusters = device.major >= 9 && function.ptxVersion >= 90;
  // Clusters lie within one part of a device, whose size need not be a multiple of theirs; large
  // blocks, of which a multiprocessor takes one, may find only half of the places.
  const int places = D <= 128 ? std::max(params.max_crowd, 1) * device.multiprocessors
                              : device.multiprocessors / 2;
  const int most = params.max_cluster > 0 ? params.max_cluster : kMostClusterBlocks;
  const int cluster = choose_cluster(most_splits(params.slots, params.window, params.tokens), lanes,
                                     places, has_clusters ? most : 1);
  Plan<C, D> plan(device, params, params.row_tiles, lanes, cluster);
  if (!plan.fits && cluster > 1) plan = Plan<C, D>(device, params, params.row_tiles, lanes, 1);
  if (plan.waits && plan.unit == 1) {
    params.max_crowd = 1;
    plan = Plan<C, D>(device, params, params.row_tiles, lanes, 1);
  }
  if (!plan.fits) return cudaErrorInvalidValue;
  params.use_clusters = plan.unit > 1;
  params.ring_slots = plan.ring_slots;
  params.levels = plan.levels;
  params.layout = plan.layout;
  params.group = Divisor(group);
  params.tiles = Divisor(tiles);
  params.lanes = Divisor(params.batch * tiles);
  params.blocks = Divisor(plan.unit * plan.units);
  const bool over_all = params.rows.over_all;
  params.q_inverse_count = 1.0f / static_cast<float>((over_all ? params.heads : 1) * D);
  params.k_inverse_count = 1.0f / static_cast<float>((over_all ? params.kv_heads : 1) * D);
  params.partial_rows = params.batch * params.tokens * params.heads;
  unsigned char* partials = static_cast<unsigned char*>(params.workspace) + kCounterBytes;
  params.partial_el = reinterpret_cast<float*>(partials);
  params.partial_o =
      reinterpret_cast<float*>(partials + store_el_bytes(params.partial_rows, params.slots));
  if (params.window == 0) params.window = std::numeric_limits<int>::max();
  if (params.soft_cap == 0.0f) params.scaling *= 1.4426950408889634f;  // scores in units of log2
  if (plan.shared_bytes + kStaticShared > kMaxSharedWithoutOptIn) {
    error = cudaFuncSetAttribute(attend_kernel<T, C, D>,
                                 cudaFuncAttributeMaxDynamicSharedMemorySize, plan.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  const dim3 grid(plan.unit, params.kv_heads, params.batch * tiles * plan.units);
  return launch_attend(attend_kernel<T, C, D>, params, grid, plan.unit, plan.shared_bytes,
                       device.major >= 9, stream);
}

template <typename T, typename C>
cudaError_t attend_type(const AttendParams& params, cudaStream_t stream) {
  switch (params.dim) {
    case 64:
      return attend_dim<T, C, 64>(params, stream);
    case 80:
      return attend_dim<T, C, 80>(params, stream);
    case 96:
      return attend_dim<T, C, 96>(params, stream);
    case 128:
      return attend_dim<T, C, 128>(params, stream);
    case 192:
      return attend_dim<T, C, 192>(params, stream);
    case 256:
      return attend_dim<T, C, 256>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flashrt
