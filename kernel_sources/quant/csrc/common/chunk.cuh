// Rows as chunks of 16 bytes, the last one possibly partial, aligned or not.
//
// Chunk i of a row holds elements [i * kVec, (i + 1) * kVec), whatever the alignment, so a
// reduction over chunks has one order and one result for aligned and unaligned views of the same
// values. Loads are plain ones: with programmatic dependent launch a kernel may start while the
// producer of its inputs still runs, so nothing here may go through the read-only path.
#pragma once

#include "common/element_type.h"
#include "common/vec.cuh"

namespace flashrt {

// Elements of chunk `index` that lie inside a row of `dim`.
template <typename T>
__device__ __forceinline__ int chunk_count(int index, int dim) {
  return min(kVec<T>, dim - index * kVec<T>);
}

template <typename T>
__device__ __forceinline__ bool is_full_chunk(int index, int dim) {
  return dim - index * kVec<T> >= kVec<T>;
}

// Chunk `index` of a row, elements past the row's end zero. `aligned` promises that the row starts
// on a 16-byte boundary.
template <typename T>
__device__ __forceinline__ uint4 load_chunk(const T* row, int index, int dim, bool aligned) {
  const T* source = row + static_cast<int64_t>(index) * kVec<T>;
  if (aligned && is_full_chunk<T>(index, dim)) return *reinterpret_cast<const uint4*>(source);
  alignas(16) T elements[kVec<T>];
  const int count = chunk_count<T>(index, dim);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) elements[i] = i < count ? source[i] : from_float<T>(0.0f);
  return *reinterpret_cast<const uint4*>(elements);
}

template <typename T>
__device__ __forceinline__ void store_chunk(T* row, int index, int dim, bool aligned,
                                            const uint4& packed) {
  T* target = row + static_cast<int64_t>(index) * kVec<T>;
  if (aligned && is_full_chunk<T>(index, dim)) {
    *reinterpret_cast<uint4*>(target) = packed;
    return;
  }
  alignas(16) T elements[kVec<T>];
  *reinterpret_cast<uint4*>(elements) = packed;
  const int count = chunk_count<T>(index, dim);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    if (i < count) target[i] = elements[i];
  }
}

// The elements that belong to chunk `index` of T, from a row that holds either T or fp32.
template <typename T>
__device__ __forceinline__ void load_as(const void* row, bool is_fp32, int index, int dim,
                                        bool aligned, float (&values)[kVec<T>]) {
  if (!is_fp32 || sizeof(T) == 4) {
    unpack<T>(load_chunk(static_cast<const T*>(row), index, dim, aligned), values);
    return;
  }
  const float* source = static_cast<const float*>(row) + static_cast<int64_t>(index) * kVec<T>;
  const int count = chunk_count<T>(index, dim);
#pragma unroll
  for (int i = 0; i < kVec<T>; i += 4) {
    if (aligned && i + 4 <= count) {
      const float4 four = *reinterpret_cast<const float4*>(source + i);
      values[i] = four.x;
      values[i + 1] = four.y;
      values[i + 2] = four.z;
      values[i + 3] = four.w;
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j) values[j] = j < count ? source[j] : 0.0f;
    }
  }
}

}  // namespace flashrt
