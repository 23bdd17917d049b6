"""Time the gated activations on cold inputs, against torch, everything in CUDA graphs.

    python benchmarks/benchmark.py --rows 1 4 1024 --dims 3072 12288

Each graph holds one call on each of several inputs, together far larger than the L2 cache. Results
are compared with torch before anything is timed. Run it with LOCAL_KERNELS set
(``flash-rt kernels env``) to time a local build.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from _common.timing import Call, time_interleaved
from kernels import get_kernel

COLD_BYTES = 256 << 20  # of inputs in one graph; no L2 is larger than 128 MB
MAX_SETS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 1024, 8192])
    parser.add_argument("--dims", type=int, nargs="+", default=[3072, 12288])
    options = parser.parse_args()
    activation = get_kernel("flashrt/activation", version=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us per call")
    print(f"{'op':20}{'rows':>7}{'dim':>7}{'flashrt':>10}{'torch':>10}{'GB/s':>8}")
    for dim in options.dims:
        for rows in options.rows:
            for name, fused, eager, passes in cases(activation, dim):
                report(name, fused, eager, rows, dim, passes)


def cases(activation, dim: int) -> list[tuple[str, Call, Call, int]]:
    """Name, the family's call, torch's, and rows of ``dim`` that cross memory per input row."""
    return [
        (
            "gated_packed silu",
            lambda x: activation.gated_packed(x),
            lambda x: F.silu(x[..., :dim]) * x[..., dim:],
            3,
        ),
        (
            "gated_packed gelu",
            lambda x: activation.gated_packed(x, activation="gelu"),
            lambda x: F.gelu(x[..., :dim]) * x[..., dim:],
            3,
        ),
        (
            "activate gelu_tanh",
            lambda x: activation.activate(x, activation="gelu_tanh"),
            lambda x: F.gelu(x, approximate="tanh"),
            4,
        ),
    ]


def report(name: str, fused: Call, eager: Call, rows: int, dim: int, passes: int) -> None:
    sets = max(1, min(MAX_SETS, COLD_BYTES // (4 * rows * dim)))
    inputs = [torch.randn(rows, 2 * dim, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    torch.testing.assert_close(fused(inputs[0]), eager(inputs[0]), rtol=0.05, atol=0.05)
    ours, theirs = time_interleaved([lambda x=x: fused(x) for x in inputs], [
        lambda x=x: eager(x) for x in inputs
    ])  # fmt: skip
    rate = passes * rows * dim * 2 / ours / 1e3
    print(f"{name:20}{rows:7}{dim:7}{ours:10.2f}{theirs:10.2f}{rate:8.0f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
