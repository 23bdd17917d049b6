// A warp's columns of x in shared memory, and how a lane reads and writes its part of a row.
#pragma once

#include <algorithm>

#include "common/vec.cuh"
#include "layout.cuh"

namespace flashrt {

// Read kVectorElements columns from `column`, zeros past `k`; kVector promises 16-byte aligned
// rows.
template <typename T, bool kVector>
__device__ __forceinline__ uint4 load_words(const void* base, int64_t offset, int column, int k) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if constexpr (kVector) {
    if (column < k)
      words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(base) + offset + column));
  } else {
    unsigned short elements[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      elements[i] = column + i < k
                        ? __ldcg(static_cast<const unsigned short*>(base) + offset + column + i)
                        : 0;
    }
    words = make_uint4(elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                       elements[4] | elements[5] << 16, elements[6] | elements[7] << 16);
  }
  return words;
}

template <typename T, bool kVector>
__device__ __forceinline__ void load_columns(const void* base, int64_t offset, int column, int k,
                                             float (&values)[kVectorElements]) {
  unpack<T>(load_words<T, kVector>(base, offset, column, k), values);
}

template <typename T, bool kVector>
__device__ __forceinline__ void store_columns(void* base, int64_t offset, int column, int k,
                                              const float (&values)[kVectorElements]) {
  if constexpr (kVector) {
    if (column < k)
      *reinterpret_cast<uint4*>(static_cast<T*>(base) + offset + column) = pack<T>(values);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (column + i < k) static_cast<T*>(base)[offset + column + i] = from_float<T>(values[i]);
    }
  }
}

// A warp's columns of x in shared memory, ordered as the products read them: [segment][piece][row]
// [lane % 4], 16 bytes each. A pass of the warp fills one turn or several.
inline constexpr int kPassElements = 32 * kVectorElements;
template <typename Format>
inline constexpr int kTurnsPerPass = std::max(1, kPassElements / kTurnElements<Format>);
template <typename Format>
inline constexpr int kPassesPerTurn = std::max(1, kTurnElements<Format> / kPassElements);

// Passes that a warp's part of a row takes.
template <typename Format>
__host__ __device__ constexpr int count_passes(int turns) {
  return (turns * kPassesPerTurn<Format> + kTurnsPerPass<Format> - 1) / kTurnsPerPass<Format>;
}

template <int kRows, typename Format>
struct Slice {
  uint4* words;  // of the warp's first turn
  int passes;
  int first_column;
  int turn_stride;  // in columns, of the turns of one pass together
  int place;        // this lane's 16 bytes of pass 0, row 0

  // Lanes follow the order of shared memory, not of columns: scattered stores are slow.
  __device__ Slice(uint4* shared_x, const Plan& plan) {
    constexpr int kTurnLanes = 32 / kTurnsPerPass<Format>;
    const int turn = threadIdx.x % 32 / kTurnLanes;  // of the pass
    const int piece = threadIdx.x % kTurnLanes / 4;  // of the turn, over two segments
    const int warp = threadIdx.x / 32;
    passes = count_passes<Format>(plan.turns);
    words = shared_x + warp * passes * kPassWords;
    first_column = (turn * plan.warps + warp) * kTurnElements<Format> +
                   piece / kPieces<Format> * kSegmentElements<Format> +
                   threadIdx.x % 4 * kLaneElements<Format> +
                   piece % kPieces<Format> * kVectorElements;
    turn_stride = kTurnsPerPass<Format> * plan.warps * kTurnElements<Format>;
    place = threadIdx.x % 32 / 4 * kRows * 4 + threadIdx.x % 4;
  }

  // The first of the lane's columns in a pass.
  __device__ int column(int pass) const {
    return first_column + pass / kPassesPerTurn<Format> * turn_stride +
           pass % kPassesPerTurn<Format> * kPassElements;
  }

  static constexpr int kPassWords = 32 * kRows;

  __device__ uint4& at(int m, int pass) const { return words[pass * kPassWords + place + m * 4]; }
};

}  // namespace flashrt
