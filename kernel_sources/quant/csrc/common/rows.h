// Where the rows of a tensor lie: any strides over the leading dims, unit stride along a row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashrt {

// Leading dims that may remain after merging those that are contiguous with each other.
inline constexpr int kMaxRowDims = 6;

// Row r is found by splitting r into coordinates, the last dim fastest. Strides are in elements;
// stride 0 broadcasts.
struct Rows {
  int dims = 1;
  uint32_t size[kMaxRowDims] = {};  // size[0] is not needed to find a row
  int64_t stride[kMaxRowDims] = {};
};

#ifdef __CUDACC__
// Offset of row `row` in elements. Rows are counted in 32 bits, as one block or warp takes each.
__device__ __forceinline__ int64_t row_offset(const Rows& rows, uint32_t row) {
  int64_t offset = 0;
// Most tensors have one dim: the loop stays small in the instruction cache.
#pragma unroll 1
  for (int dim = rows.dims - 1; dim > 0; --dim) {
    const uint32_t quotient = row / rows.size[dim];
    offset += static_cast<int64_t>(row - quotient * rows.size[dim]) * rows.stride[dim];
    row = quotient;
  }
  return offset + static_cast<int64_t>(row) * rows.stride[0];
}
#endif

// Merge `count` leading dims into as few as possible. False when more than kMaxRowDims remain.
inline bool merge_rows(const int64_t* sizes, const int64_t* strides, int count, Rows* rows) {
  int64_t size[kMaxRowDims] = {1};
  *rows = Rows{};
  int dims = 0;
  for (int i = 0; i < count; ++i) {
    if (sizes[i] == 1) continue;
    if (dims > 0 && rows->stride[dims - 1] == strides[i] * sizes[i]) {
      size[dims - 1] *= sizes[i];
      rows->stride[dims - 1] = strides[i];
      continue;
    }
    if (dims == kMaxRowDims) return false;
    size[dims] = sizes[i];
    rows->stride[dims] = strides[i];
    ++dims;
  }
  rows->dims = dims > 0 ? dims : 1;
  for (int dim = 0; dim < rows->dims; ++dim) rows->size[dim] = static_cast<uint32_t>(size[dim]);
  return true;
}

// Whether every row starts on a multiple of `boundary` bytes, a power of two.
inline bool rows_aligned(const void* pointer, const Rows& rows, int64_t element_bytes,
                         int64_t boundary = 16) {
  int64_t bits = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer));
  for (int dim = 0; dim < rows.dims; ++dim) bits |= rows.stride[dim] * element_bytes;
  return bits % boundary == 0;
}

}  // namespace flashrt
