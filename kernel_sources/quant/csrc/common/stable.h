// What every binding needs from torch's stable ABI: stream, device guard, pointers, errors.
// Shapes, dtypes and ranges are checked in Python before a binding is reached.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flashrt {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;

// torch's current stream on the tensor's device.
inline cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Address of an optional tensor, or nullptr.
inline void* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->data_ptr() : nullptr;
}

inline void check_launch(cudaError_t error, const char* op) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": launch failed: ", cudaGetErrorString(error));
}

}  // namespace flashrt
