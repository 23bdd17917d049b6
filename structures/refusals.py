"""Whole models that cannot be attached, or not as asked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import nn

from .binding import Overridden
from .catalogue.spec import NotThisForm
from .precision.choice import Chosen

if TYPE_CHECKING:
    from .plan import Plan


def check_host(model: nn.Module) -> None:
    """Refuse whole models that cannot be attached, before any work is done.

    Raises:
        ValueError: see ``plan``.
    """
    if model.training:
        raise ValueError("attach: model must be in eval mode; call model.eval() first")
    for name, module in model.named_modules():
        if getattr(getattr(module, "_hf_hook", None), "offload", False):
            raise ValueError(f"attach: module {name!r} has an offload hook; load it on one device")
    devices = sorted({str(t.device) for t in (*model.parameters(), *model.buffers())})
    if "meta" in devices:
        raise ValueError("attach: model has tensors on the meta device; load its weights first")
    places = getattr(model, "hf_device_map", None) or {}
    offloaded = sorted({str(p) for p in places.values()} & {"cpu", "disk"})
    if offloaded and len(set(map(str, places.values()))) > 1:
        raise ValueError(f"attach: model is offloaded to {offloaded}; load it on one device")
    if len(devices) > 1:
        raise ValueError(f"attach: model must be on one device, got {', '.join(devices)}")
    for name, module in model.named_modules():
        if isinstance(module, Overridden):
            raise ValueError(
                f"attach: module {name or type(module).__name__!r} is attached already; "
                "call detach() on its plan first"
            )


def check_weights(model: nn.Module, precision: Chosen) -> None:
    """``"bf16"`` casts nothing, so most weights have to be bf16 already.

    Raises:
        ValueError: they are of another dtype.
    """
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    found = elements.most_common(1)[0][0] if elements else torch.bfloat16
    if precision == "bf16" and found is not torch.bfloat16:
        raise ValueError(
            f"plan: precision='bf16' must be given bf16 weights, got {found}; cast first with "
            "model.to(torch.bfloat16), or leave precision at 'auto'"
        )


def check_kv_cache(model: nn.Module, made: Plan) -> None:
    """A format of caches asks for the decode loop, which alone keeps such caches.

    Raises:
        ValueError: the loop cannot run the model. Where a kernel family is missing nothing is said
            here: ``attach`` and the loops name it.
    """
    from .loops.decoder import read_decoder

    kv_cache = made.settings.kv_cache
    if kv_cache is None or made.unavailable:
        return
    try:
        read_decoder(model, made)
    except NotThisForm as reason:
        raise ValueError(
            "attach: kv_cache must be None for a model that the decode loop cannot run, got "
            f"{kv_cache!r}; {type(model).__name__}: {reason}"
        ) from None
