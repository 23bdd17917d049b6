"""Operations that a CUDA graph cannot hold, recognised on the CPU.

The dispatcher's tags name the operations whose result shape or value the host must know. The
Python calls that read a CPU tensor without dispatching (``tolist``, ``numpy``, ``cpu``) and the
constructors that would upload host data are recognised by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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


def refuse_unrecordable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise CaptureError when ``func`` would wait for the device or upload host data."""
    if func in _INDEXING:
        _refuse_mask_index(func, args)
        return
    if func is _aten.lift_fresh.default:
        # A 0-dim constant becomes a kernel argument; a larger one is copied from pageable memory.
        if args[0].dim() > 0:
            raise CaptureError(
                "record: the step must not make tensors from host data, got lift_fresh of shape "
                f"{tuple(args[0].shape)}"
            )
        return
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        raise CaptureError(f"record: the step must not wait for the device, got {func}")


def _refuse_mask_index(func: Any, args: tuple[Any, ...]) -> None:
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return
    writes_one_value = func is not _aten.index.Tensor and len(args) > 2 and args[2].numel() == 1
    if writes_one_value and not (len(args) > 3 and args[3]):
        return  # torch turns this into masked_fill
    raise CaptureError(
        f"record: the step must not wait for the device, got {func} with a boolean mask"
    )


class HostReads(TorchFunctionMode):
    """Refuses the Python calls that would wait for a GPU and that a CPU never dispatches."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise CaptureError(f"record: the step must not wait for the device, got {_READS[func]}")
        if func in _UPLOADS and kwargs.get("device") is not None and not _is_tensor(args, kwargs):
            raise CaptureError(
                "record: the step must not make tensors from host data, got "
                f"{_UPLOADS[func]} with device={kwargs['device']}"
            )
        return func(*args, **kwargs)


def _is_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(args[0] if args else kwargs.get("data"), torch.Tensor)
