#include "common/launch.h"
#include "residual.cuh"
#include "threshold.cuh"

namespace flashrt {

cudaError_t launch_sample(SampleArgs args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  constexpr int64_t kRound = static_cast<int64_t>(kMaxSlots) * kSlotElements;
  const int64_t slot_size = (args.vocab + kRound - 1) / kRound * kSlotElements;
  args.slot_size = static_cast<int>(slot_size);
  args.num_slots = static_cast<int>((args.vocab + slot_size - 1) / slot_size);
  args.aligned = rows_aligned(args.logits, args.logit_rows, sizeof(float));
  const int64_t table = reinterpret_cast<int64_t>(args.settings.occurrences);
  const int64_t stride = args.settings.occurrences_stride * static_cast<int64_t>(sizeof(int));
  args.occurrences_aligned = (table | stride) % 16 == 0;

  const dim3 grid(static_cast<unsigned>(args.num_rows * args.num_slots));
  const dim3 block(kThreads);
  const auto run = [&](void (*kernel)(SampleArgs)) {
    return launch(kernel, grid, block, 0, stream, args);
  };
  const bool rejects = args.draft_probs != nullptr && args.places > 1;
  const bool bins = args.settings.top_k != nullptr || args.settings.top_p != nullptr;
  cudaError_t error = run(score_kernel);
  if (error == cudaSuccess && bins) error = run(threshold_kernel);
  if (error == cudaSuccess && (bins || rejects || args.settings.min_p != nullptr)) {
    error = run(draw_kernel);
  }
  if (error == cudaSuccess && rejects) error = run(total_kernel);
  if (error == cudaSuccess && rejects) error = run(residual_kernel);
  return error;
}

}  // namespace flashrt
