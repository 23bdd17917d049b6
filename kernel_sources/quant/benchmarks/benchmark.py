"""Time quantising and dequantising on cold inputs, everything in CUDA graphs.

    python benchmarks/benchmark.py --shapes 4096x4096 12288x4096

Each graph holds one call on each of several sets of inputs, together far larger than the L2 cache.
The peer is a torch copy of as many bytes. Run it with LOCAL_KERNELS set (``flash-rt kernels env``)
to time a local build.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from _common.timing import time_interleaved
from kernels import get_kernel

COLD_BYTES = 256 << 20  # of inputs in one graph; no L2 is larger than 128 MB
MAX_SETS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["8x4096", "4096x4096", "12288x4096"])
    options = parser.parse_args()
    quant = get_kernel("flashrt/quant", version=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us per call")
    print(f"{'op':26}{'N':>7}{'K':>7}{'flashrt':>10}{'copy':>10}{'GB/s':>8}")
    for shape in options.shapes:
        N, K = (int(size) for size in shape.split("x"))
        for name, call, moved in cases(quant, N, K):
            report(name, call, N, K, moved)


def cases(quant, N: int, K: int) -> list[tuple[str, Callable, float]]:
    """Name, what makes a call, and the bytes that one element crosses memory with."""

    def weight() -> torch.Tensor:
        return torch.randn(N, K, device="cuda", dtype=torch.bfloat16)

    def quantise() -> Callable:
        x = weight()
        out, scale = quant.quantize_fp8(x)
        return lambda: quant.quantize_fp8(x, check_finite=False, out=out, scale_out=scale)

    def dequantise(name: str) -> Callable:
        data, scale = getattr(quant, f"quantize_{name}")(weight())
        out = weight()
        return lambda: getattr(quant, f"dequantize_{name}")(data, scale, out=out)

    def tiles() -> Callable:
        found = quant.quantize_nvfp4(weight())
        tiles = quant.tile_nvfp4(found.codes, found.block_scales)
        scale, out = found.global_scale.expand(N).contiguous(), weight()
        return lambda: quant.dequantize_nvfp4_tiles(tiles, scale, (N, K), out=out)

    return [
        ("quantize_fp8", quantise, 3),
        ("dequantize_fp8", lambda: dequantise("fp8"), 3),
        ("dequantize_int8", lambda: dequantise("int8"), 3),
        ("dequantize_nvfp4_tiles", tiles, 2 + 9 / 16),
    ]


def report(name: str, make: Callable, N: int, K: int, moved: float) -> None:
    sets = max(2, min(MAX_SETS, int(COLD_BYTES / (moved * N * K))))
    half = int(moved * N * K) // 2
    source = [torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    target = [torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    copies = [lambda i=i: target[i].copy_(source[i]) for i in range(sets)]
    ours, theirs = time_interleaved([make() for _ in range(sets)], copies)
    rate = moved * N * K / ours / 1e3
    print(f"{name:26}{N:7}{K:7}{ours:10.2f}{theirs:10.2f}{rate:8.0f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
