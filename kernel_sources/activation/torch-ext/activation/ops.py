"""Schemas, fakes and public functions of the `activation` family; see reference.py for the CPU."""

from __future__ import annotations

import torch

from . import reference
from ._common import checks
from ._common.activations import activation_number
from ._common.operators import define
from ._ops import ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _activate_out(x, activation, out):
    reference.activate_out(x, activation, out)


def _gated_out(gate, up, activation, out):
    reference.gated_out(gate, up, activation, out)


def _gated_packed_out(x, activation, gate_first, out):
    reference.gated_packed_out(x, activation, gate_first, out)


def _like_first(x, *arguments):
    return x.new_empty(x.shape)


def _half(x, *arguments):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


define("activate(Tensor x, int activation) -> Tensor", reference.activate, _like_first)
define("activate_out(Tensor x, int activation, Tensor(a!) out) -> ()", _activate_out)
define("gated(Tensor gate, Tensor up, int activation) -> Tensor", reference.gated, _like_first)
define("gated_out(Tensor gate, Tensor up, int activation, Tensor(a!) out) -> ()", _gated_out)
define(
    "gated_packed(Tensor x, int activation, bool gate_first) -> Tensor",
    reference.gated_packed,
    _half,
)
define(
    "gated_packed_out(Tensor x, int activation, bool gate_first, Tensor(a!) out) -> ()",
    _gated_packed_out,
)
_FP8_OUTPUTS = "Tensor? static_scale, Tensor(a!) out, Tensor(b!)? scale_out) -> ()"
define(f"activate_fp8(Tensor x, int activation, {_FP8_OUTPUTS}", reference.activate_fp8)
define(
    f"gated_fp8(Tensor gate, Tensor up, int activation, {_FP8_OUTPUTS}",
    reference.gated_fp8,
)
define(
    f"gated_packed_fp8(Tensor x, int activation, bool gate_first, {_FP8_OUTPUTS}",
    reference.gated_packed_fp8,
)


def activate(x: torch.Tensor, *, activation: str, out: torch.Tensor | None = None) -> torch.Tensor:
    """Apply an activation to every element.

    ``out = activation(x)``

    Args:
        x: ``[..., D]`` bf16, fp16 or fp32, last dim contiguous, leading dims at any strides.
        activation: one of ``ACTIVATIONS``: ``identity``, ``silu``, ``gelu`` (erf), ``gelu_tanh``,
            ``quick_gelu`` (``x * sigmoid(1.702 * x)``), ``relu``, ``relu2`` (``relu(x)**2``),
            ``sigmoid``, ``tanh``.
        out: shape and dtype of ``x``, last dim contiguous; may be ``x`` itself, and must not
            overlap it otherwise.

    Returns:
        ``out``, or a new contiguous tensor of shape and dtype of ``x``. Arithmetic is fp32,
        rounded once. A NaN stays a NaN.

    Raises:
        ValueError: an unknown activation, or a shape, stride, dtype or device outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: see ``_common/activations.py``.
    """
    op = "activate"
    number = activation_number(op, activation)
    checks.inference_only(op, x)
    check_input(op, "x", x)
    if out is None:
        return ops.activate(x, number)
    checks.output(op, "out", out, x.shape, x.dtype, x.device)
    ops.activate_out(x, number, out)
    return out


def gated(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    activation: str = "silu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate ``up`` by the activation of ``gate``.

    ``out = activation(gate) * up``

    Args:
        gate: as ``x`` of :func:`activate`.
        up: shape, dtype and device of ``gate``, last dim contiguous.
        activation: as in :func:`activate`.
        out: shape and dtype of ``gate``, last dim contiguous; may be ``gate`` or ``up`` itself, and
            must not overlap them otherwise.

    Returns:
        ``out``, or a new contiguous tensor of shape and dtype of ``gate``. Arithmetic is fp32,
        rounded once.

    Raises:
        ValueError: an unknown activation, or a shape, stride, dtype or device outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 5.
    """
    op = "gated"
    number = activation_number(op, activation)
    checks.inference_only(op, gate, up)
    check_input(op, "gate", gate)
    check_up(op, up, gate)
    if out is None:
        return ops.gated(gate, up, number)
    checks.output(op, "out", out, gate.shape, gate.dtype, gate.device)
    ops.gated_out(gate, up, number, out)
    return out


def gated_packed(
    x: torch.Tensor,
    *,
    activation: str = "silu",
    gate_first: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`gated` of the two halves of the last dim.

    ``out = activation(x[..., :D]) * x[..., D:]``, the halves swapped without ``gate_first``

    Args:
        x: ``[..., 2 * D]`` bf16, fp16 or fp32, last dim contiguous, leading dims at any strides.
        activation: as in :func:`activate`.
        gate_first: the gate is the first half.
        out: ``[..., D]``, dtype of ``x``, last dim contiguous; the first or second half of ``x``
            itself, or without overlap.

    Returns:
        ``out``, or a new contiguous ``[..., D]``. Arithmetic is fp32, rounded once.

    Raises:
        ValueError: an unknown activation, an odd last dim, or a shape, stride, dtype or device
            outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 5.
    """
    op = "gated_packed"
    number = activation_number(op, activation)
    checks.inference_only(op, x)
    check_input(op, "x", x)
    shape = half_shape(op, x)
    if out is None:
        return ops.gated_packed(x, number, gate_first)
    checks.output(op, "out", out, shape, x.dtype, x.device)
    ops.gated_packed_out(x, number, gate_first, out)
    return out


def check_input(op, name, x):
    checks.dims_at_least(op, name, x, 1)
    checks.dtype_in(op, name, x, DTYPES)
    checks.unit_stride(op, name, x)


def check_up(op, up, gate):
    checks.shape_is(op, "up", up, gate.shape)
    checks.dtype_in(op, "up", up, (gate.dtype,))
    checks.same_device(op, "up", up, gate.device)
    checks.unit_stride(op, "up", up)


def half_shape(op, x):
    """Shape of one half of the last dim."""
    shape = x.shape
    if shape[-1] % 2 != 0:
        checks.fail(op, "x", "have an even last dim", f"shape {tuple(shape)}")
    return (*shape[:-1], shape[-1] // 2)
