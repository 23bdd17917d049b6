// Unpacks the operators' arguments into LinearArgs; schemas are in torch-ext/linear/schema.py,
// checks of shapes and dtypes in torch-ext/linear/arguments.py. Only what needs addresses is
// checked here.
#include <algorithm>
#include <optional>

#include "common/stable.h"
#include "linear.h"
#include "packed_embedding.h"
#include "registration.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

ElementType element_type(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return ElementType::kBF16;
    case ScalarType::Half:
      return ElementType::kFP16;
    default:
      return ElementType::kFP32;
  }
}

// Operands are rows: a matrix, or a contiguous tensor of any dims. One row has no pitch of its own.
int64_t columns_of(const Tensor& rows) { return rows.size(rows.dim() - 1); }
int64_t row_stride(const Tensor& rows) {
  return rows.dim() == 2 && rows.size(0) > 1 ? rows.stride(0) : columns_of(rows);
}
int64_t row_count(const Tensor& rows) {
  return rows.dim() == 2 ? rows.size(0) : rows.numel() / columns_of(rows);
}
int64_t row_stride(const MaybeTensor& rows) { return rows.has_value() ? row_stride(*rows) : 0; }

WeightFormat weight_format(const Tensor& data) {
  switch (data.scalar_type()) {
    case ScalarType::Float8_e4m3fn:
      return WeightFormat::kFP8;
    case ScalarType::Char:
      return WeightFormat::kINT8;
    case ScalarType::Byte:
      return WeightFormat::kNVFP4;
    default:
      return WeightFormat::kPlain;
  }
}

// Rows of a weight: one scale each, or with a grid of scales (or none) those of its matrix.
int64_t weight_rows(const Tensor& data, const MaybeTensor& scale) {
  return scale.has_value() && scale->dim() == 1 ? scale->size(0) : data.size(0);
}
void check_tiles(const Tensor& data, WeightFormat format, const char* op) {
  constexpr uintptr_t kAlignment = 16;
  STD_TORCH_CHECK(format != WeightFormat::kNVFP4 ||
                      reinterpret_cast<uintptr_t>(data.data_ptr()) % kAlignment == 0,
                  op, ": nvfp4 data must start on a multiple of ", kAlignment, " bytes");
}
int64_t weight_stride(const Tensor& data, WeightFormat format) {
  return format == WeightFormat::kNVFP4 ? 0 : data.stride(0);
}
int scale_columns(const MaybeTensor& scale) {
  return scale.has_value() && scale->dim() == 2 ? static_cast<int>(scale->size(1)) : 0;
}

// A new contiguous tensor: the first `leading` dims of `like`, then `columns`. Much cheaper than a
// call through the dispatcher.
Tensor empty_rows(const Tensor& like, int64_t leading, int64_t columns, int32_t dtype) {
  constexpr int64_t kMaxDims = 16;
  STD_TORCH_CHECK(leading < kMaxDims, "linear: tensors must have at most ", kMaxDims, " dims");
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t dim = leading; dim >= 0; --dim) {
    sizes[dim] = dim == leading ? columns : like.size(dim);
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(leading + 1, sizes, strides, dtype,
                                                         aoti_torch_device_type_cuda(),
                                                         like.get_device_index(), &handle));
  return Tensor(handle);
}

int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// Bytes of a tensor's rows: `count` rows of `row` bytes, `pitch` apart.
struct Span {
  int64_t count;
  intptr_t start, end, pitch, row;

  explicit Span(const Tensor& rows) {
    const intptr_t size = static_cast<intptr_t>(rows.element_size());
    count = row_count(rows);
    pitch = row_stride(rows) * size;
    row = columns_of(rows) * size;
    start = reinterpret_cast<intptr_t>(rows.data_ptr());
    end = start + (count - 1) * pitch + row;
  }

  // Whether any byte is in both; columns of one buffer with equal pitch share none.
  bool overlaps(const Span& other) const {
    if (end <= other.start || other.end <= start) return false;
    if (pitch != other.pitch || pitch == 0) return true;
    const intptr_t shift = ((other.start - start) % pitch + pitch) % pitch;
    return shift < row || shift + other.row > pitch;
  }

  bool same_memory(const Span& other) const {
    return start == other.start && row == other.row && (pitch == other.pitch || count == 1);
  }
};

