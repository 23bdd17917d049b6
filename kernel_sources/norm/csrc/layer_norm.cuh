// Layer norm of rows, optionally modulated:
//
//   y   = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b     (w 1 and b 0 when absent)
//   out = round(y * (1 + scale) + shift)
//
// or out quantised to FP8 once more. x, out: [rows, dim] bf16, fp16 or fp32, unit stride along a
// row, rows at any stride; weight, bias, scale, shift: the same type or fp32. Sums are fp32, in an
// order that depends on dim and type only. Ba, Kiros and Hinton 2016, arXiv:1607.06450; modulation:
// Peebles and Xie 2022, arXiv:2212.09748, section 3.2.
#pragma once

#include "common/pdl.cuh"
#include "row_block.cuh"

namespace flashrt {

template <typename T>
__device__ __forceinline__ float sum_of_chunk(const uint4& packed) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) sum += values[i];  // elements past the end are zero
  return sum;
}

// Mean and spread of a row, known in two steps. The first mean is off by the rounding of a sum of
// dim values, which matters when the mean is much larger than the spread. So the second step sums
// the distances from it, which are small, as well as their squares.
struct Moments {
  float first_mean;
  float correction;  // mean = first_mean + correction
  float inverse_std;
};

// Add the chunk's distances from `mean` and their squares to sums[0] and sums[1].
template <typename T>
__device__ __forceinline__ void add_distances(const uint4& packed, int index, int dim, float mean,
                                              float (&sums)[2]) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  const int count = chunk_count<T>(index, dim);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    const float distance = i < count ? values[i] - mean : 0.0f;
    sums[0] += distance;
    sums[1] += distance * distance;
  }
}

__device__ __forceinline__ Moments moments_of(float first_mean, const float (&sums)[2], int dim,
                                              float eps) {
  const float correction = sums[0] / static_cast<float>(dim);
  // The correction is tiny against the spread, so nothing cancels; a constant row may leave
  // less than 0 by rounding.
  const float variance = fmaxf(sums[1] / static_cast<float>(dim) - correction * correction, 0.0f);
  return {first_mean, correction, rsqrtf(variance + eps)};
}

template <typename T>
__device__ __forceinline__ uint4 normalized_chunk(const NormArgs& args, uint32_t row, int index,
                                                  const uint4& packed, const Moments& moments) {
  float values[kVec<T>];
  float operand[kVec<T>];
  unpack<T>(packed, values);
  // Elements past the end stay zero, as they count in the largest magnitude of a row of FP8; x = 0
  // there is not at the mean.
  const int count = chunk_count<T>(index, args.dim);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    const float distance = values[i] - moments.first_mean - moments.correction;
    values[i] = i < count ? distance * moments.inverse_std : 0.0f;
  }
  if (args.weight.data != nullptr) {
    load_as<T>(args.weight.data, args.weight.is_fp32, index, args.dim, args.aligned, operand);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] *= operand[i];
  }
  if (args.bias.data != nullptr) {
    load_as<T>(args.bias.data, args.bias.is_fp32, index, args.dim, args.aligned, operand);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] += operand[i];
  }
  modulate<T>(args, row, index, values);
  return pack<T>(values);
}

// Ask for this thread's chunks of weight and bias, without waiting for them.
template <typename T>
__device__ __forceinline__ void prefetch_parameters(const NormArgs& args) {
  for (const RowsIn* operand : {&args.weight, &args.bias}) {
    if (operand->data == nullptr) continue;
    const int64_t bytes = operand->is_fp32 ? 4 : sizeof(T);
    for (int64_t at = threadIdx.x * 16; at < args.dim * bytes; at += blockDim.x * 16) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(operand->data) + at));
    }
  }
}

// kChunks chunks of the row a thread, kept in registers over both sums. Weight and bias are touched
// before the wait when that is allowed, so that they are in L2 by then.
template <typename T, int kChunks>
__global__ void __launch_bounds__(max_threads(kChunks))
    layer_norm_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float mean_partials[1][kWarp];
  __shared__ float distance_partials[2][kWarp];
  __shared__ uint32_t max_partials[kWarp];
  const uint32_t row = row_index();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  if (args.weights_static) prefetch_parameters<T>(args);
  launch_dependents();
  wait_for_inputs();
  if (row >= args.num_rows) return;  // a whole warp; blocks with a barrier have one row each

  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  uint4 packed[kChunks];
  float sum[1] = {0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) packed[c] = load_chunk(x, index, args.dim, args.aligned);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (threadIdx.x + c * blockDim.x < chunks) sum[0] += sum_of_chunk<T>(packed[c]);
  }
  row_sums(sum, mean_partials);
  const float mean = sum[0] / static_cast<float>(args.dim);
  float distances[2] = {0.0f, 0.0f};
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) add_distances<T>(packed[c], index, args.dim, mean, distances);
  }
  row_sums(distances, distance_partials);
  const Moments moments = moments_of(mean, distances, args.dim, args.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) packed[c] = normalized_chunk<T>(args, row, index, packed[c], moments);
  }
  store_row<T>(args, row, packed, max_partials);
}

// Rows longer than the registers of a block: read three times.
template <typename T>
__global__ void __launch_bounds__(max_threads(kLongRow))
    layer_norm_long_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float mean_partials[1][kWarp];
  __shared__ float distance_partials[2][kWarp];
  __shared__ uint32_t max_partials[kWarp];
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = row_index();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  float sum[1] = {0.0f};
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    sum[0] += sum_of_chunk<T>(load_chunk(x, index, args.dim, args.aligned));
  }
  row_sums(sum, mean_partials);
  const float mean = sum[0] / static_cast<float>(args.dim);
  float distances[2] = {0.0f, 0.0f};
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    const uint4 packed = load_chunk(x, index, args.dim, args.aligned);
    add_distances<T>(packed, index, args.dim, mean, distances);
  }
  row_sums(distances, distance_partials);
  const Moments moments = moments_of(mean, distances, args.dim, args.eps);
  const auto normalized = [&](int index) {
    const uint4 packed = load_chunk(x, index, args.dim, args.aligned);
    return normalized_chunk<T>(args, row, index, packed, moments);
  };
  store_long_row<T>(args, row, normalized, max_partials);
}

}  // namespace flashrt
