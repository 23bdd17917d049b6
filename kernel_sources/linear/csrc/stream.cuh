// y = x' @ W.T for 1..8 rows by reading every weight once, at the speed of memory.
//
// Tensor-core products take 16 rows of W as one operand and up to 8 rows of x as the other, so that
// one row of x costs as much as eight and few instructions are spent on a weight. The warps of a
// block share its rows of W by columns: a warp multiplies the same few columns of every row,
// prepares just that part of x, and a block reads a contiguous piece of W. Weights pass through a
// ring in shared memory, filled with cp.async; a lane reads back only the 16 bytes it asked for, so
// the ring needs no barrier. With weights that have no producer in flight, the ring is filled
// before griddepcontrol.wait: as blocks of the previous kernel leave, blocks of this one take their
// place and keep the memory system busy while x is finished.
#pragma once

#include <type_traits>

#include "common/pdl.cuh"
#include "common/vec.cuh"
#include "copy.cuh"
#include "epilogue.cuh"
#include "layout.cuh"
#include "prologue.cuh"

namespace flashrt {

// Stages of a warp's ring: 8 KB in flight a warp, less where many rows of x need the room. A
// stage is one turn of one tile, 32 lanes of 16 bytes for each segment and half.
template <int kRows, int kTeams>
inline constexpr int kStages = kRows == 8    ? 2
                               : kTeams == 2 ? 3
                                             : 4;
inline constexpr int kPieceBytes = 512;
inline constexpr int kStageBytes = kSegments * 2 * kPieceBytes;

// c += a @ b for a 16x16 tile of W, rows lane / 4 and lane / 4 + 8, and 16 elements of 8 rows of x,
// row lane / 4.
template <typename T>
__device__ __forceinline__ void multiply(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// One segment: 32 elements of the two rows of W and of the row of x that a lane holds.
template <typename T>
__device__ __forceinline__ void multiply_segment(float (&c)[4], const uint4& lower,
                                                 const uint4& upper, const uint4& x) {
  multiply<T>(c, lower.x, upper.x, lower.y, upper.y, x.x, x.y);
  multiply<T>(c, lower.z, upper.z, lower.w, upper.w, x.z, x.w);
}

// Fills a lane's part of the ring: the turns of one of its team's tiles, then those of the next.
// Once the ring is full, the stage that was just read is the one to refill, so reader and writer
// share one place.
template <int kTeams>
struct Producer {
  const char* rows[2];  // the lane's place in the next stage, in each half of the tile
  int64_t tile_stride[2];
  int rows_left[2];  // rows from the lane's on; none left reads as zeros
  int tiles_left;
  int turns_left;
  int columns_left;
  const int turns, turn_bytes, first_columns_left, rows_per_step;

  __device__ Producer(const BlockRows& block, const Plan& plan, int k)
      : turns_left(plan.turns),
        turns(plan.turns),
        turn_bytes(plan.warps * kTurnElements * 2),
        first_columns_left(k - first_column(plan)),
        rows_per_step(kTeams * block.rows_per_tile) {
    const int team = team_of<kTeams>(plan);
    const int row = team * block.rows_per_tile + threadIdx.x % 32 / 4;
    tiles_left = (block.outputs - team * block.rows_per_tile + rows_per_step - 1) / rows_per_step;
    columns_left = first_columns_left;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half] = block.base[half] + row * block.row_stride[half] + first_column(plan) * 2;
      tile_stride[half] = rows_per_step * block.row_stride[half];
      rows_left[half] = block.count[half] - row;
    }
  }

  __device__ static int first_column(const Plan& plan) {
    return warp_of_team<kTeams>(plan) * kTurnElements + threadIdx.x % 4 * kLaneElements;
  }

  // Ask for one stage; an empty commit past the end keeps the count of groups in flight.
  __device__ void produce(char* stage) {
    if (tiles_left > 0) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const bool inside = columns_left > segment * kSegmentElements;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          copy_async(stage + (segment * 2 + half) * kPieceBytes,
                     rows[half] + segment * kSegmentElements * 2,
                     inside && rows_left[half] > 0 ? 16 : 0);
        }
      }
      const bool next_tile = --turns_left == 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows[half] += next_tile ? tile_stride[half] - static_cast<int64_t>(turns - 1) * turn_bytes
                                : turn_bytes;
        if (next_tile) rows_left[half] -= rows_per_step;
      }
      columns_left -= turn_bytes / 2;
      if (next_tile) {
        --tiles_left;
        turns_left = turns;
        columns_left = first_columns_left;
      }
    }
    commit_copies();
  }
};

// Put a warp's sums of one tile where the block can add them: `partial` is [row of W][row of
// x][warp].
template <int kRows, int kTeams>
__device__ __forceinline__ void publish_tile(const float (&acc)[kSegments][4], float* partial,
                                             const Plan& plan) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = lane % 4 * 2 + i % 2;
    const int row = lane / 4 + i / 2 * kHalfTile;
    if (m < kRows) {
      partial[(row * kRows + m) * plan.warps + warp_of_team<kTeams>(plan)] = acc[0][i] + acc[1][i];
    }
  }
}

