// Which element of a weight row belongs to which warp and lane, the same for every launch with the
// same K and format.
//
// A row of K elements is cut into turns; turn i belongs to warp i % warps of the block. A turn is
// cut into two or four segments; the four lanes that hold a row of an operand take 16 bytes of a
// segment each, which are 8, 16 or 32 consecutive elements. So K is merely permuted inside the
// products, in W and x alike, and a lane reads row-major weights 16 contiguous bytes at a time.
// Even and odd segments of the turns are accumulated apart; the two sums are added, then the warps
// in order. Only K and the format decide the number of warps: neither the number of activation rows
// nor the rows of W that a block works on enters the order of a sum, and a product's columns do not
// touch each other, so the bits of a row are the same for every M.
#pragma once

#include <cstdint>

#include "linear.h"

namespace flashrt {

inline constexpr int kVectorElements = 8;  // of x, in 16 bytes
inline constexpr int kTileRows = 16;       // of W: the rows of one product
inline constexpr int kHalfTile = 8;        // a lane holds one row of each half
inline constexpr int kTileColumns = 256;   // of stored tiles
inline constexpr int kMaxWarps = 8;

// Elements along K of a lane's 16 bytes, of a segment and of a turn.
template <typename Format>
inline constexpr int kLaneElements = 128 / Format::kBits;
template <typename Format>
inline constexpr int kSegmentElements = 4 * kLaneElements<Format>;
template <typename Format>
inline constexpr int kSegments = Format::kSegments;
template <typename Format>
inline constexpr int kTurnElements = kSegments<Format> * kSegmentElements<Format>;
// 16-byte pieces of x that face a lane's 16 bytes of W.
template <typename Format>
inline constexpr int kPieces = kLaneElements<Format> / kVectorElements;

inline constexpr int kShareBits = 16;

// What the host decides for one launch, beside the caller's arguments.
struct Plan {
  int warps;            // of a block; a power of two
  int turns;            // per warp and row
  int tiles_per_block;  // of kTileRows rows of W; at most
  int blocks[3];        // of each weight; when gated, all in blocks[0]
  uint32_t share[3];    // tiles of a block of each weight, in 2^-kShareBits
  float inverse_k;
  uint32_t two = 2, four = 4, eight = 8, sixty_four = 64, five_hundred_twelve = 512;
};

// The rows of W that one block multiplies with. The lower half of a tile is rows of `base[0]`; the
// upper half is the next rows of the same weight or, when gated, the up rows of the same outputs.
struct BlockRows {
  const char* base[2];    // row 0 of the weight of each half
  int64_t row_stride[2];  // bytes
  int first[2];           // row of the weight that starts each half of tile 0
  int count[2];           // rows there are from `first` on; others read as zeros
  int rows_per_tile;      // between a half's first rows in consecutive tiles: 16, or 8 when gated
  int tile_shift;         // its logarithm
  int outputs;            // of this block
  int first_output;       // column of `out` that row 0 yields
  const char* bias[2];    // of the block's outputs in each half; null without one
  const float* scale[2];  // the same, or null
  const float* grid[2];   // scales of 128x128 blocks of each half's weight, or null

  __device__ int tiles() const { return (outputs + rows_per_tile - 1) >> tile_shift; }
};

// The first tile of a block of weight `index`: blocks share its tiles evenly, and the one past the
// last starts at or past the end.
__device__ __forceinline__ int first_tile(const Plan& plan, int index, int block) {
  return static_cast<int>(static_cast<uint64_t>(block) * plan.share[index] >> kShareBits);
}

__device__ __forceinline__ BlockRows find_block_rows(const LinearArgs& args, const Plan& plan,
                                                     int element_bits) {
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
  rows.tile_shift = args.gated ? 3 : 4;
  rows.rows_per_tile = 1 << rows.tile_shift;
  const int first = first_tile(plan, index, block) << rows.tile_shift;
  const int last = first_tile(plan, index, block + 1) << rows.tile_shift;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int weight = args.gated ? half : index;
    rows.first[half] = args.gated ? first : first + half * kHalfTile;
    rows.row_stride[half] = args.weight_stride[weight] * element_bits / 8;
    rows.base[half] = static_cast<const char*>(args.weight[weight]);
    rows.count[half] = args.n[weight] - rows.first[half];
    rows.bias[half] = static_cast<const char*>(args.bias[weight]);
    if (rows.bias[half] != nullptr) rows.bias[half] += static_cast<int64_t>(first) * kElementBytes;
    const float* const scale = args.weight_scale[weight];
    rows.scale[half] = scale != nullptr && args.scale_columns == 0 ? scale + first : nullptr;
    rows.grid[half] = args.scale_columns > 0 ? scale : nullptr;
  }
  rows.outputs = min(last, args.n[index]) - first;
  rows.first_output = skipped + first;
  return rows;
}

}  // namespace flashrt
