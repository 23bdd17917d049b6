// Arguments of the `activation` ops, unpacked for the launcher. Checks are in
// torch-ext/activation/ops.py.
#include <optional>
#include <vector>

#include "activation.h"
#include "common/row_tensor.h"
#include "registration.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

// Rows of a tensor; those of an empty row count too, as each gets a scale.
int64_t count_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return rows;
}

ActivationArgs activation_args(const Tensor& x, int64_t activation, const Tensor& out,
                               const char* op) {
  ActivationArgs args{};
  args.x = x.data_ptr();
  args.x_rows = rows_of(x, op);
  args.out = out.data_ptr();
  args.out_rows = rows_of(out, op);
  args.type = element_type(x, op);
  args.dim = static_cast<int>(out.size(-1));
  args.num_rows = count_rows(out);
  args.activation = static_cast<Activation>(activation);
  return args;
}

// The second operand and the first are the halves of x.
void set_halves(ActivationArgs* args, const Tensor& x, bool gate_first) {
  const char* first = static_cast<const char*>(x.data_ptr());
  const char* second = first + args->dim * element_bytes(args->type);
  args->x = gate_first ? first : second;
  args->up = gate_first ? second : first;
  args->up_rows = args->x_rows;
}

// `out` is FP8, by the given scale or by each row's own.
void set_fp8(ActivationArgs* args, const MaybeTensor& static_scale, const MaybeTensor& scale_out) {
  args->is_fp8 = true;
  args->fp8_scale = static_cast<const float*>(pointer_or_null(static_scale));
  args->fp8_scale_out = static_cast<float*>(pointer_or_null(scale_out));
}

void activate_out(const Tensor x, int64_t activation, Tensor out) {
  const DeviceGuard guard(x.get_device_index());
  const ActivationArgs args = activation_args(x, activation, out, "activate");
  check_launch(launch_activation(args, current_stream(x)), "activate");
}

Tensor activate(const Tensor x, int64_t activation) {
  Tensor out = new_like(x);
  activate_out(x, activation, out);
  return out;
}

void gated_out(const Tensor gate, const Tensor up, int64_t activation, Tensor out) {
  const DeviceGuard guard(gate.get_device_index());
  ActivationArgs args = activation_args(gate, activation, out, "gated");
  args.up = up.data_ptr();
  args.up_rows = rows_of(up, "gated");
  check_launch(launch_activation(args, current_stream(gate)), "gated");
}

Tensor gated(const Tensor gate, const Tensor up, int64_t activation) {
  Tensor out = new_like(gate);
  gated_out(gate, up, activation, out);
  return out;
}

void gated_packed_out(const Tensor x, int64_t activation, bool gate_first, Tensor out) {
  const DeviceGuard guard(x.get_device_index());
  ActivationArgs args = activation_args(x, activation, out, "gated_packed");
  set_halves(&args, x, gate_first);
  check_launch(launch_activation(args, current_stream(x)), "gated_packed");
}

Tensor gated_packed(const Tensor x, int64_t activation, bool gate_first) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() /= 2;
  Tensor out = torch::stable::new_empty(x, shape);
  gated_packed_out(x, activation, gate_first, out);
  return out;
}

void activate_fp8(const Tensor x, int64_t activation, const MaybeTensor static_scale, Tensor out,
                  const MaybeTensor scale_out) {
  const DeviceGuard guard(x.get_device_index());
  ActivationArgs args = activation_args(x, activation, out, "activate_fp8");
  set_fp8(&args, static_scale, scale_out);
  check_launch(launch_activation(args, current_stream(x)), "activate_fp8");
}

void gated_fp8(const Tensor gate, const Tensor up, int64_t activation,
               const MaybeTensor static_scale, Tensor out, const MaybeTensor scale_out) {
  const DeviceGuard guard(gate.get_device_index());
  ActivationArgs args = activation_args(gate, activation, out, "gated_fp8");
  args.up = up.data_ptr();
  args.up_rows = rows_of(up, "gated_fp8");
  set_fp8(&args, static_scale, scale_out);
  check_launch(launch_activation(args, current_stream(gate)), "gated_fp8");
}

void gated_packed_fp8(const Tensor x, int64_t activation, bool gate_first,
                      const MaybeTensor static_scale, Tensor out, const MaybeTensor scale_out) {
  const DeviceGuard guard(x.get_device_index());
  ActivationArgs args = activation_args(x, activation, out, "gated_packed_fp8");
  set_halves(&args, x, gate_first);
  set_fp8(&args, static_scale, scale_out);
  check_launch(launch_activation(args, current_stream(x)), "gated_packed_fp8");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("activate", TORCH_BOX(&flashrt::activate));
  ops.impl("activate_out", TORCH_BOX(&flashrt::activate_out));
  ops.impl("gated", TORCH_BOX(&flashrt::gated));
  ops.impl("gated_out", TORCH_BOX(&flashrt::gated_out));
  ops.impl("gated_packed", TORCH_BOX(&flashrt::gated_packed));
  ops.impl("gated_packed_out", TORCH_BOX(&flashrt::gated_packed_out));
  ops.impl("activate_fp8", TORCH_BOX(&flashrt::activate_fp8));
  ops.impl("gated_fp8", TORCH_BOX(&flashrt::gated_fp8));
  ops.impl("gated_packed_fp8", TORCH_BOX(&flashrt::gated_packed_fp8));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
