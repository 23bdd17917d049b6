// cub::BlockScan as far as it is used.
#pragma once

#include "emulate.h"

namespace cub {

template <typename T, int kThreads>
struct BlockScan {
  struct TempStorage {
    T values[kThreads];
  };

  TempStorage& storage;

  explicit BlockScan(TempStorage& scratch) : storage(scratch) {}

  void ExclusiveSum(T value, T& before, T& all) {
    storage.values[emulate::thread] = value;
    emulate::barrier();
    before = all = 0;
    for (int i = 0; i < kThreads; ++i) {
      if (i < emulate::thread) before += storage.values[i];
      all += storage.values[i];
    }
  }
  void ExclusiveSum(T value, T& before) {
    T all;
    ExclusiveSum(value, before, all);
  }
  void InclusiveSum(T value, T& sum) {
    ExclusiveSum(value, sum);
    sum += value;
  }
};

}  // namespace cub
