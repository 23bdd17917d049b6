"""The proof that a structure means what the host means. Names propose, numbers decide.

*Meaning*, once per kind of region: on a copy in fp32 with redrawn parameters the host, the
reference and the bound forward agree to a relative 1e-4 on every probe. Redrawn, because default
initialisation (norm weights 1, biases 0) accepts even structures that ignore them.

The copy (``twin``) lives on the CPU. A region with more than ``ON_DEVICE`` parameters is probed on
the model's own device, there against the reference alone: fp32 matrix kernels exist only on the
CPU. Config fields that the host's forward reads and the structure does not know refuse it too.

*Numbers*, per instance, are in ``numbers``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .catalogue.base import CONFIG_PASSIVE, Draw, Fast, Probe, Structure
from .quiet import tensors_made_on
from .twin import Twin

MEANING_TOLERANCE = 1e-4
ON_DEVICE = 4 << 20
SEED = 20
HOST_RAISES = "meaning: host raises"


@dataclass(frozen=True)
class Disproof:
    """Where a proposal failed, in words that fit a refusal."""

    reason: str


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
    disproof = _prove(structure, spec, module, fast, shapes)
    if shapes and disproof is not None and disproof.reason.startswith(HOST_RAISES):
        return _prove(structure, spec, module, fast, {})  # it reads sizes from elsewhere too
    return disproof


def _prove(
    structure: Structure,
    spec: Any,
    module: nn.Module,
    fast: Fast,
    shapes: Mapping[str, tuple[int, ...]],
) -> Disproof | None:
    parameters = dict(module.named_parameters())
    size = sum(math.prod(shapes.get(n, p.shape)) for n, p in parameters.items())
    device = torch.device("cpu")
    if size > ON_DEVICE:
        device = next(iter(parameters.values())).device
    try:
        twin = Twin(module, device, shapes, SEED)
    except PROBE_ERRORS as error:
        return Disproof(f"meaning: no copy to prove it on: {error}".splitlines()[0])
    draw = Draw(device, torch.float32, torch.Generator().manual_seed(SEED + 1))
    with tensors_made_on(device):
        for probe in structure.probes(spec, twin.module, draw):
            answers = _answers(structure, spec, twin, fast if device.type == "cpu" else None, probe)
            disproof = _compare(answers, probe)
            if disproof is not None:
                return disproof
    for name, value in twin.config_reads.items():
        if name not in CONFIG_PASSIVE and name not in structure.config_reads:
            return Disproof(
                f"config field {name} = {str(value)[:60]} is read by the host, but not by "
                f"{structure.name}"
            )
    return None


Answers = Iterator[tuple[str, Callable[[], Any]]]


def _answers(
    structure: Structure, spec: Any, twin: Twin, fast: Fast | None, probe: Probe
) -> Answers:
    """Who answers a probe, the host first; ``fast`` is ``None`` where its kernels have no fp32."""

    def host() -> Any:
        with twin.recording():
            return structure.call_host(spec, twin.module, probe)

    yield "host", host
    reference = partial(structure.call_reference, spec, twin.module, probe, torch.float32)
    yield "reference", reference
    if fast is not None:
        yield "bound forward", partial(structure.call_bound, spec, twin.module, fast, probe)


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


def _compare(answers: Answers, probe: Probe) -> Disproof | None:
    """Call each; all must agree with the first, the host."""
    host: Any = None
    for who, call in answers:
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
