// The activation rows a block multiplies with, rounded to T in shared memory:
//   r' = x, or round(x + branch), or round(x + round(norm(branch)));  x' = r', or round(norm(r')).
// A warp prepares exactly the columns that it multiplies later, so the only barriers of the block
// are those of the norms' sums.
#pragma once

#include "common/vec.cuh"
#include "copy.cuh"
#include "formats.cuh"
#include "narrow.cuh"
#include "slice.cuh"

namespace flashrt {

// Per row: what each warp summed.
struct alignas(16) PrologueScratch {
  float branch_sums[kMaxRows][kMaxWarps];
  float sums[kMaxRows][kMaxWarps];
};

template <typename T>
__device__ __forceinline__ void round_to(float (&values)[kVectorElements]) {
  const uint4 words = pack<T>(values);
  unpack<T>(words, values);
}

// Multiply by the row's scale and the norm's weight.
template <typename T>
__device__ __forceinline__ void apply_norm(float (&values)[kVectorElements], float row_scale,
                                           const uint4& weight_words, bool has_weight, int kind) {
  float weight[kVectorElements];
  unpack<T>(weight_words, weight);
  const float offset = kind == kZeroCenteredRmsNorm || !has_weight ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i)
    values[i] = (values[i] * row_scale) * (weight[i] + offset);
}

template <typename T, bool kVector>
__device__ __forceinline__ uint4 load_norm_weight(const void* weight, int column, int k) {
  return weight == nullptr ? make_uint4(0, 0, 0, 0) : load_words<T, kVector>(weight, 0, column, k);
}

__device__ __forceinline__ float square_sum(const float (&values)[kVectorElements]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) sum = __fmaf_rn(values[i], values[i], sum);
  return sum;
}

// Put each row's sum over the warp where the block can see it. The caller places the barrier.
template <int kRows>
__device__ __forceinline__ void publish_sums(float (&sums)[kRows],
                                             float (&shared_sums)[kMaxRows][kMaxWarps]) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      sums[m] += __shfl_xor_sync(0xffffffffu, sums[m], offset);
    if (threadIdx.x % 32 == 0) shared_sums[m][threadIdx.x / 32] = sums[m];
  }
}

// The warps' sums in ascending order; `values` is 16-byte aligned and `warps` 4 or kMaxWarps.
__device__ __forceinline__ float sum_warps(const float* values, int warps) {
  static_assert(kMaxWarps == 8);
  const float4 a = *reinterpret_cast<const float4*>(values);
  const float sum = ((a.x + a.y) + a.z) + a.w;
  if (warps < kMaxWarps) return sum;
  const float4 b = *reinterpret_cast<const float4*>(values + 4);
  return (((sum + b.x) + b.y) + b.z) + b.w;
}

// 1 / sqrt(mean + eps) of a row; every thread adds the warps' sums in the same order.
__device__ __forceinline__ float row_scale(const float (&warp_sums)[kMaxWarps], const Plan& plan,
                                           float eps) {
  return rsqrtf(sum_warps(warp_sums, plan.warps) * plan.inverse_k + eps);
}

// Norm weights of a lane's first passes, read before the activations are ready.
inline constexpr int kPreloadedPasses = 2;

template <typename T, int kRows, typename Format, bool kVector>
struct NormWords {
  uint4 words[kPreloadedPasses];

  __device__ void preload(const LinearArgs& args, const Slice<kRows, Format>& slice) {
#pragma unroll
    for (int pass = 0; pass < kPreloadedPasses; ++pass) {
      words[pass] = load_norm_weight<T, kVector>(args.norm_weight, slice.column(pass), args.k);
    }
  }

  __device__ uint4 get(const LinearArgs& args, const Slice<kRows, Format>& slice, int pass) const {
    if (pass == 0) return words[0];
    if (pass == 1) return words[1];
    return load_norm_weight<T, kVector>(args.norm_weight, slice.column(pass), args.k);
  }
};

// Sums of squares of the branch rows, for the norm that is applied to the branch before it is
// added.
template <typename T, int kRows, typename Format, bool kVector>
__device__ __forceinline__ void sum_branch(const LinearArgs& args, const Plan& plan,
                                           PrologueScratch& scratch,
                                           const Slice<kRows, Format>& slice) {
  float sums[kRows] = {};
#pragma unroll 1
  for (int pass = 0; pass < slice.passes; ++pass) {
    const int column = slice.column(pass);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      float branch[kVectorElements] = {};
      if (m < args.m)
        load_columns<T, kVector>(args.branch, m * args.branch_stride, column, args.k, branch);
      sums[m] += square_sum(branch);
    }
  }
  publish_sums<kRows>(sums, scratch.branch_sums);
  __syncthreads();
}

// r' = round(x + branch) of one thread's columns of one row; with branch_norm, the branch is normed
// first.
template <typename T, bool kVector>
__device__ __forceinline__ void add_branch(const LinearArgs& args, const Plan& plan,
                                           const PrologueScratch& scratch, int m, int column,
                                           float (&values)[kVectorElements]) {
  float branch[kVectorElements];
  load_columns<T, kVector>(args.branch, m * args.branch_stride, column, args.k, branch);
  if (args.branch_norm_kind != kNoNorm) {
    const uint4 weight = load_norm_weight<T, kVector>(args.branch_norm_weight, column, args.k);
    apply_norm<T>(branch, row_scale(scratch.branch_sums[m], plan, args.branch_norm_eps), weight,
                  args.branch_norm_weight != nullptr, args.branch_norm_kind);
    round_to<T>(branch);
  }
#pragma unroll
  for (int i = 0; i < kVectorElements; ++i) values[i] += branch[i];
  round_to<T>(values);
  if (args.residual_out != nullptr && blockIdx.x == 0) {
    store_columns<T, kVector>(args.residual_out, m * args.residual_out_stride, column, args.k,
                              values);
  }
}

