// The step from an element type that is a value to one that is a C++ type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/element_type.h"

namespace flashrt {

// Calls body(T()) with the C++ type T of `type`, and returns what it returns.
template <typename Body>
auto for_element(ElementType type, Body body) {
  switch (type) {
    case ElementType::kBF16:
      return body(__nv_bfloat16());
    case ElementType::kFP16:
      return body(__half());
    default:
      return body(float());
  }
}

}  // namespace flashrt
