// Chooses the path, the warps and the rows of a block, and launches.
#include <algorithm>
#include <type_traits>

#include "common/launch.h"
#include "linear.h"
#include "stream.cuh"
#include "strided.cuh"

namespace flashrt {
namespace {

bool vectors(const void* pointer, int64_t stride) {
  return pointer == nullptr ||
         (reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && stride % kLaneElements == 0);
}

// Every row that is read or written 16 bytes at a time starts on a 16-byte boundary.
bool takes_stream_path(const LinearArgs& args) {
  bool aligned = args.k % kLaneElements == 0 && args.weight_col_stride == 1;
  for (int i = 0; i < args.num_weights; ++i) {
    aligned = aligned && vectors(args.weight[i], args.weight_stride[i]);
  }
  return aligned && vectors(args.x, args.x_stride) && vectors(args.branch, args.branch_stride) &&
         vectors(args.residual_out, args.residual_out_stride) && vectors(args.norm_weight, 0) &&
         vectors(args.branch_norm_weight, 0);
}

int divide_up(int value, int divisor) { return (value + divisor - 1) / divisor; }

// The number of warps depends on K alone, for it is part of the order of every sum.
int choose_warps(int k) { return divide_up(k, kTurnElements) > 16 ? 8 : 4; }

// A second team shares one copy of x once that is so large that little else fits beside it.
bool shares_x(const LinearArgs& args, int x_bytes) {
  constexpr int kLargeBytes = 64 * 1024;
  return args.norm_kind == kNoNorm && args.branch == nullptr && x_bytes > kLargeBytes;
}

// Blocks enough to keep every multiprocessor of a large device busy, rows enough for each to be
// worth its copy of x. Measured on an H200 with benchmarks/chain.cu.
int choose_tiles_per_block(int rows, int rows_of_x) {
  const int blocks = rows_of_x <= 2 ? 132 * 2 : 132;
  const int most_tiles = rows_of_x <= 2 ? 4 : 2;
  return std::max(1, std::min(most_tiles, rows / (blocks * kTileRows)));
}

Plan make_plan(const LinearArgs& args, int rows_of_x, int teams) {
  Plan plan{};
  int rows = 0;
  for (int i = 0; i < args.num_weights; ++i) rows += args.n[i];
  plan.warps = choose_warps(args.k);
  plan.turns = divide_up(args.k, plan.warps * kTurnElements);
  plan.tiles_per_block = std::max(teams, choose_tiles_per_block(rows, rows_of_x));
  for (int i = 0; i < args.num_weights; ++i) {
    plan.blocks[i] = divide_up(args.n[i], plan.tiles_per_block * kTileRows);
  }
  if (args.gated) {
    plan.blocks[0] = divide_up(args.n[0], plan.tiles_per_block * kHalfTile);
    plan.blocks[1] = 0;
  }
  plan.inverse_k = 1.0f / static_cast<float>(args.k);
  return plan;
}

template <typename Kernel>
cudaError_t launch_plan(Kernel kernel, const LinearArgs& args, const Plan& plan, int teams,
                        int shared_bytes, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const int blocks = plan.blocks[0] + plan.blocks[1] + plan.blocks[2];
  return launch(kernel, dim3(blocks), dim3(teams * plan.warps * 32), shared_bytes, stream, args,
                plan);
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
template <typename T, int kRows>
cudaError_t launch_rows(const LinearArgs& args, int shared_limit, cudaStream_t stream) {
  const int limit = shared_limit - static_cast<int>(sizeof(PrologueScratch));
  const bool streams = takes_stream_path(args);
  if constexpr (kRows > 2) {
    const Plan plan = make_plan(args, kRows, 2);
    const int bytes = shared_bytes<kRows, 2>(plan, true);
    if (streams && bytes <= limit && shares_x(args, kRows * args.k * 2)) {
      return launch_plan(stream_kernel<T, kRows, 2>, args, plan, 2, bytes, stream);
    }
  }
  const Plan plan = make_plan(args, kRows, 1);
  const int bytes = shared_bytes<kRows, 1>(plan, streams);
  if (streams && bytes <= limit) {
    return launch_plan(stream_kernel<T, kRows, 1>, args, plan, 1, bytes, stream);
  }
  // The slow path needs no ring, so it also serves a single row that leaves no room for one.
  const int strided_bytes = shared_bytes<kRows, 1>(plan, false);
  if ((!streams || kRows == 1) && strided_bytes <= limit) {
    return launch_plan(strided_kernel<T, kRows>, args, plan, 1, strided_bytes, stream);
  }
  if constexpr (kRows == 1) {
    return cudaErrorInvalidValue;
  } else {
    const int half = std::min(args.m, kRows / 2);
    const cudaError_t error =
        launch_rows<T, kRows / 2>(take_rows<T>(args, 0, half), shared_limit, stream);
    if (error != cudaSuccess || args.m == half) return error;
    return launch_rows<T, kRows / 2>(take_rows<T>(args, half, args.m - half), shared_limit, stream);
  }
}

// Rows of a smaller M ride along as zeros.
template <typename T>
cudaError_t launch_typed(const LinearArgs& args, cudaStream_t stream) {
  int device = 0;
  int shared_limit = 0;  // the most one block may ask for
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  if (args.m == 1) return launch_rows<T, 1>(args, shared_limit, stream);
  if (args.m == 2) return launch_rows<T, 2>(args, shared_limit, stream);
  if (args.m <= 4) return launch_rows<T, 4>(args, shared_limit, stream);
  return launch_rows<T, 8>(args, shared_limit, stream);
}

}  // namespace

cudaError_t launch_linear(const LinearArgs& args, cudaStream_t stream) {
  if (args.m < 1 || args.m > kMaxRows || args.k < 1) return cudaErrorInvalidValue;
  switch (args.type) {
    case ElementType::kBF16:
      return launch_typed<__nv_bfloat16>(args, stream);
    case ElementType::kFP16:
      return launch_typed<__half>(args, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flashrt
