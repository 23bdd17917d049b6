// Arguments of the `attention` ops, unpacked for the launchers. Checks are in
// torch-ext/attention/ops.py.
#include "append.h"
#include "attend.h"
#include "common/row_tensor.h"
#include "norm_rope.h"
#include "registration.h"

namespace flashrt {
namespace {

using MaybeTensor = std::optional<Tensor>;

void leading_strides(const Tensor& tensor, int64_t (&strides)[3]) {
  for (int dim = 0; dim < 3; ++dim) strides[dim] = tensor.stride(dim);
}

constexpr int64_t kVectorBytes = 16;

// Whether every row starts on a multiple of `bytes`.
bool rows_aligned(const Tensor& tensor, int64_t bytes) {
  const int64_t size = static_cast<int64_t>(tensor.element_size());
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % bytes == 0;
  for (int dim = 0; dim < tensor.dim() - 1; ++dim) {
    aligned = aligned && (tensor.size(dim) == 1 || tensor.stride(dim) * size % bytes == 0);
  }
  return aligned;
}

// Kernels read and write heads by pairs of elements.
int64_t pair_bytes(const Tensor& tensor) {
  return 2 * element_bytes(element_type(tensor, "attention"));
}

// The tensor, or a copy with aligned rows.
Tensor with_rows_aligned(const Tensor& tensor, int64_t bytes) {
  if (rows_aligned(tensor, bytes)) return tensor;
  Tensor copy = new_like(tensor);
  torch::stable::copy_(copy, tensor);
  return copy;
}

Tensor with_pairs(const Tensor& tensor) { return with_rows_aligned(tensor, pair_bytes(tensor)); }

// An output to write to in place of `out`, and what brings its values there.
class PairOutput {
 public:
  explicit PairOutput(const Tensor& out)
      : out_(out), target_(rows_aligned(out, pair_bytes(out)) ? out : new_like(out)) {}
  void* data() const { return target_.data_ptr(); }
  void finish() {
    if (target_.data_ptr() != out_.data_ptr()) torch::stable::copy_(out_, target_);
  }

