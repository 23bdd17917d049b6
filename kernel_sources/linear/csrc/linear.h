// The launcher's side of the `linear` family, free of torch: out = epilogue(prologue(x) @ W.T).
//
// For each row, with every sum in fp32 and the stated roundings only:
//   1. with a branch:  r' = round(x + round(branch_norm(branch))), residual_out = r';  else r' = x
//   2. with a norm:    x' = round(norm(r'));                                           else x' = r'
//   3. y_i = x' @ W_i.T + bias_i, the W_i below each other as one matrix of n[0] + n[1] + n[2] rows
//   4. gated:          y = activation(y_0) * y_1;                        else y = activation(y)
//   5. out = round(residual + soft_cap * tanh(scale * y / soft_cap)), soft_cap 0 meaning no cap
// "round" is to `type`, in step 5 to `out_type`.
//   norm(v) = v * rsqrt(mean(v^2) + eps) * w, or * (1 + w) for kZeroCentered.
// The bits of a row depend on that row alone: not on m, on its place or on the other rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/element_type.h"

namespace flashrt {

enum class Activation : int;  // defined in common/activations.cuh

// Norms, in LinearArgs::norm_kind and branch_norm_kind; numbered alike in
// torch-ext/linear/reference.py.
inline constexpr int kNoNorm = 0;
inline constexpr int kRmsNorm = 1;
inline constexpr int kZeroCenteredRmsNorm = 2;

// How weights are stored. Of a packed weight W = scale * value; each is a tensor of its own beside
// its FP32 scales.
enum class WeightFormat : int {
  kPlain,  // `type`
  kFP8,    // E4M3, [n, k]
  kINT8,   // [n, k]
  kNVFP4,  // E2M1 with E4M3 scales of blocks of 16 along k, in tiles: see formats.cuh
};

// Rows that one launch takes.
inline constexpr int kMaxRows = 8;

// All pointers are device addresses, null when the operand is absent. Strides are in elements.
// Every operand has element type `type` except packed weights, scales, and `out`, which has
// `out_type`: the same, or kFP32.
// Activations have unit stride along a row; nothing is assumed about the alignment of a row.
struct LinearArgs {
  const void* x;  // [m, k]: the input, or with `branch` the residual stream it is added to
  int64_t x_stride;

  WeightFormat format;    // of all weights
  const void* weight[3];  // [n[i], k], or tiles
  int64_t weight_stride[3];
  int64_t weight_col_stride;     // shared by all weights; 1 on the fast path
  const float* weight_scale[3];  // of packed weights: [n[i]], or the grid below
  int scale_columns;    // 0, or columns of a grid [ceil(n[i] / 128), scale_columns], one scale
                        // for 128x128 elements
  const void* bias[3];  // [n[i]], contiguous; each may be null
  int n[3];
  int num_weights;

  const void* branch;  // [m, k]
  int64_t branch_stride;
  const void* branch_norm_weight;  // [k]
  float branch_norm_eps;
  void* residual_out;  // [m, k], set exactly when `branch` is
  int64_t residual_out_stride;

  const void* norm_weight;  // [k]
  float norm_eps;
  int norm_kind;
  int branch_norm_kind;

  const void* residual;  // [m, n_out], the same memory as `out` or disjoint from it
  int64_t residual_stride;
  float scale;
  float soft_cap;
  Activation activation;
  bool gated;  // exactly two weights of n[0] == n[1] rows: gate, up

  void* out;  // [m, n_out]; n_out is n[0] when gated, else the sum of n
  int64_t out_stride;
  ElementType type;
  ElementType out_type;

  int m;  // 1..kMaxRows
  int k;  // at least 1
  // Weights, biases and norm weights have no producer still running: they may be read before
  // griddepcontrol.wait.
  bool weights_static;
};

cudaError_t launch_linear(const LinearArgs& args, cudaStream_t stream);

// out[i] = round(scale * table[ids[i]]), rows of `out` contiguous; an id outside [0, vocab) gives a
// row of NaN. `weights_static` speaks of the table.
cudaError_t launch_embedding(const int64_t* ids, const void* table, int64_t table_stride, void* out,
                             int64_t num_ids, int64_t vocab, int d, float scale, ElementType type,
                             bool weights_static, cudaStream_t stream);

}  // namespace flashrt
