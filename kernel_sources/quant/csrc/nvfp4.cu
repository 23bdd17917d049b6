// NVFP4 in its row-major form: choose block scales and codes, and give values back.
#include "common/chunk.cuh"
#include "common/for_element.h"
#include "common/fp8.cuh"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "nvfp4.cuh"
#include "quant.h"

namespace flashrt {
namespace {

constexpr int kThreads = 256;
constexpr float kNVFP4Max = 2688.0f;  // 6 * 448
// Steps of the E4M3 code that the search tries around max(abs(block)) / 6; see reference.py.
constexpr int kSearchBelow = 2;
constexpr int kSearchAbove = 6;

unsigned blocks_for(int64_t items) {
  return static_cast<unsigned>((items + kThreads - 1) / kThreads);
}

// sum(importance * (value - s * q)^2), element after element, each step rounded.
__device__ __forceinline__ float squared_error(const float (&values)[kBlock], float scale,
                                               const float* importance, int count) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float distance = values[i];
    if (scale != 0.0f) {
      const float near = from_e2m1(to_e2m1(__fdiv_rn(values[i], scale)));
      distance = __fsub_rn(values[i], __fmul_rn(near, scale));
    }
    float term = __fmul_rn(distance, distance);
    if (importance != nullptr) term = __fmul_rn(term, i < count ? importance[i] : 0.0f);
    total = __fadd_rn(total, term);
  }
  return total;
}

// One block of 16 a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_nvfp4_kernel(const __grid_constant__ NVFP4Args args) {
  wait_for_inputs();
  const int64_t blocks = (args.columns + kBlock - 1) / kBlock;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.rows * blocks) return;
  const int64_t row = index / blocks;
  const int block = static_cast<int>(index % blocks);
  const int columns = static_cast<int>(args.columns);
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const float global_scale = *args.scale;

  float values[kBlock];
  float largest = 0.0f;
#pragma unroll
  for (int c = 0; c < kBlock / kVec<T>; ++c) {
    float part[kVec<T>];
    const int chunk = block * (kBlock / kVec<T>)+c;
    if (chunk * kVec<T> < columns) {
      unpack<T>(load_chunk(x, chunk, columns, args.aligned), part);
    } else {
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) part[i] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      const float value = __fdiv_rn(part[i], global_scale);
      values[c * kVec<T> + i] = fminf(fmaxf(value, -kNVFP4Max), kNVFP4Max);
      largest = fmaxf(largest, fabsf(value));
    }
  }
  const int count = min(kBlock, columns - block * kBlock);
  const float* importance = args.importance == nullptr ? nullptr : args.importance + block * kBlock;
  const int center = to_fp8(fminf(largest, kNVFP4Max), kE2M1Max);
  int kept = center;
  float best = __uint_as_float(0x7f800000u);
#pragma unroll 1
  for (int step = -kSearchBelow; step <= kSearchAbove; ++step) {
    const int candidate = min(max(center + step, 0), 126);
    const float error = squared_error(values, from_fp8(candidate), importance, count);
    if (error < best) {
      best = error;
      kept = candidate;
    }
  }
  const float scale = from_fp8(kept);
  args.block_scales[index] = static_cast<uint8_t>(kept);
  const int64_t packed_columns = (args.columns + 1) / 2;
  uint8_t* codes = args.codes + row * packed_columns + block * (kBlock / 2);
#pragma unroll
  for (int i = 0; i < kBlock / 2; ++i) {
    if (2 * i >= count) continue;
    uint32_t byte = 0;
    if (scale != 0.0f) {
      byte = to_e2m1(__fdiv_rn(values[2 * i], scale));
      byte |= to_e2m1(__fdiv_rn(values[2 * i + 1], scale)) << 4;
    }
    codes[i] = static_cast<uint8_t>(byte);
  }
}

// Eight elements a thread.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_nvfp4_kernel(const __grid_constant__ NVFP4Args args) {
  wait_for_inputs();
  const int64_t packed_columns = (args.columns + 1) / 2;
  const int64_t eights = (args.columns + 7) / 8;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= args.rows * eights) return;
  const int64_t row = index / eights;
  const int64_t eight = index % eights;
  const uint8_t* codes = args.codes + row * packed_columns + eight * 4;
  const int64_t scale_columns = (args.columns + kBlock - 1) / kBlock;
  const float block_scale = from_fp8(args.block_scales[row * scale_columns + eight / 2]);
  const float scale = args.scale[args.scale_per_row ? row : 0];
  T* out = static_cast<T*>(args.out) + row * args.out_stride + eight * 8;
  float values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool inside = eight * 8 + i < args.columns;
    const uint32_t code = inside ? codes[i / 2] >> (i % 2 * 4) & 15u : 0u;
    values[i] = __fmul_rn(__fmul_rn(from_e2m1(code), block_scale), scale);
  }
#pragma unroll
  for (int i = 0; i < 8; i += kVec<T>) {
    float part[kVec<T>];
#pragma unroll
    for (int j = 0; j < kVec<T>; ++j) part[j] = values[i + j];
    const int left = static_cast<int>(args.columns - eight * 8);
    if (i < left) store_chunk(out, i / kVec<T>, left, args.aligned, pack<T>(part));
  }
}

bool rows_start_aligned(const void* data, int64_t stride, int64_t bytes) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(stride * bytes)) % 16 == 0;
}

template <typename T>
cudaError_t launch_quantize_as(NVFP4Args args, cudaStream_t stream) {
  args.aligned = rows_start_aligned(args.x, args.x_stride, sizeof(T));
  const int64_t blocks = (args.columns + kBlock - 1) / kBlock;
  const dim3 grid(blocks_for(args.rows * blocks));
  return launch(quantize_nvfp4_kernel<T>, grid, dim3(kThreads), 0, stream, args);
}

template <typename T>
cudaError_t launch_dequantize_as(NVFP4Args args, cudaStream_t stream) {
  args.aligned = rows_start_aligned(args.out, args.out_stride, sizeof(T));
  const dim3 grid(blocks_for(args.rows * ((args.columns + 7) / 8)));
  return launch(dequantize_nvfp4_kernel<T>, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace

cudaError_t launch_quantize_nvfp4(NVFP4Args args, cudaStream_t stream) {
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  return for_element(
      args.type, [&](auto element) { return launch_quantize_as<decltype(element)>(args, stream); });
}

cudaError_t launch_dequantize_nvfp4(NVFP4Args args, cudaStream_t stream) {
  if (args.rows == 0 || args.columns == 0) return cudaSuccess;
  return for_element(args.type, [&](auto element) {
    return launch_dequantize_as<decltype(element)>(args, stream);
  });
}

}  // namespace flashrt
