"""``./run demo``: a real model answers a question, attached, beside its unattached self."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from . import real_model
from .host import default_device, default_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flash_rt.structures.explain import Table

QUESTION = "Why is the sky blue?"


def main() -> None:
    """Load the model, time the host, attach, explain, stream an answer, compare."""
    parser = argparse.ArgumentParser(prog="./run demo", description=__doc__)
    parser.add_argument("--question", default=QUESTION, help="default: %(default)s")
    parser.add_argument("--new", type=int, help="new tokens at most; default 256, 32 on a CPU")
    options = parser.parse_args()
    device = default_device()
    if device.type == "cuda":
        build_kernels()
    print(f"SmolLM2-135M-Instruct on {describe(device)}")
    if not (real_model.cache_root() / real_model.FOLDER_NAME).is_dir():
        print(f"converting it once into {real_model.cache_root()} (15 s)", flush=True)
    new_tokens = options.new or (256 if device.type == "cuda" else 32)
    run(options.question, new_tokens=new_tokens, device=device)


def describe(device: torch.device) -> str:
    """The GPU's name, or what a CPU run stands for."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (
        "the CPU: reference kernels in plain torch, which show the values and not the speed\n"
        "this takes about 20 s, and longer on a busy machine"
    )


def build_kernels() -> None:
    """Build the kernels for this GPU; an unchanged build does nothing.

    Where there is neither nvcc nor a usable build, starts the demo over without the GPU.
    """
    from .kernels import resolver
    from .kernels.cli import build
    from .kernels.manifest import require_workspace

    build(arch=["native"], skip_without_nvcc=True)
    try:
        for family in require_workspace().families():
            resolver.load(family.name)
    except resolver.KernelNotFoundError as error:
        print(f"{error}\nThe demo runs on the CPU instead.", flush=True)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "flash_rt.flashrt_hf.demo", *sys.argv[1:]]
        os.execv(sys.executable, command)


def run(question: str, *, new_tokens: int, device: torch.device) -> None:
    """Answer ``question`` with host and FlashRT and print both speeds."""
    import transformers

    from flash_rt import structures

    transformers.logging.disable_progress_bar()
    model = real_model.load(device=device, dtype=default_dtype(device))
    tokenizer = real_model.tokenizer()
    ids = real_model.chat_ids(question, device=device)
    print(f"timing the host (transformers eager), {new_tokens} tokens ...", flush=True)
    host_answer(model, ids, 2)
    host_tokens, host_s = timed(lambda: host_answer(model, ids, new_tokens), device)

    print("proving and attaching ...", flush=True)
    start = time.perf_counter()
    plan = structures.attach(model, model.forward)
    loop = structures.decode_loop(model, max_len=ids.shape[1] + new_tokens)
    print(f"attached in {time.perf_counter() - start:.1f} s\n")
    print("\n".join(folded(structures.explain(plan))), flush=True)
    loop.generate(ids, max_new_tokens=2)

    print(f"\n> {question}")
    streamer = transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    tokens, fast_s = timed(
        lambda: loop.generate(ids, max_new_tokens=new_tokens, streamer=streamer), device
    )
    if device.type == "cuda":  # fast enough that printing would be what is timed
        tokens, fast_s = timed(lambda: loop.generate(ids, max_new_tokens=new_tokens), device)
    plan.detach()

    ours, host = _new(tokens, ids), _new(host_tokens, ids)
    same = sum(1 for a, b in zip(ours, host, strict=False) if a == b)
    print(f"\nhost     {len(host):4d} tokens, {len(host) / host_s:8.1f} tokens/s")
    print(f"FlashRT  {len(ours):4d} tokens, {len(ours) / fast_s:8.1f} tokens/s")
    if device.type == "cpu":
        print("on a CPU both speeds are plain torch's and move with the machine's load")
    print(f"{same} of {len(host)} tokens are the host's")


def folded(table: Table) -> list[str]:
    """Lines of a table without its notes; of rows that only number and error tell apart, the first.

    ``flash-rt explain smollm2`` prints every row.
    """
    header, *lines = str(table).splitlines()
    forms = [
        (re.sub(r"\d+", "N", row.path), type(row), row.structure, row.reason, row.tied)
        for row in table
    ]
    text = [header]
    for _, group in itertools.groupby(range(len(forms)), key=forms.__getitem__):
        first, *rest = group
        text.append(lines[first])
        if rest:
            text.append(f"  and {len(rest)} like it (flash-rt explain smollm2 prints every row)")
    return text


def host_answer(model: PreTrainedModel, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """The unattached model's own greedy ``generate``."""
    mask = torch.ones_like(ids)
    tokens: torch.Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
    )
    return tokens


def timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """Result and seconds of a call."""
    from .bench.timing import wall_ms

    result: list[torch.Tensor] = []
    milliseconds = wall_ms(lambda: result.append(call()), device)
    return result[0], milliseconds / 1e3


def _new(tokens: torch.Tensor, ids: torch.Tensor) -> list[int]:
    return [int(token) for token in tokens[0, ids.shape[1] :]]


if __name__ == "__main__":
    main()
