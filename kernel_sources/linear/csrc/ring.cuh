// The rings that weights, and perhaps x, pass through on their way to the products.
#pragma once

#include "copy.cuh"
#include "formats.cuh"
#include "slice.cuh"

namespace flashrt {

// Where x comes from while products run.
enum class RowSource { kShared, kRing };

inline constexpr int kPieceBytes = 512;  // of one segment and half: 16 a lane

// Stages of a ring: about 8 KB of weights in flight a warp, less where many rows of x need the room
// of other blocks. `narrow` blocks, of half the warps, have room for more of the largest stages.
template <int kRows, typename Format, RowSource kSource>
constexpr int stages_of(bool narrow) {
  if (Format::kTiled) return kRows > 2 ? 1 : narrow ? 3 : 2;
  if (Format::kBits == 8) return kRows <= 2 ? 4 : kRows == 4 ? 3 : 2;
  if (kSource == RowSource::kRing) return kRows == 4 ? 4 : 3;
  return kRows == 8 ? 2 : 4;
}

// One kernel's ring: a stage is one turn of one tile, a piece for each segment and half, with block
// scales as they are stored, then perhaps the turn's columns of x.
template <int kRows, typename Format, RowSource kSource, int kStages>
struct Ring {
  static constexpr bool kHasRows = kSource == RowSource::kRing;
  static constexpr int kWeightBytes = Format::kTiled
                                          ? kSegments<Format> / 2 * NVFP4Format::kTileBytes
                                          : kSegments<Format> * 2 * kPieceBytes;
  static constexpr int kRowBytes =
      kHasRows ? kRows * kTurnElements<Format> * static_cast<int>(sizeof(uint16_t)) : 0;
  static constexpr int kStageBytes = kWeightBytes + kRowBytes;
  static constexpr int kBytes = kStages * kStageBytes;
};

// Where a lane's 16 bytes lie in a stage, less lane * 16.
template <typename Format>
__host__ __device__ constexpr int weight_offset(int segment, int half) {
  return (segment * 2 + half) * kPieceBytes +
         (Format::kTiled ? segment / 2 * (NVFP4Format::kTileBytes - NVFP4Format::kCodeBytes) : 0);
}

// Fills a lane's part of the ring: the turns of a tile, then those of the next. Once the ring is
// full, the stage that was just read is the one to refill, so reader and writer share one place.
template <typename Format>
struct Producer {
  static constexpr int kSegmentBytes = 64;  // of a row-major row

  const BlockRows& block;
  const char* place[2];  // of the lane in the next stage, in each half of the tile
  int scale_offset[2];   // from place, of a tiled format
  int rows_left[2];      // from the lane's row on; none left reads as zeros
  bool is_upper;         // whether the lower half of a tile is the upper of a stored one
  int tiles_left;
  int turns_left;
  int columns_left;
  const int turns, turn_step, turn_bytes, row_tiles, first_columns_left;

  __device__ Producer(const BlockRows& rows, const Plan& plan, int k)
      : block(rows),
        tiles_left(rows.tiles()),
        turns(plan.turns),
        turn_step(plan.warps * kTurnElements<Format>),
        turn_bytes(plan.warps * (Format::kTiled ? kSegments<Format> / 2 * NVFP4Format::kTileBytes
                                                : kSegments<Format> * kSegmentBytes)),
        row_tiles((k + kTileColumns - 1) / kTileColumns),
        first_columns_left(k - first_column()) {
    first_tile();
  }

  __device__ static int first_column() {
    return threadIdx.x / 32 * kTurnElements<Format> + threadIdx.x % 4 * kLaneElements<Format>;
  }

  __device__ void first_tile() {
    const int lane = threadIdx.x % 32;
    turns_left = turns;
    columns_left = first_columns_left;
    is_upper = block.first[0] / kHalfTile % 2 == 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = block.first[half];
      rows_left[half] = block.count[half] - (Format::kTiled ? 0 : lane / 4);
      if constexpr (Format::kTiled) {
        const int upper = first / kHalfTile % 2;
        const int64_t stored = static_cast<int64_t>(first / kTileRows) * row_tiles +
                               threadIdx.x / 32 * (kSegments<Format> / 2);
        place[half] =
            block.base[half] + stored * Format::kTileBytes + upper * kPieceBytes + lane * 16;
        scale_offset[half] = Format::kCodeBytes - upper * (kPieceBytes - 4) - lane * 8;
      } else {
        place[half] = block.base[half] + (first + lane / 4) * block.row_stride[half] +
                      first_column() * Format::kBits / 8;
      }
    }
  }

