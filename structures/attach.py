"""``attach``: bind what a plan decided; ``detach``: give the host back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .binding import PLAN, Binder, Overridden, guarded, host_class, proven_numbers
from .capture import CapturedForward
from .discover import FLOATS
from .kernels import KernelUnavailable
from .kv_format import KVCache
from .lending import indexed, move
from .numbers import place, region_dtype
from .plan import Plan, Settings, host_of, make_plan, read_settings
from .precision.choice import Precision
from .precision.host_weights import KeepHost, refuse_absent
from .precision.packing import Packing
from .precision.quantising import MIN_COSINE
from .precision.settle import finish, prepare
from .precision.streaming import streamed
from .quiet import proof_state, proofs_alone, tensors_made_on
from .weights import Copies, refuse_released


def attach(
    model: Any,
    forward: Callable[..., Any] | None = None,
    *,
    precision: Precision = "auto",
    calibration: Any = None,
    observer: str = "max",
    min_cosine: float | None = MIN_COSINE,
    keep_host: KeepHost = "cpu",
    kv_cache: KVCache = None,
    device: torch.device | str | None = None,
) -> Plan:
    """Bind FlashRT's structures into an unmodified model, and capture its forward.

    Args:
        model: an ``nn.Module`` in eval mode on one device, or a handle with ``.model``.
        forward: the method through which the model is called, of the model or of a module inside;
            default ``model.forward``. Calls of it replay graphs where they can.
        precision: ``"auto"`` takes the weights as they are; ``"bf16"`` also, and refuses a model
            whose weights are of another dtype. Neither changes a parameter. ``"fp8"``, ``"int8"``
            and ``"nvfp4"`` read the linear weights of bound regions from packed copies. A dict maps
            globs over module paths to one of these; the last that matches a module, or a module
            around it, decides, and what none matches stays ``"auto"``.
        calibration: text like that which the model will read: token ids ``[B, T]``, an iterable of
            them, of dicts of the forward's arguments, or of tuples; or a callable that takes the
            model and calls it. FP8 products of many rows then use static scales, NVFP4 scales weigh
            the columns by their inputs, and fidelity is measured on the half that is held out.
        observer: what a static scale covers: ``"max"``, or a percentile such as ``"p99.9"``.
        min_cosine: floor of the cosine between the logits of the quantised and of the
            full-precision model, see ``explain``. Weights that break it are promoted from nvfp4 to
            fp8, int8 and bf16 until it holds. None measures nothing.
        keep_host: where the full-precision weights of packed copies are meanwhile: ``"cpu"`` moves
            them there and ``detach`` brings them back, ``"gpu"`` leaves them, False releases them,
            and neither ``detach`` nor saving is possible then.
        kv_cache: what ``generate`` and the decode loops keep keys and values in: None for the
            model's dtype, ``"fp8"`` as described at ``decode_loop``.
        device: where a model that is still on the CPU is to run; None is where it is. What is
            quantised goes there packed, weight by weight, so that the device never holds the
            model in full precision (unless ``keep_host`` is ``"gpu"``); ``detach`` leaves all of
            it there.

    Returns:
        The plan in force. Attaching again with the same settings returns the same plan, and so does
        attaching a handle that came attached without asking for a precision.

    The plan refers to the model and the model to the plan. After ``plan.detach()`` the memory of
    both is free with the last reference; a model that is dropped attached keeps its memory until
    ``gc.collect()``.

    Raises:
        TypeError: no module, or ``forward`` is not a method of it.
        ValueError: see ``plan``; also settings or a device other than those attached.
        KernelUnavailable: no kernel family that the model needs can be loaded.
        The host is untouched after any error.
    """
    host = host_of(model)
    settings = read_settings(
        *(model, host, forward),
        precision=precision,
        calibration=calibration,
        observer=observer,
        min_cosine=min_cosine,
        keep_host=keep_host,
        kv_cache=kv_cache,
    )
    target = host.get_submodule(settings.forward)
    wanted = None if device is None else indexed(device)
    existing: Plan | None = vars(host).get(PLAN)
    if existing is not None and model is not host and settings == existing.settings.unasked():
        return _existing(existing, host, wanted)
    with proofs_alone:
        return _attach(host, target, settings, wanted)


def _existing(plan: Plan, host: nn.Module, device: torch.device | None) -> Plan:
    """The plan that is in force, if it runs where it is asked to."""
    home = place(host)[1] if plan.packing is None else plan.packing.device
    if device is not None and device != home:
        raise ValueError(
            f"attach: model is attached on {home}, asked for {device}; call detach() on its plan "
            "first"
        )
    return plan


def _attach(
    host: nn.Module, target: nn.Module, settings: Settings, device: torch.device | None
) -> Plan:
    existing: Plan | None = vars(host).get(PLAN)
    if existing is not None:
        if existing.settings != settings:
            raise ValueError(
                f"attach: model is attached with {existing.settings}, asked for {settings}; call "
                "detach() on its plan first"
            )
        return _existing(existing, host, device)
    back = _nothing
    if device is not None and (
        settings.quantising is None or settings.quantising.keep_host == "gpu"
    ):
        back, device = move(host, device), None
    try:
        return _bound(host, target, settings, device)
    except BaseException:
        back()
        raise


def _bound(
    host: nn.Module, target: nn.Module, settings: Settings, device: torch.device | None
) -> Plan:
    made = make_plan(host, settings, device)
    if made.unavailable and not made.candidates:
        raise KernelUnavailable(f"attach: {made.unavailable[0]}")
    binder = Binder()
    packing, quantising = made.packing, settings.quantising
    back = _nothing
    try:
        begun = perf_counter()
        if packing is not None and quantising is not None:
            back = packing.bring(host)
            with (
                torch.inference_mode(False),
                proof_state(packing.device),
                tensors_made_on(packing.device),
                streamed(host, packing.weights(), packing.device),
            ):
                prepared = prepare(host, packing, quantising)
        _bind(made, host, binder)
        if packing is not None and quantising is not None:
            packing.bind(host, binder)
            with (
                torch.inference_mode(False),
                proof_state(packing.device),
                tensors_made_on(packing.device),
            ):
                finish(host, packing, quantising, prepared)
            packing.hosts.settle(packing.owners(host), binder)
            packing.seconds = perf_counter() - begun
        made.captured = _capture(target, binder, packing)
        made.generation = _open_generate(made, host, binder)
        if not isinstance(host, Overridden):
            binder.override(host, "plan")  # copies and pickles must leave the plan behind
    except BaseException:
        binder.restore()
        back()
        if packing is not None:
            packing.undo()
        raise
    made.binder = binder
    vars(host)[PLAN] = made
    return made


def _bind(plan: Plan, model: nn.Module, binder: Binder) -> None:
    _, home = place(model)
    device = home if plan.packing is None else plan.packing.device
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
            before_host=None if plan.packing is None else refuse_absent,
        )
        key = (candidate.structure.name, candidate.spec, proven_numbers(region.module))
        binder.override(region.module, key, forward=forward)


def _capture(module: nn.Module, binder: Binder, packing: Packing | None) -> CapturedForward:
    """Let calls of ``module`` replay graphs; without grad unless an input asks for it."""
    eager = type(module).forward
    device = None if packing is None else packing.device
    captured = CapturedForward(module, eager.__get__(module), device=device)
    copies = None if packing is None else Copies(module)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return eager(self, *args, **kwargs)
        if copies is not None:
            copies.refresh()
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


def _nothing() -> None:
    return None


def _wants_grad(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def detach(plan: Plan) -> None:
    """Undo ``attach``; see ``Plan.detach``."""
    if plan.binder is None:
        return
    if plan.packing is not None and plan.packing.hosts.released:
        refuse_released()
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
    if plan.packing is not None:
        plan.packing.undo()
    binder.restore()
