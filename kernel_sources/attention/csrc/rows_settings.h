// Scalars of norm and rotary, shared by host and device.
#pragma once

namespace flashrt {

struct RowSettings {
  float eps;
  int rotary_dim;  // 0 without rotary
  bool interleaved;
  bool zero_centered;  // scale by 1 + w
  bool over_all;       // the mean runs over all heads of the token
  bool tables_fp32;    // cos and sin are fp32, else T
};

}  // namespace flashrt