// x of every row, each lane its own columns, into shared memory. kAsync: all loads in flight at
// once as asynchronous copies, which are fast where lanes of consecutive columns have consecutive
// places.
template <typename T, int kRows, typename Format, bool kVector>
__device__ __forceinline__ void fetch_rows(const LinearArgs& args,
                                           const Slice<kRows, Format>& slice) {
  constexpr bool kAsync = kVector && kPieces<Format> == 1;
#pragma unroll(kAsync || !kVector ? 1 : 2)
  for (int pass = 0; pass < slice.passes; ++pass) {
    const int column = slice.column(pass);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const bool inside = m < args.m && column < args.k;
      if constexpr (kAsync) {
        const T* source = static_cast<const T*>(args.x) + (inside ? m * args.x_stride + column : 0);
        copy_async(&slice.at(m, pass), source, inside ? 16 : 0);
      } else {
        slice.at(m, pass) =
            load_words<T, kVector>(args.x, m * args.x_stride, column, inside ? args.k : 0);
      }
    }
  }
  if constexpr (kAsync) {
    commit_copies();
    wait_copies<0>();
  }
}

// Passes whose words a lane can hold, for all of a few rows or for one row without a norm.
inline constexpr int kFewPasses = 2;
inline constexpr int kManyPasses = 6;

// x' of a few rows without a branch, straight from registers into shared memory.
template <int kPasses, typename T, int kRows, typename Format>
__device__ __forceinline__ void prepare_held_rows(
    const LinearArgs& args, const Plan& plan, PrologueScratch& scratch,
    const Slice<kRows, Format>& slice, const NormWords<T, kRows, Format, true>& norm_words,
    RowFactors& factors) {
  uint4 words[kPasses][kRows];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int column = slice.column(pass);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const bool inside = m < args.m && pass < slice.passes;
      words[pass][m] = load_words<T, true>(args.x, m * args.x_stride, column, inside ? args.k : 0);
    }
  }
  if (kPasses <= kPreloadedPasses && args.norm_kind != kNoNorm) {
    float sums[kRows] = {};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int m = 0; m < kRows; ++m) {
        float values[kVectorElements];
        unpack<T>(words[pass][m], values);
        sums[m] += square_sum(values);
      }
    }
    publish_sums<kRows>(sums, scratch.sums);
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      const float scale = row_scale(scratch.sums[m], plan, args.norm_eps);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        float values[kVectorElements];
        unpack<T>(words[pass][m], values);
        apply_norm<T>(values, scale, norm_words.words[pass], args.norm_weight != nullptr,
                      args.norm_kind);
        words[pass][m] = pack<T>(values);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    if constexpr (!std::is_same_v<T, Operand<T, Format>>) {
      Narrowing narrowing;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) narrowing.see(words[pass][m]);
      narrowing.choose(factors, m);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) words[pass][m] = narrowing.apply(words[pass][m]);
    }
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (pass < slice.passes) slice.at(m, pass) = words[pass][m];
    }
  }
}

// x' of every row, each lane its own columns, into shared memory.
template <typename T, int kRows, typename Format, bool kVector>
__device__ __forceinline__ void prepare_rows(
    const LinearArgs& args, const Plan& plan, PrologueScratch& scratch,
    const Slice<kRows, Format>& slice, const NormWords<T, kRows, Format, kVector>& norm_words) {
  fetch_rows<T, kRows, Format, kVector>(args, slice);
  if (args.branch == nullptr && args.norm_kind == kNoNorm) return;
  if (args.branch_norm_kind != kNoNorm)
    sum_branch<T, kRows, Format, kVector>(args, plan, scratch, slice);
  float sums[kRows] = {};
#pragma unroll 1
  for (int pass = 0; pass < slice.passes; ++pass) {
    const int column = slice.column(pass);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      float values[kVectorElements];
      unpack<T>(slice.at(m, pass), values);
      if (args.branch != nullptr && m < args.m) {
        add_branch<T, kVector>(args, plan, scratch, m, column, values);
        slice.at(m, pass) = pack<T>(values);
      }
      sums[m] += square_sum(values);
    }
  }
  if (args.norm_kind == kNoNorm) return;
  publish_sums<kRows>(sums, scratch.sums);
  __syncthreads();
#pragma unroll
  for (int m = 0; m < kRows; ++m) sums[m] = row_scale(scratch.sums[m], plan, args.norm_eps);
#pragma unroll 1
  for (int pass = 0; pass < slice.passes; ++pass) {
    const uint4 weight = norm_words.get(args, slice, pass);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      float values[kVectorElements];
      unpack<T>(slice.at(m, pass), values);
      apply_norm<T>(values, sums[m], weight, args.norm_weight != nullptr, args.norm_kind);
      slice.at(m, pass) = pack<T>(values);
    }
  }
}

}  // namespace flashrt
