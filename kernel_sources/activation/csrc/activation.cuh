// Elementwise activation, optionally times a second operand; the contract is in activation.h.
#pragma once

#include "activation.h"
#include "common/activations.cuh"
#include "common/chunk.cuh"
#include "common/pdl.cuh"

namespace flashrt {

// One chunk a thread: blockIdx.x counts chunks of a row, blockIdx.y rows, in steps of gridDim.y.
template <typename T>
__global__ void activation_kernel(const __grid_constant__ ActivationArgs args) {
  launch_dependents();
  wait_for_inputs();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= chunks) return;
  for (int64_t row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
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
    }
    T* out = static_cast<T*>(args.out) + row_offset(args.out_rows, row);
    store_chunk(out, index, args.dim, args.aligned, pack<T>(values));
  }
}

}  // namespace flashrt
