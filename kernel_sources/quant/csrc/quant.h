// The launchers of the `quant` family, free of torch. The arithmetic is that of
// torch-ext/quant/reference.py in every bit.
//
// Each of them writes what later work reads as weights, so none lets its successor start early.
#pragma once

#include <cuda_runtime_api.h>

#include "common/element_type.h"
#include "common/rows.h"

namespace flashrt {

// out = round(x / scale) per row, E4M3 or INT8. Rows have unit stride.
struct QuantizeArgs {
  const void* x;
  Rows x_rows;
  ElementType type;  // of x
  uint8_t* out;
  Rows out_rows;
  bool to_int8;
  const float* static_scale;  // null: max(abs(row)) / 448 or 127, written to scale_out
  bool scale_per_row;         // static_scale has one element for each row
  float* scale_out;           // [num_rows]
  int64_t num_rows;
  int dim;
  bool aligned;  // set by the launcher: rows may be read and written by whole chunks
};

enum class ScaleOf : int { kTensor = 0, kRow = 1, kBlock = 2 };  // a block is 128 x 128

// out = round(data * scale), data E4M3 or INT8.
struct DequantizeArgs {
  const uint8_t* data;
  Rows data_rows;
  bool from_int8;
  const float* scale;
  ScaleOf scale_of;
  void* out;
  Rows out_rows;
  ElementType type;  // of out
  int64_t num_rows;
  int dim;
  bool aligned;  // set by the launcher
};

// An NVFP4 weight [rows, columns]: codes [rows, ceil(columns / 2)] and block scales
// [rows, ceil(columns / 16)] row-major and contiguous; or tiles (see torch-ext/quant/tiles.py).
struct NVFP4Args {
  const void* x;            // quantize: [rows, columns] of `type`, unit stride along a row
  int64_t x_stride;         // in elements
  const float* importance;  // quantize: [columns] or null
  const float* scale;       // quantize: the global scale; dequantize: one, or one a row
  bool scale_per_row;
  uint8_t* codes;
  uint8_t* block_scales;
  uint8_t* tiles;
  void* out;           // dequantize: [rows, columns] of `type`, unit stride along a row
  int64_t out_stride;  // in elements
  ElementType type;
  int64_t rows;
  int64_t columns;
  bool aligned;  // set by the launcher: rows of x or out start on 16 bytes
};

cudaError_t launch_quantize(QuantizeArgs args, cudaStream_t stream);
cudaError_t launch_dequantize(DequantizeArgs args, cudaStream_t stream);
cudaError_t launch_quantize_nvfp4(NVFP4Args args, cudaStream_t stream);
cudaError_t launch_dequantize_nvfp4(NVFP4Args args, cudaStream_t stream);
cudaError_t launch_tile_nvfp4(NVFP4Args args, cudaStream_t stream);
cudaError_t launch_untile_nvfp4(NVFP4Args args, cudaStream_t stream);
cudaError_t launch_dequantize_nvfp4_tiles(NVFP4Args args, cudaStream_t stream);

}  // namespace flashrt
