"""What all kernel families share; edit it in kernel_sources/common, ``flash-rt kernels sync`` copies."""
