// The activation rows a block multiplies with, rounded to T in shared memory:
//   r' = x, or round(x + branch), or round(x + round(norm(branch)));  x' = r', or round(norm(r')).
// A warp prepares exactly the columns that it multiplies later, four turns at a time, so the only
// barriers of the block are those of the norms' sums.
#pragma once

#include <algorithm>

#include "common/vec.cuh"
#include "copy.cuh"
#include "formats.cuh"

namespace flashrt {

// Per row: what each warp summed.
struct alignas(16) PrologueScratch {
  float branch_sums[kMaxRows][kMaxWarps];
  float sums[kMaxRows][kMaxWarps];
};

// Read kVectorElements columns from `column`, zeros past `k`; kVector promises 16-byte aligned
// rows.
template <typename T, bool kVector>
__device__ __forceinline__ uint4 load_words(const void* base, int64_t offset, int column, int k) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if constexpr (kVector) {
    if (column < k)
      words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(base) + offset + column));
  } else {
    unsigned short elements[kVectorElements];
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      elements[i] = column + i < k
                        ? __ldcg(static_cast<const unsigned short*>(base) + offset + column + i)
                        : 0;
    }
    words = make_uint4(elements[0] | elements[1] << 16, elements[2] | elements[3] << 16,
                       elements[4] | elements[5] << 16, elements[6] | elements[7] << 16);
  }
  return words;
}

template <typename T, bool kVector>
__device__ __forceinline__ void load_columns(const void* base, int64_t offset, int column, int k,
                                             float (&values)[kVectorElements]) {
  unpack<T>(load_words<T, kVector>(base, offset, column, k), values);
}

template <typename T, bool kVector>
__device__ __forceinline__ void store_columns(void* base, int64_t offset, int column, int k,
                                              const float (&values)[kVectorElements]) {
  if constexpr (kVector) {
    if (column < k)
      *reinterpret_cast<uint4*>(static_cast<T*>(base) + offset + column) = pack<T>(values);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) {
      if (column + i < k) static_cast<T*>(base)[offset + column + i] = from_float<T>(values[i]);
    }
  }
}

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

// The warps' sums in ascending order; `values` is 16-byte aligned and `warps` a multiple of 4.
__device__ __forceinline__ float sum_warps(const float* values, int warps) {
  float sum = 0.0f;
  for (int w = 0; w < warps; w += 4) {
    const float4 four = *reinterpret_cast<const float4*>(values + w);
    sum = (((sum + four.x) + four.y) + four.z) + four.w;
  }
  return sum;
}

// 1 / sqrt(mean + eps) of a row; every thread adds the warps' sums in the same order.
__device__ __forceinline__ float row_scale(const float (&warp_sums)[kMaxWarps], const Plan& plan,
                                           float eps) {
  return rsqrtf(sum_warps(warp_sums, plan.warps) * plan.inverse_k + eps);
}

// A warp's columns of x in shared memory, ordered as the products read them: [segment][piece][row]
// [lane % 4], 16 bytes each. A pass of the warp fills one turn or several.
inline constexpr int kPassElements = 32 * kVectorElements;
template <typename Format>
inline constexpr int kTurnsPerPass = std::max(1, kPassElements / kTurnElements<Format>);
template <typename Format>
inline constexpr int kPassesPerTurn = std::max(1, kTurnElements<Format> / kPassElements);

// Passes that a warp's part of a row takes.
template <typename Format>
__host__ __device__ constexpr int count_passes(int turns) {
  return (turns * kPassesPerTurn<Format> + kTurnsPerPass<Format> - 1) / kTurnsPerPass<Format>;
}

template <int kRows, typename Format>
struct Slice {
  uint4* words;  // of the warp's first turn
  int passes;
  int first_column;
  int turn_stride;  // in columns, of the turns of one pass together
  int place;        // this lane's 16 bytes of pass 0, row 0

