// What the kernels of one draw leave each other, in the workspace.
#pragma once

#include "keys.cuh"
#include "sample.h"

namespace flashrt {

enum class Phase : int { kDone = 0, kThreshold = 1, kDraw = 2, kTotal = 3, kResidual = 4 };

struct RowState {
  uint64_t mass_before_k;  // of the bins above bin_k
  uint64_t mass_before_p;  // of the bins above first_bin_p
  uint64_t total;          // mass of all that stays
  Phase phase;             // what is still to be done
  float highest;           // score
  uint32_t lowest;         // key of the lowest score that stays
  uint32_t count_before_k;
  uint32_t list_size;
  int bin_k;        // where top-k's threshold lies; kBins: it leaves all
  int first_bin_p;  // where top-p's threshold lies: in one of these bins; kBins: it leaves all
  int last_bin_p;
  int chosen;
};
static_assert(sizeof(RowState) <= kRowStateBytes, "state of a row");

struct RowMemory {
  RowState* state;
  uint64_t* keys;           // [kMaxSlots]
  uint64_t* bin_mass;       // [kBins]
  uint32_t* bin_count;      // [kBins]
  float* scores;            // [vocab], padded to 32
  uint32_t* list;           // [vocab]
  uint32_t* counter;        // of the blocks that are done; 0 between kernels
  uint32_t* place_counter;  // of the places of a sequence that are done, in its first row
};

__device__ __forceinline__ RowMemory row_memory(const SampleWorkspace& workspace, int vocab,
                                                uint32_t row) {
  char* memory = workspace.end - (int64_t{row} + 1) * workspace.row_bytes;
  RowMemory result;
  result.state = reinterpret_cast<RowState*>(memory);
  result.bin_mass = reinterpret_cast<uint64_t*>(memory + kRowStateBytes);
  result.bin_count = reinterpret_cast<uint32_t*>(result.bin_mass + kBins);
  result.scores = reinterpret_cast<float*>(result.bin_count + kBins);
  result.list = reinterpret_cast<uint32_t*>(result.scores + (vocab + 31) / 32 * 32);
  char* start = workspace.start + int64_t{row} * kWorkspaceBytesPerRow;
  result.counter = reinterpret_cast<uint32_t*>(start);
  result.place_counter = result.counter + 1;
  result.keys = reinterpret_cast<uint64_t*>(start) + 1;
  return result;
}

// Bin 0 holds the highest score. Bins follow the distance below it in logits (score times
// temperature): 256 of equal width for distances 0 to 1, 256 for 1 to 3, for 3 to 7 and so on. The
// bin never falls as the score falls, which is all that the result depends on.
__device__ __forceinline__ int bin_of(float score, float highest, float temperature) {
  const float distance = __fmul_rn(__fsub_rn(highest, score), temperature);
  const uint32_t bits = __float_as_uint(__fadd_rn(distance, 1.0f));
  return min((bits - 0x3f800000u) >> 15, kBins - 1u);
}

}  // namespace flashrt
