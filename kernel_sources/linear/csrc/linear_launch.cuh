// Chooses the path, the warps and the rows of a block, and launches, for one format of weights.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/launch.h"
#include "linear.h"
#include "stream.cuh"
#include "strided.cuh"

namespace flashrt {

inline bool vectors(const void* pointer, int64_t stride_bytes) {
  return pointer == nullptr ||
         (reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride_bytes % 16 == 0);
}

// Every row that is read or written 16 bytes at a time starts on a 16-byte boundary.
template <typename Format>
bool takes_stream_path(const LinearArgs& args) {
  bool aligned = args.k % kVectorElements == 0;
  for (int i = 0; i < args.num_weights; ++i) {
    aligned = aligned && vectors(args.weight[i],
                                 Format::kTiled ? 0 : args.weight_stride[i] * Format::kBits / 8);
  }
  if (!Format::kTiled)
    aligned = aligned && args.k % kLaneElements<Format> == 0 && args.weight_col_stride == 1;
  return aligned && vectors(args.x, args.x_stride * 2) &&
         vectors(args.branch, args.branch_stride * 2) &&
         vectors(args.residual_out, args.residual_out_stride * 2) && vectors(args.norm_weight, 0) &&
         vectors(args.branch_norm_weight, 0);
}

inline int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

// The number of warps depends on K and the format alone, for it is part of the order of every sum.
template <typename Format>
int choose_warps(int k) {
  const int turns = divide_up(k, kTurnElements<Format>);
  return turns >= (Format::kBits == 16 ? 17 : 8) ? 8 : 4;
}

// Rows of x pass through the ring once they are so many bytes that few blocks fit with all of them.
inline bool streams_rows(const LinearArgs& args, int x_bytes) {
  constexpr int kLargeBytes = 30 * 1000;
  return args.norm_kind == kNoNorm && args.branch == nullptr && x_bytes >= kLargeBytes;
}

// A launch on one device: what of its limits decides the plan.
struct Device {
  int multiprocessors = 0;
  int block_shared = 0;  // bytes that one block may ask for
  int multiprocessor_shared = 0;

