"""The proof that a structure means what the host means. Names propose, numbers decide.

*Meaning*, once per kind of region: on a copy in fp32 with redrawn parameters the host, the
reference and the bound forward agree to a relative 1e-4 on every probe. Redrawn, because default
initialisation (norm weights 1, biases 0) accepts even structures that ignore them.

The copy lives on the CPU. Weights over ``LARGE`` elements are drawn as overlapping windows of one
short random vector (``w[i, j] = v[7 i + j]``), so the copy of a 12288 x 4096 layer costs neither
150 million random numbers nor their memory; all rows and columns still differ, so a transposed,
shifted or swapped weight shows. A region with more than ``ON_DEVICE`` parameters is probed on the
model's own device, there against the reference alone: fp32 matrix kernels exist only on the CPU.

*Numbers*, per instance, are in ``numbers``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .catalogue.base import Draw, Fast, Probe, Structure

MEANING_TOLERANCE = 1e-4
LARGE = 1 << 20
ON_DEVICE = 4 << 20
SEED = 20


@dataclass(frozen=True)
class Disproof:
    """Where a proposal failed, in words that fit a refusal."""

    reason: str


def redrawn(
    module: nn.Module,
    device: torch.device,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = SEED,
) -> nn.Module:
    """An fp32 copy of ``module`` on ``device`` with other parameters and no hooks.

    ``shapes`` gives some parameters another shape.

    Weights are N(0, 1/fan_in) with fan_in the last dimension, vectors N(0.7, 0.4^2): norm weights
    and biases that are neither 0 nor 1. Buffers keep their values. Tied parameters stay tied.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        shape = torch.Size((shapes or {}).get(name, parameter.shape))
        memo[id(parameter)] = nn.Parameter(_draw(shape, generator).to(device), requires_grad=False)
    for buffer in module.buffers():
        kept = buffer.detach().to(device, copy=True)
        memo[id(buffer)] = kept.float() if kept.is_floating_point() else kept
    twin = copy.deepcopy(module, memo)
    for inner in twin.modules():
        clear_hooks(inner)
    return twin.eval()


def _draw(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) < 2:
        return torch.randn(shape, generator=generator).mul_(0.4).add_(0.7)
    columns = shape[-1]
    rows = shape.numel() // max(1, columns)
    if shape.numel() <= LARGE:
        return torch.randn(shape, generator=generator).mul_(columns**-0.5)
    values = torch.randn(7 * (rows - 1) + columns, generator=generator) * columns**-0.5
    windows: torch.Tensor = values.as_strided((rows, columns), (7, 1))
    return windows.reshape(shape)


def clear_hooks(module: nn.Module) -> None:
    """Remove every hook from a module that is ours to change."""
    for name, value in list(vars(module).items()):
        if name.endswith("_hooks") and isinstance(value, dict):
            vars(module)[name] = type(value)()


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a forward's result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def difference(got: Any, wanted: Any, added_to: torch.Tensor | None) -> float | str:
    """Largest deviation relative to the largest wanted value, over all tensors of a result.

    ``inf`` for a value that is not finite, words where number or shape of tensors differ.
    ``added_to`` is subtracted from the wanted value that sets the scale.
    """
    ours, theirs = list(tensors_of(got)), list(tensors_of(wanted))
    shapes, wanted_shapes = [tuple(t.shape) for t in ours], [tuple(t.shape) for t in theirs]
    if shapes != wanted_shapes or not ours:
        return f"gives shapes {shapes}, the host {wanted_shapes}"
    worst = 0.0
    for mine, host in zip(ours, theirs, strict=True):
        if host.numel():
            mine, host = mine.double(), host.double()
            part = host - added_to.double() if added_to is not None else host
            error = (mine - host).abs().max() / part.abs().max().clamp_min(1e-30)
            worst = max(worst, float(torch.nan_to_num(error, nan=float("inf"))))
    return worst


@torch.no_grad()
def prove_meaning(
    structure: Structure, spec: Any, module: nn.Module, fast: Fast
) -> Disproof | None:
    """Compare host, reference and bound forward on a redrawn copy; ``None`` when they agree."""
    shapes = structure.crop(spec, module)
    parameters = dict(module.named_parameters())
    size = sum(math.prod(shapes.get(n, p.shape)) for n, p in parameters.items())
    device = torch.device("cpu")
    if size > ON_DEVICE:
        device = next(iter(parameters.values())).device
    twin = redrawn(module, device, shapes)
    draw = Draw(device, torch.float32, torch.Generator().manual_seed(SEED + 1))
    for probe in structure.probes(spec, twin, draw):
        answers = {"host": lambda: structure.call_host(spec, twin, probe)}  # noqa: B023
        answers["reference"] = lambda: structure.call_reference(spec, twin, probe, torch.float32)  # noqa: B023
        if device.type == "cpu":
            answers["bound forward"] = lambda: structure.call_bound(spec, twin, fast, probe)  # noqa: B023
        disproof = _compare(answers, probe)
        if disproof is not None:
            return disproof
    return None


# What a module does with a probe it was not made for.
PROBE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def _compare(answers: Mapping[str, Callable[[], Any]], probe: Probe) -> Disproof | None:
    """Call each; all must agree with the first, the host."""
    host: Any = None
    for who, call in answers.items():
        try:
            answer = call()
        except PROBE_ERRORS as raised:
            text = str(raised).splitlines()[0][:120] if str(raised) else ""
            name = type(raised).__name__
            return Disproof(f"meaning: {who} raises {name}: {text} ({probe.label})")
        if who == "host":
            host = answer
            continue
        error = difference(answer, host, probe.added_to)
        if isinstance(error, str):
            return Disproof(f"meaning: {who} {error} ({probe.label})")
        if not error <= MEANING_TOLERANCE:
            return Disproof(
                f"meaning: {who} differs from the host by {error:.1e}, "
                f"limit {MEANING_TOLERANCE:g} ({probe.label})"
            )
    return None
