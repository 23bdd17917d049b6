#include <algorithm>
#include <limits>

#include "activation.cuh"
#include "common/for_element.h"
#include "common/launch.h"

namespace flashrt {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxGridRows = 65535;  // limit of gridDim.y

bool has_row_scales(const ActivationArgs& args) { return args.is_fp8 && args.fp8_scale == nullptr; }

bool is_contiguous(const Rows& rows, const ActivationArgs& args) {
  return rows.dims == 1 && (rows.stride[0] == args.dim || args.num_rows == 1);
}

// Contiguous operands are one long row, so that short rows do not leave threads idle.
void merge_contiguous(ActivationArgs* args) {
  const int64_t elements = args->num_rows * args->dim;
  const bool contiguous = is_contiguous(args->x_rows, *args) &&
                          (args->up == nullptr || is_contiguous(args->up_rows, *args)) &&
                          is_contiguous(args->out_rows, *args);
  if (!contiguous || elements > std::numeric_limits<int>::max()) return;
  args->dim = static_cast<int>(elements);
  args->num_rows = 1;
  args->x_rows = args->up_rows = args->out_rows = Rows{};
}

// FP8 with a scale of each row, of `chunks` chunks.
template <typename T>
cudaError_t launch_rows(const ActivationArgs& args, int chunks, cudaStream_t stream) {
  const int per_thread = chunks <= kMaxRowThreads       ? 1
                         : chunks <= 2 * kMaxRowThreads ? 2
                         : chunks <= 4 * kMaxRowThreads ? 4
                                                        : kLongRow;
  const int wanted =
      per_thread == kLongRow ? kMaxRowThreads : (chunks + per_thread - 1) / per_thread;
  const dim3 block(std::max(kWarp, (wanted + kWarp - 1) / kWarp * kWarp));
  const dim3 grid(static_cast<unsigned>(args.num_rows));
  void (*kernel)(ActivationArgs) = activation_row_kernel<T, kLongRow>;
  if (per_thread == 1) kernel = activation_row_kernel<T, 1>;
  if (per_thread == 2) kernel = activation_row_kernel<T, 2>;
  if (per_thread == 4) kernel = activation_row_kernel<T, 4>;
  return launch(kernel, grid, block, 0, stream, args);
}

template <typename T>
cudaError_t launch_as(ActivationArgs args, cudaStream_t stream) {
  const int64_t bytes = sizeof(T);
  args.aligned = rows_aligned(args.x, args.x_rows, bytes) &&
                 (args.up == nullptr || rows_aligned(args.up, args.up_rows, bytes)) &&
                 (args.is_fp8 ? rows_aligned(args.out, args.out_rows, 1, kVec<T>)
                              : rows_aligned(args.out, args.out_rows, bytes));
  const int chunks = args.dim / kVec<T> + (args.dim % kVec<T> != 0);
  if (has_row_scales(args)) return launch_rows<T>(args, chunks, stream);
  const dim3 grid((chunks + kThreads - 1) / kThreads, std::min(args.num_rows, kMaxGridRows));
  return launch(activation_kernel<T>, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace

cudaError_t launch_activation(ActivationArgs args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  if (!has_row_scales(args)) {
    if (args.dim == 0) return cudaSuccess;
    merge_contiguous(&args);
  }
  return for_element(args.type,
                     [&](auto element) { return launch_as<decltype(element)>(args, stream); });
}

}  // namespace flashrt
