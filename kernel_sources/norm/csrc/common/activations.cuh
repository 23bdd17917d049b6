// Activations in fp32. The numbers are the positions of the names in common/python/activations.py,
// where the sources are.
#pragma once

namespace flashrt {

enum class Activation : int {
  kIdentity = 0,
  kSilu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kQuickGelu = 4,
  kRelu = 5,
  kRelu2 = 6,
  kSigmoid = 7,
  kTanh = 8,
};

// 1 / (1 + exp(-x)); exp overflows to infinity for x < -88, and the quotient is then 0.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The branch is the same for every thread of a launch.
__device__ __forceinline__ float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1.0f + expf(-x));
    case Activation::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));  // 1 / sqrt(2)
    case Activation::kGeluTanh: {
      // sqrt(2 / pi) * (x + 0.044715 * x^3)
      const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case Activation::kQuickGelu:
      return x * sigmoid(1.702f * x);
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // a NaN stays one
    case Activation::kRelu2: {
      const float positive = x < 0.0f ? 0.0f : x;
      return positive * positive;
    }
    case Activation::kSigmoid:
      return sigmoid(x);
    case Activation::kTanh:
      return tanhf(x);
    default:
      return x;
  }
}

}  // namespace flashrt