  // Ask for the weights of one stage. The caller commits, past the end too, so that the count of
  // groups in flight stays.
  __device__ void produce(char* stage) {
    if (tiles_left == 0) return;
#pragma unroll
    for (int segment = 0; segment < kSegments<Format>; ++segment) {
      const bool inside = columns_left > segment * kSegmentElements<Format>;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        copy_async(stage + weight_offset<Format>(segment, half),
                   place[half] + (Format::kTiled ? weight_offset<Format>(segment, 0)
                                                 : segment * kSegmentBytes),
                   inside && rows_left[half] > 0 ? 16 : 0);
      }
    }
    if constexpr (Format::kTiled) {
      char* const scales = stage + Format::kCodeBytes - threadIdx.x % 32 * 8;
#pragma unroll
      for (int tile = 0; tile < kSegments<Format> / 2; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          copy_async_word(scales + tile * Format::kTileBytes + half * 4,
                          place[half] + scale_offset[half] + tile * Format::kTileBytes,
                          columns_left > tile * kTileColumns && rows_left[half] > 0 ? 4 : 0);
      }
    }
    if (--turns_left > 0) {
      place[0] += turn_bytes;
      place[1] += turn_bytes;
      columns_left -= turn_step;
    } else {
      --tiles_left;
      next_tile();
    }
  }

  __device__ void next_tile() {
    turns_left = turns;
    columns_left = first_columns_left;
    const int64_t back = static_cast<int64_t>(turns - 1) * turn_bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows_left[half] -= block.rows_per_tile;
      if constexpr (Format::kTiled) {
        // Tiles of 16 rows hold two of the gated kind.
        const bool to_upper = block.rows_per_tile == kHalfTile && !is_upper;
        const int64_t step =
            to_upper ? kPieceBytes
                     : static_cast<int64_t>(row_tiles) * Format::kTileBytes -
                           (is_upper && block.rows_per_tile == kHalfTile ? kPieceBytes : 0);
        place[half] += step - back;
      } else {
        place[half] += block.rows_per_tile * block.row_stride[half] - back;
      }
    }
    if (Format::kTiled && block.rows_per_tile == kHalfTile) {
      const int step = is_upper ? kPieceBytes - 4 : 4 - kPieceBytes;
      scale_offset[0] += step;
      scale_offset[1] += step;
      is_upper = !is_upper;
    }
  }
};

// Fills the ring's part of x, a turn a stage, over and over for every tile.
template <typename T, int kRows, typename Format>
struct RowProducer {
  static constexpr int kCopies = kRows * kTurnElements<Format> / kPassElements;
  static constexpr int kPiecesPerCopy =
      8 / kRows;  // of a lane, in which a copy of the warp differs

  const T* place;
  int columns_left;
  int turns_left;
  const int turns, turn_step, first_columns_left;

  __device__ RowProducer(const LinearArgs& args, const Plan& plan)
      : turns(plan.turns),
        turn_step(plan.warps * kTurnElements<Format>),
        first_columns_left(threadIdx.x % 32 / 4 % kRows < args.m ? args.k - first_column() : 0) {
    turns_left = turns;
    columns_left = first_columns_left;
    const int m = threadIdx.x % 32 / 4 % kRows;
    place = static_cast<const T*>(args.x) + m * args.x_stride + first_column();
  }

  // Of piece `index` of a lane's part of a turn.
  __device__ static constexpr int offset(int index) {
    return index / kPieces<Format> * kSegmentElements<Format> +
           index % kPieces<Format> * kVectorElements;
  }
  __device__ static int first_column() {
    return threadIdx.x / 32 * kTurnElements<Format> + threadIdx.x % 4 * kLaneElements<Format> +
           offset(threadIdx.x % 32 / 4 / kRows);
  }

  __device__ void produce(char* rows) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int column = offset(i * kPiecesPerCopy);
      copy_async(rows + (i * 32 + threadIdx.x % 32) * 16, place + column,
                 columns_left > column ? 16 : 0);
    }
    if (--turns_left > 0) {
      place += turn_step;
      columns_left -= turn_step;
    } else {
      place -= (turns - 1) * turn_step;
      turns_left = turns;
      columns_left = first_columns_left;
    }
  }
};

}  // namespace flashrt
