// Runs the device code of attend on a CPU: every CUDA thread is a fiber, and warps, blocks and
// clusters meet at barriers. Warps advance in random order, so that a missing barrier shows; shared
// memory starts as NaN. Included before any other file of the program.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)

namespace emulate {

// Completes when `expected` have arrived; then the next generation begins.
struct Barrier {
  int expected = 0;
  int arrived = 0;
  long generation = 0;

  void complete_if_due() {
    if (arrived < expected) return;
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  Barrier barrier;
  uint32_t words[32][6];  // what each lane shows the others
};

struct Block {
  Barrier barrier;
  std::vector<Warp> warps;
  std::vector<unsigned char> shared;   // dynamic shared memory
  std::vector<unsigned char> statics;  // shared variables
  uint3 index;
};

struct Cluster {
  Barrier barrier;
  std::vector<Block> blocks;
};

struct Copy {
  void* shared;
  const void* global;
  int bytes;
};

struct Thread {
  void* stack_pointer = nullptr;
  std::vector<char> stack;
  uint3 index;
  int lane = 0;
  Warp* warp = nullptr;
  Block* block = nullptr;
  Cluster* cluster = nullptr;
  bool done = false;
  Barrier* waits_for = nullptr;
  long waits_until = 0;  // generation that `waits_for` must leave
  bool cluster_arrived = false;
  long cluster_generation = 0;  // in which it arrived
  std::vector<Copy> open_copies;
  std::deque<std::vector<Copy>> copies;  // committed groups on their way
};

extern Thread* current;
extern dim3 grid;

[[noreturn]] inline void fail(const char* what) {
  std::printf("%s\n", what);
  std::exit(2);
}

void yield();
void wait(Barrier& barrier, long generation);

inline void meet(Barrier& barrier) {
  const long generation = barrier.generation;
  ++barrier.arrived;
  barrier.complete_if_due();
  wait(barrier, generation);
}

// What `pick` finds in the words that all lanes of the warp have shown.
template <typename Pick>
uint32_t exchange(uint32_t word, Pick pick) {
  Warp& warp = *current->warp;
  warp.words[current->lane][0] = word;
  meet(warp.barrier);
  const uint32_t found = pick(warp);
  meet(warp.barrier);
  return found;
}

// One launch, cluster by cluster; every block gets `shared_bytes`.
void run(dim3 blocks, int threads, int cluster_blocks, int shared_bytes,
         const std::function<void()>& kernel, unsigned seed);

}  // namespace emulate

#define threadIdx (emulate::current->index)
#define blockIdx (emulate::current->block->index)
#define gridDim (emulate::grid)

using std::max;
using std::min;

inline void __syncthreads() { emulate::meet(emulate::current->block->barrier); }
inline void __syncwarp() { emulate::meet(emulate::current->warp->barrier); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline int __umulhi(uint32_t a, uint32_t b) { return (static_cast<uint64_t>(a) * b) >> 32; }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __int_as_float(int bits) { return __uint_as_float(bits); }
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
template <typename T>
T __ldcg(const T* pointer) {
  return *pointer;
}
inline float __shfl_sync(unsigned, float value, int from) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return __uint_as_float(
      emulate::exchange(bits, [&](emulate::Warp& warp) { return warp.words[from][0]; }));
}
inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
  return __shfl_sync(mask, value, emulate::current->lane ^ distance);
}