 private:
  Tensor out_;
  Tensor target_;
};

void check_cache(const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(rows_aligned(cache, kVectorBytes), "attend: ", name,
                  " must have rows on 16-byte boundaries, got one that starts elsewhere");
}

bool is_fp8(const Tensor& cache) { return cache.scalar_type() == ScalarType::Float8_e4m3fn; }

// Scales of an FP8 cache, one for all key heads or one for each.
template <typename Params>
void set_scales(const MaybeTensor& k_scale, const MaybeTensor& v_scale, Params& params) {
  params.k_scale = static_cast<const float*>(pointer_or_null(k_scale));
  params.v_scale = static_cast<const float*>(pointer_or_null(v_scale));
  params.k_scale_stride = k_scale.has_value() && k_scale->size(0) > 1 ? 1 : 0;
  params.v_scale_stride = v_scale.has_value() && v_scale->size(0) > 1 ? 1 : 0;
}

RowSettings row_settings(const Tensor& q, const MaybeTensor& cos, double eps, bool zero_centered,
                         bool over_all, bool interleaved) {
  RowSettings rows{};
  rows.eps = static_cast<float>(eps);
  rows.rotary_dim = cos.has_value() ? static_cast<int>(cos->size(-1)) : 0;
  rows.interleaved = interleaved;
  rows.zero_centered = zero_centered;
  rows.over_all = over_all;
  rows.tables_fp32 = cos.has_value() && cos->scalar_type() != q.scalar_type();
  return rows;
}

void attend(const Tensor q_given, const Tensor k_given, const Tensor v_given, Tensor k_cache,
            Tensor v_cache, const Tensor lengths, const MaybeTensor k_scale,
            const MaybeTensor v_scale, const MaybeTensor cos, const MaybeTensor sin,
            const MaybeTensor q_weight, const MaybeTensor k_weight, Tensor workspace, Tensor out,
            double norm_eps, bool norm_zero_centered, bool norm_over_all, bool interleaved,
            double scaling, int64_t window, double soft_cap, bool history_static) {
  const DeviceGuard guard(q_given.get_device_index());
  check_cache(k_cache, "k_cache");
  check_cache(v_cache, "v_cache");
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(workspace.data_ptr()) % kVectorBytes == 0,
                  "attend: workspace must start on a 16-byte boundary");
  const Tensor q = with_pairs(q_given), k = with_pairs(k_given);
  const Tensor v = with_rows_aligned(v_given, kVectorBytes);
  PairOutput result(out);
  AttendParams params{};
  params.q = q.data_ptr();
  params.k = k.data_ptr();
  params.v = v.data_ptr();
  params.k_cache = k_cache.data_ptr();
  params.v_cache = v_cache.data_ptr();
  params.lengths = static_cast<const int*>(lengths.data_ptr());
  set_scales(k_scale, v_scale, params);
  params.cos = pointer_or_null(cos);
  params.sin = pointer_or_null(sin);
  params.q_weight = pointer_or_null(q_weight);
  params.k_weight = pointer_or_null(k_weight);
  params.workspace = workspace.data_ptr();
  params.out = result.data();
  leading_strides(q, params.q_strides);
  leading_strides(k, params.k_strides);
  leading_strides(v, params.v_strides);
  leading_strides(k_cache, params.k_cache_strides);
  leading_strides(v_cache, params.v_cache_strides);
  if (cos.has_value()) {
    params.table_strides[0] = cos->size(0) == 1 ? 0 : cos->stride(0);
    if (cos->dim() == 2) {
      params.table_rows = static_cast<int>(cos->size(0));
    } else {
      params.table_strides[1] = cos->stride(1);
    }
  }
  params.batch = static_cast<int>(q.size(0));
  params.tokens = static_cast<int>(q.size(1));
  params.heads = static_cast<int>(q.size(2));
  params.kv_heads = static_cast<int>(k.size(2));
  params.slots = static_cast<int>(k_cache.size(2));
  params.dim = static_cast<int>(q.size(3));
  params.window = static_cast<int>(window);
  params.scaling = static_cast<float>(scaling);
  params.soft_cap = static_cast<float>(soft_cap);
  params.history_static = history_static;
  params.rows = row_settings(q, cos, norm_eps, norm_zero_centered, norm_over_all, interleaved);
  const bool bf16 = q.scalar_type() == ScalarType::BFloat16, fp8 = is_fp8(k_cache);
  const auto launcher =
      bf16 ? (fp8 ? attend_bf16_fp8 : attend_bf16) : (fp8 ? attend_fp16_fp8 : attend_fp16);
  check_launch(launcher(params, current_stream(q)), "attend");
  result.finish();
}

void norm_rope_out(const Tensor q_given, const Tensor k_given, const MaybeTensor cos,
                   const MaybeTensor sin, const MaybeTensor q_weight, const MaybeTensor k_weight,
                   double norm_eps, bool norm_zero_centered, bool norm_over_all, bool interleaved,
                   Tensor q_out, Tensor k_out) {
  const DeviceGuard guard(q_given.get_device_index());
  const Tensor q = with_pairs(q_given), k = with_pairs(k_given);
  PairOutput q_result(q_out), k_result(k_out);
  NormRopeParams params{};
  params.q = q.data_ptr();
  params.k = k.data_ptr();
  params.cos = pointer_or_null(cos);
  params.sin = pointer_or_null(sin);
  params.q_weight = pointer_or_null(q_weight);
  params.k_weight = pointer_or_null(k_weight);
  params.q_out = q_result.data();
  params.k_out = k_result.data();
  leading_strides(q, params.q_strides);
  leading_strides(k, params.k_strides);
  if (cos.has_value()) {
    params.table_strides[0] = cos->size(0) == 1 ? 0 : cos->stride(0);
    params.table_strides[1] = cos->stride(1);
  }
  params.batch = q.size(0);
  params.tokens = q.size(1);
  params.heads = static_cast<int>(q.size(2));
  params.kv_heads = static_cast<int>(k.size(2));
  params.dim = static_cast<int>(q.size(3));
  params.rows = row_settings(q, cos, norm_eps, norm_zero_centered, norm_over_all, interleaved);
  check_launch(norm_rope(params, element_type(q, "norm_rope"), current_stream(q)), "norm_rope");
  q_result.finish();
  k_result.finish();
}

void append_out(const Tensor k, const Tensor v, Tensor k_cache, Tensor v_cache,
                const Tensor lengths, const MaybeTensor k_scale, const MaybeTensor v_scale) {
  const DeviceGuard guard(k.get_device_index());
  AppendParams params{};
  params.k = k.data_ptr();
  params.v = v.data_ptr();
  params.k_cache = k_cache.data_ptr();
  params.v_cache = v_cache.data_ptr();
  params.lengths = static_cast<const int*>(lengths.data_ptr());
  set_scales(k_scale, v_scale, params);
  leading_strides(k, params.k_strides);
  leading_strides(v, params.v_strides);
  leading_strides(k_cache, params.k_cache_strides);
  leading_strides(v_cache, params.v_cache_strides);
  params.batch = k.size(0);
  params.tokens = k.size(1);
  params.kv_heads = static_cast<int>(k.size(2));
  params.slots = static_cast<int>(k_cache.size(2));
  params.dim = static_cast<int>(k.size(3));
  const ElementType type = element_type(k, "append");
  if (is_fp8(k_cache)) {
    check_launch(append_fp8(params, type, current_stream(k)), "append");
    return;
  }
  const int bytes = static_cast<int>(element_bytes(type));
  bool vectors = params.dim * bytes % kVectorBytes == 0;
  for (const Tensor& tensor :
       {k, v, static_cast<const Tensor&>(k_cache), static_cast<const Tensor&>(v_cache)}) {
    vectors = vectors && rows_aligned(tensor, kVectorBytes);
  }
  check_launch(append(params, bytes, vectors, current_stream(k)), "append");
}

}  // namespace
}  // namespace flashrt

STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("attend", TORCH_BOX(&flashrt::attend));
  ops.impl("norm_rope", TORCH_BOX(&flashrt::norm_rope_out));
  ops.impl("append", TORCH_BOX(&flashrt::append_out));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
