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

template <Activation kActivation>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (kActivation == Activation::kGelu) {
    return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));  // 1 / sqrt(2)
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    // sqrt(2 / pi) * (x + 0.044715 * x^3)
    const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanhf(inner));
  } else if constexpr (kActivation == Activation::kQuickGelu) {
    return x * sigmoid(1.702f * x);
  } else if constexpr (kActivation == Activation::kRelu) {
    return x < 0.0f ? 0.0f : x;  // a NaN stays one
  } else if constexpr (kActivation == Activation::kRelu2) {
    const float positive = x < 0.0f ? 0.0f : x;
    return positive * positive;
  } else if constexpr (kActivation == Activation::kSigmoid) {
    return sigmoid(x);
  } else if constexpr (kActivation == Activation::kTanh) {
    return tanhf(x);
  } else {
    return x;
  }
}

// Apply `activation`, the same for every thread of a launch, to N values: one branch, then the
// loop.
template <int N>
__device__ __forceinline__ void activate(Activation activation, float (&values)[N]) {
#define FLASHRT_ACTIVATION_CASE(name)                         \
  case Activation::name:                                      \
    _Pragma("unroll") for (int i = 0; i < N; ++i) values[i] = \
        activate<Activation::name>(values[i]);                \
    break;
  switch (activation) {
    FLASHRT_ACTIVATION_CASE(kSilu)
    FLASHRT_ACTIVATION_CASE(kGelu)
    FLASHRT_ACTIVATION_CASE(kGeluTanh)
    FLASHRT_ACTIVATION_CASE(kQuickGelu)
    FLASHRT_ACTIVATION_CASE(kRelu)
    FLASHRT_ACTIVATION_CASE(kRelu2)
    FLASHRT_ACTIVATION_CASE(kSigmoid)
    FLASHRT_ACTIVATION_CASE(kTanh)
    case Activation::kIdentity:
      break;
  }
#undef FLASHRT_ACTIVATION_CASE
}

__device__ __forceinline__ float activate(Activation activation, float x) {
  float values[1] = {x};
  activate(activation, values);
  return values[0];
}

}  // namespace flashrt
