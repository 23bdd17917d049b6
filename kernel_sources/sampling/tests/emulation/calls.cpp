// The launchers for ctypes: addresses and numbers in the order of test_sampling_emulated.py.
#include "lookup_drafts.h"
#include "sample.h"

using namespace flashrt;

namespace {

Rows rows_of(const int64_t* numbers) {  // dims, then a size and a stride for each
  int64_t sizes[4], strides[4];
  const int dims = static_cast<int>(numbers[0]);
  for (int dim = 0; dim < dims; ++dim) {
    sizes[dim] = numbers[1 + 2 * dim];
    strides[dim] = numbers[2 + 2 * dim];
  }
  Rows rows;
  merge_rows(sizes, strides, dims, &rows);
  return rows;
}

template <typename T>
void take(T*& target, void**& addresses) {
  target = static_cast<T*>(*addresses++);
}

template <typename T>
void take(T& target, const int64_t*& numbers) {
  target = static_cast<T>(*numbers++);
}

}  // namespace

extern "C" void sample(void** addresses, const int64_t* numbers, const int64_t* rows) {
  SampleArgs args{};
  args.logit_rows = rows_of(rows);
  GreedyStepArgs& step = args.step;
  Settings& settings = args.settings;
  void* workspace;
  int64_t bytes;
  take(args.logits, addresses);
  take(step.tokens, addresses);
  take(step.counts, addresses);
  take(step.lengths, addresses);
  take(step.finished, addresses);
  take(step.next_ids, addresses);
  take(step.eos, addresses);
  take(step.max_new, addresses);
  take(settings.temperature, addresses);
  take(settings.seed, addresses);
  take(settings.top_k, addresses);
  take(settings.top_p, addresses);
  take(settings.min_p, addresses);
  take(settings.min_new, addresses);
  take(settings.repetition_penalty, addresses);
  take(settings.presence_penalty, addresses);
  take(settings.frequency_penalty, addresses);
  take(settings.occurrences, addresses);
  take(settings.bias_ids, addresses);
  take(settings.bias_values, addresses);
  take(settings.allowed, addresses);
  take(args.drafts, addresses);
  take(args.draft_probs, addresses);
  take(args.accepted, addresses);
  take(workspace, addresses);
  take(args.num_rows, numbers);
  take(args.places, numbers);
  take(args.vocab, numbers);
  take(step.tokens_stride, numbers);
  take(step.capacity, numbers);
  take(step.num_eos, numbers);
  take(step.eos_stride, numbers);
  take(step.pad_id, numbers);
  take(settings.occurrences_stride, numbers);
  take(settings.num_bias, numbers);
  take(bytes, numbers);
  args.workspace = sample_workspace(workspace, bytes, args.vocab);
  launch_sample(args, nullptr);
}

extern "C" void logprobs(void** addresses, const int64_t* numbers, const int64_t* rows) {
  LogprobsArgs args{};
  args.logit_rows = rows_of(rows);
  void* workspace;
  int64_t bytes;
  take(args.logits, addresses);
  take(args.ids, addresses);
  take(args.chosen, addresses);
  take(args.top_ids, addresses);
  take(args.top, addresses);
  take(workspace, addresses);
  take(args.num_rows, numbers);
  take(args.vocab, numbers);
  take(args.top_n, numbers);
  take(bytes, numbers);
  args.workspace = sample_workspace(workspace, bytes, args.vocab);
  launch_logprobs(args, nullptr);
}

extern "C" void lookup_drafts(void** addresses, const int64_t* numbers) {
  LookupDraftsArgs args{};
  take(args.prompt, addresses);
  take(args.tokens, addresses);
  take(args.counts, addresses);
  take(args.lengths, addresses);
  take(args.drafts, addresses);
  take(args.prompt_stride, numbers);
  take(args.tokens_stride, numbers);
  take(args.num_rows, numbers);
  take(args.num_drafts, numbers);
  launch_lookup_drafts(args, nullptr);
}
