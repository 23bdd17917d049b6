#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "registration.h"
#include "scale.h"

extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

void scale(const torch::stable::Tensor& x, torch::stable::Tensor y) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device(), &stream));
  const cudaError_t error = launch_scale(
      static_cast<const float*>(x.data_ptr()), static_cast<float*>(y.data_ptr()),
      static_cast<int>(x.numel()), static_cast<cudaStream_t>(stream));
  STD_TORCH_CHECK(error == cudaSuccess, "scale: ", cudaGetErrorString(error));
}

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("scale", TORCH_BOX(&scale));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
