// Tensors of a binding as rows: what stable.h leaves to the families that work row by row.
#pragma once

#include <torch/csrc/stable/ops.h>

#include "common/element_type.h"
#include "common/rows.h"
#include "common/stable.h"

namespace flashrt {

inline ElementType element_type(const Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return ElementType::kBF16;
    case ScalarType::Half:
      return ElementType::kFP16;
    case ScalarType::Float:
      return ElementType::kFP32;
    default:
      STD_TORCH_CHECK(false, op, ": tensors must be bfloat16, float16 or float32");
  }
  return ElementType::kFP32;
}

// Rows of `tensor` broadcast over the leading dims of `shape_of`; the last dim is the row.
inline Rows rows_like(const Tensor& tensor, const Tensor& shape_of, const char* op) {
  constexpr int kMaxDims = 16;
  const int count = static_cast<int>(shape_of.dim()) - 1;
  const int missing = static_cast<int>(shape_of.dim() - tensor.dim());
  STD_TORCH_CHECK(count <= kMaxDims && missing >= 0, op, ": tensors must have at most ",
                  kMaxDims + 1, " dims and broadcast to the input");
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
  for (int dim = 0; dim < count; ++dim) {
    sizes[dim] = shape_of.size(dim);
    const bool broadcast = dim < missing || tensor.size(dim - missing) == 1;
    strides[dim] = broadcast ? 0 : tensor.stride(dim - missing);
  }
  Rows rows;
  STD_TORCH_CHECK(merge_rows(sizes, strides, count, &rows), op,
                  ": the strides of a tensor must merge into at most ", kMaxRowDims,
                  " leading dims; make it contiguous first");
  return rows;
}

inline Rows rows_of(const Tensor& tensor, const char* op) { return rows_like(tensor, tensor, op); }

// Uninitialised and contiguous, with shape, type and device of `tensor`.
inline Tensor new_like(const Tensor& tensor) {
  return torch::stable::new_empty(tensor, tensor.sizes());
}

}  // namespace flashrt
