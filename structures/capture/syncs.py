"""Operations that a CUDA graph cannot hold, recognised before a capture would break on them.

The dispatcher's tags name the operations whose result shape or value the host must know. Python
calls that read a CPU tensor without dispatching (``tolist``, ``numpy``, ``cpu``) and constructors
that would upload host data are recognised by name. On a GPU only what touches the GPU counts; the
tape takes every CPU tensor for one on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .protocol import CaptureError

_aten = torch.ops.aten
_INDEXING = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._unsafe_index.Tensor,
}
_READS = {
    torch.Tensor.tolist: "tolist",
    torch.Tensor.numpy: "numpy",
    torch.Tensor.cpu: "cpu",
    torch.Tensor.__array__: "__array__",
    torch.Tensor.pin_memory: "pin_memory",
}
_UPLOADS = {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor"}


def refuse_unrecordable(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> None:
    """Raise CaptureError when ``func`` would wait for the device or upload host data."""
    if func in _INDEXING:
        _refuse_index(func, args, device_type)
    elif func is _aten.lift_fresh.default:
        # A 0-dim constant becomes a kernel argument; a larger one is copied from pageable memory.
        if args[0].device.type == device_type and args[0].dim() > 0:
            raise CaptureError(
                "record: the step must not make tensors from host data, got lift_fresh of shape "
                f"{tuple(args[0].shape)}"
            )
    elif func is _aten._to_copy.default or func is _aten.copy_.default:
        _refuse_transfer(func, args, kwargs, device_type)
    elif func is _aten._grouped_mm.default and device_type == "cuda":
        # On a GPU fp32 has no kernel: a loop over the groups instead. The tape runs it as one call.
        if args[0].is_cuda and args[0].dtype is torch.float32:
            raise CaptureError(
                f"record: the step must not wait for the device, got {func} of torch.float32, "
                "whose groups are read on the host; torch.bfloat16 has a kernel"
            )
    elif (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    ):
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return
        if func is _aten.one_hot.default and len(args) > 1 and args[1] >= 0:
            return
        if any(_on(leaf, device_type) for leaf in tree_leaves((args, kwargs))):
            raise CaptureError(f"record: the step must not wait for the device, got {func}")


def _on(value: Any, device_type: str) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == device_type


def _refuse_index(func: Any, args: tuple[Any, ...], device_type: str) -> None:
    indices = [i for i in args[1] if i is not None]
    if _on(args[0], device_type) and any(not _on(i, device_type) for i in indices):
        raise CaptureError(f"record: the step must not upload host data, got {func} by the host's")
    masks = [i for i in indices if i.dtype in (torch.bool, torch.uint8) and _on(i, device_type)]
    if not masks:
        return
    writes_one_value = len(args) > 2 and args[2].numel() == 1
    if writes_one_value and not (len(args) > 3 and args[3]):
        return  # torch turns this into masked_fill
    raise CaptureError(
        f"record: the step must not wait for the device, got {func} with a boolean mask"
    )


def _refuse_transfer(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> None:
    """Copies between host and device wait for the device, unless they are said not to."""
    if func is _aten.copy_.default:
        places = {args[0].device.type, args[1].device.type}
        blocks = not (len(args) > 2 and args[2])
    else:
        target = kwargs.get("device") or args[0].device
        places = {args[0].device.type, torch.device(target).type}
        blocks = not kwargs.get("non_blocking")
    if len(places) > 1 and device_type in places and blocks:
        raise CaptureError(
            "record: the step must not copy between host and device, got "
            f"{func} of shape {tuple(args[0].shape)}"
        )


class HostReads(TorchFunctionMode):
    """Refuses Python calls that would wait for the device or upload to it."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and _on(args[0], self._device_type):
            raise CaptureError(f"record: the step must not wait for the device, got {_READS[func]}")
        if func in _UPLOADS and self._uploads(args, kwargs):
            raise CaptureError(
                "record: the step must not make tensors from host data, got "
                f"{_UPLOADS[func]} with device={kwargs['device']}"
            )
        return func(*args, **kwargs)

    def _uploads(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        data = args[0] if args else kwargs.get("data")
        return (
            device is not None
            and not isinstance(data, torch.Tensor)
            and torch.device(device).type == self._device_type
        )


class Preflight(TorchDispatchMode):
    """Runs a warm-up and refuses what a capture would break on.

    A capture that the CUDA runtime has to abort costs more than an exception: torch leaves its
    pinned allocator routed to the pool, which then cannot be used again.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        refuse_unrecordable(func, args, kwargs, self._device_type)
        return func(*args, **kwargs)
