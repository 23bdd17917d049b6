// The launchers of the `sampling` family, free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include "common/element_type.h"
#include "common/rows.h"

namespace flashrt {

// A row of logits is cut into slots, one block each. At most kMaxSlots of them, each a multiple of
// kSlotElements: up to 262144 logits a thread then reads at most 16 elements, all at once.
inline constexpr int kMaxSlots = 128;
inline constexpr int kSlotElements = 2048;

// For each row a counter and the keys of its slots, 8 bytes each.
inline constexpr int kWorkspaceBytesPerRow = (1 + kMaxSlots) * 8;

struct ArgmaxArgs {
  const void* logits;  // [num_rows, vocab], unit stride along a row
  Rows logit_rows;
  ElementType type;
  int64_t num_rows;
  int vocab;
  bool aligned;     // set by the launcher: every row starts on 16 bytes
  int num_slots;    // set by the launcher
  int slot_size;    // set by the launcher, in elements
  void* workspace;  // num_rows times kWorkspaceBytesPerRow, 8-byte aligned, zero before its first
                    // use; left ready for the next launch, also one of other sizes
};

// What one greedy step does with each row's argmax; see greedy_step.cuh.
struct GreedyStepArgs {
  int64_t* tokens;  // [num_rows, capacity]
  int64_t tokens_stride;
  int capacity;
  int* counts;  // [num_rows], as all below
  int* lengths;
  bool* finished;
  int64_t* next_ids;
  const int* max_new;
  const int64_t* eos;  // [num_eos] of each row
  int num_eos;
  int64_t eos_stride;  // 0 when all rows have the same
  int64_t pad_id;
};

// out[row] = index of the largest logit.
cudaError_t launch_argmax(ArgmaxArgs args, int64_t* out, cudaStream_t stream);

cudaError_t launch_greedy_step(ArgmaxArgs args, GreedyStepArgs step, cudaStream_t stream);

}  // namespace flashrt
