// y = x' @ W.T for one row, any K, any alignment, any weight strides: the slow path of
// stream.cuh, with the same order of sums. Row-major weights are read element by element.
#pragma once

#include "stream.cuh"

namespace flashrt {

// A lane's 16 bytes of one row from `column` on, zeros past the ends.
template <typename Format>
__device__ __forceinline__ uint4 gather_elements(const LinearArgs& args, const char* row,
                                                 bool inside, int column) {
  constexpr int kBytes = Format::kBits / 8;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kLaneElements<Format>; ++i) {
    if (!inside || column + i >= args.k) continue;
    const char* const element = row + (column + i) * args.weight_col_stride * kBytes;
    const uint32_t bits = kBytes == 2 ? *reinterpret_cast<const unsigned short*>(element)
                                      : *reinterpret_cast<const unsigned char*>(element);
    words[i * kBytes / 4] |= bits << i * kBytes % 4 * 8;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// What a lane holds of one turn of one half of a tile.
template <typename Format>
struct GatheredTurn {
  uint4 words[kSegments<Format>];
  uint32_t scales[kSegments<Format>] = {};

  __device__ GatheredTurn(const LinearArgs& args, const BlockRows& rows, int half, int first,
                          int turn) {
    const int lane = threadIdx.x % 32;
    const int row = rows.first[half] + first + lane / 4;
    if constexpr (Format::kTiled) {
      const int row_tiles = (args.k + kTileColumns - 1) / kTileColumns;
      const int upper = row / kHalfTile % 2;
#pragma unroll
      for (int segment = 0; segment < kSegments<Format>; ++segment) {
        const int column = turn * (kSegments<Format> / 2) + segment / 2;
        const int64_t index = static_cast<int64_t>(row / kTileRows) * row_tiles + column;
        const char* const tile = rows.base[half] + index * Format::kTileBytes;
        words[segment] = make_uint4(0, 0, 0, 0);
        if (column >= row_tiles || rows.count[half] <= first) continue;
        const int piece = segment % 2 * 2 + upper;
        words[segment] = reinterpret_cast<const uint4*>(tile)[piece * 32 + lane];
        scales[segment] =
            reinterpret_cast<const uint32_t*>(tile + Format::kCodeBytes)[lane * 2 + upper];
      }
    } else {
      const char* const source = rows.base[half] + row * rows.row_stride[half];
#pragma unroll
      for (int segment = 0; segment < kSegments<Format>; ++segment) {
        const int column = turn * kTurnElements<Format> + segment * kSegmentElements<Format> +
                           lane % 4 * kLaneElements<Format>;
        words[segment] =
            gather_elements<Format>(args, source, first + lane / 4 < rows.count[half], column);
      }
    }
  }
};

template <typename T, typename Format>
__global__ void __launch_bounds__(kMaxWarps * 32, 2)
    strided_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ Plan plan) {
  constexpr int kRows = 1;
  extern __shared__ __align__(kSharedAlignment) char shared[];
  __shared__ PrologueScratch scratch;
  __shared__ RowFactors row_factors;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  launch_dependents();
  wait_for_inputs();
  const BlockRows rows = find_block_rows(args, plan, Format::kBits);
  const Slice<kRows, Format> slice(reinterpret_cast<uint4*>(shared), plan);
  NormWords<T, kRows, Format, false> norm_words;
  norm_words.preload(args, slice);
  prepare_rows<T, kRows, Format, false>(args, plan, scratch, slice, norm_words);
  if constexpr (!std::is_same_v<T, Operand<T, Format>>) narrow_rows<kRows>(slice, row_factors);
  __syncwarp();
  float* const partial = reinterpret_cast<float*>(shared) +
                         plan.warps * slice.passes * Slice<kRows, Format>::kPassWords * 4;
  const uint4* const x = slice.words + lane % (4 * kRows);
  float factors[2];
  read_factors<T, kRows, Format>(factors, row_factors);
  const int tiles = rows.tiles();
  for (int tile = 0; tile < tiles; ++tile) {
    TileSums<Format> sums;
#pragma unroll 1
    for (int turn = 0; turn < plan.turns; ++turn) {
      const int place = turn * plan.warps + warp;
      const int first = tile * rows.rows_per_tile;
      const GatheredTurn<Format> lower(args, rows, 0, first, place);
      const GatheredTurn<Format> upper(args, rows, 1, first, place);
#pragma unroll
      for (int segment = 0; segment < kSegments<Format>; ++segment) {
        uint4 v[kPieces<Format>];
#pragma unroll
        for (int piece = 0; piece < kPieces<Format>; ++piece) {
          const int index = (turn * kSegments<Format> + segment) * kPieces<Format> + piece;
          v[piece] = x[index * kRows * 4];
        }
        multiply_segment<T, Format>(sums.turns[segment % 2], lower.words[segment],
                                    upper.words[segment], v, lower.scales[segment],
                                    upper.scales[segment], segment, plan);
      }
      sums.end_turn(args, rows, tile, place);
    }
    sums.end_tile();
    publish_tile<kRows>(sums.tile, factors, partial + tile * kTileRows * kRows * plan.warps, plan);
  }
  __syncthreads();
  const Output<T> output(args, rows, threadIdx.x, kRows);
  finish_outputs<T, kRows, Format>(args, plan, rows, partial, output);
}

}  // namespace flashrt