  // Lanes follow the order of shared memory, not of columns: scattered stores are slow.
  __device__ Slice(uint4* shared_x, const Plan& plan) {
    constexpr int kTurnLanes = 32 / kTurnsPerPass<Format>;
    const int turn = threadIdx.x % 32 / kTurnLanes;  // of the pass
    const int piece = threadIdx.x % kTurnLanes / 4;  // of the turn, over two segments
    const int warp = threadIdx.x / 32;
    passes = count_passes<Format>(plan.turns);
    words = shared_x + warp * passes * kPassWords;
    first_column = (turn * plan.warps + warp) * kTurnElements<Format> +
                   piece / kPieces<Format> * kSegmentElements<Format> +
                   threadIdx.x % 4 * kLaneElements<Format> +
                   piece % kPieces<Format> * kVectorElements;
    turn_stride = kTurnsPerPass<Format> * plan.warps * kTurnElements<Format>;
    place = threadIdx.x % 32 / 4 * kRows * 4 + threadIdx.x % 4;
  }

  // The first of the lane's columns in a pass.
  __device__ int column(int pass) const {
    return first_column + pass / kPassesPerTurn<Format> * turn_stride +
           pass % kPassesPerTurn<Format> * kPassElements;
  }

  static constexpr int kPassWords = 32 * kRows;

  __device__ uint4& at(int m, int pass) const { return words[pass * kPassWords + place + m * 4]; }
};

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

// Per warp and row: the factor that undoes narrow_rows.
struct RowFactors {
  float values[kMaxRows][kMaxWarps];
};

// How a warp's part of a row of x' turns from bf16 into fp16: scaled by a power of two that brings
// its largest element to [2^14, 2^15). Elements below 2^-29 of that keep fewer bits than bf16 has,
// at an error of 2^-40 of the largest: nothing else is rounded.
struct Narrowing {
  uint32_t largest = 0;  // magnitudes of two bf16
  float factor = 0.0f;

  __device__ __forceinline__ void see(const uint4& words) {
    constexpr uint32_t kMagnitude = 0x7fff7fffu;
    largest = __vmaxu2(largest, __vmaxu2(__vmaxu2(words.x & kMagnitude, words.y & kMagnitude),
                                         __vmaxu2(words.z & kMagnitude, words.w & kMagnitude)));
  }

  // All lanes of the warp have seen their columns of row `m`.
  __device__ __forceinline__ void choose(RowFactors& factors, int m) {
    constexpr int kMantissaBits = 7;
    constexpr uint32_t kLeast = 15;  // keeps both factors normal
    const uint32_t most = __reduce_max_sync(0xffffffffu, max(largest & 0xffffu, largest >> 16));
    const uint32_t exponent = max(most >> kMantissaBits, kLeast);
    factor = __uint_as_float((268u - exponent) << 23);
    if (threadIdx.x % 32 == 0)
      factors.values[m][threadIdx.x / 32] = __uint_as_float((exponent - 14u) << 23);
  }

  __device__ __forceinline__ uint4 apply(const uint4& words) const {
    float values[kVectorElements];
    unpack<__nv_bfloat16>(words, values);
#pragma unroll
    for (int i = 0; i < kVectorElements; ++i) values[i] *= factor;
    return pack<__half>(values);
  }
};

// Narrow a warp's columns of x' in shared memory.
template <int kRows, typename Format>
__device__ __forceinline__ void narrow_rows(const Slice<kRows, Format>& slice,
                                            RowFactors& factors) {
#pragma unroll 1
  for (int m = 0; m < kRows; ++m) {
    Narrowing narrowing;
#pragma unroll 2
    for (int pass = 0; pass < slice.passes; ++pass) narrowing.see(slice.at(m, pass));
    narrowing.choose(factors, m);
#pragma unroll 2
    for (int pass = 0; pass < slice.passes; ++pass)
      slice.at(m, pass) = narrowing.apply(slice.at(m, pass));
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
