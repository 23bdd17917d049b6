// From a lane's sums of products to a block's outputs.
#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "formats.cuh"
#include "narrow.cuh"
#include "prologue.cuh"

namespace flashrt {

// Put a warp's sums of one tile where the block can add them: `partial` is [row of W][row of
// x][warp].
template <int kRows>
__device__ __forceinline__ void publish_tile(const float (&sums)[4], const float (&factors)[2],
                                             float* partial, const Plan& plan) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = lane % 4 * 2 + i % 2;
    const int row = lane / 4 + i / 2 * kHalfTile;
    if (m < kRows)
      partial[(row * kRows + m) * plan.warps + threadIdx.x / 32] = sums[i] * factors[i % 2];
  }
}

// Factors on a lane's sums of a tile: those of the two rows of x that it holds.
template <typename T, int kRows, typename Format>
__device__ __forceinline__ void read_factors(float (&values)[2], const RowFactors& factors) {
  constexpr bool kNarrowed = !std::is_same_v<T, Operand<T, Format>>;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int m = threadIdx.x % 4 * 2 + i;
    values[i] = Format::kFactor;
    if (kNarrowed && m < kRows) values[i] *= factors.values[m][threadIdx.x / 32];
  }
}

// Add the warps' sums of the block's outputs and finish them.
template <typename T, int kRows, typename Format>
__device__ __forceinline__ void finish_outputs(const LinearArgs& args, const Plan& plan,
                                               const BlockRows& rows, const float* partial,
                                               Output<T> output) {
  const int tile_stride = kTileRows * kRows * plan.warps;
  for (int index = threadIdx.x; index < rows.outputs * kRows; index += blockDim.x) {
    if (index != static_cast<int>(threadIdx.x)) output = Output<T>(args, rows, index, kRows);
    if (!output.active) continue;
    const int tile = output.row >> rows.tile_shift;
    const int row = output.row & (rows.rows_per_tile - 1);
    const float* sums = partial + tile * tile_stride + (row * kRows + output.m) * plan.warps;
    const float up =
        args.gated ? sum_warps(sums + kHalfTile * kRows * plan.warps, plan.warps) : 0.0f;
    output.store(args, sum_warps(sums, plan.warps), up);
  }
}

// A lane's sums of one tile. Scales of 128x128 elements apply to each turn's.
template <typename Format>
struct TileSums {
  float tile[4] = {};
  float turns[2][4] = {};  // of even and odd segments, since the last scales

  __device__ __forceinline__ void end_turn(const LinearArgs& args, const BlockRows& rows, int index,
                                           int turn) {
    if constexpr (Format::kBits == 8) {
      constexpr int kGrid = 128;
      static_assert(kTurnElements<Format> == kGrid);
      if (args.scale_columns == 0) return;
      const int column = turn < args.scale_columns ? turn : 0;  // past the end all is zero
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = index * rows.rows_per_tile;
        const int64_t grid_row = (rows.first[half] + row) / kGrid;
        const float scale = rows.count[half] > row
                                ? __ldg(rows.grid[half] + grid_row * args.scale_columns + column)
                                : 0.0f;
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          tile[i] = __fmaf_rn(scale, turns[0][i] + turns[1][i], tile[i]);
          turns[0][i] = turns[1][i] = 0.0f;
        }
      }
    }
  }

  __device__ __forceinline__ void end_tile() {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] += turns[0][i] + turns[1][i];
  }
};

}  // namespace flashrt
