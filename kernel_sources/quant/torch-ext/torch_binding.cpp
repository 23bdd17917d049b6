// Arguments of the `quant` ops, unpacked for the launchers. Checks are in torch-ext/quant.
#include <optional>

#include "common/row_tensor.h"
#include "quant.h"
#include "registration.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

int64_t count_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t dim = 0; dim + 1 < tensor.dim(); ++dim) rows *= tensor.size(dim);
  return rows;
}

void quantize_rows(const Tensor x, const MaybeTensor static_scale, Tensor out,
                   const MaybeTensor scale_out) {
  const DeviceGuard guard(x.get_device_index());
  QuantizeArgs args{};
  args.x = x.data_ptr();
  args.x_rows = rows_of(x, "quantize");
  args.type = element_type(x, "quantize");
  args.out = pointer<uint8_t>(out);
  args.out_rows = rows_of(out, "quantize");
  args.to_int8 = out.scalar_type() == ScalarType::Char;
  args.static_scale = static_cast<const float*>(pointer_or_null(static_scale));
  args.scale_per_row = static_scale.has_value() && static_scale->numel() != 1;
  args.scale_out = static_cast<float*>(pointer_or_null(scale_out));
  args.num_rows = count_rows(x);
  args.dim = static_cast<int>(x.size(-1));
  check_launch(launch_quantize(args, current_stream(x)), "quantize");
}

void dequantize(const Tensor data, const Tensor scale, Tensor out) {
  const DeviceGuard guard(data.get_device_index());
  DequantizeArgs args{};
  args.data = pointer<uint8_t>(data);
  args.data_rows = rows_of(data, "dequantize");
  args.from_int8 = data.scalar_type() == ScalarType::Char;
  args.scale = pointer<float>(scale);
  args.scale_of = scale.numel() == 1          ? ScaleOf::kTensor
                  : scale.dim() == data.dim() ? ScaleOf::kBlock
                                              : ScaleOf::kRow;
  args.out = out.data_ptr();
  args.out_rows = rows_of(out, "dequantize");
  args.type = element_type(out, "dequantize");
  args.num_rows = count_rows(data);
  args.dim = static_cast<int>(data.size(-1));
  check_launch(launch_dequantize(args, current_stream(data)), "dequantize");
}

// The row-major parts of a weight of `columns` columns.
NVFP4Args nvfp4_args(const Tensor& codes, const Tensor& block_scales, int64_t columns) {
  NVFP4Args args{};
  args.codes = pointer<uint8_t>(codes);
  args.block_scales = pointer<uint8_t>(block_scales);
  args.rows = codes.size(0);
  args.columns = columns;
  return args;
}

void set_values(NVFP4Args* args, const Tensor& scale, const Tensor& out, const char* op) {
  args->scale = pointer<float>(scale);
  args->scale_per_row = scale.numel() != 1;
  args->out = out.data_ptr();
  args->out_stride = out.stride(0);
  args->type = element_type(out, op);
}

void quantize_nvfp4(const Tensor x, const Tensor global_scale, const MaybeTensor importance,
                    Tensor codes, Tensor block_scales) {
  const DeviceGuard guard(x.get_device_index());
  NVFP4Args args = nvfp4_args(codes, block_scales, x.size(1));
  args.x = x.data_ptr();
  args.x_stride = x.stride(0);
  args.type = element_type(x, "quantize_nvfp4");
  args.scale = pointer<float>(global_scale);
  args.importance = static_cast<const float*>(pointer_or_null(importance));
  check_launch(launch_quantize_nvfp4(args, current_stream(x)), "quantize_nvfp4");
}

void dequantize_nvfp4(const Tensor codes, const Tensor block_scales, const Tensor scale,
                      Tensor out) {
  const DeviceGuard guard(codes.get_device_index());
  NVFP4Args args = nvfp4_args(codes, block_scales, out.size(1));
  set_values(&args, scale, out, "dequantize_nvfp4");
  check_launch(launch_dequantize_nvfp4(args, current_stream(codes)), "dequantize_nvfp4");
}

// Two codes a byte; where K is odd, the last high nibble is part of the weight and 0.
void tile_nvfp4(const Tensor codes, const Tensor block_scales, Tensor tiles) {
  const DeviceGuard guard(codes.get_device_index());
  NVFP4Args args = nvfp4_args(codes, block_scales, 2 * codes.size(1));
  args.tiles = pointer<uint8_t>(tiles);
  check_launch(launch_tile_nvfp4(args, current_stream(codes)), "tile_nvfp4");
}

void untile_nvfp4(const Tensor tiles, Tensor codes, Tensor block_scales) {
  const DeviceGuard guard(tiles.get_device_index());
  NVFP4Args args = nvfp4_args(codes, block_scales, 2 * codes.size(1));
  args.tiles = pointer<uint8_t>(tiles);
  check_launch(launch_untile_nvfp4(args, current_stream(tiles)), "untile_nvfp4");
}

void dequantize_nvfp4_tiles(const Tensor tiles, const Tensor scale, Tensor out) {
  const DeviceGuard guard(tiles.get_device_index());
  NVFP4Args args{};
  args.tiles = pointer<uint8_t>(tiles);
  args.rows = out.size(0);
  args.columns = out.size(1);
  set_values(&args, scale, out, "dequantize_nvfp4_tiles");
  check_launch(launch_dequantize_nvfp4_tiles(args, current_stream(tiles)),
               "dequantize_nvfp4_tiles");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("quantize_rows", TORCH_BOX(&flashrt::quantize_rows));
  ops.impl("dequantize", TORCH_BOX(&flashrt::dequantize));
  ops.impl("quantize_nvfp4", TORCH_BOX(&flashrt::quantize_nvfp4));
  ops.impl("dequantize_nvfp4", TORCH_BOX(&flashrt::dequantize_nvfp4));
  ops.impl("tile_nvfp4", TORCH_BOX(&flashrt::tile_nvfp4));
  ops.impl("untile_nvfp4", TORCH_BOX(&flashrt::untile_nvfp4));
  ops.impl("dequantize_nvfp4_tiles", TORCH_BOX(&flashrt::dequantize_nvfp4_tiles));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