void check_disjoint(const Span& written, const char* written_name, const MaybeTensor& read,
                    const char* read_name) {
  STD_TORCH_CHECK(!read.has_value() || !written.overlaps(Span(*read)), "linear: ", written_name,
                  " must not share memory with ", read_name);
}

void check_rows(const Span& written, const char* name) {
  STD_TORCH_CHECK(written.count == 1 || written.pitch >= written.row, "linear: rows of ", name,
                  " must not share memory");
}

// A kernel's blocks write while others still read. overlap.py asks the same on the CPU.
void check_overlap(const Tensor& out, const MaybeTensor& residual_out, const Tensor& x,
                   const MaybeTensor& branch, const MaybeTensor& residual) {
  const Span result(out);
  check_rows(result, "out");
  check_disjoint(result, "out", x, "x");
  check_disjoint(result, "out", branch, "branch");
  if (residual.has_value() && !result.same_memory(Span(*residual))) {
    check_disjoint(result, "out", residual, "residual");
  }
  if (residual_out.has_value()) {
    const Span stream(*residual_out);
    check_rows(stream, "residual_out");
    check_disjoint(stream, "residual_out", x, "x");
    check_disjoint(stream, "residual_out", branch, "branch");
    check_disjoint(stream, "residual_out", residual, "residual");
    check_disjoint(stream, "residual_out", out, "out");
  }
}

// The same call for at most kMaxRows rows from `first` on.
LinearArgs take_rows(LinearArgs args, int first) {
  const int64_t element = args.type == ElementType::kFP32 ? 4 : 2;
  const int64_t out_element = args.out_type == ElementType::kFP32 ? 4 : 2;
  const auto moved = [first](const void* rows, int64_t stride, int64_t size) {
    return rows == nullptr ? nullptr : static_cast<const char*>(rows) + first * stride * size;
  };
  const auto moved_output = [first](void* rows, int64_t stride, int64_t size) {
    return rows == nullptr ? nullptr : static_cast<char*>(rows) + first * stride * size;
  };
  args.x = moved(args.x, args.x_stride, element);
  args.branch = moved(args.branch, args.branch_stride, element);
  args.residual = moved(args.residual, args.residual_stride, element);
  args.residual_out = moved_output(args.residual_out, args.residual_out_stride, element);
  args.out = moved_output(args.out, args.out_stride, out_element);
  args.m = std::min(args.m - first, kMaxRows);
  return args;
}

void linear_out(const Tensor& out, const MaybeTensor& residual_out, const MaybeTensor& branch,
                const MaybeTensor& branch_norm_weight, double branch_norm_eps,
                int64_t branch_norm_kind, const Tensor& x, const Tensor& w0, const MaybeTensor& w1,
                const MaybeTensor& w2, const MaybeTensor& scale0, const MaybeTensor& scale1,
                const MaybeTensor& scale2, const MaybeTensor& b0, const MaybeTensor& b1,
                const MaybeTensor& b2, const MaybeTensor& norm_weight, double norm_eps,
                int64_t norm_kind, const MaybeTensor& residual, int64_t activation, bool gated,
                double scale, double soft_cap, bool weights_static) {
  check_overlap(out, residual_out, x, branch, residual);
  LinearArgs args{};
  args.x = x.data_ptr();
  args.x_stride = row_stride(x);
  args.m = static_cast<int>(row_count(x));
  args.k = static_cast<int>(columns_of(x));

  const Tensor* const weights[3] = {&w0, w1.has_value() ? &*w1 : nullptr,
                                    w2.has_value() ? &*w2 : nullptr};
  const MaybeTensor* const scales[3] = {&scale0, &scale1, &scale2};
  const MaybeTensor* const biases[3] = {&b0, &b1, &b2};
  args.format = weight_format(w0);
  args.scale_columns = scale_columns(scale0);
  for (const Tensor* weight : weights) {
    if (weight == nullptr) break;
    const int i = args.num_weights++;
    args.weight[i] = weight->data_ptr();
    check_tiles(*weight, args.format, "linear");
    args.weight_stride[i] = weight_stride(*weight, args.format);
    args.n[i] = static_cast<int>(weight_rows(*weight, *scales[i]));
    args.weight_scale[i] = static_cast<const float*>(pointer_or_null(*scales[i]));
    args.bias[i] = pointer_or_null(*biases[i]);
  }
  const bool plain = args.format == WeightFormat::kPlain;
  args.weight_col_stride = args.k == 1 || !plain ? 1 : w0.stride(1);

  args.branch = pointer_or_null(branch);
  args.branch_stride = row_stride(branch);
  args.branch_norm_weight = pointer_or_null(branch_norm_weight);
  args.branch_norm_eps = static_cast<float>(branch_norm_eps);
  args.branch_norm_kind = static_cast<int>(branch_norm_kind);
  args.residual_out = pointer_or_null(residual_out);
  args.residual_out_stride = row_stride(residual_out);
  args.norm_weight = pointer_or_null(norm_weight);
  args.norm_eps = static_cast<float>(norm_eps);
  args.norm_kind = static_cast<int>(norm_kind);

  args.residual = pointer_or_null(residual);
  args.residual_stride = row_stride(residual);
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap);
  args.activation = static_cast<Activation>(activation);
  args.gated = gated;
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.type = element_type(x);
  args.out_type = element_type(out);
  args.weights_static = weights_static;

  const DeviceGuard guard(x.get_device_index());
  const cudaStream_t stream = current_stream(x);
  for (int first = 0; first < args.m; first += kMaxRows) {
    check_launch(launch_linear(take_rows(args, first), stream), "linear");
  }
}