  cudaError_t read() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const std::pair<int*, cudaDeviceAttr> wanted[] = {
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

// Tiles of each weight; when gated, of both together.
struct TileCounts {
  int tiles[3] = {};
  int weights;

  explicit TileCounts(const LinearArgs& args) : weights(args.gated ? 1 : args.num_weights) {
    for (int i = 0; i < weights; ++i)
      tiles[i] = divide_up(args.n[i], args.gated ? kHalfTile : kTileRows);
  }
  int total() const { return tiles[0] + tiles[1] + tiles[2]; }
};

// Deal a weight's tiles out to its plan.blocks.
inline void share_tiles(const TileCounts& counts, Plan& plan) {
  plan.tiles_per_block = 1;
  for (int i = 0; i < counts.weights; ++i) {
    const uint64_t tiles = static_cast<uint64_t>(counts.tiles[i]) << kShareBits;
    plan.share[i] = static_cast<uint32_t>((tiles + plan.blocks[i] - 1) / plan.blocks[i]);
    plan.tiles_per_block =
        std::max(plan.tiles_per_block, divide_up(static_cast<int>(plan.share[i]), 1 << kShareBits));
  }
}

// As many rows a block as let all blocks run at once, for each prepares x anew. The warps' sums of
// many rows of x want room, too.
template <int kRows, typename Format, RowSource kSource>
Plan make_plan(const LinearArgs& args, const Device& device,
               int most_tiles = kRows <= 2 ? 8 : 32 / kRows) {
  constexpr int kReservedShared = 1024;             // that the system takes of a block's
  constexpr int kMostWarps = kRows <= 2 ? 24 : 16;  // of a multiprocessor, by their registers
  Plan plan{};
  plan.warps = choose_warps<Format>(args.k);
  plan.turns = divide_up(args.k, plan.warps * kTurnElements<Format>);
  plan.inverse_k = 1.0f / static_cast<float>(args.k);
  plan.tiles_per_block = 1;
  const TileCounts counts(args);
  const int bytes = shared_bytes<kRows, Format, kSource>(plan, true) + kReservedShared;
  const int resident = std::clamp(device.multiprocessor_shared / bytes, 1, kMostWarps / plan.warps);
  const int per_block =
      std::clamp(divide_up(counts.total(), device.multiprocessors * resident), 1, most_tiles);
  for (int i = 0; i < counts.weights; ++i) plan.blocks[i] = divide_up(counts.tiles[i], per_block);
  share_tiles(counts, plan);
  return plan;
}

template <typename Kernel>
cudaError_t launch_plan(Kernel kernel, const LinearArgs& args, const Plan& plan, int shared_bytes,
                        cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int blocks = plan.blocks[0] + plan.blocks[1] + plan.blocks[2];
  return launch(kernel, dim3(blocks), dim3(plan.warps * 32), shared_bytes, stream, args, plan);
}

template <typename T, int kRows, typename Format, RowSource kSource>
cudaError_t launch_stream(const LinearArgs& args, const Plan& plan, int bytes,
                          cudaStream_t stream) {
  constexpr int kWide = stages_of<kRows, Format, kSource>(false);
  constexpr int kNarrow = stages_of<kRows, Format, kSource>(true);
  if (plan.warps < kMaxWarps)
    return launch_plan(stream_kernel<T, kRows, Format, kSource, kNarrow>, args, plan, bytes,
                       stream);
  return launch_plan(stream_kernel<T, kRows, Format, kSource, kWide>, args, plan, bytes, stream);
}

// The same launch for rows [first, first + count) alone.
template <typename T>
LinearArgs take_rows(LinearArgs args, int first, int count) {
  const auto advance = [first](auto*& pointer, int64_t stride, size_t element_bytes) {
    if (pointer == nullptr) return;
    const auto address = reinterpret_cast<uintptr_t>(pointer) + first * stride * element_bytes;
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(address);
  };
  advance(args.x, args.x_stride, sizeof(T));
  advance(args.branch, args.branch_stride, sizeof(T));
  advance(args.residual, args.residual_stride, sizeof(T));
  advance(args.residual_out, args.residual_out_stride, sizeof(T));
  advance(args.out, args.out_stride,
          args.out_type == ElementType::kFP32 ? sizeof(float) : sizeof(T));
  args.m = count;
  return args;
}

// Launch once when the rows of x fit beside the ring, else once for each half of them.
template <typename T, int kRows, typename Format>
cudaError_t launch_rows(const LinearArgs& args, const Device& device, cudaStream_t stream) {
  const int limit =
      device.block_shared - static_cast<int>(sizeof(PrologueScratch) + sizeof(RowFactors));
  const bool streams = takes_stream_path<Format>(args);
  if constexpr (kRows > 2 && Format::kBits == 16) {
    if (streams && streams_rows(args, kRows * args.k * 2)) {
      const Plan plan = make_plan<kRows, Format, RowSource::kRing>(args, device);
      const int bytes = shared_bytes<kRows, Format, RowSource::kRing>(plan, true);
      if (bytes <= limit)
        return launch_stream<T, kRows, Format, RowSource::kRing>(args, plan, bytes, stream);
    }
  }
  if (streams) {
    const Plan plan = make_plan<kRows, Format, RowSource::kShared>(args, device);
    const int bytes = shared_bytes<kRows, Format, RowSource::kShared>(plan, true);
    if (bytes <= limit)
      return launch_stream<T, kRows, Format, RowSource::kShared>(args, plan, bytes, stream);
  }
  // The slow path needs no ring, so it also serves a single row that leaves no room for one.
  if constexpr (kRows == 1) {
    const Plan slow = make_plan<kRows, Format, RowSource::kShared>(args, device, 1);
    const int slow_bytes = shared_bytes<kRows, Format, RowSource::kShared>(slow, false);
    if (slow_bytes > limit) return cudaErrorInvalidValue;
    return launch_plan(strided_kernel<T, Format>, args, slow, slow_bytes, stream);
  } else {
    const int half = std::min(args.m, kRows / 2);
    const cudaError_t error =
        launch_rows<T, kRows / 2, Format>(take_rows<T>(args, 0, half), device, stream);
    if (error != cudaSuccess || args.m == half) return error;
    return launch_rows<T, kRows / 2, Format>(take_rows<T>(args, half, args.m - half), device,
                                             stream);
  }
}

// Rows of a smaller M ride along as zeros.
template <typename T, typename Format>
cudaError_t launch_format(const LinearArgs& args, cudaStream_t stream) {
  Device device;
  const cudaError_t error = device.read();
  if (error != cudaSuccess) return error;
  if (args.m == 1) return launch_rows<T, 1, Format>(args, device, stream);
  if (args.m == 2) return launch_rows<T, 2, Format>(args, device, stream);
  if (args.m <= 4) return launch_rows<T, 4, Format>(args, device, stream);
  return launch_rows<T, 8, Format>(args, device, stream);
}

template <typename Format>
cudaError_t launch_types(const LinearArgs& args, cudaStream_t stream) {
  switch (args.type) {
    case ElementType::kBF16:
      return launch_format<__nv_bfloat16, Format>(args, stream);
    case ElementType::kFP16:
      return launch_format<__half, Format>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flashrt
