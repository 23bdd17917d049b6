"""Time the norms on cold inputs, against torch, everything in CUDA graphs.

    python benchmarks/benchmark.py --rows 1 4 1024 --dims 1024 4096

Each graph holds one call on each of several sets of inputs, together far larger than the L2 cache.
Results are compared with torch before anything is timed. Run it with LOCAL_KERNELS set
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
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 1024, 16384])
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 4096])
    options = parser.parse_args()
    norm = get_kernel("flashrt/norm", version=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, us per call")
    print(f"{'op':14}{'rows':>7}{'dim':>7}{'flashrt':>10}{'torch':>10}{'GB/s':>8}")
    for dim in options.dims:
        for rows in options.rows:
            for name, fused, eager, passes in cases(norm, dim):
                report(name, fused, eager, rows, dim, passes)


def cases(norm, dim: int) -> list[tuple[str, Call, Call, int]]:
    """Name, the family's call, torch's, and how many times the input crosses memory."""

    def add_eager(x, r, w):
        total = x + r
        return F.rms_norm(total, (dim,), w, EPS), total

    return [
        (
            "rms_norm",
            lambda x, r, w: norm.rms_norm(x, w, eps=EPS, weights_static=True),
            lambda x, r, w: F.rms_norm(x, (dim,), w, EPS),
            2,
        ),
        (
            "add_rms_norm",
            lambda x, r, w: norm.add_rms_norm(x, r, w, eps=EPS, weights_static=True),
            add_eager,
            4,
        ),
        (
            "layer_norm",
            lambda x, r, w: norm.layer_norm(x, w, w, eps=EPS, weights_static=True),
            lambda x, r, w: F.layer_norm(x, (dim,), w, w, EPS),
            2,
        ),
    ]


def report(name: str, fused: Call, eager: Call, rows: int, dim: int, passes: int) -> None:
    sets = max(1, min(MAX_SETS, COLD_BYTES // (4 * rows * dim)))
    inputs = [
        (
            torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16),
            torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16),
            torch.randn(dim, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(sets)
    ]
    torch.testing.assert_close(fused(*inputs[0]), eager(*inputs[0]), rtol=0.05, atol=0.05)
    ours, theirs = time_interleaved([lambda i=i: fused(*i) for i in inputs], [
        lambda i=i: eager(*i) for i in inputs
    ])  # fmt: skip
    rate = passes * rows * dim * 2 / ours / 1e3
    print(f"{name:14}{rows:7}{dim:7}{ours:10.2f}{theirs:10.2f}{rate:8.0f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
