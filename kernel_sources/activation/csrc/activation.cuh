// Elementwise activation, optionally times a second operand; the contract is in activation.h.
#pragma once

#include "activation.h"
#include "common/activations.cuh"
#include "common/chunk.cuh"
#include "common/fp8.cuh"
#include "common/pdl.cuh"

namespace flashrt {

inline constexpr int kWarp = 32;
inline constexpr int kMaxRowThreads = 512;
inline constexpr int kLongRow = 0;  // chunks per thread of a row that is computed twice

// Chunk `index` of `row`, rounded to T, elements past the row's end zero.
template <typename T>
__device__ __forceinline__ uint4 activated_chunk(const ActivationArgs& args, int64_t row,
                                                 int index) {
  const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
  uint4 packed = load_chunk(x, index, args.dim, args.aligned);
  uint4 packed_up{};
  if (args.up != nullptr) {
    const T* up = static_cast<const T*>(args.up) + row_offset(args.up_rows, row);
    packed_up = load_chunk(up, index, args.dim, args.aligned);
  }
  float values[kVec<T>];
  unpack<T>(packed, values);
  activate(args.activation, values);
  if (args.up != nullptr) {
    float factors[kVec<T>];
    unpack<T>(packed_up, factors);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] *= factors[i];
  } else {
    // The sigmoid of what load_chunk puts past the end is 1/2, which is no part of the row's
    // largest magnitude; above, `up` is zero there.
    const int count = chunk_count<T>(index, args.dim);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] = i < count ? values[i] : 0.0f;
  }
  return pack<T>(values);
}

template <typename T>
__device__ __forceinline__ void store_as_fp8(const ActivationArgs& args, int64_t row, int index,
                                             const uint4& packed, float scale) {
  uint8_t* out = static_cast<uint8_t*>(args.out) + row_offset(args.out_rows, row);
  store_fp8_chunk<T>(out, index, args.dim, args.aligned, packed, scale);
}

// One chunk a thread: blockIdx.x counts chunks of a row, blockIdx.y rows, in steps of gridDim.y.
template <typename T>
__global__ void activation_kernel(const __grid_constant__ ActivationArgs args) {
  launch_dependents();
  wait_for_inputs();
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= chunks) return;
  const float scale = args.is_fp8 ? *args.fp8_scale : 1.0f;
  for (int64_t row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
    const uint4 packed = activated_chunk<T>(args, row, index);
    if (args.is_fp8) {
      store_as_fp8<T>(args, row, index, packed, scale);
    } else {
      T* out = static_cast<T*>(args.out) + row_offset(args.out_rows, row);
      store_chunk(out, index, args.dim, args.aligned, packed);
    }
  }
}

// The maximum over the block's threads, in all of them.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* partials) {
  value = __reduce_max_sync(0xffffffffu, value);
  if (blockDim.x == kWarp) return value;
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) partials[threadIdx.x / kWarp] = value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < blockDim.x / kWarp ? partials[lane] : 0u);
}

// FP8 with a scale of each row: one block a row, which keeps kChunks chunks a thread between the
// maximum and the rounding.
template <typename T, int kChunks>
__global__ void __launch_bounds__(kMaxRowThreads)
    activation_row_kernel(const __grid_constant__ ActivationArgs args) {
  __shared__ uint32_t partials[kWarp];
  launch_dependents();
  wait_for_inputs();
  const int64_t row = blockIdx.x;
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  uint4 packed[kChunks == kLongRow ? 1 : kChunks];
  uint32_t magnitude = 0;
  if constexpr (kChunks == kLongRow) {
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
      magnitude = max(magnitude, magnitude_of_chunk<T>(activated_chunk<T>(args, row, index)));
    }
  } else {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int index = threadIdx.x + c * blockDim.x;
      if (index >= chunks) continue;
      packed[c] = activated_chunk<T>(args, row, index);
      magnitude = max(magnitude, magnitude_of_chunk<T>(packed[c]));
    }
  }
  const float scale = scale_of_magnitude(block_max(magnitude, partials), 448.0f);
  if (threadIdx.x == 0) args.fp8_scale_out[row] = scale;
  if constexpr (kChunks == kLongRow) {
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
      store_as_fp8<T>(args, row, index, activated_chunk<T>(args, row, index), scale);
    }
  } else {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int index = threadIdx.x + c * blockDim.x;
      if (index < chunks) store_as_fp8<T>(args, row, index, packed[c], scale);
    }
  }
}

}  // namespace flashrt
