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
DRAWS = {
    "greedy": dict(temperature=0.0),
    "temperature": dict(temperature=0.8),
    "top_k": dict(temperature=0.8, top_k=50),
    "top_p": dict(temperature=0.8, top_p=0.95),
    "k, p, min_p": dict(temperature=0.8, top_k=50, top_p=0.95, min_p=0.05),
    "penalties": dict(temperature=0.8, top_k=50, repetition_penalty=1.1, presence_penalty=0.2),
}
NEUTRAL = dict(top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0)


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
    print("\nsample_step by what is on, accept_drafts of 3 drafts, logprobs; fp32, us per call")
    columns = (*DRAWS, "3 drafts", "logprobs", "top 20", "torch top_p")
    print(f"{'rows':>4}{'vocab':>8}" + "".join(f"{name:>13}" for name in columns))
    for vocab in options.vocab:
        for rows in options.rows:
            report_draws(sampling, rows, vocab)
    print("\nlookup_drafts of 7 drafts, us per call")
    for size in (512, 4096, 32768, 131072):
        report_lookup(sampling, size)


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


def report_draws(sampling, rows: int, vocab: int) -> None:
    """All settings are given in every call, as in a recording that serves any of them."""
    generator = torch.Generator().manual_seed(vocab)
    on_cpu = torch.randn(rows, vocab, generator=generator) * 3
    logits = on_cpu.cuda()
    scratch = sampling.sample_workspace(4 * rows, vocab, "cuda")
    calls = []
    for settings in DRAWS.values():
        ids = {}
        for device, scores in (("cpu", on_cpu), ("cuda", logits)):
            step, ids[device] = draws(sampling, scores, scratch.to(device), settings)
            step()
        torch.testing.assert_close(ids["cuda"].cpu(), ids["cpu"], rtol=0, atol=0)
        calls.append(step)
    ids = logits.argmax(-1)
    calls.append(verification(sampling, logits, scratch))
    for top_n in (0, 20):
        out = sampling.logprobs(logits, ids, top_n=top_n)

        def value(top_n=top_n, out=out):
            sampling.logprobs(logits, ids, top_n=top_n, workspace=scratch, out=out)

        calls.append(value)
    calls.append(lambda: torch_top_p(logits, 0.8, 0.95))
    times = time_interleaved(*([call] * CALLS for call in calls))
    print(f"{rows:4}{vocab:8}" + "".join(f"{time:13.2f}" for time in times))


def report_lookup(sampling, size: int) -> None:
    """A text of ``size`` random tokens with its last eight at its start too."""
    text = torch.randint(50_000, (1, size), device="cuda")
    text[:, -8:] = text[:, :8]
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    last = torch.full_like(none, size - 1)
    out = torch.empty(1, 7, dtype=torch.int64, device="cuda")

    def search():
        sampling.lookup_drafts(text, text[:, :0], none, last, out=out)

    search()
    torch.testing.assert_close(out, text[:, 8:15], rtol=0, atol=0)
    [time] = time_interleaved([search] * CALLS)
    print(f"{size:10}{time:10.2f}")


def sequences(rows: int, device: str) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """State and stops of sequences that do not end while they are timed."""
    integers = [torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2)]
    tokens = torch.zeros(rows, 4 * (ROUNDS + 2) * (CALLS + 3), dtype=torch.int64, device=device)
    finished = torch.zeros(rows, dtype=torch.bool, device=device)
    next_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    max_new = torch.full((rows,), 1 << 30, dtype=torch.int32, device=device)
    eos = torch.full((2,), -1, dtype=torch.int64, device=device)
    return (tokens, *integers, finished, next_ids), (eos, max_new)


def settings_of(rows: int, vocab: int, device: str, settings: dict) -> dict:
    tensors = {
        name: torch.full(
            (rows,), value, device=device, dtype=torch.int32 if name == "top_k" else torch.float32
        )
        for name, value in (NEUTRAL | settings).items()
    }
    tensors["seed"] = torch.arange(rows, device=device)
    tensors["occurrences"] = torch.ones(rows, vocab, dtype=torch.int32, device=device)
    return tensors


def draws(sampling, logits: torch.Tensor, scratch: torch.Tensor, settings: dict):
    """A call of sample_step, and the ids that it writes."""
    rows, vocab = logits.shape
    state, stops = sequences(rows, logits.device.type)
    tensors = settings_of(rows, vocab, logits.device.type, settings)

    def step():
        sampling.sample_step(logits, *state, *stops, **tensors, pad_id=0, workspace=scratch)

    return step, state[-1]


def verification(sampling, logits: torch.Tensor, scratch: torch.Tensor):
    """A call of accept_drafts on the same logits in four places; its drafts are refused."""
    rows, vocab = logits.shape
    places = logits[:, None].repeat(1, 4, 1)
    drafts = torch.full((rows, 3), -1, device="cuda")
    state, stops = sequences(rows, "cuda")
    accepted = torch.zeros(rows, dtype=torch.int32, device="cuda")
    tensors = settings_of(rows, vocab, "cuda", dict(temperature=0.8, top_p=0.95))

    def step():
        sampling.accept_drafts(
            *(places, drafts, *state, accepted, *stops), **tensors, pad_id=0, workspace=scratch
        )

    return step


def torch_top_p(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """By sorting, as transformers does."""
    ordered, order = (logits / temperature).sort(-1)
    probabilities = ordered.softmax(-1)
    removed = probabilities.cumsum(-1) <= 1 - top_p
    removed[:, -1] = False
    chosen = torch.multinomial(probabilities.masked_fill(removed, 0.0), 1)
    return order.gather(-1, chosen)[:, 0]


if __name__ == "__main__":
    with torch.inference_mode():
        main()