Tensor linear(const Tensor& x, const Tensor& w0, const MaybeTensor& w1, const MaybeTensor& w2,
              const MaybeTensor& scale0, const MaybeTensor& scale1, const MaybeTensor& scale2,
              const MaybeTensor& b0, const MaybeTensor& b1, const MaybeTensor& b2,
              const MaybeTensor& norm_weight, double norm_eps, int64_t norm_kind,
              const MaybeTensor& residual, int64_t activation, bool gated, double scale,
              double soft_cap, bool weights_static, bool fp32_out) {
  int64_t columns = weight_rows(w0, scale0);
  if (!gated) {
    if (w1.has_value()) columns += weight_rows(*w1, scale1);
    if (w2.has_value()) columns += weight_rows(*w2, scale2);
  }
  const int32_t dtype = fp32_out ? aoti_torch_dtype_float32() : dtype_of(x);
  Tensor out = empty_rows(x, x.dim() - 1, columns, dtype);
  linear_out(out, std::nullopt, std::nullopt, std::nullopt, 0.0, kNoNorm, x, w0, w1, w2, scale0,
             scale1, scale2, b0, b1, b2, norm_weight, norm_eps, norm_kind, residual, activation,
             gated, scale, soft_cap, weights_static);
  return out;
}

void embedding_out(const Tensor& out, const Tensor& ids, const Tensor& table,
                   const MaybeTensor& table_scale, double scale, bool weights_static) {
  const int64_t num_ids = ids.numel();
  if (num_ids == 0) return;
  const DeviceGuard guard(table.get_device_index());
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  const int64_t vocab = weight_rows(table, table_scale);
  const int columns = static_cast<int>(columns_of(out));
  const auto factor = static_cast<float>(scale);
  const WeightFormat format = weight_format(table);
  const int64_t stride = weight_stride(table, format);
  check_tiles(table, format, "embedding");
  const cudaStream_t stream = current_stream(table);
  if (!table_scale.has_value()) {
    check_launch(launch_embedding(id, table.data_ptr(), stride, out.data_ptr(), num_ids, vocab,
                                  columns, factor, element_type(table), weights_static, stream),
                 "embedding");
    return;
  }
  check_launch(launch_packed_embedding(
                   id, table.data_ptr(), stride, static_cast<const float*>(table_scale->data_ptr()),
                   scale_columns(table_scale), format, out.data_ptr(), num_ids, vocab, columns,
                   factor, element_type(out), weights_static, stream),
               "embedding");
}

Tensor embedding(const Tensor& ids, const Tensor& table, double scale, bool weights_static) {
  Tensor out = empty_rows(ids, ids.dim(), table.size(1), dtype_of(table));
  embedding_out(out, ids, table, std::nullopt, scale, weights_static);
  return out;
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("linear", TORCH_BOX(&flashrt::linear));
  ops.impl("linear_out", TORCH_BOX(&flashrt::linear_out));
  ops.impl("embedding", TORCH_BOX(&flashrt::embedding));
  ops.impl("embedding_out", TORCH_BOX(&flashrt::embedding_out));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
