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
// Packed weights meet x in fp16. They are fewer bytes but not less work for a block, whose time is
// then mostly latency and decoding: operations of the integer pipe, at two cycles each.
#pragma once

#include <type_traits>

#include "common/pdl.cuh"
#include "prologue.cuh"
#include "ring.cuh"
#include "sums.cuh"

namespace flashrt {

// Shared memory of one block: the rings, x, the warps' sums. Copies into it are written a line of
// 128 bytes at a time.
inline constexpr int kSharedAlignment = 128;
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
  extern __shared__ __align__(kSharedAlignment) char shared[];
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

  // With few rows the epilogue's operands are read ahead of the sums, with many the registers are
  // short.
  constexpr bool kReadsAhead = kRows <= 4;
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
    if constexpr (kReadsAhead) output = Output<T>(args, rows, threadIdx.x, kRows);
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
    if constexpr (kReadsAhead) output = Output<T>(args, rows, threadIdx.x, kRows);
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
  if constexpr (!kReadsAhead) output = Output<T>(args, rows, threadIdx.x, kRows);
  finish_outputs<T, kRows, Format>(args, plan, rows, partial, output);
}

}  // namespace flashrt
