// Stands in for csrc/ptx.cuh on a CPU; the contracts are there.
#pragma once

#include "common/vec.cuh"
#include "emulate.h"

namespace flashrt {

template <typename T>
float element(uint32_t word, int half);
template <>
inline float element<__nv_bfloat16>(uint32_t word, int half) {
  return __uint_as_float((half ? word >> 16 : word & 0xffff) << 16);
}
template <>
inline float element<__half>(uint32_t word, int half) {
  __half_raw raw;
  raw.x = static_cast<unsigned short>(half ? word >> 16 : word & 0xffff);
  return __half2float(__half(raw));
}

template <typename T>
void mma_16x8x16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                 uint32_t b1) {
  emulate::Warp& warp = *emulate::current->warp;
  const int lane = emulate::current->lane;
  const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
  std::copy(own, own + 6, warp.words[lane]);
  emulate::meet(warp.barrier);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; ++k) {
      const uint32_t a = warp.words[row % 8 * 4 + k % 8 / 2][row / 8 + 2 * (k / 8)];
      const uint32_t b = warp.words[column * 4 + k % 8 / 2][4 + k / 8];
      sum += static_cast<double>(element<T>(a, k % 2)) * element<T>(b, k % 2);
    }
    c[i] = static_cast<float>(sum);
  }
  emulate::meet(warp.barrier);
}

template <typename T>
inline constexpr uint32_t kOnes2 = 0;
template <>
inline constexpr uint32_t kOnes2<__nv_bfloat16> = 0x3f803f80u;
template <>
inline constexpr uint32_t kOnes2<__half> = 0x3c003c00u;

inline uint32_t transpose_8x8(uint32_t word) {
  const int r = emulate::current->lane / 4, c = emulate::current->lane % 4;
  return emulate::exchange(word, [&](emulate::Warp& warp) {
    const auto at = [&](int row) {
      const uint32_t pair = warp.words[row * 4 + r / 2][0];
      return r % 2 ? pair >> 16 : pair & 0xffff;
    };
    return at(2 * c) | at(2 * c + 1) << 16;
  });
}

inline float exp2_fast(float x) { return exp2f(x); }
inline float tanh_fast(float x) { return tanhf(x); }

inline void load_matrices(uint32_t (&m)[4], const void* row, bool transposed) {
  emulate::Warp& warp = *emulate::current->warp;
  const int lane = emulate::current->lane, r = lane / 4, c = lane % 4;
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulate::fail("misaligned load_matrices");
  std::memcpy(warp.words[lane], &row, sizeof row);
  emulate::meet(warp.barrier);
  for (int i = 0; i < 4; ++i) {
    uint16_t elements[2];
    for (int j = 0; j < 2; ++j) {
      const int matrix_row = transposed ? 2 * c + j : r, column = transposed ? r : 2 * c + j;
      const uint16_t* from;
      std::memcpy(&from, warp.words[8 * i + matrix_row], sizeof from);
      elements[j] = from[column];
    }
    std::memcpy(&m[i], elements, 4);
  }
  emulate::meet(warp.barrier);
}
inline void load_matrices(uint32_t (&m)[4], const void* row) { load_matrices(m, row, false); }
inline void load_matrices_transposed(uint32_t (&m)[4], const void* row) {
  load_matrices(m, row, true);
}

// A copy arrives as late as it may: when its thread waits for it. Until then its target is NaN.
inline void copy_async(void* shared, const void* global, int bytes) {
  emulate::Copy copy{shared, global, bytes};
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0) emulate::fail("misaligned copy");
  if (bytes != 0 && reinterpret_cast<uintptr_t>(global) % 16 != 0) emulate::fail("misaligned copy");
  std::memset(shared, 0xff, 16);
  emulate::current->open_copies.push_back(copy);
}
inline void commit_copies() {
  emulate::current->copies.push_back(emulate::current->open_copies);
  emulate::current->open_copies.clear();
}
inline void wait_copies(int pending) {
  if (pending < 0) emulate::fail("wait for a copy that nobody asked for");
  auto& groups = emulate::current->copies;
  while (static_cast<int>(groups.size()) > pending) {
    for (const emulate::Copy& copy : groups.front()) {
      std::memset(copy.shared, 0, 16);
      std::memcpy(copy.shared, copy.global, copy.bytes);
    }
    groups.pop_front();
  }
}

template <typename T>
uint32_t scale_pair(uint32_t pair, float power) {
  const T scaled[2] = {from_float<T>(element<T>(pair, 0) * power),
                       from_float<T>(element<T>(pair, 1) * power)};
  uint32_t word;
  std::memcpy(&word, scaled, 4);
  return word;
}

inline int add_in_order(int* counter, int value) {
  const int before = *counter;
  *counter += value;
  return before;
}

inline void cluster_arrive() {
  emulate::Thread& self = *emulate::current;
  emulate::Barrier& barrier = self.cluster->barrier;
  if (self.cluster_arrived) emulate::fail("cluster_arrive twice without cluster_wait");
  self.cluster_arrived = true;
  self.cluster_generation = barrier.generation;
  ++barrier.arrived;
  barrier.complete_if_due();
}
inline void cluster_start() { cluster_arrive(); }
inline void cluster_wait() {
  emulate::Thread& self = *emulate::current;
  if (!self.cluster_arrived) emulate::fail("cluster_wait without cluster_arrive");
  self.cluster_arrived = false;
  emulate::wait(self.cluster->barrier, self.cluster_generation);
}

class ByteBarrier {
 public:
  void init() {
    bytes_ = 0;
    pending_ = 1;
    phase_ = 0;
  }
  void arrive_expecting(int bytes) {
    if (pending_ != 1) emulate::fail("more than one arrival in a phase");
    bytes_ += bytes;
    pending_ = 0;
    complete_if_due();
  }
  void wait(int parity) {
    while (phase_ % 2 == parity) emulate::yield();
  }
  void store_to_first(const float2* target, float2 value) {
    emulate::Block& self = *emulate::current->block;
    emulate::Block& first = emulate::current->cluster->blocks[0];
    const auto offset = reinterpret_cast<const unsigned char*>(target) - self.shared.data();
    if (offset < 0 || offset + sizeof value > self.shared.size()) emulate::fail("store outside");
    std::memcpy(first.shared.data() + offset, &value, sizeof value);
    const auto own = reinterpret_cast<unsigned char*>(this) - self.statics.data();
    auto* barrier = reinterpret_cast<ByteBarrier*>(first.statics.data() + own);
    barrier->bytes_ -= sizeof value;
    barrier->complete_if_due();
  }

 private:
  void complete_if_due() {
    if (pending_ != 0 || bytes_ != 0) return;
    ++phase_;
    pending_ = 1;
  }
  int bytes_;
  short pending_, phase_;
};

}  // namespace flashrt
