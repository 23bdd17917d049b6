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
//
// x stays in shared memory for all tiles of a block, or, where it needs no preparation and would
// take the room of other blocks, passes through the ring beside the weights that it meets.
//
// Packed weights meet x in fp16. Bytes per weight fall faster than what a block costs, so such a
// block's time is decoding: operations of the integer pipe, of which there are two cycles each.
#pragma once

#include "common/pdl.cuh"
#include "common/vec.cuh"
#include "copy.cuh"
#include "epilogue.cuh"
#include "formats.cuh"
#include "prologue.cuh"

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
    const int tile = output.row / rows.rows_per_tile;
    const int row = output.row % rows.rows_per_tile;
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

// Shared memory of one block: the rings, x, the warps' sums.
template <int kRows, typename Format, RowSource kSource>
inline int shared_bytes(const Plan& plan, bool with_ring) {
  const int stage = Ring<kRows, Format, kSource, 1>::kBytes;
  const int stages = stages_of<kRows, Format, kSource>(plan.warps < kMaxWarps);
  const int ring = with_ring ? plan.warps * stages * stage : 0;
  const int passes = count_passes<Format>(plan.turns);
  const int x =
      kSource == RowSource::kRing ? 0 : plan.warps * passes * Slice<kRows, Format>::kPassWords * 16;
  return ring + x +
         plan.tiles_per_block * kTileRows * kRows * plan.warps * static_cast<int>(sizeof(float));
}

template <typename T, int kRows, typename Format, RowSource kSource, int kStages>
__global__ void __launch_bounds__(kMaxWarps * 32, kRows > 2             ? 2
                                                  : Format::kBits == 16 ? 4
                                                                        : 3)
    stream_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ Plan plan) {
  using Stages = Ring<kRows, Format, kSource, kStages>;
  extern __shared__ __align__(16) char shared[];
  __shared__ PrologueScratch scratch;
  __shared__ RowFactors row_factors;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  char* const ring = shared + warp * Stages::kBytes;
  char* const after_rings = shared + plan.warps * Stages::kBytes;

  launch_dependents();
  const BlockRows rows = find_block_rows(args, plan, Format::kBits);
  Producer<Format> producer(rows, plan, args.k);
  if (!args.weights_static) wait_for_inputs();
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    producer.produce(ring + i * Stages::kStageBytes + lane * 16);
    if constexpr (kSource == RowSource::kShared) commit_copies();
  }

  // Columns of a product do not touch each other: those without a row of x repeat one.
  const int column = lane % (4 * kRows);
  Output<T> output;
  float* partial;
  const uint4* x = nullptr;
  RowProducer<T, kRows, Format> row_producer(args, plan);
  if constexpr (kSource == RowSource::kShared) {
    const Slice<kRows, Format> slice(reinterpret_cast<uint4*>(after_rings), plan);
    NormWords<T, kRows, Format, true> norm_words;
    norm_words.preload(args, slice);
    if (args.weights_static) wait_for_inputs();
    // With few rows the epilogue's operands are read ahead of the sums, with many the registers are
    // short.
    if constexpr (kRows <= 2) output = Output<T>(args, rows, threadIdx.x, kRows);
    const bool few = kRows <= 4 && args.branch == nullptr && slice.passes <= kFewPasses;
    const bool many = kRows == 1 && args.branch == nullptr && args.norm_kind == kNoNorm &&
                      slice.passes <= kManyPasses;
    if (few) {
      if constexpr (kRows <= 4)
        prepare_held_rows<kFewPasses, T>(args, plan, scratch, slice, norm_words, row_factors);
    } else if (many) {
      if constexpr (kRows == 1)
        prepare_held_rows<kManyPasses, T>(args, plan, scratch, slice, norm_words, row_factors);
    } else {
      prepare_rows<T, kRows, Format, true>(args, plan, scratch, slice, norm_words);
      if constexpr (!std::is_same_v<T, Operand<T, Format>>) narrow_rows<kRows>(slice, row_factors);
    }
    __syncwarp();
    x = slice.words + column;
    partial = reinterpret_cast<float*>(after_rings + plan.warps * slice.passes *
                                                         Slice<kRows, Format>::kPassWords * 16);
  } else {
    if (args.weights_static) wait_for_inputs();
    // The first group holds all weights that were asked for, too.
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      row_producer.produce(ring + i * Stages::kStageBytes + Stages::kWeightBytes);
      commit_copies();
    }
    partial = reinterpret_cast<float*>(after_rings);
  }
  float factors[2];
  read_factors<T, kRows, Format>(factors, row_factors);
  int stage = 0;
  const int tiles = rows.tiles();
  for (int tile = 0; tile < tiles; ++tile) {
    TileSums<Format> sums;
#pragma unroll 1
    for (int turn = 0; turn < plan.turns; ++turn) {
      // Before the loop, what was asked for had one group a stage; each turn since added one.
      wait_copies<kStages - 1>();
      if constexpr (kSource == RowSource::kRing) __syncwarp();
      char* const base = ring + stage * Stages::kStageBytes;
      const char* const codes = base + lane * 16;
      // What is decoded is read as it is needed and its stage refilled behind it, for registers.
      constexpr bool kReadAhead = !Format::kTiled;
      uint4 w[kSegments<Format>][2];
      const auto read_segment = [&](int segment) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          w[segment][half] =
              *reinterpret_cast<const uint4*>(codes + weight_offset<Format>(segment, half));
      };
      if constexpr (kReadAhead) {
#pragma unroll
        for (int segment = 0; segment < kSegments<Format>; ++segment) read_segment(segment);
        if constexpr (kSource == RowSource::kShared) {
          producer.produce(base + lane * 16);
          commit_copies();
        }
      }
#pragma unroll
      for (int segment = 0; segment < kSegments<Format>; ++segment) {
        uint2 scales = make_uint2(0, 0);
        if constexpr (!kReadAhead) {
          read_segment(segment);
          scales = *reinterpret_cast<const uint2*>(base + segment / 2 * Format::kTileBytes +
                                                   Format::kCodeBytes + lane * 8);
        }
        uint4 v[kPieces<Format>];
#pragma unroll
        for (int piece = 0; piece < kPieces<Format>; ++piece) {
          const int index = segment * kPieces<Format> + piece;
          const uint4* const source =
              kSource == RowSource::kShared
                  ? x + (turn * kSegments<Format> * kPieces<Format> + index) * kRows * 4
                  : reinterpret_cast<const uint4*>(base + Stages::kWeightBytes) +
                        index * kRows * 4 + column;
          v[piece] = *source;
        }
        multiply_segment<T, Format>(sums.turns[segment % 2], w[segment][0], w[segment][1], v,
                                    scales.x, scales.y, segment, plan);
      }
      if constexpr (kSource == RowSource::kRing || !kReadAhead) {
        if constexpr (kSource == RowSource::kRing) __syncwarp();
        producer.produce(base + lane * 16);
        if constexpr (kSource == RowSource::kRing)
          row_producer.produce(base + Stages::kWeightBytes);
        commit_copies();
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      sums.end_turn(args, rows, tile, turn * plan.warps + warp);
    }
    sums.end_tile();
    publish_tile<kRows>(sums.tile, factors, partial + tile * kTileRows * kRows * plan.warps, plan);
  }
  __syncthreads();
  if constexpr (kRows > 2 || kSource == RowSource::kRing)
    output = Output<T>(args, rows, threadIdx.x, kRows);
  finish_outputs<T, kRows, Format>(args, plan, rows, partial, output);
}

}  // namespace flashrt
