"""What each precision of each unit costs the model's output: the price list that promotion reads.

Quantising a unit adds an error ``d = x @ (Q(W) - W).T`` to its output. To first order the logits
then move by ``J d``, and the cosine falls by ``|J d|^2 / (2 |y|^2)``. With ``v`` of independent
signs, ``E[(v . J d_t)^2] = |J d_t|^2`` at every position t, and ``J^T v`` is one backward pass for
all units together. So one forward and one backward over some hundred positions price every unit in
every precision that it may have; errors of different units and positions add up as squares.

Source: the estimator is Hutchinson 1989, doi:10.1080/03610918908812806, applied to ``J^T J``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn

from ..products import has_fp8_products
from ..prove import PROBE_ERRORS
from ..weights import ROW_GROUP
from .data import Call, joined
from .fidelity import output_of
from .formats import CLIMB, packer, unpack
from .observe import FP8_MAX, SMALLEST_SCALE, first, hooks
from .units import Leaf, Unit

PRICE_POSITIONS = 512
# Positions of one backward pass: on a GPU they bound its memory, on a CPU every pass packs again.
PASS_POSITIONS = {"cuda": 128}
BLOCK_ELEMENTS = 16 << 20  # of a weight at a time: 64 MB in fp32
SEED = 21
# Loss of cosine, by unit and precision.
Prices: TypeAlias = "dict[str, dict[str, float]]"


@dataclass
class _Run:
    """One call: the inputs and outputs of every weight."""

    seen: list[tuple[Leaf, torch.Tensor, torch.Tensor]] = field(default_factory=list)


def measure_prices(
    model: nn.Module,
    units: Sequence[Unit],
    calls: Sequence[Call],
    importance: Mapping[str, torch.Tensor],
    device: torch.device,
) -> tuple[Prices, str]:
    """Price the units on the first ``PRICE_POSITIONS`` of ``calls``; how that was done.

    Where the model cannot be differentiated, errors count relative to the unit's own output.
    """
    chosen: list[Call] = []
    for call in calls:
        chosen.append(call)
        if sum(c.positions for c in chosen) >= PRICE_POSITIONS:
            break
    chosen = joined(chosen, PASS_POSITIONS.get(device.type, PRICE_POSITIONS))
    try:
        prices = _measured(model, units, chosen, importance, device, differentiate=True)
    except PROBE_ERRORS as error:
        text = str(error).splitlines()[0][:100] if str(error) else ""
        prices = _measured(model, units, chosen, importance, device, differentiate=False)
        return prices, (
            "prices are errors of each unit's own output, because the model has no gradients: "
            f"{type(error).__name__}: {text}"
        )
    return prices, "prices are first-order losses of cosine, from one backward pass"


def _measured(
    model: nn.Module,
    units: Sequence[Unit],
    calls: Sequence[Call],
    importance: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    differentiate: bool,
) -> Prices:
    errors = {unit.name: dict.fromkeys(reachable(unit.precision), 0.0) for unit in units}
    sizes = dict.fromkeys(errors, 0.0)
    norm = 0.0
    for index, call in enumerate(calls):
        with _watched(units, differentiate) as run:
            out, _ = output_of(call.run(model, device))
        gradients: Sequence[torch.Tensor | None] = [None] * len(run.seen)
        if differentiate:
            norm += float(out.detach().float().square().sum())
            gradients = _gradients(out, [y for _, _, y in run.seen], index)
        for unit in units:
            found = [
                (leaf, x, y, g)
                for (leaf, x, y), g in zip(run.seen, gradients, strict=True)
                if any(leaf is own for own in unit.leaves)
            ]
            with torch.no_grad():
                sizes[unit.name] += _add(errors[unit.name], found, importance.get(unit.name))
    for name, unit_errors in errors.items():
        scale = 2.0 * (norm if differentiate else sizes[name])
        for precision in unit_errors:
            unit_errors[precision] = unit_errors[precision] / scale if scale else 0.0
    return errors


def reachable(precision: str) -> Iterator[str]:
    """``precision`` and what it can be promoted to, without the host's own."""
    while precision in CLIMB:
        yield precision
        precision = CLIMB[precision]


