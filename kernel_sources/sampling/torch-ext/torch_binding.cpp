// Arguments of the `sampling` ops, unpacked for the launchers. Checks are in
// torch-ext/sampling/ops.py.
#include "common/row_tensor.h"
#include "registration.h"
#include "sampling.h"

namespace flashrt {
namespace {

ArgmaxArgs argmax_args(const Tensor& logits, const Tensor& workspace, const char* op) {
  ArgmaxArgs args{};
  args.logits = logits.data_ptr();
  args.logit_rows = rows_of(logits, op);
  args.type = element_type(logits, op);
  args.vocab = static_cast<int>(logits.size(-1));
  args.num_rows = logits.numel() / args.vocab;
  args.workspace = workspace.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(args.workspace) % sizeof(uint64_t) == 0, op,
                  ": workspace must start on an 8-byte boundary");
  return args;
}

void argmax(const Tensor logits, Tensor workspace, Tensor out) {
  const DeviceGuard guard(logits.get_device_index());
  const ArgmaxArgs args = argmax_args(logits, workspace, "argmax");
  int64_t* indices = static_cast<int64_t*>(out.data_ptr());
  check_launch(launch_argmax(args, indices, current_stream(logits)), "argmax");
}

void greedy_step(const Tensor logits, Tensor tokens, Tensor counts, Tensor lengths, Tensor finished,
                 Tensor next_ids, const Tensor eos, const Tensor max_new, int64_t pad_id,
                 Tensor workspace) {
  const DeviceGuard guard(logits.get_device_index());
  const ArgmaxArgs args = argmax_args(logits, workspace, "greedy_step");
  GreedyStepArgs step{};
  step.tokens = static_cast<int64_t*>(tokens.data_ptr());
  step.tokens_stride = tokens.stride(0);
  step.capacity = static_cast<int>(tokens.size(1));
  step.counts = static_cast<int*>(counts.data_ptr());
  step.lengths = static_cast<int*>(lengths.data_ptr());
  step.finished = static_cast<bool*>(finished.data_ptr());
  step.next_ids = static_cast<int64_t*>(next_ids.data_ptr());
  step.max_new = static_cast<const int*>(max_new.data_ptr());
  step.eos = static_cast<const int64_t*>(eos.data_ptr());
  step.num_eos = static_cast<int>(eos.size(-1));
  step.eos_stride = eos.dim() == 2 ? step.num_eos : 0;
  step.pad_id = pad_id;
  check_launch(launch_greedy_step(args, step, current_stream(logits)), "greedy_step");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("argmax", TORCH_BOX(&flashrt::argmax));
  ops.impl("greedy_step", TORCH_BOX(&flashrt::greedy_step));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
