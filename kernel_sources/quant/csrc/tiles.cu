// NVFP4 between its row-major form and the decode layout, and from the decode layout to values.
// A thread takes one word of a tile at a time: eight elements of a row.
#include "common/chunk.cuh"
#include "common/for_element.h"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "nvfp4.cuh"
#include "quant.h"

namespace flashrt {
namespace {

constexpr int kThreads = 128;
constexpr int kWordsPerThread = kTileWords / kThreads;

// Where word `index` of a tile comes from: 16 bytes of a lane hold four words.
struct Place {
  int64_t row;
  int64_t column;       // of its first element
  int scale_byte;       // place of its block's scale in the tile
  bool first_of_block;  // of the two words that share a block
};

__device__ __forceinline__ Place place_of_word(int index, int64_t tile_row, int64_t tile_column) {
  const int word = index % 4;
  const int lane = index / 4 % 32;
  const int half = index / 128 % 2;
  const int segment = index / 256;
  const int g = lane / 4;
  const int t = lane % 4;
  return {tile_row * kTileRows + 8 * half + g,
          tile_column * kTileColumns + 128 * segment + 32 * t + 8 * word,
          kTileCodeBytes + lane * 8 + half * 4 + 2 * segment + word / 2, word % 2 == 0};
}

// Calls `body(word index, word's place, tile)` for each word of the block's tile.
template <typename Body>
__device__ __forceinline__ void for_words(const NVFP4Args& args, Body body) {
  const int64_t tile_columns = (args.columns + kTileColumns - 1) / kTileColumns;
  const int64_t tile = blockIdx.x;
  uint8_t* bytes = args.tiles + tile * kTileBytes;
#pragma unroll
  for (int i = 0; i < kWordsPerThread; ++i) {
    const int index = threadIdx.x + i * kThreads;
    body(index, place_of_word(index, tile / tile_columns, tile % tile_columns), bytes);
  }
}

__global__ void __launch_bounds__(kThreads) tile_kernel(const __grid_constant__ NVFP4Args args) {
  wait_for_inputs();
  const int64_t packed_columns = (args.columns + 1) / 2;
  const int64_t scale_columns = (args.columns + kBlock - 1) / kBlock;
  for_words(args, [&](int index, const Place& place, uint8_t* tile) {
    uint32_t codes = 0;
    uint32_t scale = 0;
    if (place.row < args.rows && place.column < args.columns) {
      scale = args.block_scales[place.row * scale_columns + place.column / kBlock];
      const int64_t byte = place.column / 2;
      const uint8_t* source = args.codes + place.row * packed_columns + byte;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (byte + i < packed_columns) codes |= static_cast<uint32_t>(source[i]) << (8 * i);
      }
      if (scale == 0) codes = 0;
    }
    reinterpret_cast<uint32_t*>(tile)[index] = word_of_codes(codes);
    if (place.first_of_block) tile[place.scale_byte] = static_cast<uint8_t>(e5m3_of_e4m3(scale));
  });
}

__global__ void __launch_bounds__(kThreads) untile_kernel(const __grid_constant__ NVFP4Args args) {
  wait_for_inputs();
  const int64_t packed_columns = (args.columns + 1) / 2;
  const int64_t scale_columns = (args.columns + kBlock - 1) / kBlock;
  for_words(args, [&](int index, const Place& place, uint8_t* tile) {
    if (place.row >= args.rows || place.column >= args.columns) return;
    const uint32_t codes = codes_of_word(reinterpret_cast<const uint32_t*>(tile)[index]);
    const int64_t byte = place.column / 2;
    uint8_t* target = args.codes + place.row * packed_columns + byte;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (byte + i < packed_columns) target[i] = static_cast<uint8_t>(codes >> (8 * i));
    }
    if (place.first_of_block) {
      args.block_scales[place.row * scale_columns + place.column / kBlock] =
          static_cast<uint8_t>(e4m3_of_e5m3(tile[place.scale_byte]));
    }
  });
}

// value = 2^-126 e2m1 * (2^118 block scale) * (2^8 scale): no factor overflows, and only the last
// product rounds.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    dequantize_tiles_kernel(const __grid_constant__ NVFP4Args args) {
  wait_for_inputs();
  for_words(args, [&](int index, const Place& place, const uint8_t* tile) {
    if (place.row >= args.rows || place.column >= args.columns) return;
    const uint32_t word = reinterpret_cast<const uint32_t*>(tile)[index];
    const float block_scale = from_e5m3(tile[place.scale_byte]) * 3.32306998946228968e35f;  // 2^118
    const float scale = args.scale[args.scale_per_row ? place.row : 0] * 256.0f;
    float values[8];
    tiny_values_of_word(word, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = __fmul_rn(__fmul_rn(values[i], block_scale), scale);
    T* out = static_cast<T*>(args.out) + place.row * args.out_stride + place.column;
    const int left = static_cast<int>(args.columns - place.column);
#pragma unroll
    for (int i = 0; i < 8; i += kVec<T>) {
      float part[kVec<T>];
#pragma unroll
      for (int j = 0; j < kVec<T>; ++j) part[j] = values[i + j];
      if (i < left) store_chunk(out, i / kVec<T>, left, args.aligned, pack<T>(part));
    }
  });
}

dim3 tiles_of(const NVFP4Args& args) {
  return dim3(static_cast<unsigned>(((args.rows + kTileRows - 1) / kTileRows) *
                                    ((args.columns + kTileColumns - 1) / kTileColumns)));
}

bool is_empty(const NVFP4Args& args) { return args.rows == 0 || args.columns == 0; }

template <typename T>
cudaError_t launch_dequantize_as(NVFP4Args args, cudaStream_t stream) {
  const auto stride_bytes = static_cast<uintptr_t>(args.out_stride * sizeof(T));
  args.aligned = (reinterpret_cast<uintptr_t>(args.out) | stride_bytes) % 16 == 0;
  return launch(dequantize_tiles_kernel<T>, tiles_of(args), dim3(kThreads), 0, stream, args);
}

}  // namespace

cudaError_t launch_tile_nvfp4(NVFP4Args args, cudaStream_t stream) {
  if (is_empty(args)) return cudaSuccess;
  return launch(tile_kernel, tiles_of(args), dim3(kThreads), 0, stream, args);
}

cudaError_t launch_untile_nvfp4(NVFP4Args args, cudaStream_t stream) {
  if (is_empty(args)) return cudaSuccess;
  return launch(untile_kernel, tiles_of(args), dim3(kThreads), 0, stream, args);
}

cudaError_t launch_dequantize_nvfp4_tiles(NVFP4Args args, cudaStream_t stream) {
  if (is_empty(args)) return cudaSuccess;
  return for_element(args.type, [&](auto element) {
    return launch_dequantize_as<decltype(element)>(args, stream);
  });
}

}  // namespace flashrt
