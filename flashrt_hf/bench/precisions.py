"""One benchmark entry for each precision: twins over the same weights, attached side by side.

Packed copies hang on parameters, so every entry has parameters of its own that alias the memory of
the model's, and the model's own weights stay on the device for the peers.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from . import models

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flash_rt import structures

    from .session import Session

PLAIN = "auto"


def entry_name(precision: str) -> str:
    """``flashrt`` for the model's own precision, ``flashrt fp8`` for another."""
    return "flashrt" if precision == PLAIN else f"flashrt {precision}"


def entry_model(session: Session, precision: str) -> PreTrainedModel:
    """The model that ``precision`` is attached to."""
    return session.model if precision == PLAIN else models.alias(session.host)


def attach(
    model: PreTrainedModel,
    precision: str,
    *,
    min_cosine: float | None = None,
    calibration: torch.Tensor | None = None,
) -> structures.Plan:
    """Attach at ``precision``; the host's weights stay where they are."""
    from flash_rt import structures

    return structures.attach(
        model,
        model.forward,
        precision=precision,
        min_cosine=min_cosine,
        calibration=None if precision == PLAIN else calibration,
        keep_host="gpu",
    )


def reference_dtype(host: PreTrainedModel) -> torch.dtype:
    """What errors are measured against: fp32, and fp64 for a host that is fp32 itself."""
    return torch.float64 if host.dtype is torch.float32 else torch.float32


@torch.no_grad()
def dequantised(host: PreTrainedModel, plan: structures.Plan, dtype: torch.dtype) -> Any:
    """A copy of ``host`` in ``dtype`` whose weights are what the plan's packed copies stand for."""
    twin = copy.deepcopy(host).to(dtype)
    if plan.packing is not None:
        for unit in plan.packing.quantised:
            for leaf in unit.leaves:
                twin.get_submodule(leaf.path).weight.copy_(leaf.unpacked(dtype))
    return twin


def step_weight_bytes(session: Session, plan: structures.Plan) -> int:
    """Weights that a decode step of the plan reads."""
    read = session.traffic.weight_bytes
    if plan.packing is not None:
        done = plan.packing.quantised
        read -= sum(unit.size("bf16") - unit.packed_bytes for unit in done)
    return read


def summary(plan: structures.Plan) -> dict[str, Any]:
    """What a record keeps of a plan's precisions; weights are those of bound linear layers."""
    if plan.packing is None:
        return {}
    units = plan.packing.units
    elements = sum(unit.elements for unit in units)
    by_precision: Counter[str] = Counter()
    for unit in units:
        by_precision[unit.precision] += unit.elements
    found: dict[str, Any] = dict(
        bits_per_weight=8 * sum(unit.packed_bytes for unit in units) / elements,
        share_of_weights={name: count / elements for name, count in by_precision.items()},
        packed_bytes=plan.packing.memory_bytes,
        promotions=len(plan.packing.promotions),
        seconds=plan.packing.seconds,
    )
    measured = plan.packing.fidelity
    if measured is not None:
        found["floor"] = dict(
            decode_cosine=measured.decode.cosine,
            prefill_cosine=measured.prefill.cosine,
            positions=measured.decode.positions,
            text=measured.text,
        )
    return found