@contextmanager
def _watched(units: Sequence[Unit], differentiate: bool) -> Iterator[_Run]:
    run = _Run()

    def watch(leaf: Leaf) -> Any:
        def note(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor
        ) -> torch.Tensor:
            if differentiate and not out.requires_grad:
                out = out.detach().requires_grad_()
            run.seen.append((leaf, first(args, kwargs).detach(), out))
            return out

        return leaf.module.register_forward_hook(note, with_kwargs=True)

    leaves = {id(leaf.module): leaf for unit in units for leaf in unit.leaves}
    with hooks(map(watch, leaves.values())), torch.set_grad_enabled(differentiate):
        yield run


def _gradients(
    out: torch.Tensor, inputs: list[torch.Tensor], index: int
) -> Sequence[torch.Tensor | None]:
    """``J^T v`` for signs ``v`` without the part along ``out``, which no cosine sees."""
    generator = torch.Generator(device=out.device).manual_seed(SEED + index)
    flat = out.detach().float().flatten()
    signs = torch.randint(0, 2, flat.shape, generator=generator, device=out.device)
    v = signs.float().mul_(2.0).sub_(1.0)
    v -= flat * (v @ flat / flat.square().sum().clamp_min(1e-30))
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        out, inputs, v.view(out.shape).to(out.dtype), allow_unused=True
    )
    return found


Seen: TypeAlias = "tuple[Leaf, torch.Tensor, torch.Tensor, torch.Tensor | None]"


def _add(errors: dict[str, float], seen: Sequence[Seen], importance: torch.Tensor | None) -> float:
    """Add the squared errors of one unit; returns the square of its output."""
    size = 0.0
    sums: dict[str, torch.Tensor] = {}
    alone: dict[str, float] = dict.fromkeys(errors, 0.0)
    for leaf, x, y, gradient in seen:
        x = x.reshape(-1, x.shape[-1])
        size += float(y.detach().float().square().sum())
        if gradient is not None:
            gradient = gradient.reshape(len(x), -1)
        for start, weight in _row_blocks(leaf):
            weight = weight.to(x.device)
            for precision in errors:
                moved = _moved(x, weight, precision, importance)
                if gradient is None:
                    alone[precision] += float(moved.square().sum())
                    continue
                rows = (moved * gradient[:, start : start + len(weight)].float()).sum(-1)
                sums[precision] = sums.get(precision, torch.zeros_like(rows)) + rows
    for precision in errors:
        if precision in sums:
            errors[precision] += float(sums[precision].square().sum())
        elif seen and seen[0][3] is None:
            errors[precision] += alone[precision]
    return size


def _row_blocks(leaf: Leaf) -> Iterator[tuple[int, torch.Tensor]]:
    """First row and ``[rows, K]`` of parts of a weight: bounds what pricing adds to the memory."""
    weight = leaf.parameter.detach()
    weight = weight.t() if leaf.transposed else weight
    step = max(ROW_GROUP, BLOCK_ELEMENTS // weight.shape[1] // ROW_GROUP * ROW_GROUP)
    for start in range(0, weight.shape[0], step):
        yield start, weight[start : start + step]


def _moved(
    x: torch.Tensor, weight: torch.Tensor, precision: str, importance: torch.Tensor | None
) -> torch.Tensor:
    """What quantising adds to ``x @ weight.T``, in fp32."""
    packed = packer(precision, importance=importance)(weight)
    wrong = unpack(packed, torch.float32) - weight
    moved = F.linear(x, wrong.to(x.dtype))
    if precision == "fp8" and has_fp8_products(x.device):
        moved = moved + F.linear(fp8_rounded(x) - x, weight)
    return moved.float()


def fp8_rounded(x: torch.Tensor) -> torch.Tensor:
    """``x [M, K]`` through E4M3 with a scale for each row."""
    scale = (x.abs().amax(1, keepdim=True).float() / FP8_MAX).clamp_min(SMALLEST_SCALE)
    return ((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype)
