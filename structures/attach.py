"""``attach``: bind what a plan decided; ``detach``: give the host back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .binding import PLAN, Binder, guarded, host_class
from .discover import FLOATS
from .plan import (
    Plan,
    Settings,
    _checked_precision,
    host_of,
    make_plan,
    place,
    region_dtype,
)


def attach(
    model: Any, forward: Callable[..., Any] | None = None, *, precision: str = "auto"
) -> Plan:
    """Bind FlashRT's structures into an unmodified model.

    Args:
        model: an ``nn.Module`` in eval mode on one device, or a handle with ``.model``.
        forward: the bound method through which the model is called; default ``model.forward``.
        precision: ``"auto"`` and ``"bf16"`` change no parameter.

    Returns:
        The plan in force. Attaching again with the same settings returns the same plan.

    Raises:
        TypeError, ValueError: see ``plan``; also other settings than those attached. The host is
            untouched after any error.
    """
    host = host_of(model)
    settings = Settings(precision=_checked_precision(precision))
    existing: Plan | None = vars(host).get(PLAN)
    if existing is not None:
        if existing.settings != settings:
            raise ValueError(
                f"attach: model is attached with {existing.settings}; call detach() on its plan "
                "before attaching with other settings"
            )
        return existing
    made = make_plan(host, settings)
    binder = Binder()
    try:
        _bind(made, host, binder)
    except BaseException:
        binder.restore()
        raise
    made.binder = binder
    vars(host)[PLAN] = made
    return made


def _bind(plan: Plan, model: nn.Module, binder: Binder) -> None:
    _, device = place(model)
    for candidate in plan.candidates.values():
        region = candidate.region
        own = region_dtype(region, torch.float64)
        forward = guarded(
            host_class(region.module),
            candidate.fast,
            unary=candidate.structure.unary,
            example=region.module,
            dtypes=FLOATS if own is torch.float64 else (own,),
            device=device.type,
        )
        binder.override(region.module, (candidate.structure.name, candidate.spec), forward=forward)


def detach(plan: Plan) -> None:
    """Undo ``attach``; see ``Plan.detach``."""
    if plan.binder is None:
        return
    binder, plan.binder = plan.binder, None
    vars(plan.model).pop(PLAN, None)
    binder.restore()
