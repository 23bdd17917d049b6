// From logits to scores: bias, penalties, bans, in this order, every operation rounded by itself.
#pragma once

#include "common/chunk.cuh"
#include "keys.cuh"
#include "noise.cuh"
#include "sample.h"

namespace flashrt {

// What one sequence's settings come to, the same in all threads.
struct RowSettings {
  float temperature;
  uint64_t seed;
  float top_p;  // 1: off
  float min_p;  // 0: off
  float repetition;
  float presence;
  float frequency;
  int top_k;  // 0: off
  int min_new;
  bool greedy;
  bool penalised;
};

template <typename T>
__device__ __forceinline__ T value_or(const T* values, uint32_t index, T otherwise) {
  return values == nullptr ? otherwise : values[index];
}

__device__ __forceinline__ RowSettings load_settings(const Settings& settings, uint32_t sequence,
                                                     int vocab) {
  RowSettings result;
  result.temperature = settings.temperature[sequence];
  result.seed = static_cast<uint64_t>(settings.seed[sequence]);
  result.top_k = value_or(settings.top_k, sequence, 0);
  result.top_p = value_or(settings.top_p, sequence, 1.0f);
  result.min_p = value_or(settings.min_p, sequence, 0.0f);
  result.min_new = value_or(settings.min_new, sequence, 0);
  result.repetition = value_or(settings.repetition_penalty, sequence, 1.0f);
  result.presence = value_or(settings.presence_penalty, sequence, 0.0f);
  result.frequency = value_or(settings.frequency_penalty, sequence, 0.0f);
  result.greedy = !(result.temperature >= kSmallestTemperature);
  if (result.top_k < 0 || result.top_k >= vocab) result.top_k = 0;
  if (!(result.top_p < 1.0f)) result.top_p = 1.0f;
  if (!(result.min_p > 0.0f)) result.min_p = 0.0f;
  result.penalised =
      result.repetition != 1.0f || result.presence != 0.0f || result.frequency != 0.0f;
  return result;
}

// This thread's part of kSlotElements values of a row from `start` on.
struct RoundChunks {
  uint4 chunk[2];
};

__device__ __forceinline__ RoundChunks load_round(const float* row, int start, int end, int vocab,
                                                  bool aligned) {
  static_assert(kSlotElements == 2 * 4 * kThreads, "two chunks of four a thread and round");
  RoundChunks result;
#pragma unroll
  for (int load = 0; load < 2; ++load) {
    const int chunk = start / 4 + load * kThreads + threadIdx.x;
    if (chunk_count<float>(chunk, end) > 0) {
      result.chunk[load] = load_chunk(row, chunk, vocab, aligned);
    }
  }
  return result;
}

// Bias and bans of kSlotElements logits from `start` on, gathered by a whole block.
struct SlotPatch {
  float bias[kSlotElements];
  uint32_t allowed[kSlotElements / 32];
};

struct PatchFlags {
  bool bias;
  bool bans;
};

__device__ __forceinline__ PatchFlags gather_patch(const SampleArgs& args, uint32_t row,
                                                   uint32_t sequence, bool ban_eos, int start,
                                                   SlotPatch& patch) {
  const Settings& settings = args.settings;
  const int num_bias = settings.num_bias;
  const int64_t* ids = settings.bias_ids + static_cast<int64_t>(sequence) * num_bias;
  const float* values = settings.bias_values + static_cast<int64_t>(sequence) * num_bias;
  PatchFlags flags{false, settings.allowed != nullptr || ban_eos};
  bool hit = false;
  for (int i = threadIdx.x; i < num_bias; i += kThreads) {
    hit |= ids[i] >= start && ids[i] < start + kSlotElements && ids[i] < args.vocab;
  }
  if (num_bias > 0) flags.bias = __syncthreads_or(hit);
  if (!flags.bias && !flags.bans) return flags;

  __syncthreads();  // the patch before this one has been read
  if (flags.bias) {
    for (int i = threadIdx.x; i < kSlotElements; i += kThreads) patch.bias[i] = 0.0f;
  }
  if (flags.bans && threadIdx.x < kSlotElements / 32) {
    const int words = (args.vocab + 31) / 32;
    const int word = start / 32 + threadIdx.x;
    const bool masked = settings.allowed != nullptr && word < words;
    patch.allowed[threadIdx.x] =
        masked ? settings.allowed[static_cast<int64_t>(row) * words + word] : 0xffffffffu;
  }
  __syncthreads();
  if (flags.bias) {
    for (int i = threadIdx.x; i < num_bias; i += kThreads) {
      const int64_t id = ids[i];
      if (id < start || id >= start + kSlotElements) continue;
      float sum = 0.0f;  // equal ids add up in the order of the list, in every thread that has one
      for (int j = 0; j < num_bias; ++j) {
        if (ids[j] == id) sum = exact::add(sum, values[j]);
      }
      patch.bias[id - start] = sum;
    }
  }
  if (ban_eos) {
    const int64_t* eos = args.step.eos + sequence * args.step.eos_stride;
    for (int i = threadIdx.x; i < args.step.num_eos; i += kThreads) {
      const int64_t place = eos[i] - start;
      if (place < 0 || place >= kSlotElements) continue;
      atomicAnd(&patch.allowed[place / 32], ~(1u << (place % 32)));
    }
  }
  __syncthreads();
  return flags;
}

// Occurrences of the logits of one chunk, the drafts before this place counted as generated.
__device__ __forceinline__ void load_occurrences(const SampleArgs& args, uint32_t sequence,
                                                 int place, int chunk, int (&counts)[4]) {
  const int* row = args.settings.occurrences + sequence * args.settings.occurrences_stride;
  const uint4 packed =
      load_chunk(reinterpret_cast<const float*>(row), chunk, args.vocab, args.occurrences_aligned);
  counts[0] = static_cast<int>(packed.x);
  counts[1] = static_cast<int>(packed.y);
  counts[2] = static_cast<int>(packed.z);
  counts[3] = static_cast<int>(packed.w);
  const int64_t* drafts = args.drafts + static_cast<int64_t>(sequence) * (args.places - 1);
  for (int before = 0; before < place; ++before) {
    const int64_t offset = drafts[before] - static_cast<int64_t>(chunk) * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) counts[i] += offset == i ? 2 : 0;
  }
}

__device__ __forceinline__ float penalise(float score, int occurrences,
                                          const RowSettings& settings) {
  if (occurrences != 0) {
    score = score < 0.0f ? exact::mul(score, settings.repetition)
                         : __fdiv_rn(score, settings.repetition);
  }
  const int generated = occurrences >> 1;
  if (generated != 0) {
    score = exact::sub(score, exact::mul(settings.frequency, static_cast<float>(generated)));
    score = exact::sub(score, settings.presence);
  }
  return score;
}

}  // namespace flashrt
