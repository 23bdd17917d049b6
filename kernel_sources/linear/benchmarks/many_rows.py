"""Time products of many rows (prefill) with quantised weights against bf16, everything in graphs.

    python benchmarks/many_rows.py --rows 512 2048

Columns are microseconds of ``x @ W.T``: torch in bf16; FP8 with x quantised in the call, with x
given as E4M3, and torch's product alone with one scale for all of x and W; INT8 and NVFP4, which
are dequantised. "error" is that of FP8 against bf16, of its norm.
Run it with LOCAL_KERNELS set (``flash-rt kernels env``) to time a local build.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _common.timing import time_interleaved
from benchmark import pack, unpack
from kernels import get_kernel

SIZES = [(6144, 4096), (4096, 4096), (12288, 4096), (4096, 12288)]  # N, K of Qwen3-8B
FP8 = torch.float8_e4m3fn


def measure(rows: int, n: int, k: int) -> tuple[list[float], float]:
    """Median microseconds of each way, and the relative error of FP8."""
    family = get_kernel("flashrt/linear", version=1)
    x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5
    fp8, int8, nvfp4 = (pack(weight, form) for form in ("fp8", "int8", "nvfp4"))
    scale = x.abs().amax(1).float() / 448
    quantized = (x.float() / scale[:, None]).to(FP8)
    one = torch.ones((), device="cuda")
    plain = unpack(fp8)

    def whole() -> torch.Tensor:
        operands = (quantized, fp8.data.t())
        return torch._scaled_mm(
            *operands, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls = [
        lambda: F.linear(x, plain),
        lambda: family.linear(x, fp8),
        lambda: family.linear(quantized, fp8, input_scale=scale),
        whole,
        lambda: family.linear(x, int8),
        lambda: family.linear(x, nvfp4),
    ]
    eager, result = calls[0]().double(), calls[2]().double()
    error = float((result - eager).norm() / eager.norm())
    return time_interleaved(*([call] * 4 for call in calls)), error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| M | N | K | bf16 | fp8 | fp8, x in E4M3 | one scale | int8 | nvfp4 | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with torch.no_grad():
        for rows in options.rows:
            for n, k in SIZES:
                times, error = measure(rows, n, k)
                columns = " | ".join(f"{time:.1f}" for time in times)
                print(f"| {rows} | {n} | {k} | {columns} | {error:.3f} |")


if __name__ == "__main__":
    main()
