"""The product on top of structures: kernel builds, benchmarks, the command line."""

if __name__ != "flash_rt.flashrt_hf":
    raise ImportError(f"flashrt_hf must be imported as flash_rt.flashrt_hf, not as {__name__}")
