#include "launch_argmax.cuh"

namespace flashrt {
namespace {

struct WriteIndex {
  struct State {};
  int64_t* out;
  __device__ State load(uint32_t) const { return {}; }
  __device__ void store(uint32_t row, int index, const State&) const { out[row] = index; }
};

}  // namespace

cudaError_t launch_argmax(ArgmaxArgs args, int64_t* out, cudaStream_t stream) {
  return launch_with(args, WriteIndex{out}, stream);
}

}  // namespace flashrt
