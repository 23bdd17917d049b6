// Root mean square norm of rows, optionally of a sum with a residual, optionally modulated:
//
//   r'  = round(x + residual)                       (r' = x without a residual)
//   y   = r' * rsqrt(mean(r'^2) + eps) * w          (w, 1 + w, or 1)
//   out = round(y * (1 + scale) + shift)
//
// or out quantised to FP8 once more. x, residual, residual_out, out: [rows, dim] bf16, fp16 or
// fp32, unit stride along a row, rows at any stride; weight, scale, shift: the same type or fp32.
// Sums are fp32 in an order that depends on dim and type only. Zhang and Sennrich 2019,
// arXiv:1910.07467, eq. 4.
#pragma once

#include "common/pdl.cuh"
#include "row_block.cuh"

namespace flashrt {

// The chunk of `out` from one chunk of r'. `weight` is the raw chunk of a weight of type T, when
// `has_weight` says that it was loaded already.
template <typename T>
__device__ __forceinline__ uint4 scaled_chunk(const NormArgs& args, uint32_t row, int index,
                                              const uint4& packed, float inverse_rms,
                                              bool has_weight, const uint4& weight) {
  float values[kVec<T>];
  unpack<T>(packed, values);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) values[i] *= inverse_rms;
  if (args.weight.data != nullptr) {
    float factor[kVec<T>];
    if (has_weight) {
      unpack<T>(weight, factor);
    } else {
      load_as<T>(args.weight.data, args.weight.is_fp32, index, args.dim, args.aligned, factor);
    }
    const float center = args.zero_centered ? 1.0f : 0.0f;
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] *= center + factor[i];
  }
  modulate<T>(args, row, index, values);
  return pack<T>(values);
}

// r' for one chunk, written to residual_out when there is a residual.
template <typename T>
__device__ __forceinline__ uint4 add_residual(const NormArgs& args, uint32_t row, int index,
                                              const uint4& x, const uint4& residual) {
  float sum[kVec<T>];
  float other[kVec<T>];
  unpack<T>(x, sum);
  unpack<T>(residual, other);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) sum[i] += other[i];
  const uint4 rounded = pack<T>(sum);
  store_chunk(row_of<T>(args.residual_out, row), index, args.dim, args.aligned, rounded);
  return rounded;
}

template <typename T>
__device__ __forceinline__ float sum_of_squares(const uint4& packed) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) sum += values[i] * values[i];
  return sum;
}

// kChunks chunks of the row a thread, kept in registers between the sum and the scaling.
template <typename T, int kChunks>
__global__ void __launch_bounds__(max_threads(kChunks))
    rms_norm_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float partials[1][kWarp];
  __shared__ uint32_t max_partials[kWarp];
  const uint32_t row = row_index();
  const bool has_row = row < args.num_rows;
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  // Registers for a weight of type T beside the row; with 8 chunks there are none left.
  constexpr bool kRoomForWeight = kChunks <= 4;
  const bool early_weight = kRoomForWeight && args.weight.data != nullptr && !args.weight.is_fp32;

  uint4 weight[kRoomForWeight ? kChunks : 1];
  const auto load_weight = [&] {
#pragma unroll
    for (int c = 0; c < (kRoomForWeight ? kChunks : 0); ++c) {
      const int index = threadIdx.x + c * blockDim.x;
      if (index < chunks) {
        weight[c] =
            load_chunk(static_cast<const T*>(args.weight.data), index, args.dim, args.aligned);
      }
    }
  };
  if (early_weight && args.weights_static) load_weight();
  launch_dependents();
  wait_for_inputs();
  if (!has_row) return;  // a whole warp; blocks with a barrier have one row each

  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  uint4 packed[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) packed[c] = load_chunk(x, index, args.dim, args.aligned);
  }
  if (early_weight && !args.weights_static) load_weight();
  if (args.residual.data != nullptr) {
    const T* residual = static_cast<const T*>(row_of(args.residual, row, sizeof(T)));
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int index = threadIdx.x + c * blockDim.x;
      if (index >= chunks) continue;
      const uint4 other = load_chunk(residual, index, args.dim, args.aligned);
      packed[c] = add_residual<T>(args, row, index, packed[c], other);
    }
  }
  float sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (threadIdx.x + c * blockDim.x < chunks) sum[0] += sum_of_squares<T>(packed[c]);
  }
  row_sums(sum, partials);
  const float mean_square = sum[0] / static_cast<float>(args.dim);
  const float inverse_rms = rsqrtf(mean_square + args.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index >= chunks) continue;
    packed[c] = scaled_chunk<T>(args, row, index, packed[c], inverse_rms, early_weight,
                                weight[kRoomForWeight ? c : 0]);
  }
  store_row<T>(args, row, packed, max_partials);
}

// Rows longer than the registers of a block: read once for the sum and once for the scaling.
template <typename T>
__global__ void __launch_bounds__(max_threads(kLongRow))
    rms_norm_long_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float partials[1][kWarp];
  __shared__ uint32_t max_partials[kWarp];
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = row_index();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  const bool adds = args.residual.data != nullptr;
  const T* residual = adds ? static_cast<const T*>(row_of(args.residual, row, sizeof(T))) : nullptr;

  float sum[1] = {0.0f};
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    uint4 packed = load_chunk(x, index, args.dim, args.aligned);
    if (adds) {
      const uint4 other = load_chunk(residual, index, args.dim, args.aligned);
      packed = add_residual<T>(args, row, index, packed, other);
    }
    sum[0] += sum_of_squares<T>(packed);
  }
  row_sums(sum, partials);
  const float mean_square = sum[0] / static_cast<float>(args.dim);
  const float inverse_rms = rsqrtf(mean_square + args.eps);
  // A thread reads back only what it wrote itself.
  const T* summed = adds ? row_of<T>(args.residual_out, row) : x;
  const auto scaled = [&](int index) {
    const uint4 packed = load_chunk(summed, index, args.dim, args.aligned);
    return scaled_chunk<T>(args, row, index, packed, inverse_rms, false, uint4{});
  };
  store_long_row<T>(args, row, scaled, max_partials);
}

}  // namespace flashrt
