"""The product on top of structures: kernel builds, loading, serving, the command line."""

if __name__ != "flash_rt.flashrt_hf":
    raise ImportError(f"import it as flash_rt.flashrt_hf, got {__name__!r}")
