// Layer norm of rows, optionally modulated:
//
//   y   = (x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps) * w + b     (w 1 and b 0 when absent)
//   out = round(y * (1 + scale) + shift)
//
// x, out: [rows, dim] bf16, fp16 or fp32, unit stride along a row, rows at any stride; weight,
// bias, scale, shift: the same type or fp32. Two passes over the row in fp32, in an order that
// depends on dim and type only. Ba, Kiros and Hinton 2016, arXiv:1607.06450; modulation: Peebles
// and Xie 2022, arXiv:2212.09748, section 3.2.
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

template <typename T>
__device__ __forceinline__ float squared_distance(const uint4& packed, int index, int dim,
                                                  float mean) {
  float values[kVec<T>];
  unpack<T>(packed, values);
  const int count = chunk_count<T>(index, dim);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    const float distance = i < count ? values[i] - mean : 0.0f;
    sum += distance * distance;
  }
  return sum;
}

template <typename T>
__device__ __forceinline__ void normalize_chunk(const NormArgs& args, uint32_t row, int index,
                                                const uint4& packed, float mean,
                                                float inverse_std) {
  float values[kVec<T>];
  float operand[kVec<T>];
  unpack<T>(packed, values);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) values[i] = (values[i] - mean) * inverse_std;
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
  store_chunk(row_of<T>(args.out, row), index, args.dim, args.aligned, pack<T>(values));
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
  __shared__ float partials[2][kWarp];
  const uint32_t row = row_index();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  if (args.weights_static) prefetch_parameters<T>(args);
  launch_dependents();
  wait_for_inputs();
  if (row >= args.num_rows) return;  // a whole warp; blocks with a barrier have one row each

  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  uint4 packed[kChunks];
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) packed[c] = load_chunk(x, index, args.dim, args.aligned);
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (threadIdx.x + c * blockDim.x < chunks) sum += sum_of_chunk<T>(packed[c]);
  }
  const float mean = row_sum(sum, partials[0]) / static_cast<float>(args.dim);
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) squares += squared_distance<T>(packed[c], index, args.dim, mean);
  }
  const float variance = row_sum(squares, partials[1]) / static_cast<float>(args.dim);
  const float inverse_std = rsqrtf(variance + args.eps);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) normalize_chunk<T>(args, row, index, packed[c], mean, inverse_std);
  }
}

// Rows longer than the registers of a block: read three times.
template <typename T>
__global__ void __launch_bounds__(max_threads(kLongRow))
    layer_norm_long_kernel(const __grid_constant__ NormArgs args) {
  __shared__ float partials[2][kWarp];
  launch_dependents();
  wait_for_inputs();
  const uint32_t row = row_index();
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  const T* x = static_cast<const T*>(row_of(args.x, row, sizeof(T)));
  float sum = 0.0f;
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    sum += sum_of_chunk<T>(load_chunk(x, index, args.dim, args.aligned));
  }
  const float mean = row_sum(sum, partials[0]) / static_cast<float>(args.dim);
  float squares = 0.0f;
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    squares +=
        squared_distance<T>(load_chunk(x, index, args.dim, args.aligned), index, args.dim, mean);
  }
  const float variance = row_sum(squares, partials[1]) / static_cast<float>(args.dim);
  const float inverse_std = rsqrtf(variance + args.eps);
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    const uint4 packed = load_chunk(x, index, args.dim, args.aligned);
    normalize_chunk<T>(args, row, index, packed, mean, inverse_std);
  }
}

}  // namespace flashrt
