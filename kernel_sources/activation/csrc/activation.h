// The launcher of the `activation` family, free of torch:
//
//   out = round(activation(x))  or  out = round(activation(x) * up)
//
// Arithmetic is fp32, rounded once. With FP8 output that result is quantised: by a given scale, or
// by the largest magnitude of its row. Every operand has rows [num_rows, dim] of one element type,
// unit stride along a row and rows at any stride.
#pragma once

#include <cuda_runtime_api.h>

#include "common/element_type.h"
#include "common/rows.h"

namespace flashrt {

enum class Activation : int;

struct ActivationArgs {
  const void* x;   // the gate, when there is `up`
  const void* up;  // null when absent
  void* out;       // may be the memory of x or of up; with is_fp8 it is neither
  Rows x_rows;
  Rows up_rows;
  Rows out_rows;
  ElementType type;
  int64_t num_rows;
  int dim;
  Activation activation;
  bool is_fp8;             // out is E4M3
  const float* fp8_scale;  // one element, or null: max(abs(row)) / 448 of each row,
  float* fp8_scale_out;    // written here, [num_rows]
  bool aligned;  // set by the launcher: every row of every operand starts on a whole chunk
};

cudaError_t launch_activation(ActivationArgs args, cudaStream_t stream);

}  // namespace flashrt
