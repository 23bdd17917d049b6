// y = x' @ W.T for 1..8 rows, any K, any alignment, any weight strides: the slow path of
// stream.cuh, with the same order of sums. Weights are read element by element.
#pragma once

#include "stream.cuh"

namespace flashrt {

// 8 elements of one row from `column` on, zeros past the ends.
template <typename T>
__device__ __forceinline__ uint4 gather_elements(const LinearArgs& args, const char* row,
                                                 bool inside, int column) {
  uint32_t elements[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    elements[i] =
        inside && column + i < args.k
            ? reinterpret_cast<const unsigned short*>(row)[(column + i) * args.weight_col_stride]
            : 0;
  }
  return make_uint4(elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                    elements[4] | elements[5] << 16, elements[6] | elements[7] << 16);
}

template <typename T, int kRows>
__global__ void __launch_bounds__(kMaxWarps * 32, 2)
    strided_kernel(const __grid_constant__ LinearArgs args, const __grid_constant__ Plan plan) {
  extern __shared__ __align__(16) char shared[];
  __shared__ PrologueScratch scratch;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  launch_dependents();
  wait_for_inputs();
  const BlockRows rows = find_block_rows(args, plan);
  const Slice<kRows, 1> slice(reinterpret_cast<uint4*>(shared), plan);
  NormWords<T, kRows, 1, false> norm_words;
  norm_words.preload(args, slice);
  prepare_rows<T, kRows, 1, false>(args, plan, scratch, slice, norm_words);
  __syncwarp();
  float* const partial = reinterpret_cast<float*>(shared) +
                         plan.warps * slice.passes * Slice<kRows, 1>::kPassWords * 4;
  const uint4* const x = slice.words + lane;
  float* tile_partial = partial;
  for (int first = 0; first < rows.outputs; first += rows.rows_per_tile) {
    float acc[kSegments][4] = {};
    const int row = first + lane / 4;
#pragma unroll 1
    for (int turn = 0; turn < plan.turns; ++turn) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const int column = (turn * plan.warps + warp) * kTurnElements + segment * kSegmentElements +
                           lane % 4 * kLaneElements;
        uint4 w[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          w[half] = gather_elements<T>(args, rows.base[half] + row * rows.row_stride[half],
                                       row < rows.count[half], column);
        }
        const uint4 v =
            lane / 4 < kRows ? x[(turn * kSegments + segment) * kRows * 4] : make_uint4(0, 0, 0, 0);
        multiply_segment<T>(acc[segment], w[0], w[1], v);
      }
    }
    publish_tile<kRows, 1>(acc, tile_partial, plan);
    tile_partial += kTileRows * kRows * plan.warps;
  }
  __syncthreads();
  const Output<T> output(args, rows, threadIdx.x, kRows);
  finish_outputs<T, kRows>(args, plan, rows, partial, output);
}

}  // namespace flashrt
