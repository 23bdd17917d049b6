"""``attach``: bind what a plan decided; ``detach``: give the host back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from .binding import PLAN, Binder, Overridden, guarded, host_class, proven_numbers
from .capture import CapturedForward
from .discover import FLOATS
from .kernels import KernelUnavailable
from .numbers import place, region_dtype
from .plan import (
    Plan,
    Settings,
    _checked_precision,
    host_of,
    make_plan,
)
from .quiet import proofs_alone


def attach(
    model: Any, forward: Callable[..., Any] | None = None, *, precision: str = "auto"
) -> Plan:
    """Bind FlashRT's structures into an unmodified model, and capture its forward.

    Args:
        model: an ``nn.Module`` in eval mode on one device, or a handle with ``.model``.
        forward: the method through which the model is called, of the model or of a module inside;
            default ``model.forward``. Calls of it replay graphs where they can.
        precision: ``"auto"`` takes the weights as they are; ``"bf16"`` also, and refuses a model
            whose weights are of another dtype. Neither changes a parameter.

    Returns:
        The plan in force. Attaching again with the same settings returns the same plan.

    The plan refers to the model and the model to the plan. After ``plan.detach()`` the memory of
    both is free with the last reference; a model that is dropped attached keeps its memory until
    ``gc.collect()``.

    Raises:
        TypeError: no module, or ``forward`` is not a method of it.
        ValueError: see ``plan``; also settings other than those attached.
        KernelUnavailable: no kernel family that the model needs can be loaded.
        The host is untouched after any error.
    """
    host = host_of(model)
    target = _target(model, host, forward)
    settings = Settings(_checked_precision(precision), _path_of(host, target))
    with proofs_alone:
        return _attach(host, target, settings)


def _attach(host: nn.Module, target: nn.Module, settings: Settings) -> Plan:
    existing: Plan | None = vars(host).get(PLAN)
    if existing is not None:
        if existing.settings != settings:
            raise ValueError(
                f"attach: model is attached with {existing.settings}, asked for {settings}; call "
                "detach() on its plan first"
            )
        return existing
    made = make_plan(host, settings)
    if made.unavailable and not made.candidates:
        raise KernelUnavailable(f"attach: {made.unavailable[0]}")
    binder = Binder()
    try:
        _bind(made, host, binder)
        made.captured = _capture(target, binder)
        made.generation = _open_generate(made, host, binder)
        if not isinstance(host, Overridden):
            binder.override(host, "plan")  # copies and pickles must leave the plan behind
    except BaseException:
        binder.restore()
        raise
    made.binder = binder
    vars(host)[PLAN] = made
    return made


def _target(model: Any, host: nn.Module, forward: Callable[..., Any] | None) -> nn.Module:
    """The module whose forward was named."""
    if forward is None or forward == getattr(model, "forward", None):
        return host
    target = getattr(forward, "__self__", None)
    if isinstance(target, nn.Module) and getattr(forward, "__name__", "") == "forward":
        return target
    raise TypeError(
        "attach: forward must be the forward method of the model or of a module inside, got "
        f"{getattr(forward, '__qualname__', type(forward).__name__)}"
    )


def _path_of(host: nn.Module, target: nn.Module) -> str:
    for name, module in host.named_modules():
        if module is target:
            return str(name)
    raise TypeError(
        f"attach: forward belongs to a {type(target).__name__} that is not part of the model"
    )


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
        key = (candidate.structure.name, candidate.spec, proven_numbers(region.module))
        binder.override(region.module, key, forward=forward)


def _capture(module: nn.Module, binder: Binder) -> CapturedForward:
    """Let calls of ``module`` replay graphs; without grad unless an input asks for it."""
    eager = type(module).forward
    captured = CapturedForward(module, eager.__get__(module))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return eager(self, *args, **kwargs)
        if not torch.is_grad_enabled() or _wants_grad(args) or _wants_grad(kwargs.values()):
            return captured(*args, **kwargs)
        with torch.no_grad():
            return captured(*args, **kwargs)

    binder.override(module, "captured forward", forward=forward)
    return captured


def _open_generate(plan: Plan, model: nn.Module, binder: Binder) -> Any:
    """Let ``generate`` use the decode loop, where the model has one."""
    from .loops.generate import open_door

    return open_door(plan, model, binder)


def _wants_grad(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def detach(plan: Plan) -> None:
    """Undo ``attach``; see ``Plan.detach``."""
    if plan.binder is None:
        return
    binder, plan.binder = plan.binder, None
    model = plan._model() if plan._model is not None else None
    if model is not None:
        vars(model).pop(PLAN, None)
    if plan.captured is not None:
        plan.captured.release()
    plan.captured = None
    if plan.generation is not None:
        plan.generation.release()
    plan.generation = None
    binder.restore()
