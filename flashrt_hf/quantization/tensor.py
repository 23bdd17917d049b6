"""A parameter that is a packed weight: shape and dtype of a layer's matrix, a part of its bytes.

A linear layer whose weight is a ``PackedTensor`` stays an ``nn.Linear``: products and embedding
look-ups read the packed form, and every other operation gets its values, rounded to its dtype.
Moved, or cast to another floating-point dtype, it stays packed.
``structures`` finds the packed form where it finds packed copies, so bound regions read it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map_only

from flash_rt.structures import kernels
from flash_rt.structures.precision.formats import unpack
from flash_rt.structures.weights import COPY, ROW_GROUP, PackedCopy, PackedWeight

_aten = torch.ops.aten
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class AdoptedCopy(PackedCopy):
    """The packed form of a weight that has no other: made by nobody, never made again."""

    def __init__(self, tensor: PackedTensor) -> None:
        packed = tensor.packed
        self.precision, self.transposed = tensor.precision, False
        self.input_scale = tensor.input_scale
        self.repacked = 0
        self.device = packed.data.device
        self._rows = packed.shape[0]
        self._parts = {(0, self._rows): packed}
        self._views = {}

    def weight(self, start: int | None = None, stop: int | None = None) -> PackedWeight:
        """Rows ``start:stop``; those that begin inside an NVFP4 tile are brought into own ones.

        Raises:
            ValueError: they begin inside a block of FP8 that shares a scale.
        """
        run = start or 0, self._rows if stop is None else stop
        whole = self._parts[0, self._rows]
        if run[0] % ROW_GROUP and whole.data.dtype == torch.uint8 and run not in self._views:
            self._views[run] = _retiled(whole, *run)
        return super().weight(start, stop)

    def mark(self, parameter: torch.Tensor) -> None:
        """Nothing writes to the parameter."""

    def is_current(self, parameter: torch.Tensor) -> bool:
        """Always."""
        return True

    def refresh(self, parameter: torch.Tensor) -> bool:
        """Never."""
        return False


class _Packed:
    """What ``structures`` finds on the tensor, unless it has hung a copy of its own there."""

    def __get__(self, tensor: PackedTensor | None, owner: type) -> PackedCopy:
        if tensor is None:
            raise AttributeError(COPY)
        if tensor.adopted is None:
            tensor.adopted = AdoptedCopy(tensor)
        return tensor.adopted


class PackedTensor(torch.Tensor):
    """``W[n, k] = scale[n] * value(data)[n, k]``, as a tensor ``[N, K]`` of ``dtype``.

    Args:
        packed: ``linear.PackedWeight``.
        dtype: what its values are rounded to where they are asked for; the model's.
        input_scale: static scale (fp32, one element) of the layer's input in FP8 products.
    """

    packed: PackedWeight
    input_scale: torch.Tensor | None
    adopted: AdoptedCopy | None

    @staticmethod
    def __new__(
        cls, packed: PackedWeight, dtype: torch.dtype, input_scale: torch.Tensor | None = None
    ) -> PackedTensor:
        made: PackedTensor = torch.Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=dtype, device=packed.data.device, requires_grad=False
        )
        made.packed, made.input_scale, made.adopted = packed, input_scale, None
        return made

    @property
    def precision(self) -> str:
        """fp8, int8 or nvfp4."""
        return _format(self.packed)

    def dequantize(self) -> torch.Tensor:
        """The values as a plain tensor, rounded to the dtype."""
        return unpack(self.packed, self.dtype)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the packed data."""
        return self.packed.data.untyped_storage()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"PackedTensor({self.precision}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"device={self.device})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _like(self, torch.Tensor.clone(self))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = (self.packed.data, self.packed.scale, tuple(self.packed.shape))
        kept = {name: value for name, value in vars(self).items() if name == "_is_param"}
        return _rebuild, (*parts, self.dtype, self.input_scale, kept)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func == _SET_DATA:
            return _replace(*args)
        if func is F.embedding:
            found = _embedding(*args, **kwargs)
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._with(lambda tensor: tensor)
        if func is _aten.clone.default and isinstance(args[0], PackedTensor):
            return args[0]._with(torch.clone)
        dtype = kwargs.get("dtype") or args[0].dtype if args else None
        if func is _aten._to_copy.default and dtype in FLOATS:
            place = kwargs.get("device") or args[0].device
            return args[0]._with(lambda tensor: tensor.to(place, copy=True), dtype)
        if func._schema.is_mutable:
            written = _written(func, args, kwargs)
            if written:
                raise RuntimeError(
                    f"{func}: {written} must not be a quantised weight, which cannot be written "
                    "in place; load the model in full precision to change it"
                )
        plain = tree_map_only(PackedTensor, PackedTensor.dequantize, (tuple(args), kwargs))
        return func(*plain[0], **plain[1])

    def _with(self, change: Any, dtype: torch.dtype | None = None) -> PackedTensor:
        """The same weight with every stored tensor changed, perhaps rounded to another dtype."""
        data, scale = change(self.packed.data), change(self.packed.scale)
        packed = packed_weight(data, scale, self.packed.shape)
        scale_in = None if self.input_scale is None else change(self.input_scale)
        return PackedTensor(packed, dtype or self.dtype, scale_in)


