// Arguments of the `norm` ops, unpacked for the launchers. Checks are in torch-ext/norm/ops.py.
#include <tuple>

#include "common/row_tensor.h"
#include "norm.h"
#include "registration.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

RowsIn rows_in(const MaybeTensor& tensor, const Tensor& x, const char* op) {
  if (!tensor.has_value()) return {};
  return {tensor->data_ptr(), rows_like(*tensor, x, op), tensor->scalar_type() != x.scalar_type()};
}

RowsOut rows_out(const Tensor& tensor, const char* op) {
  return {tensor.data_ptr(), rows_of(tensor, op)};
}

NormArgs norm_args(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& scale,
                   const MaybeTensor& shift, double eps, bool weights_static, const Tensor& out,
                   const char* op) {
  NormArgs args{};
  args.type = element_type(x, op);
  args.dim = static_cast<int>(x.size(-1));
  args.num_rows = x.numel() / args.dim;
  args.x = rows_in(x, x, op);
  args.weight = rows_in(weight, x, op);
  args.scale = rows_in(scale, x, op);
  args.shift = rows_in(shift, x, op);
  args.out = rows_out(out, op);
  args.eps = static_cast<float>(eps);
  args.weights_static = weights_static;
  return args;
}

// FP8 in place of `out`, by the given scale or by each row's own.
void set_fp8(NormArgs* args, const Tensor& out, const MaybeTensor& static_scale,
             const MaybeTensor& scale_out, const char* op) {
  args->out = {};
  args->fp8_out = rows_out(out, op);
  args->fp8_scale = static_cast<const float*>(pointer_or_null(static_scale));
  args->fp8_scale_out = static_cast<float*>(pointer_or_null(scale_out));
}

void rms_norm_out(const Tensor x, const MaybeTensor weight, const MaybeTensor scale,
                  const MaybeTensor shift, double eps, bool zero_centered, bool weights_static,
                  Tensor out) {
  const DeviceGuard guard(x.get_device_index());
  NormArgs args = norm_args(x, weight, scale, shift, eps, weights_static, out, "rms_norm");
  args.zero_centered = zero_centered;
  check_launch(launch_rms_norm(args, current_stream(x)), "rms_norm");
}

Tensor rms_norm(const Tensor x, const MaybeTensor weight, const MaybeTensor scale,
                const MaybeTensor shift, double eps, bool zero_centered, bool weights_static) {
  Tensor out = new_like(x);
  rms_norm_out(x, weight, scale, shift, eps, zero_centered, weights_static, out);
  return out;
}

void add_rms_norm_out(const Tensor x, const Tensor residual, const MaybeTensor weight, double eps,
                      bool zero_centered, bool weights_static, Tensor out, Tensor residual_out) {
  const DeviceGuard guard(x.get_device_index());
  NormArgs args =
      norm_args(x, weight, std::nullopt, std::nullopt, eps, weights_static, out, "add_rms_norm");
  args.residual = rows_in(residual, x, "add_rms_norm");
  args.residual_out = rows_out(residual_out, "add_rms_norm");
  args.zero_centered = zero_centered;
  check_launch(launch_rms_norm(args, current_stream(x)), "add_rms_norm");
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor x, const Tensor residual,
                                        const MaybeTensor weight, double eps, bool zero_centered,
                                        bool weights_static) {
  Tensor out = new_like(x);
  Tensor residual_out = new_like(x);
  add_rms_norm_out(x, residual, weight, eps, zero_centered, weights_static, out, residual_out);
  return {out, residual_out};
}

void layer_norm_out(const Tensor x, const MaybeTensor weight, const MaybeTensor bias,
                    const MaybeTensor scale, const MaybeTensor shift, double eps,
                    bool weights_static, Tensor out) {
  const DeviceGuard guard(x.get_device_index());
  NormArgs args = norm_args(x, weight, scale, shift, eps, weights_static, out, "layer_norm");
  args.bias = rows_in(bias, x, "layer_norm");
  check_launch(launch_layer_norm(args, current_stream(x)), "layer_norm");
}

Tensor layer_norm(const Tensor x, const MaybeTensor weight, const MaybeTensor bias,
                  const MaybeTensor scale, const MaybeTensor shift, double eps,
                  bool weights_static) {
  Tensor out = new_like(x);
  layer_norm_out(x, weight, bias, scale, shift, eps, weights_static, out);
  return out;
}

void rms_norm_fp8(const Tensor x, const MaybeTensor weight, const MaybeTensor scale,
                  const MaybeTensor shift, double eps, bool zero_centered, bool weights_static,
                  const MaybeTensor static_scale, Tensor out, const MaybeTensor scale_out) {
  const DeviceGuard guard(x.get_device_index());
  NormArgs args = norm_args(x, weight, scale, shift, eps, weights_static, out, "rms_norm_fp8");
  args.zero_centered = zero_centered;
  set_fp8(&args, out, static_scale, scale_out, "rms_norm_fp8");
  check_launch(launch_rms_norm(args, current_stream(x)), "rms_norm_fp8");
}

void add_rms_norm_fp8(const Tensor x, const Tensor residual, const MaybeTensor weight, double eps,
                      bool zero_centered, bool weights_static, const MaybeTensor static_scale,
                      Tensor out, const MaybeTensor scale_out, Tensor residual_out) {
  const char* op = "add_rms_norm_fp8";
  const DeviceGuard guard(x.get_device_index());
  NormArgs args = norm_args(x, weight, std::nullopt, std::nullopt, eps, weights_static, out, op);
  args.residual = rows_in(residual, x, op);
  args.residual_out = rows_out(residual_out, op);
  args.zero_centered = zero_centered;
  set_fp8(&args, out, static_scale, scale_out, op);
  check_launch(launch_rms_norm(args, current_stream(x)), op);
}

void layer_norm_fp8(const Tensor x, const MaybeTensor weight, const MaybeTensor bias,
                    const MaybeTensor scale, const MaybeTensor shift, double eps,
                    bool weights_static, const MaybeTensor static_scale, Tensor out,
                    const MaybeTensor scale_out) {
  const DeviceGuard guard(x.get_device_index());
  NormArgs args = norm_args(x, weight, scale, shift, eps, weights_static, out, "layer_norm_fp8");
  args.bias = rows_in(bias, x, "layer_norm_fp8");
  set_fp8(&args, out, static_scale, scale_out, "layer_norm_fp8");
  check_launch(launch_layer_norm(args, current_stream(x)), "layer_norm_fp8");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("rms_norm", TORCH_BOX(&flashrt::rms_norm));
  ops.impl("rms_norm_out", TORCH_BOX(&flashrt::rms_norm_out));
  ops.impl("add_rms_norm", TORCH_BOX(&flashrt::add_rms_norm));
  ops.impl("add_rms_norm_out", TORCH_BOX(&flashrt::add_rms_norm_out));
  ops.impl("layer_norm", TORCH_BOX(&flashrt::layer_norm));
  ops.impl("layer_norm_out", TORCH_BOX(&flashrt::layer_norm_out));
  ops.impl("rms_norm_fp8", TORCH_BOX(&flashrt::rms_norm_fp8));
  ops.impl("add_rms_norm_fp8", TORCH_BOX(&flashrt::add_rms_norm_fp8));
  ops.impl("layer_norm_fp8", TORCH_BOX(&flashrt::layer_norm_fp8));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
