"""What choosing NVFP4 with a look at the inputs buys: SmolLM2-135M-Instruct, on the CPU.

    python benchmarks/nvfp4_refinement.py --calibration-tokens 4096 --tokens 1024

Every linear weight but the vocabulary's is replaced by its NVFP4 values in fp32, so nothing but the
quantisation errs. Calibration and evaluation read different parts of Python's own documentation.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import time
from collections.abc import Callable

import torch
from torch import nn

from flash_rt.flashrt_hf import real_model
from flash_rt.structures import kernels

WINDOW_TOKENS = 512
# Layers that read the same input, by the one whose input is looked at.
SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    model = real_model.load(device="cpu", dtype=torch.float32)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = real_model.tokenizer()(text, return_tensors="pt").input_ids[0]
    held_out, rest = ids[: options.tokens], ids[options.tokens + WINDOW_TOKENS :]
    linears = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    weights = {name: module.weight.data for name, module in linears.items()}
    reference = logits(model, held_out)
    moments = second_moments(model, linears, rest[: options.calibration_tokens])
    quant = kernels.family("quant")

    def values(weight: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        found = quant.quantize_nvfp4(weight, **given)
        return quant.dequantize_nvfp4(*found, columns=weight.shape[1], dtype=torch.float32)

    ways: dict[str, Callable[[str], torch.Tensor]] = {
        "scales by squared error": lambda name: values(weights[name]),
        "importance of columns": lambda name: values(
            weights[name], importance=moments[name].diagonal().contiguous()
        ),
        "hessian": lambda name: values(weights[name], hessian=moments[name]),
    }
    print(f"{'NVFP4':26}{'cosine':>9}{'perplexity':>12}{'change':>9}{'seconds':>9}")
    exact = perplexity(reference, held_out)
    print(f"{'(full precision)':26}{1.0:9.5f}{exact:12.3f}")
    for title, way in ways.items():
        start = time.perf_counter()
        for name, module in linears.items():
            module.weight.data = way(name)
        seconds = time.perf_counter() - start
        got = logits(model, held_out)
        cosine = torch.cosine_similarity(got.double().flatten(), reference.double().flatten(), 0)
        found = perplexity(got, held_out)
        change = f"{found / exact - 1:+.2%}"
        print(f"{title:26}{float(cosine):9.5f}{found:12.3f}{change:>9}{seconds:9.0f}", flush=True)


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """``[T, V]``, in windows that do not see each other."""
    windows = [model(part[None], use_cache=False).logits[0] for part in ids.split(WINDOW_TOKENS)]
    return torch.cat(windows)


def perplexity(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Of each token after the first of its window."""
    pairs = zip(logits.split(WINDOW_TOKENS), ids.split(WINDOW_TOKENS), strict=True)
    losses = [nn.functional.cross_entropy(part[:-1], i[1:], reduction="sum") for part, i in pairs]
    windows = -(-len(ids) // WINDOW_TOKENS)
    return float((torch.stack(losses).sum() / (len(ids) - windows)).exp())


def second_moments(
    model: nn.Module, linears: dict[str, nn.Linear], ids: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Mean of ``x.T @ x`` over the inputs of every layer; one pass, nothing else is kept."""
    sums: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in linears.items():
        if name.rpartition(".")[2] in SAME_INPUT:
            continue

        def add(module: nn.Module, args: tuple[torch.Tensor], name: str = name) -> None:
            x = args[0].flatten(0, -2)
            sums[name] = sums.get(name, 0) + x.T @ x / len(ids)

        hooks.append(module.register_forward_pre_hook(add))
    for part in ids.split(WINDOW_TOKENS):
        model.base_model(part[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    found = {}
    for name in linears:
        head, _, tail = name.rpartition(".")
        found[name] = sums[f"{head}.{SAME_INPUT.get(tail, tail)}"].contiguous()
    return found


if __name__ == "__main__":
    with torch.inference_mode():
        main()