// Add the warps' sums of the block's outputs and finish them.
template <typename T, int kRows>
__device__ __forceinline__ void finish_outputs(const LinearArgs& args, const Plan& plan,
                                               const BlockRows& rows, const float* partial,
                                               Output<T> output) {
  const int tile_stride = kTileRows * kRows * plan.warps;
  for (int index = threadIdx.x; index < rows.outputs * kRows; index += blockDim.x) {
    if (index != static_cast<int>(threadIdx.x)) output = Output<T>(args, rows, index, kRows);
    if (!output.active) continue;
    const int tile = output.row / rows.rows_per_tile;
    const int row = output.row % rows.rows_per_tile;
    const float* sums = partial + tile * tile_stride + (row * kRows + output.m) * plan.warps;
    const float up =
        args.gated ? sum_warps(sums + kHalfTile * kRows * plan.warps, plan.warps) : 0.0f;
    output.store(args, sum_warps(sums, plan.warps), up);
  }
}

// Shared memory of one block: the ring, x, the warps' sums.
template <int kRows, int kTeams>
inline int shared_bytes(const Plan& plan, bool with_ring) {
  const int ring = with_ring ? kTeams * plan.warps * kStages<kRows, kTeams> * kStageBytes : 0;
  const int passes = (plan.turns + kTurnsPerPass - 1) / kTurnsPerPass;
  const int x = plan.warps * passes * Slice<kRows, kTeams>::kPassWords * 16;
  return ring + x +
         plan.tiles_per_block * kTileRows * kRows * plan.warps * static_cast<int>(sizeof(float));
}

template <typename T, int kRows, int kTeams>
__global__ void __launch_bounds__(kTeams * kMaxWarps * 32, kTeams == 2  ? 1
                                                           : kRows <= 2 ? 4
                                                                        : 2)
    stream_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ PrologueScratch scratch;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  char* const ring = shared + warp * (kStages<kRows, kTeams> * kStageBytes) + lane * 16;
  char* const ring_end = ring + kStages<kRows, kTeams> * kStageBytes;
  uint4* const shared_x =
      reinterpret_cast<uint4*>(shared + kTeams * plan.warps * kStages<kRows, kTeams> * kStageBytes);

  launch_dependents();
  const BlockRows rows = find_block_rows(args, plan);
  const Slice<kRows, kTeams> slice(shared_x, plan);
  Producer<kTeams> producer(rows, plan, args.k);
  NormWords<T, kRows, kTeams, true> norm_words;
  if (!args.weights_static) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kStages<kRows, kTeams>; ++i) producer.produce(ring + i * kStageBytes);
  norm_words.preload(args, slice);
  if (args.weights_static) wait_for_inputs();

  // With few rows the epilogue's operands are read ahead of the sums, with many the registers are
  // short.
  Output<T> output;
  if constexpr (kRows <= 2) output = Output<T>(args, rows, threadIdx.x, kRows);
  prepare_rows<T, kRows, kTeams, true>(args, plan, scratch, slice, norm_words);
  if constexpr (kTeams > 1) {
    __syncthreads();
  } else {
    __syncwarp();
  }
  float* const partial = reinterpret_cast<float*>(shared_x + plan.warps * slice.passes *
                                                                 Slice<kRows, kTeams>::kPassWords);
  const uint4* const x = slice.words + lane;  // of the row lane / 4, when there is one
  const bool has_row = lane / 4 < kRows;
  char* stage = ring;
  const int tiles = (rows.outputs + rows.rows_per_tile - 1) / rows.rows_per_tile;
  for (int tile = team_of<kTeams>(plan); tile < tiles; tile += kTeams) {
    float acc[kSegments][4] = {};
#pragma unroll 1
    for (int turn = 0; turn < plan.turns; ++turn) {
      // fetch_rows has waited for all that was asked for until then; each turn since asked for one
      // stage.
      wait_copies<kStages<kRows, kTeams> - 1>();
      uint4 w[kSegments][2];
      uint4 v[kSegments];
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          w[segment][half] =
              *reinterpret_cast<const uint4*>(stage + (segment * 2 + half) * kPieceBytes);
        }
        v[segment] = has_row ? x[(turn * kSegments + segment) * kRows * 4] : make_uint4(0, 0, 0, 0);
      }
      producer.produce(stage);
      stage += kStageBytes;
      if (stage == ring_end) stage = ring;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        multiply_segment<T>(acc[segment], w[segment][0], w[segment][1], v[segment]);
      }
    }
    publish_tile<kRows, kTeams>(acc, partial + tile * kTileRows * kRows * plan.warps, plan);
  }
  __syncthreads();
  if constexpr (kRows > 2) output = Output<T>(args, rows, threadIdx.x, kRows);
  finish_outputs<T, kRows>(args, plan, rows, partial, output);
}

}  // namespace flashrt
