// Arguments of the `sampling` ops, unpacked for the launchers. Checks are in
// torch-ext/sampling/ops.py.
#include "common/row_tensor.h"
#include "lookup_drafts.h"
#include "registration.h"
#include "sample.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

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

GreedyStepArgs step_args(const Tensor& tokens, const Tensor& counts, const Tensor& lengths,
                         const Tensor& finished, const Tensor& next_ids, const Tensor& eos,
                         const Tensor& max_new, int64_t pad_id) {
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
  return step;
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
  const GreedyStepArgs step =
      step_args(tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id);
  check_launch(launch_greedy_step(args, step, current_stream(logits)), "greedy_step");
}

template <typename T>
T* address(const MaybeTensor& tensor) {
  return static_cast<T*>(pointer_or_null(tensor));
}

SampleWorkspace workspace_of(const Tensor& workspace, int vocab, const char* op) {
  void* memory = workspace.data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(memory) % 16 == 0, op,
                  ": workspace must start on a 16-byte boundary");
  return sample_workspace(memory, workspace.numel(), vocab);
}

SampleArgs sample_args(const Tensor& logits, const Tensor& workspace, const char* op) {
  SampleArgs args{};
  args.logits = static_cast<const float*>(logits.data_ptr());
  args.logit_rows = rows_of(logits, op);
  args.vocab = static_cast<int>(logits.size(-1));
  args.num_rows = logits.numel() / args.vocab;
  args.places = logits.dim() == 3 ? static_cast<int>(logits.size(1)) : 1;
  args.workspace = workspace_of(workspace, args.vocab, op);
  return args;
}

Settings settings_of(const Tensor& temperature, const Tensor& seed, const MaybeTensor& top_k,
                     const MaybeTensor& top_p, const MaybeTensor& min_p, const MaybeTensor& min_new,
                     const MaybeTensor& repetition_penalty, const MaybeTensor& presence_penalty,
                     const MaybeTensor& frequency_penalty, const MaybeTensor& occurrences,
                     const MaybeTensor& bias_ids, const MaybeTensor& bias_values,
                     const MaybeTensor& allowed) {
  Settings settings{};
  settings.temperature = static_cast<const float*>(temperature.data_ptr());
  settings.seed = static_cast<const int64_t*>(seed.data_ptr());
  settings.top_k = address<const int>(top_k);
  settings.top_p = address<const float>(top_p);
  settings.min_p = address<const float>(min_p);
  settings.min_new = address<const int>(min_new);
  settings.repetition_penalty = address<const float>(repetition_penalty);
  settings.presence_penalty = address<const float>(presence_penalty);
  settings.frequency_penalty = address<const float>(frequency_penalty);
  settings.occurrences = address<int>(occurrences);
  settings.occurrences_stride = occurrences.has_value() ? occurrences->stride(0) : 0;
  settings.bias_ids = address<const int64_t>(bias_ids);
  settings.bias_values = address<const float>(bias_values);
  settings.num_bias = bias_ids.has_value() ? static_cast<int>(bias_ids->size(1)) : 0;
  settings.allowed = address<const uint32_t>(allowed);
  return settings;
}

void sample_step(const Tensor logits, Tensor tokens, Tensor counts, Tensor lengths, Tensor finished,
                 Tensor next_ids, const Tensor eos, const Tensor max_new, const Tensor temperature,
                 const Tensor seed, const MaybeTensor top_k, const MaybeTensor top_p,
                 const MaybeTensor min_p, const MaybeTensor min_new,
                 const MaybeTensor repetition_penalty, const MaybeTensor presence_penalty,
                 const MaybeTensor frequency_penalty, MaybeTensor occurrences,
                 const MaybeTensor bias_ids, const MaybeTensor bias_values,
                 const MaybeTensor allowed, int64_t pad_id, Tensor workspace) {
  const DeviceGuard guard(logits.get_device_index());
  SampleArgs args = sample_args(logits, workspace, "sample_step");
  args.step = step_args(tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id);
  args.settings =
      settings_of(temperature, seed, top_k, top_p, min_p, min_new, repetition_penalty,
                  presence_penalty, frequency_penalty, occurrences, bias_ids, bias_values, allowed);
  check_launch(launch_sample(args, current_stream(logits)), "sample_step");
}

