// Arguments of the `activation` ops, unpacked for the launcher. Checks are in
// torch-ext/activation/ops.py.
#include "activation.h"
#include "common/row_tensor.h"
#include "registration.h"

namespace flashrt {
namespace {

void run(const Tensor& x, const Tensor* up, int64_t activation, const Tensor& out,
         const char* op) {
  const DeviceGuard guard(x.get_device_index());
  ActivationArgs args{};
  args.x = x.data_ptr();
  args.x_rows = rows_of(x, op);
  if (up != nullptr) {
    args.up = up->data_ptr();
    args.up_rows = rows_of(*up, op);
  }
  args.out = out.data_ptr();
  args.out_rows = rows_of(out, op);
  args.type = element_type(x, op);
  args.dim = static_cast<int>(x.size(-1));
  args.num_rows = args.dim == 0 ? 0 : x.numel() / args.dim;
  args.activation = static_cast<Activation>(activation);
  check_launch(launch_activation(args, current_stream(x)), op);
}

void activate_out(const Tensor x, int64_t activation, Tensor out) {
  run(x, nullptr, activation, out, "activate");
}

Tensor activate(const Tensor x, int64_t activation) {
  Tensor out = new_like(x);
  activate_out(x, activation, out);
  return out;
}

void gated_out(const Tensor gate, const Tensor up, int64_t activation, Tensor out) {
  run(gate, &up, activation, out, "gated");
}

Tensor gated(const Tensor gate, const Tensor up, int64_t activation) {
  Tensor out = new_like(gate);
  gated_out(gate, up, activation, out);
  return out;
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("activate", TORCH_BOX(&flashrt::activate));
  ops.impl("activate_out", TORCH_BOX(&flashrt::activate_out));
  ops.impl("gated", TORCH_BOX(&flashrt::gated));
  ops.impl("gated_out", TORCH_BOX(&flashrt::gated_out));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
