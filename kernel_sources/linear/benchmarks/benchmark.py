"""Time a decoder layer's products with cold weights, against torch, everything in CUDA graphs.

    python benchmarks/benchmark.py --model qwen3-8b --rows 1 4 8
    python benchmarks/benchmark.py --model qwen3-8b --format nvfp4

Each graph holds one call on each of several sets of weights, together far larger than the L2 cache,
so that every call reads its weights from memory. Results are compared with torch before anything is
timed. Torch has the weights in bf16 whatever the format, dequantised from it.
Run it with LOCAL_KERNELS set (``flash-rt kernels env``) to time a local build.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _common.timing import time_interleaved
from kernels import get_kernel

COLD_BYTES = 512 << 20  # of weights in one graph; no L2 is larger than 128 MB
EPS = 1e-6
BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "nvfp4": 0.5 + 1 / 16}  # of an element of a weight


@dataclass(frozen=True)
class Shape:
    """Sizes of one decoder layer and its head."""

    d: int
    q: int
    kv: int
    inner: int
    vocabulary: int


SHAPES = {
    "qwen3-0.6b": Shape(1024, 2048, 1024, 3072, 151936),
    "llama-3.2-1b": Shape(2048, 2048, 512, 8192, 128256),
    "qwen3-8b": Shape(4096, 4096, 1024, 12288, 151936),
}


@dataclass(frozen=True)
class Case:
    """One product: sizes of its weights, and the call by the family and by torch."""

    name: str
    k: int
    sizes: tuple[int, ...]
    fused: Callable[..., torch.Tensor]
    eager: Callable[..., torch.Tensor]

    def weight_bytes(self, form: str) -> float:
        return BYTES[form] * self.k * sum(self.sizes)


def make_cases(shape: Shape, rows: int) -> list[Case]:
    """The five products of a decode step; the calls take x and a list of weights."""
    family = get_kernel("flashrt/linear", version=1)
    norm = torch.randn(shape.d, dtype=torch.bfloat16, device="cuda")
    residual = torch.randn(rows, shape.d, dtype=torch.bfloat16, device="cuda")
    normed = {"norm_weight": norm, "norm_eps": EPS, "weights_static": True}
    added = {"residual": residual, "weights_static": True}

    def add(x: torch.Tensor, w: list[Any]) -> torch.Tensor:
        return family.linear(x, w[0], **added)

    def eager_add(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        return residual + F.linear(x, w[0])

    def rms(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (shape.d,), norm, EPS)

    def eager_split(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        x = rms(x)
        results = [F.linear(x, weight) for weight in w]
        return results[0]

    def eager_gated(x: torch.Tensor, w: list[torch.Tensor]) -> torch.Tensor:
        x = rms(x)
        return F.silu(F.linear(x, w[0])) * F.linear(x, w[1])

    d = shape.d
    return [
        Case(
            "norm + q, k, v",
            d,
            (shape.q, shape.kv, shape.kv),
            lambda x, w: family.linear_split(x, w, **normed)[0],
            eager_split,
        ),
        Case("o + residual", shape.q, (d,), add, eager_add),
        Case(
            "norm + silu(gate) * up",
            d,
            (shape.inner, shape.inner),
            lambda x, w: family.gated_linear(x, w[0], w[1], **normed),
            eager_gated,
        ),
        Case("down + residual", shape.inner, (d,), add, eager_add),
        Case(
            "norm + head",
            d,
            (shape.vocabulary,),
            lambda x, w: family.linear(x, w[0], **normed),
            lambda x, w: F.linear(rms(x), w[0]),
        ),
    ]


def pack(weight: torch.Tensor, form: str) -> Any:
    """``weight`` as the family takes it in ``form``."""
    if form == "bf16":
        return weight
    quant = get_kernel("flashrt/quant", version=1)
    if form == "nvfp4":
        codes, blocks, scale = quant.quantize_nvfp4(weight)
        data, scale = quant.tile_nvfp4(codes, blocks), scale.expand(len(weight)).contiguous()
    else:
        data, scale = {"fp8": quant.quantize_fp8, "int8": quant.quantize_int8}[form](weight)
    return get_kernel("flashrt/linear", version=1).PackedWeight(data, scale, tuple(weight.shape))


def unpack(weight: Any) -> torch.Tensor:
    """What torch multiplies with: the values of ``weight`` in bf16."""
    if isinstance(weight, torch.Tensor):
        return weight
    rows = torch.arange(weight.shape[0], device="cuda")
    return get_kernel("flashrt/linear", version=1).embedding(rows, weight)


def check(case: Case, x: torch.Tensor, packed: list[Any], plain: list[torch.Tensor]) -> None:
    """Fused and eager agree to what bf16, or a quantised x in more than 8 rows, can show."""
    fused, eager = case.fused(x, packed).double(), case.eager(x, plain).double()
    error = float((fused - eager).norm() / eager.norm())
    if error > (2**-6 if len(x) <= 8 else 2**-4):
        raise SystemExit(f"{case.name}: differs from torch by {error:.1e} of its norm")


def measure(case: Case, rows: int, form: str) -> tuple[float, float]:
    """Median microseconds of a call: fused, eager; the two are timed in turns."""
    count = max(2, math.ceil(COLD_BYTES / case.weight_bytes(form)))
    packed = [
        [
            pack(torch.randn(n, case.k, dtype=torch.bfloat16, device="cuda") * case.k**-0.5, form)
            for n in case.sizes
        ]
        for _ in range(count)
    ]
    plain = [[unpack(weight) for weight in weights] for weights in packed]
    x = torch.randn(rows, case.k, dtype=torch.bfloat16, device="cuda")
    check(case, x, packed[0], plain[0])
    fused, eager = time_interleaved(
        [partial(case.fused, x, weights) for weights in packed],
        [partial(case.eager, x, weights) for weights in plain],
    )
    return fused, eager


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--format", choices=BYTES, default="bf16")
    options = parser.parse_args()
    torch.manual_seed(0)
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{options.model} in {options.format} on {where}")
    print("| product | rows | us | TB/s | torch us | ratio |\n|---|---|---|---|---|---|")
    with torch.no_grad():
        for rows in options.rows:
            for case in make_cases(SHAPES[options.model], rows):
                fused, eager = measure(case, rows, options.format)
                rate = case.weight_bytes(options.format) / fused * 1e-6
                print(
                    f"| {case.name} | {rows} | {fused:.2f} | {rate:.2f} "
                    f"| {eager:.2f} | {eager / fused:.2f} |"
                )


if __name__ == "__main__":
    main()
