#include "common/launch.h"
#include "lookup_drafts.cuh"

namespace flashrt {

cudaError_t launch_lookup_drafts(const LookupDraftsArgs& args, cudaStream_t stream) {
  if (args.num_rows == 0 || args.num_drafts == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(args.num_rows));
  return launch(lookup_drafts_kernel, grid, dim3(kSearchThreads), 0, stream, args);
}

}  // namespace flashrt
