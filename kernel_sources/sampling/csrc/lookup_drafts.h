// Arguments of the search for drafts in a sequence's own text, free of torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace flashrt {

inline constexpr int kContext = 8;  // tokens that are compared
inline constexpr int kNewestWeight = 1000;

struct LookupDraftsArgs {
  const int64_t* prompt;  // [num_rows, *], unit stride along a row, as tokens
  int64_t prompt_stride;
  const int64_t* tokens;
  int64_t tokens_stride;
  const int* counts;   // [num_rows]
  const int* lengths;  // [num_rows]
  int64_t* drafts;     // [num_rows, num_drafts]
  int64_t num_rows;
  int num_drafts;  // at most kSearchThreads
};

inline constexpr int kSearchThreads = 512;

cudaError_t launch_lookup_drafts(const LookupDraftsArgs& args, cudaStream_t stream);

}  // namespace flashrt
