// out[i, :] = factor * (scale * value)[ids[i], :] of a quantised table, one block a row; an id
// outside the table writes NaN. Sixteen columns a thread and step.
#include <cmath>

#include "common/for_element.h"
#include "common/fp8.cuh"
#include "common/launch.h"
#include "common/pdl.cuh"
#include "common/vec.cuh"
#include "formats.cuh"
#include "packed_embedding.h"

namespace flashrt {
namespace {

constexpr int kPackedThreads = 256;
constexpr int kColumns = 16;      // of a thread's step: one NVFP4 block
constexpr int kScaleBlock = 128;  // rows and columns that share a scale of a grid

struct PackedTable {
  const uint8_t* data;
  int64_t stride;  // bytes
  const float* scale;
  int scale_columns;
  WeightFormat format;
  int64_t vocab;
  int d;
};

// E2M1 in slot `slot` of a 16-bit half of a word, in the low bits of `half`.
__device__ __forceinline__ float from_slot(uint32_t half, int slot) {
  const uint32_t sign = half >> (slot == 0 ? 15 : slot == 1 ? 12 : slot == 2 ? 14 : 13);
  const uint32_t magnitude = half >> (9 - 3 * slot);
  const uint32_t exponent = magnitude >> 1 & 3;
  const uint32_t mantissa = magnitude & 1;
  const float value = exponent == 0 ? 0.5f * static_cast<float>(mantissa)
                                    : static_cast<float>((2 + mantissa) << exponent) * 0.25f;
  return (sign & 1) != 0 ? -value : value;
}

__device__ __forceinline__ float from_scale_image(uint8_t byte) {
  return byte == 0 ? 0.0f : __uint_as_float((static_cast<uint32_t>(byte) << 20) + (105u << 23));
}

// Columns [16 * block, + 16) of row `id` of NVFP4 tiles: exact.
__device__ __forceinline__ void load_tile_block(const PackedTable& table, int64_t id, int block,
                                                float (&values)[kColumns]) {
  const int64_t row_tiles = (table.d + kTileColumns - 1) / kTileColumns;
  const int column = block * kColumns;
  const int in_turn = column % kTileColumns;
  const uint8_t* tile =
      table.data + (id / kTileRows * row_tiles + column / kTileColumns) * NVFP4Format::kTileBytes;
  const int half = static_cast<int>(id % kTileRows) / 8;
  const int lane = static_cast<int>(id % 8) * 4 + in_turn % 128 / 32;
  const int segment = in_turn / 128;
  const int second = in_turn % 32 / kColumns;  // of the lane's two blocks
  const uint2 words =
      *reinterpret_cast<const uint2*>(tile + ((segment * 2 + half) * 32 + lane) * 16 + second * 8);
  const float scale = from_scale_image(
      tile[NVFP4Format::kCodeBytes + (lane * 2 + half) * 4 + segment * 2 + second]);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const uint32_t word = i < 8 ? words.x : words.y;
    values[i] = from_slot(i % 2 == 0 ? word & 0xffffu : word >> 16, i % 8 / 2) * scale;
  }
}

// Columns [16 * block, + 16) of a row of 8-bit values, those past the end zero.
__device__ __forceinline__ void load_bytes(const PackedTable& table, int64_t id, int block,
                                           float (&values)[kColumns]) {
  const uint8_t* source = table.data + id * table.stride + block * kColumns;
  const int count = min(kColumns, table.d - block * kColumns);
  alignas(16) uint8_t bytes[kColumns];
  if (count == kColumns && reinterpret_cast<uintptr_t>(source) % 16 == 0) {
    *reinterpret_cast<uint4*>(bytes) = *reinterpret_cast<const uint4*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) bytes[i] = i < count ? source[i] : 0;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    values[i] = table.format == WeightFormat::kFP8
                    ? from_fp8(bytes[i])
                    : static_cast<float>(static_cast<int8_t>(bytes[i]));
  }
}

template <typename T>
__device__ __forceinline__ void store_columns(T* target, int count,
                                              const float (&values)[kColumns]) {
  constexpr int kChunk = kVec<T>;
  if (count == kColumns && reinterpret_cast<uintptr_t>(target) % 16 == 0) {
#pragma unroll
    for (int chunk = 0; chunk < kColumns / kChunk; ++chunk) {
      float part[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; ++i) part[i] = values[chunk * kChunk + i];
      *reinterpret_cast<uint4*>(target + chunk * kChunk) = pack<T>(part);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < count) target[i] = from_float<T>(values[i]);
  }
}

template <typename T>
__global__ void __launch_bounds__(kPackedThreads)
    packed_embedding_kernel(const int64_t* ids, PackedTable table, T* out, float factor) {
  launch_dependents();
  wait_for_inputs();
  const int64_t asked = __ldcg(reinterpret_cast<const long long*>(ids) + blockIdx.x);
  const bool inside = asked >= 0 && asked < table.vocab;
  const int64_t id = inside ? asked : 0;
  T* target = out + static_cast<int64_t>(blockIdx.x) * table.d;
  const int64_t scale_row = id / kScaleBlock * table.scale_columns;
  for (int block = threadIdx.x; block * kColumns < table.d; block += kPackedThreads) {
    const int column = block * kColumns;
    float values[kColumns];
    if (table.format == WeightFormat::kNVFP4) {
      load_tile_block(table, id, block, values);
    } else {
      load_bytes(table, id, block, values);
    }
    const float scale =
        table.scale_columns == 0 ? table.scale[id] : table.scale[scale_row + column / kScaleBlock];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      values[i] = inside ? values[i] * scale * factor : nanf("");
    }
    store_columns(target + column, min(kColumns, table.d - column), values);
  }
}

template <typename T>
cudaError_t launch_packed_rows(const int64_t* ids, const PackedTable& table, void* out,
                               int64_t num_ids, float factor, cudaStream_t stream) {
  return launch(packed_embedding_kernel<T>, dim3(static_cast<unsigned>(num_ids)),
                dim3(kPackedThreads), 0, stream, ids, table, static_cast<T*>(out), factor);
}

}  // namespace

cudaError_t launch_packed_embedding(const int64_t* ids, const void* table, int64_t table_stride,
                                    const float* scale, int scale_columns, WeightFormat format,
                                    void* out, int64_t num_ids, int64_t vocab, int d, float factor,
                                    ElementType type, bool /*weights_static*/,
                                    cudaStream_t stream) {
  if (format == WeightFormat::kPlain) return cudaErrorInvalidValue;
  const PackedTable rows{
      static_cast<const uint8_t*>(table), table_stride, scale, scale_columns, format, vocab, d};
  return for_element(type, [&](auto element) {
    return launch_packed_rows<decltype(element)>(ids, rows, out, num_ids, factor, stream);
  });
}

}  // namespace flashrt
