// The launcher of the `activation` family, free of torch:
//
//   out = round(activation(x))  or  out = round(activation(x) * up)
//
// Arithmetic is fp32, rounded once. Every operand has rows [num_rows, dim] of one element type,
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
  void* out;       // may be the memory of x or of up
  Rows x_rows;
  Rows up_rows;
  Rows out_rows;
  ElementType type;
  int64_t num_rows;
  int dim;
  Activation activation;
  bool aligned;  // set by the launcher: every row of every operand starts on 16 bytes
};

cudaError_t launch_activation(ActivationArgs args, cudaStream_t stream);

}  // namespace flashrt
