// out = residual + soft_cap * tanh(scale * activation(y + bias) / soft_cap), in fp32 with one
// rounding.
#pragma once

#include "common/activations.cuh"
#include "common/vec.cuh"
#include "layout.cuh"

namespace flashrt {

// Read one element through L2: it may come from a kernel that this one overlaps.
template <typename T>
__device__ __forceinline__ float load_element(const void* base, int64_t index) {
  const unsigned short bits = __ldcg(static_cast<const unsigned short*>(base) + index);
  return to_float(*reinterpret_cast<const T*>(&bits));
}

// One element of `out`, and what is read for it ahead of the sums.
template <typename T>
struct Output {
  int m;
  int n;    // column of `out`
  int row;  // of the block's outputs
  bool active;
  float scale = 1.0f;  // of the row of W
  float up_scale = 1.0f;
  float bias = 0.0f;
  float up_bias = 0.0f;
  float residual = 0.0f;

  Output() = default;

  __device__ Output(const LinearArgs& args, const BlockRows& rows, int index, int rows_of_x) {
    row = index / rows_of_x;
    m = index % rows_of_x;
    n = rows.first_output + row;
    active = m < args.m && row < rows.outputs;
    if (!active) return;
    if (rows.scale[0] != nullptr) scale = __ldcg(rows.scale[0] + row);
    if (args.gated && rows.scale[1] != nullptr) up_scale = __ldcg(rows.scale[1] + row);
    if (rows.bias[0] != nullptr) bias = load_element<T>(rows.bias[0], row);
    if (args.gated && rows.bias[1] != nullptr) up_bias = load_element<T>(rows.bias[1], row);
    if (args.residual != nullptr)
      residual = load_element<T>(args.residual, m * args.residual_stride + n);
  }

  // `sum` is the product of the row, or of the gate row with `up` that of the up row.
  __device__ void store(const LinearArgs& args, float sum, float up) const {
    float y = activate(args.activation, __fmaf_rn(sum, scale, bias));
    if (args.gated) y *= __fmaf_rn(up, up_scale, up_bias);
    y *= args.scale;
    if (args.soft_cap != 0.0f) y = args.soft_cap * tanhf(y / args.soft_cap);
    if (args.residual != nullptr) y += residual;
    const int64_t index = m * args.out_stride + n;
    if (args.out_type == ElementType::kFP32) {
      static_cast<float*>(args.out)[index] = y;
    } else {
      static_cast<T*>(args.out)[index] = from_float<T>(y);
    }
  }
};

}  // namespace flashrt
