// How a row is spread over threads, shared by the norms of this family.
//
// One block takes one row, or one warp takes it when it has at most 32 chunks. Thread t owns chunks
// t, t + threads, t + 2 * threads, ... The shape depends on `dim` and the element type only, so
// neither the number of rows nor their alignment changes the order of a sum.
#pragma once

#include <type_traits>

#include "common/chunk.cuh"
#include "common/for_element.h"
#include "common/fp8.cuh"
#include "common/launch.h"
#include "norm.h"

namespace flashrt {

inline constexpr int kWarp = 32;
inline constexpr int kLongRow = 0;       // chunks per thread of a row that is read twice
inline constexpr int kRowsPerBlock = 4;  // when a warp takes a row

// Threads of a block that keeps `chunks` chunks a thread in registers: 8 chunks need twice the
// threads to reach 65536 elements of 16 bits.
__host__ __device__ constexpr int max_threads(int chunks) {
  return chunks == kLongRow || chunks == 8 ? 1024 : 512;
}

// Sums of N values over the threads of a row, the same bits in every thread. Warps first, then the
// warps' sums, both as butterflies. `partials` is shared memory that no other call has used.
template <int N>
__device__ __forceinline__ void row_sums(float (&values)[N], float (&partials)[N][kWarp]) {
  const auto sum_over_warp = [&] {
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        values[i] += __shfl_xor_sync(0xffffffffu, values[i], distance);
      }
    }
  };
  sum_over_warp();
  if (blockDim.x == kWarp) return;
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) partials[i][threadIdx.x / kWarp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = lane < blockDim.x / kWarp ? partials[i][lane] : 0.0f;
  sum_over_warp();
}

// The maximum over the threads of a row, in all of them. `partials` as for row_sums.
__device__ __forceinline__ uint32_t row_max(uint32_t value, uint32_t* partials) {
  value = __reduce_max_sync(0xffffffffu, value);
  if (blockDim.x == kWarp) return value;
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) partials[threadIdx.x / kWarp] = value;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, lane < blockDim.x / kWarp ? partials[lane] : 0u);
}

__device__ __forceinline__ uint32_t row_index() { return blockIdx.x * blockDim.y + threadIdx.y; }

// Start of a row, in bytes from an operand's base.
__device__ __forceinline__ const void* row_of(const RowsIn& in, uint32_t row, int element_bytes) {
  const int64_t offset = row_offset(in.rows, row) * (in.is_fp32 ? 4 : element_bytes);
  return static_cast<const char*>(in.data) + offset;
}

template <typename T>
__device__ __forceinline__ T* row_of(const RowsOut& out, uint32_t row) {
  return static_cast<T*>(out.data) + row_offset(out.rows, row);
}

// values = values * (1 + scale) + shift, for chunk `index` of `row`.
template <typename T>
__device__ __forceinline__ void modulate(const NormArgs& args, uint32_t row, int index,
                                         float (&values)[kVec<T>]) {
  float operand[kVec<T>];
  if (args.scale.data != nullptr) {
    load_as<T>(row_of(args.scale, row, sizeof(T)), args.scale.is_fp32, index, args.dim,
               args.aligned, operand);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] *= 1.0f + operand[i];
  }
  if (args.shift.data != nullptr) {
    load_as<T>(row_of(args.shift, row, sizeof(T)), args.shift.is_fp32, index, args.dim,
               args.aligned, operand);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[i] += operand[i];
  }
}

// The scale of a row of FP8: the given one, or the one of `magnitude`, this thread's largest
// magnitude bits, which is then written too.
__device__ __forceinline__ float fp8_scale_of_row(const NormArgs& args, uint32_t row,
                                                  uint32_t magnitude, uint32_t* partials) {
  if (args.fp8_scale != nullptr) return *args.fp8_scale;
  const float scale = scale_of_magnitude(row_max(magnitude, partials), 448.0f);
  if (threadIdx.x == 0) args.fp8_scale_out[row] = scale;
  return scale;
}

