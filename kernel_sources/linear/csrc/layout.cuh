// Which element of a weight row belongs to which warp and lane, the same for every launch with the
// same K.
//
// A row of K elements is cut into turns of 64; turn i belongs to warp i % warps of the block. A
// turn is cut into segments of 32, each one k-extent of two m16n8k16 products; the four lanes that
// hold a row of an operand take 8 consecutive elements each. So a lane loads 16 contiguous bytes of
// the caller's own row-major weights, and K is merely permuted inside the product, in W and x
// alike. The first and second segments of the turns are accumulated apart; the two sums are added,
// then the warps in order. Only K decides the number of warps: neither the number of activation
// rows nor the rows of W that a block works on enters the order of a sum, and a product's columns
// do not touch each other, so the bits of a row are the same for every M.
#pragma once

#include <cstdint>

#include "linear.h"

namespace flashrt {

inline constexpr int kLaneElements = 8;
inline constexpr int kSegmentElements = 4 * kLaneElements;
inline constexpr int kSegments = 2;
inline constexpr int kTurnElements = kSegments * kSegmentElements;
inline constexpr int kTileRows = 16;  // of W: the rows of one product
inline constexpr int kHalfTile = 8;   // a lane holds one row of each half
inline constexpr int kMaxWarps = 8;   // of a team

// What the host decides for one launch, beside the caller's arguments.
struct Plan {
  int warps;            // per team; a power of two
  int turns;            // per warp and row
  int tiles_per_block;  // of kTileRows rows of W
  int blocks[3];        // of each weight; when gated, all in blocks[0]
  float inverse_k;
};

// A block has one or two teams of plan.warps warps; each takes every kTeams-th tile.
template <int kTeams>
__device__ __forceinline__ int team_of(const Plan& plan) {
  return kTeams > 1 && threadIdx.x / 32 >= plan.warps ? 1 : 0;
}
template <int kTeams>
__device__ __forceinline__ int warp_of_team(const Plan& plan) {
  return kTeams > 1 ? threadIdx.x / 32 & (plan.warps - 1) : threadIdx.x / 32;
}

// The rows of W that one block multiplies with. The lower half of a tile is rows of `base[0]`; the
// upper half is the next rows of the same weight or, when gated, the up rows of the same outputs.
struct BlockRows {
  const char* base[2];    // row 0 of each half of tile 0
  int64_t row_stride[2];  // bytes
  int rows_per_tile;      // between a half's first rows in consecutive tiles: 16, or 8 when gated
  int count[2];           // rows there are from each base on; others read as zeros
  int outputs;            // of this block
  int first_output;       // column of `out` that row 0 yields
  const char* bias[2];    // of base[0]'s rows and, when gated, of base[1]'s; null without one
};

__device__ __forceinline__ BlockRows find_block_rows(const LinearArgs& args, const Plan& plan) {
  constexpr int kElementBytes = 2;
  int block = blockIdx.x;
  int index = 0;
  int skipped = 0;
  while (!args.gated && index < args.num_weights - 1 && block >= plan.blocks[index]) {
    block -= plan.blocks[index];
    skipped += args.n[index];
    ++index;
  }
  BlockRows rows;
  rows.rows_per_tile = args.gated ? kHalfTile : kTileRows;
  const int first = block * plan.tiles_per_block * rows.rows_per_tile;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int weight = args.gated ? half : index;
    const int row = args.gated ? first : first + half * kHalfTile;
    rows.row_stride[half] = args.weight_stride[weight] * kElementBytes;
    rows.base[half] = static_cast<const char*>(args.weight[weight]) + row * rows.row_stride[half];
    rows.count[half] = args.n[weight] - row;
    rows.bias[half] = static_cast<const char*>(args.bias[weight]);
    if (rows.bias[half] != nullptr) rows.bias[half] += static_cast<int64_t>(first) * kElementBytes;
  }
  rows.outputs =
      min(plan.tiles_per_block * rows.rows_per_tile, args.n[args.gated ? 0 : index] - first);
  rows.first_output = skipped + first;
  return rows;
}

}  // namespace flashrt
