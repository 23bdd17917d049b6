// The launcher's side of `embedding` with a quantised table, free of torch.
#pragma once

#include "linear.h"

namespace flashrt {

// out[i] = round(factor * (scale * value)[ids[i]]): every product in fp32, rows of `out`
// contiguous; an id outside [0, vocab) gives a row of NaN. `table`, its stride in bytes (of no
// meaning for kNVFP4), `scale` and `scale_columns` are as in LinearArgs; `weights_static` speaks of
// them.
cudaError_t launch_packed_embedding(const int64_t* ids, const void* table, int64_t table_stride,
                                    const float* scale, int scale_columns, WeightFormat format,
                                    void* out, int64_t num_ids, int64_t vocab, int d, float factor,
                                    ElementType type, bool weights_static, cudaStream_t stream);

}  // namespace flashrt
