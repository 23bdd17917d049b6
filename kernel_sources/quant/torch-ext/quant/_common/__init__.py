"""What all kernel families share: edit kernel_sources/common, then `flash-rt kernels sync`."""
