// cub::BlockReduce as far as it is used: the result is in thread 0, something else in the others.
#pragma once

#include "emulate.h"

namespace cub {

template <typename T, int kThreads>
struct BlockReduce {
  struct TempStorage {
    T values[kThreads];
  };

  TempStorage& storage;

  explicit BlockReduce(TempStorage& scratch) : storage(scratch) {}

  template <typename Op>
  T Reduce(T value, Op op) {
    storage.values[emulate::thread] = value;
    emulate::barrier();
    T result{};
    if (emulate::thread != 0) return static_cast<T>(0x5a5a5a5a);
    result = storage.values[0];
    for (int i = 1; i < kThreads; ++i) result = op(result, storage.values[i]);
    return result;
  }

  T Sum(T value) {
    return Reduce(value, [](T a, T b) { return a + b; });
  }
};

}  // namespace cub
