// FP8 and INT8 by rows: quantise with the row's own or a given scale, and dequantise.
#include <algorithm>

#include "common/chunk.cuh"
#include "common/for_element.h"
#include "common/fp8.cuh"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "quant.h"

namespace flashrt {
namespace {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 512;
constexpr int64_t kMaxGridRows = 65535;  // limit of gridDim.y
constexpr int kScaleBlock = 128;         // rows and columns of a block that shares a scale

// The maximum over the block's threads, in all of them.
__device__ __forceinline__ uint32_t block_max(uint32_t value, uint32_t* partials) {
  value = __reduce_max_sync(0xffffffffu, value);
  if (blockDim.x == kWarp) return value;
  if (threadIdx.x % kWarp == 0) partials[threadIdx.x / kWarp] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  return __reduce_max_sync(0xffffffffu, lane < blockDim.x / kWarp ? partials[lane] : 0u);
}

// Round to nearest even within +-127; NaN is 0.
__device__ __forceinline__ uint8_t to_int8(float value, float scale) {
  const float quotient = __fdiv_rn(value, scale);
  if (!(quotient == quotient)) return 0;
  return static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(quotient, -127.0f), 127.0f)));
}

// One block a row: the largest magnitude first, unless the scale is given, then the bytes.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads)
    quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  __shared__ uint32_t partials[kWarp];
  wait_for_inputs();
  const uint32_t row = blockIdx.x;
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  const T* x = static_cast<const T*>(args.x) + row_offset(args.x_rows, row);
  float scale;
  if (args.static_scale != nullptr) {
    scale = args.static_scale[args.scale_per_row ? row : 0];
  } else {
    uint32_t largest = 0;
    for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
      const uint4 packed = load_chunk(x, index, args.dim, args.aligned);
      largest = max(largest, magnitude_of_chunk<T>(packed));
    }
    largest = block_max(largest, partials);
    scale = scale_of_magnitude(largest, args.to_int8 ? 127.0f : 448.0f);
    if (threadIdx.x == 0) args.scale_out[row] = scale;
  }
  uint8_t* out = args.out + row_offset(args.out_rows, row);
  for (int index = threadIdx.x; index < chunks; index += blockDim.x) {
    const uint4 packed = load_chunk(x, index, args.dim, args.aligned);
    if (!args.to_int8) {
      store_fp8_chunk<T>(out, index, args.dim, args.aligned, packed, scale);
      continue;
    }
    float values[kVec<T>];
    unpack<T>(packed, values);
    uint8_t bytes[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) bytes[i] = to_int8(values[i], scale);
    store_bytes(out, index, args.dim, args.aligned, bytes);
  }
}

template <typename T>
cudaError_t launch_quantize_as(QuantizeArgs args, cudaStream_t stream) {
  args.aligned = rows_aligned(args.x, args.x_rows, sizeof(T)) &&
                 rows_aligned(args.out, args.out_rows, 1, kVec<T>);
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  const int wanted = (chunks + kWarp - 1) / kWarp * kWarp;
  const dim3 block(std::clamp(wanted, kWarp, kMaxThreads));
  const dim3 grid(static_cast<unsigned>(args.num_rows));
  return launch(quantize_kernel<T>, grid, block, 0, stream, args);
}

// One chunk of kVec<T> elements a thread: blockIdx.x counts chunks of a row, blockIdx.y rows, in
// steps of gridDim.y. A chunk never crosses a block of 128.
template <typename T>
__global__ void dequantize_kernel(const __grid_constant__ DequantizeArgs args) {
  wait_for_inputs();
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= chunks) return;
  const int column = index * kVec<T>;
  const int64_t scale_columns = (args.dim + kScaleBlock - 1) / kScaleBlock;
  for (int64_t row = blockIdx.y; row < args.num_rows; row += gridDim.y) {
    const uint8_t* data = args.data + row_offset(args.data_rows, row) + column;
    alignas(8) uint8_t bytes[kVec<T>];
    if (args.aligned && column + kVec<T> <= args.dim) {
      if constexpr (kVec<T> == 8) {
        *reinterpret_cast<uint2*>(bytes) = *reinterpret_cast<const uint2*>(data);
      } else {
        *reinterpret_cast<uint32_t*>(bytes) = *reinterpret_cast<const uint32_t*>(data);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVec<T>; ++i) bytes[i] = column + i < args.dim ? data[i] : 0;
    }
    int64_t place = 0;
    if (args.scale_of == ScaleOf::kRow) place = row;
    if (args.scale_of == ScaleOf::kBlock) {
      place = row / kScaleBlock * scale_columns + column / kScaleBlock;
    }
    const float scale = args.scale[place];
    float values[kVec<T>];
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      const float value =
          args.from_int8 ? static_cast<float>(static_cast<int8_t>(bytes[i])) : from_fp8(bytes[i]);
      values[i] = __fmul_rn(value, scale);
    }
    T* out = static_cast<T*>(args.out) + row_offset(args.out_rows, row);
    store_chunk(out, index, args.dim, args.aligned, pack<T>(values));
  }
}

template <typename T>
cudaError_t launch_dequantize_as(DequantizeArgs args, cudaStream_t stream) {
  constexpr int kThreads = 128;
  args.aligned = rows_aligned(args.out, args.out_rows, sizeof(T)) &&
                 rows_aligned(args.data, args.data_rows, 1, kVec<T>);
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  const dim3 grid((chunks + kThreads - 1) / kThreads, std::min(args.num_rows, kMaxGridRows));
  return launch(dequantize_kernel<T>, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace

cudaError_t launch_quantize(QuantizeArgs args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  return for_element(
      args.type, [&](auto element) { return launch_quantize_as<decltype(element)>(args, stream); });
}

cudaError_t launch_dequantize(DequantizeArgs args, cudaStream_t stream) {
  if (args.num_rows == 0 || args.dim == 0) return cudaSuccess;
  return for_element(args.type, [&](auto element) {
    return launch_dequantize_as<decltype(element)>(args, stream);
  });
}

}  // namespace flashrt
