"""``capture``: graphs for any function or module, without a plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .forward import MAX_OUTPUT_BYTES, CapturedForward
from .protocol import CaptureError
from .trees import flatten


def capture(
    target: Callable[..., Any],
    *args: Any,
    max_graphs: int = 8,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
    **kwargs: Any,
) -> CapturedForward:
    """Make ``target`` replay a graph for every signature of its tensors.

    The result takes the same arguments as ``target`` and returns the same values, without grad, as
    fresh tensors. A call with new shapes, dtypes or constants runs eagerly once and is recorded; a
    call that cannot be captured runs eagerly, and ``.stats`` says why. ``.release()`` gives all
    graphs back.

    What ``target`` reads besides its arguments is baked in by address. Modules that it belongs to,
    closes over or names as a global are watched: replaced or moved parameters, hooks and training
    mode are noticed. Other tensors keep the memory they had at recording.

    Args:
        target: an ``nn.Module``, a method of one, or any function.
        args, kwargs: of a first call, which is recorded at once.
        max_graphs: at least 1; the least recently used graph is released for a new one.
        max_output_bytes: calls that return more run eagerly.

    Raises:
        TypeError: ``target`` is not callable.
        ValueError: no tensor in the example and no module in ``target`` says on which device.
        CaptureError: the example call cannot be captured; the text says why.
    """
    if not callable(target):
        raise TypeError(f"capture: target must be callable, got {type(target).__name__}")
    holder = nn.ModuleList(_modules(target))
    holder.training = False  # .eval() would reach into the modules
    tensors = flatten([args, kwargs])[0]
    device = tensors[0].device if tensors else None
    captured = CapturedForward(
        holder,
        target,
        device=device,
        signature=target.forward if isinstance(target, nn.Module) else target,
        max_graphs=max_graphs,
        max_output_bytes=max_output_bytes,
    )
    if device is None and captured.watch.device is None:
        raise ValueError(
            "capture: target needs an example tensor, or a module on one device, got neither"
        )
    functools.update_wrapper(captured, target, updated=())
    if args or kwargs:
        captured(*args, **kwargs)
        if not captured.stats.captures:
            reasons = ", ".join(captured.stats.fallbacks) or "the module is not in eval mode"
            raise CaptureError(f"capture: the example call must be capturable, but {reasons}")
    return captured


def _modules(target: Any) -> Iterator[nn.Module]:
    """Modules that ``target`` is, belongs to, closes over, or names as a global."""
    if isinstance(target, nn.Module):
        yield target
        return
    if isinstance(target, functools.partial):
        for value in (target.func, *target.args, *target.keywords.values()):
            yield from _modules(value)
        return
    owner = getattr(target, "__self__", None)
    if isinstance(owner, nn.Module):
        yield owner
    function = inspect.unwrap(getattr(target, "__func__", target))
    if inspect.isfunction(function):
        found = inspect.getclosurevars(function)
        for value in (*found.nonlocals.values(), *found.globals.values()):
            if isinstance(value, nn.Module):
                yield value
