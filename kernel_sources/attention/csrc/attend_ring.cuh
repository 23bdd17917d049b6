// The ring in shared memory through which a block's keys and values pass.
//
// Items are the keys of the block's first split, its values, the keys of the second, and so on;
// item n lies in slot n modulo the number of slots. Warp w copies rows 16w..16w+15 of every item:
// keys are read by the warp that copied them, values by all. Rows that are not in the cache yet,
// and dead ones, are zeros.
#pragma once

#include "attend_work.cuh"

namespace flashrt {

template <typename C, int D>
class Ring {
 public:
  static constexpr int kSlotBytes = SharedLayout<C, D>::kSlotBytes;

  __device__ __forceinline__ Ring(const AttendParams& p, const Work& work, unsigned char* memory)
      : memory_(memory),
        slots_(p.ring_slots),
        items_(2 * (work.own_end - work.own)),
        split_(work.own),
        first_(work.begin),
        last_(work.length - 1) {
    keys_ = static_cast<const C*>(p.k_cache) + work.sequence * p.k_cache_strides[0] +
            work.kv_head * p.k_cache_strides[1];
    values_ = static_cast<const C*>(p.v_cache) + work.sequence * p.v_cache_strides[0] +
              work.kv_head * p.v_cache_strides[1];
    key_stride_ = p.k_cache_strides[2];
    value_stride_ = p.v_cache_strides[2];
    if (kWholeRows) {
      const int row = threadIdx.x / 32 * kTile + threadIdx.x % 32 / kPieces;
      const int piece = threadIdx.x % 32 % kPieces;
      keys_ += row * key_stride_ + kPiece * piece;
      values_ += row * value_stride_ + kPiece * piece;
      place_ = row * kCacheRowBytes<C, D> + 16 * piece;
    }
  }

  // With so few slots, values are read only after all keys and values before are done with.
  __device__ __forceinline__ bool is_shallow() const { return slots_ <= 2; }

  // Ask for the items whose slots are free, now that the first `done` items are done with.
  __device__ __forceinline__ void fill(int done) {
#pragma unroll 1
    for (; next_ < min(items_, done + slots_); ++next_) {
      const bool is_value = next_ % 2 == 1;
      copy_rows(is_value ? values_ : keys_, is_value ? value_stride_ : key_stride_,
                split_ + next_ / 2);
      commit_copies();
      write_ = write_ + 1 == slots_ ? 0 : write_ + 1;
    }
  }
  // The next item's slot, once this thread's part of it has arrived.
  __device__ __forceinline__ const unsigned char* take() {
    wait_copies(next_ - 1 - taken_++);
    const unsigned char* slot = memory_ + read_ * kSlotBytes;
    read_ = read_ + 1 == slots_ ? 0 : read_ + 1;
    return slot;
  }

 private:
  static constexpr int kPiece = 16 / sizeof(C), kPieces = D / kPiece;  // of a row, 16 bytes each
  // A warp takes whole rows at once: every lane has its row, and others so many rows below.
  static constexpr bool kWholeRows = 32 % kPieces == 0;

  __device__ __forceinline__ void copy_rows(const C* rows, int64_t stride, int split) const {
    unsigned char* slot = memory_ + write_ * kSlotBytes;
    const int slot0 = split * kSplit, lane = threadIdx.x % 32;
    if (kWholeRows && slot0 >= first_ && slot0 + kSplit - 1 <= last_) {  // all is history
      constexpr int kRows = 32 / kPieces;
      unsigned char* target = slot + place_;
      const C* source = rows + slot0 * stride;
#pragma unroll
      for (int i = 0; i < kTile / kRows; ++i) {
        copy_async(target + i * kRows * kCacheRowBytes<C, D>, source + i * kRows * stride, 16);
      }
      return;
    }
    const int row0 = threadIdx.x / 32 * kTile;
    if (kWholeRows) rows -= (row0 + lane / kPieces) * stride + kPiece * (lane % kPieces);
#pragma unroll
    for (int i = lane; i < kTile * kPieces; i += 32) {
      const int row = row0 + i / kPieces, piece = i % kPieces;
      const bool is_history = slot0 + row >= first_ && slot0 + row <= last_;
      const C* source = rows + (is_history ? slot0 + row : 0) * stride + kPiece * piece;
      copy_async(slot + row * kCacheRowBytes<C, D> + 16 * piece, source, is_history ? 16 : 0);
    }
  }

  unsigned char* memory_;
  const C* keys_;
  const C* values_;
  int64_t key_stride_, value_stride_;
  int slots_, items_, split_;
  int first_, last_;          // slots of the cache that are read
  int next_ = 0, taken_ = 0;  // items asked for, and taken
  int place_ = 0;             // of the lane's first piece in a slot, in bytes
  int write_ = 0, read_ = 0;  // slots of the next item to ask for, and to take
};

}  // namespace flashrt