setattr(PackedTensor, COPY, _Packed())


def packed_weight(
    data: torch.Tensor, scale: torch.Tensor, shape: tuple[int, int] | torch.Size
) -> PackedWeight:
    """``linear.PackedWeight``."""
    rows, columns = shape
    made: PackedWeight = kernels.family("linear").PackedWeight(data, scale, (rows, columns))
    return made


def _format(packed: Any) -> str:
    name: str = packed.format
    return name


def _retiled(packed: PackedWeight, start: int, stop: int) -> PackedWeight:
    """Rows of an NVFP4 weight in tiles of their own, the same values."""
    quant = kernels.family("quant")
    codes, block_scales = quant.untile_nvfp4(packed.data, packed.shape)
    tiles = quant.tile_nvfp4(codes[start:stop].contiguous(), block_scales[start:stop].contiguous())
    scale = packed.scale[start:stop].contiguous()
    return packed_weight(tiles, scale, (stop - start, packed.shape[1]))


def _like(old: PackedTensor, made: Any) -> Any:
    """``made`` as the kind of parameter that ``old`` is."""
    if isinstance(old, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=old.requires_grad)
    return made


def _rebuild(
    data: torch.Tensor,
    scale: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    input_scale: torch.Tensor | None,
    kept: dict[str, Any],
) -> Any:
    made = PackedTensor(packed_weight(data, scale, shape), dtype, input_scale)
    return torch.nn.Parameter(made, requires_grad=False) if kept else made


def _replace(target: torch.Tensor, value: Any) -> None:
    """``target.data = value``, as modules do to move and to cast their parameters.

    Raises:
        RuntimeError: one of them is packed and the other is not.
    """
    if not isinstance(target, PackedTensor) or not isinstance(value, PackedTensor):
        raise RuntimeError(
            "data: a quantised weight must be replaced by a quantised weight, got "
            f"{type(value).__name__} for {type(target).__name__}"
        )
    with torch._C.DisableTorchFunctionSubclass():
        target.data = value
    target.packed, target.input_scale, target.adopted = value.packed, value.input_scale, None


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``F.linear`` where some operand is packed."""
    # The kernels have no fp32 on a GPU; torch's own product of the values has.
    wide = input.dtype == torch.float32 and input.is_cuda
    if not isinstance(weight, PackedTensor) or isinstance(input, PackedTensor) or wide:
        dense = [t.dequantize() if isinstance(t, PackedTensor) else t for t in (input, weight)]
        return F.linear(dense[0], dense[1], bias)
    if input.dtype != weight.dtype:
        raise RuntimeError(
            f"linear: input must be {weight.dtype} as the layer's quantised weight, got "
            f"{input.dtype}; cast it, or load the model with dtype={input.dtype}"
        )
    linear = kernels.family("linear").linear
    rows = input if input.stride(-1) == 1 else input.contiguous()
    out: torch.Tensor = linear(rows, weight.packed, bias, input_scale=weight.input_scale)
    return out


def _embedding(
    input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor | None:
    """``F.embedding`` of a packed table; None where it is asked for more than rows."""
    renormalises = args[1] if len(args) > 1 else kwargs.get("max_norm")
    if not isinstance(weight, PackedTensor) or renormalises is not None:
        return None
    out: torch.Tensor = kernels.family("linear").embedding(
        input.long(), weight.packed, out_dtype=weight.dtype
    )
    return out


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Name of a packed argument that ``func`` writes."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and isinstance(given.get(argument.name), PackedTensor):
            return str(argument.name)
    return None
