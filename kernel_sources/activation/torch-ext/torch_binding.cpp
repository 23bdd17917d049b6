// Arguments of the `activation` ops, unpacked for the launcher. Checks are in
// torch-ext/activation/ops.py.
#include <vector>

#include "activation.h"
#include "common/row_tensor.h"
#include "registration.h"

namespace flashrt {
namespace {

ActivationArgs activation_args(const Tensor& x, int64_t activation, const Tensor& out,
                               const char* op) {
  ActivationArgs args{};
  args.x = x.data_ptr();
  args.x_rows = rows_of(x, op);
  args.out = out.data_ptr();
  args.out_rows = rows_of(out, op);
  args.type = element_type(x, op);
  args.dim = static_cast<int>(out.size(-1));
  args.num_rows = args.dim == 0 ? 0 : out.numel() / args.dim;
  args.activation = static_cast<Activation>(activation);
  return args;
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
  const char* first = static_cast<const char*>(x.data_ptr());
  const char* second = first + args.dim * element_bytes(args.type);
  args.x = gate_first ? first : second;
  args.up = gate_first ? second : first;
  args.up_rows = args.x_rows;
  check_launch(launch_activation(args, current_stream(x)), "gated_packed");
}

Tensor gated_packed(const Tensor x, int64_t activation, bool gate_first) {
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() /= 2;
  Tensor out = torch::stable::new_empty(x, shape);
  gated_packed_out(x, activation, gate_first, out);
  return out;
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
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