// Write the chunks of a row that this thread keeps, as they are or as FP8.
template <typename T, int kChunks>
__device__ __forceinline__ void store_row(const NormArgs& args, uint32_t row,
                                          const uint4 (&packed)[kChunks], uint32_t* partials) {
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  if (args.out.data != nullptr) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int index = threadIdx.x + c * blockDim.x;
      if (index < chunks) {
        store_chunk(row_of<T>(args.out, row), index, args.dim, args.aligned, packed[c]);
      }
    }
    return;
  }
  uint32_t magnitude = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (threadIdx.x + c * blockDim.x < chunks) {
      magnitude = max(magnitude, magnitude_of_chunk<T>(packed[c]));
    }
  }
  const float scale = fp8_scale_of_row(args, row, magnitude, partials);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int index = threadIdx.x + c * blockDim.x;
    if (index < chunks) {
      store_fp8_chunk<T>(row_of<uint8_t>(args.fp8_out, row), index, args.dim, args.aligned,
                         packed[c], scale);
    }
  }
}

// The same for a row that no registers hold: `chunk(index)` computes a chunk, twice for FP8 with
// its own scale.
template <typename T, typename Chunk>
__device__ __forceinline__ void store_long_row(const NormArgs& args, uint32_t row, Chunk chunk,
                                               uint32_t* partials) {
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  if (args.out.data != nullptr) {
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
      store_chunk(row_of<T>(args.out, row), index, args.dim, args.aligned, chunk(index));
    }
    return;
  }
  uint32_t magnitude = 0;
  if (args.fp8_scale == nullptr) {
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
      magnitude = max(magnitude, magnitude_of_chunk<T>(chunk(index)));
    }
  }
  const float scale = fp8_scale_of_row(args, row, magnitude, partials);
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    store_fp8_chunk<T>(row_of<uint8_t>(args.fp8_out, row), index, args.dim, args.aligned,
                       chunk(index), scale);
  }
}

inline bool is_aligned(const RowsIn& in, ElementType type) {
  const int64_t bytes = in.is_fp32 ? 4 : element_bytes(type);
  return in.data == nullptr || rows_aligned(in.data, in.rows, bytes);
}

inline bool is_aligned(const RowsOut& out, ElementType type) {
  return out.data == nullptr || rows_aligned(out.data, out.rows, element_bytes(type));
}

// Bytes of FP8 that one chunk of `type` becomes.
inline bool is_fp8_aligned(const RowsOut& out, ElementType type) {
  return out.data == nullptr || rows_aligned(out.data, out.rows, 1, 16 / element_bytes(type));
}

inline bool all_aligned(const NormArgs& args) {
  return is_aligned(args.x, args.type) && is_aligned(args.residual, args.type) &&
         is_aligned(args.residual_out, args.type) && is_aligned(args.weight, args.type) &&
         is_aligned(args.bias, args.type) && is_aligned(args.scale, args.type) &&
         is_aligned(args.shift, args.type) && is_aligned(args.out, args.type) &&
         is_fp8_aligned(args.fp8_out, args.type);
}

// Launch `select(chunks per thread)`, a kernel for elements of type T, over all rows.
template <typename T, typename Select>
cudaError_t launch_over_rows(const NormArgs& args, Select select, cudaStream_t stream) {
  const int chunks = (args.dim + kVec<T> - 1) / kVec<T>;
  const int per_thread = chunks <= 512    ? 1
                         : chunks <= 1024 ? 2
                         : chunks <= 2048 ? 4
                         : chunks <= 8192 ? 8
                                          : kLongRow;
  const int wanted = per_thread == kLongRow ? 1024 : (chunks + per_thread - 1) / per_thread;
  const int threads = (wanted + kWarp - 1) / kWarp * kWarp;
  const int rows_per_block = threads == kWarp ? kRowsPerBlock : 1;
  const dim3 block(threads, rows_per_block);
  const dim3 grid(static_cast<unsigned>((args.num_rows + rows_per_block - 1) / rows_per_block));
  void (*kernel)(NormArgs) = nullptr;
  if (per_thread == 1) kernel = select(std::integral_constant<int, 1>{});
  if (per_thread == 2) kernel = select(std::integral_constant<int, 2>{});
  if (per_thread == 4) kernel = select(std::integral_constant<int, 4>{});
  if (per_thread == 8) kernel = select(std::integral_constant<int, 8>{});
  if (per_thread == kLongRow) kernel = select(std::integral_constant<int, kLongRow>{});
  return launch(kernel, grid, block, 0, stream, args);
}

// The same for the element type of `args`: `select(T{}, chunks per thread)`.
template <typename Select>
cudaError_t launch_norm(NormArgs args, Select select, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  args.aligned = all_aligned(args);
  return for_element(args.type, [&](auto element) {
    return launch_over_rows<decltype(element)>(
        args, [&](auto chunks) { return select(element, chunks); }, stream);
  });
}

}  // namespace flashrt
