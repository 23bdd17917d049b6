// Element types of the kernels, as run-time values. Free of torch.
#pragma once

#include <cstdint>

namespace flashrt {

enum class ElementType : int { kBF16 = 0, kFP16 = 1, kFP32 = 2 };

inline int64_t element_bytes(ElementType type) { return type == ElementType::kFP32 ? 4 : 2; }

}  // namespace flashrt
