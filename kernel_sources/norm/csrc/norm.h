// The launchers of the `norm` family, free of torch. A norm reads rows [rows, dim] and writes rows
// of the same shape; sums and affine arithmetic are fp32, the result is rounded once. With FP8
// output that rounded result is quantised: by a given scale, or by the largest magnitude of its
// row.
#pragma once

#include <cuda_runtime_api.h>

#include "common/element_type.h"
#include "common/rows.h"

namespace flashrt {

// A tensor by rows. `data` is null when the operand is absent.
struct RowsIn {
  const void* data = nullptr;
  Rows rows;
  bool is_fp32 = false;  // fp32 although x is not; never set for x and residual
};

struct RowsOut {
  void* data = nullptr;
  Rows rows;
};

// Each operand has `dim` elements a row and unit stride along it.
struct NormArgs {
  RowsIn x;
  RowsIn residual;       // rms_norm only: r' = round(x + residual) is normed, and
  RowsOut residual_out;  // written here; both or neither. May be the memory of `residual`
  RowsIn weight;         // [dim]
  RowsIn bias;           // [dim], layer_norm only
  RowsIn scale;          // rows that broadcast over those of x
  RowsIn shift;
  RowsOut out;             // may be the memory of `x`; null with fp8_out
  RowsOut fp8_out;         // E4M3; null with out
  const float* fp8_scale;  // one element, or null: max(abs(row)) / 448 of each row,
  float* fp8_scale_out;    // written here, [num_rows]
  ElementType type;        // of x, residual, residual_out and out
  int64_t num_rows;
  int dim;
  float eps;
  bool zero_centered;   // rms_norm only: 1 + weight in place of weight
  bool weights_static;  // weight and bias have no producer still running
  bool aligned;         // set by the launcher: every row of every operand starts on 16 bytes
};

cudaError_t launch_rms_norm(NormArgs args, cudaStream_t stream);
cudaError_t launch_layer_norm(NormArgs args, cudaStream_t stream);

}  // namespace flashrt
