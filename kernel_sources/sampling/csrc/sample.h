// Arguments and workspace of the kernels that draw a token, free of torch.
//
// A call has R = B * T rows of logits: T places of each of B sequences (T = 1 in a plain step). It
// is up to five kernels, one block for each slot of a row (see sampling.h), of which the last to
// finish goes on alone:
//   score      bias, penalties, bans, temperature; ends here for a greedy row and for one without
//              thresholds
//   threshold  a histogram of the scores, which leaves one or a few bins undecided
//   draw       decides them, and draws
//   total, residual   only with the probabilities of a draft: the rejection rule
// Whether a row takes part is decided on the device, so one recording serves all settings. Every
// sum that decides anything is a sum of integers, so its order does not matter.
#pragma once

#include "sampling.h"

namespace flashrt {

inline constexpr float kSmallestTemperature = 1e-5f;
inline constexpr int kBins = 2048;

struct Settings {  // of each sequence, in device memory; null: off
  const float* temperature;
  const int64_t* seed;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const int* min_new;
  const float* repetition_penalty;
  const float* presence_penalty;
  const float* frequency_penalty;
  int* occurrences;  // [num_sequences, vocab]: bit 0 in the prompt, above it the times generated
  int64_t occurrences_stride;
  const int64_t* bias_ids;  // [num_sequences, num_bias], as the values
  const float* bias_values;
  int num_bias;
  const uint32_t* allowed;  // [num_rows, ceil(vocab / 32)]
};

// At its start what an argmax needs, kWorkspaceBytesPerRow for each row (see sampling.h): a
// counter, in whose upper half the places of a sequence are counted, and the keys of the slots.
// From its end downwards the memory of each row. So a call of fewer or smaller rows, also an
// argmax, leaves the counters zero.
struct SampleWorkspace {
  char* start;  // 16-byte aligned; zero before its first use
  char* end;    // 16-byte aligned
  int64_t row_bytes;
};

inline constexpr int kRowStateBytes = 128;

inline SampleWorkspace sample_workspace(void* memory, int64_t bytes, int vocab) {
  const int64_t padded = (static_cast<int64_t>(vocab) + 31) / 32 * 32;
  char* start = static_cast<char*>(memory);
  return {start, start + (bytes & ~int64_t{15}),
          kRowStateBytes + kBins * (8 + 4) + padded * (4 + 4)};
}

struct SampleArgs {
  const float* logits;  // [num_rows, vocab], unit stride along a row
  Rows logit_rows;
  int64_t num_rows;
  int places;  // T
  int vocab;
  bool aligned;              // set by the launcher: every row starts on 16 bytes
  bool occurrences_aligned;  // set by the launcher
  int num_slots;             // set by the launcher
  int slot_size;             // set by the launcher, in elements
  Settings settings;
  GreedyStepArgs step;
  const int64_t* drafts;     // [num_sequences, places - 1], or null
  const float* draft_probs;  // [num_sequences, places - 1, vocab], or null
  int* accepted;             // [num_sequences], or null: a plain step
  SampleWorkspace workspace;
};

// Append a drawn token to every sequence, or with `accepted` as many as agree with the drafts.
cudaError_t launch_sample(SampleArgs args, cudaStream_t stream);

inline constexpr int kMaxTop = 20;

struct LogprobsArgs {
  const float* logits;
  Rows logit_rows;
  int64_t num_rows;
  int vocab;
  bool aligned;        // set by the launcher
  int num_slots;       // set by the launcher
  const int64_t* ids;  // [num_rows]
  int top_n;
  float* chosen;     // [num_rows]
  int64_t* top_ids;  // [num_rows, top_n]
  float* top;
  SampleWorkspace workspace;
};

cudaError_t launch_logprobs(LogprobsArgs args, cudaStream_t stream);

}  // namespace flashrt