void accept_drafts(const Tensor logits, const Tensor drafts, Tensor tokens, Tensor counts,
                   Tensor lengths, Tensor finished, Tensor next_ids, Tensor accepted,
                   const Tensor eos, const Tensor max_new, const MaybeTensor draft_probs,
                   const Tensor temperature, const Tensor seed, const MaybeTensor top_k,
                   const MaybeTensor top_p, const MaybeTensor min_p, const MaybeTensor min_new,
                   const MaybeTensor repetition_penalty, const MaybeTensor presence_penalty,
                   const MaybeTensor frequency_penalty, MaybeTensor occurrences,
                   const MaybeTensor bias_ids, const MaybeTensor bias_values,
                   const MaybeTensor allowed, int64_t pad_id, Tensor workspace) {
  const DeviceGuard guard(logits.get_device_index());
  SampleArgs args = sample_args(logits, workspace, "accept_drafts");
  args.step = step_args(tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id);
  args.settings =
      settings_of(temperature, seed, top_k, top_p, min_p, min_new, repetition_penalty,
                  presence_penalty, frequency_penalty, occurrences, bias_ids, bias_values, allowed);
  args.drafts = static_cast<const int64_t*>(drafts.data_ptr());
  args.draft_probs = address<const float>(draft_probs);
  args.accepted = static_cast<int*>(accepted.data_ptr());
  check_launch(launch_sample(args, current_stream(logits)), "accept_drafts");
}

void logprobs(const Tensor logits, const Tensor ids, Tensor workspace, Tensor chosen,
              Tensor top_ids, Tensor top) {
  const DeviceGuard guard(logits.get_device_index());
  LogprobsArgs args{};
  args.logits = static_cast<const float*>(logits.data_ptr());
  args.logit_rows = rows_of(logits, "logprobs");
  args.vocab = static_cast<int>(logits.size(-1));
  args.num_rows = logits.numel() / args.vocab;
  args.ids = static_cast<const int64_t*>(ids.data_ptr());
  args.top_n = static_cast<int>(top.size(-1));
  args.chosen = static_cast<float*>(chosen.data_ptr());
  args.top_ids = static_cast<int64_t*>(top_ids.data_ptr());
  args.top = static_cast<float*>(top.data_ptr());
  args.workspace = workspace_of(workspace, args.vocab, "logprobs");
  check_launch(launch_logprobs(args, current_stream(logits)), "logprobs");
}

void lookup_drafts(const Tensor prompt, const Tensor tokens, const Tensor counts,
                   const Tensor lengths, Tensor drafts) {
  const DeviceGuard guard(drafts.get_device_index());
  LookupDraftsArgs args{};
  args.prompt = static_cast<const int64_t*>(prompt.data_ptr());
  args.prompt_stride = prompt.stride(0);
  args.tokens = static_cast<const int64_t*>(tokens.data_ptr());
  args.tokens_stride = tokens.stride(0);
  args.counts = static_cast<const int*>(counts.data_ptr());
  args.lengths = static_cast<const int*>(lengths.data_ptr());
  args.drafts = static_cast<int64_t*>(drafts.data_ptr());
  args.num_rows = drafts.size(0);
  args.num_drafts = static_cast<int>(drafts.size(1));
  check_launch(launch_lookup_drafts(args, current_stream(drafts)), "lookup_drafts");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("argmax", TORCH_BOX(&flashrt::argmax));
  ops.impl("greedy_step", TORCH_BOX(&flashrt::greedy_step));
  ops.impl("sample_step", TORCH_BOX(&flashrt::sample_step));
  ops.impl("accept_drafts", TORCH_BOX(&flashrt::accept_drafts));
  ops.impl("logprobs", TORCH_BOX(&flashrt::logprobs));
  ops.impl("lookup_drafts", TORCH_BOX(&flashrt::lookup_drafts));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
