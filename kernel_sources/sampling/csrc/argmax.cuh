// Index of the largest logit of each row: lowest index among equals, NaN above everything (as
// torch.argmax has it), -0 equal to +0.
//
// logits [rows, vocab] bf16, fp16 or fp32, unit stride along a row, rows at any stride. Every block
// scans one slot of a row and writes its best as one 64-bit key; the last block of the row to
// finish takes the largest key and hands the index on. The maximum of keys does not depend on any
// order, so the result is deterministic whichever block comes last.
#pragma once

#include <cub/block/block_reduce.cuh>
#include <cuda/functional>

#include "common/chunk.cuh"
#include "common/pdl.cuh"
#include "keys.cuh"

namespace flashrt {

// Largest key among this thread's elements of [begin, end); 0 when it has none.
template <typename T>
__device__ __forceinline__ uint64_t best_of_slot(const T* row, int begin, int end, int vocab,
                                                 bool aligned) {
  constexpr int kLoads = kSlotElements / (kThreads * kVec<T>);  // chunks a thread and round
  uint32_t best = 0;
  int best_index = 0;
  for (int start = begin; start < end; start += kSlotElements) {
    uint4 packed[kLoads];
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int chunk = start / kVec<T> + load * kThreads + threadIdx.x;
      if (chunk_count<T>(chunk, vocab) > 0) packed[load] = load_chunk(row, chunk, vocab, aligned);
    }
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int chunk = start / kVec<T> + load * kThreads + threadIdx.x;
      const int count = chunk_count<T>(chunk, vocab);
      float values[kVec<T>];
      unpack<T>(packed[load], values);
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) {
        const uint32_t ordered = i < count ? ordered_bits(values[i]) : 0;
        if (ordered > best) {  // indices ascend, so the first of equals stays
          best = ordered;
          best_index = chunk * kVec<T> + i;
        }
      }
    }
  }
  return best == 0 ? 0 : key_of(best, best_index);
}

// Finish: `state = finish.load(row)` before the scan, in one thread of every block, for what does
// not depend on the result; `finish.store(row, index, state)` once per row.
template <typename T, typename Finish>
__global__ void __launch_bounds__(kThreads)
    argmax_kernel(const __grid_constant__ ArgmaxArgs args, const __grid_constant__ Finish finish) {
  using Reduce = cub::BlockReduce<uint64_t, kThreads>;
  __shared__ typename Reduce::TempStorage scratch;
  __shared__ bool is_last;
  launch_dependents();
  wait_for_inputs();

  const uint32_t row = blockIdx.x / args.num_slots;
  const int slot = blockIdx.x - row * args.num_slots;
  typename Finish::State state{};
  if (threadIdx.x == 0) state = finish.load(row);

  const T* logits = static_cast<const T*>(args.logits) + row_offset(args.logit_rows, row);
  const int begin = slot * args.slot_size;
  const int end = min(begin + args.slot_size, args.vocab);
  uint64_t key = best_of_slot(logits, begin, end, args.vocab, args.aligned);
  key = Reduce(scratch).Reduce(key, cuda::maximum<uint64_t>{});

  uint64_t* scratch_row = static_cast<uint64_t*>(args.workspace) + row * (1 + kMaxSlots);
  uint32_t* counter = reinterpret_cast<uint32_t*>(scratch_row);
  uint64_t* keys = scratch_row + 1;
  if (threadIdx.x == 0) {
    keys[slot] = key;
    const uint32_t last = args.num_slots - 1;
    is_last = count_in(counter, last) == last;
  }
  __syncthreads();
  if (!is_last) return;

  key = threadIdx.x < args.num_slots ? __ldcg(&keys[threadIdx.x]) : 0;
  key = Reduce(scratch).Reduce(key, cuda::maximum<uint64_t>{});
  if (threadIdx.x == 0) finish.store(row, index_of(key), state);
}

}  // namespace flashrt
