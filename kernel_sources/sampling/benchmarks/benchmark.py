"""Time the choice of the next token against torch, everything in CUDA graphs.

    python benchmarks/benchmark.py --rows 1 8 --vocab 128256 151936

The logits stay in the L2 cache, as in a decode step that has just computed them. Results are
compared with torch before anything is timed. Run it with LOCAL_KERNELS set
(``flash-rt kernels env``) to time a local build.
"""

from __future__ import annotations

import argparse

import torch
from _common.timing import ROUNDS, time_interleaved
from kernels import get_kernel

CALLS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--vocab", type=int, nargs="+", default=[50257, 128256, 151936, 262144])
    options = parser.parse_args()
    sampling = get_kernel("flashrt/sampling", version=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us per call")
    print(f"{'dtype':10}{'rows':>6}{'vocab':>8}{'argmax':>10}{'torch':>10}{'greedy_step':>13}")
    for dtype in (torch.float32, torch.bfloat16):
        for vocab in options.vocab:
            for rows in options.rows:
                report(sampling, dtype, rows, vocab)


def report(sampling, dtype: torch.dtype, rows: int, vocab: int) -> None:
    logits = torch.randn(rows, vocab, device="cuda").to(dtype)
    scratch = sampling.workspace(rows, vocab, "cuda")
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    integers = [torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(2)]
    max_new = torch.full((rows,), 1 << 30, dtype=torch.int32, device="cuda")
    tokens = torch.zeros(rows, (ROUNDS + 2) * (CALLS + 3), dtype=torch.int64, device="cuda")
    finished = torch.zeros(rows, dtype=torch.bool, device="cuda")
    eos = torch.full((2,), -1, device="cuda")

    def argmax():
        sampling.argmax(logits, workspace=scratch, out=out)

    def greedy_step():
        sampling.greedy_step(
            *(logits, tokens, *integers, finished, out, eos, max_new),
            pad_id=0,
            workspace=scratch,
        )

    argmax()
    value = logits.gather(1, out[:, None])[:, 0]
    torch.testing.assert_close(value, logits.amax(-1), rtol=0, atol=0)
    ours, theirs, step = time_interleaved(
        [argmax] * CALLS, [lambda: torch.argmax(logits, -1)] * CALLS, [greedy_step] * CALLS
    )
    name = str(dtype).removeprefix("torch.")
    print(f"{name:10}{rows:6}{vocab:8}{ours:10.2f}{theirs:10.2f}{step:13.2f}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
