"""Schemas, fakes and public functions of the `norm` family; see reference.py for the CPU."""

from __future__ import annotations

import torch

from . import reference
from ._common import checks
from ._common.operators import define, returns_nothing
from ._ops import ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_SCHEMAS = (
    "rms_norm(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, "
    "bool zero_centered, bool weights_static) -> Tensor",
    "rms_norm_out(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, "
    "bool zero_centered, bool weights_static, Tensor(a!) out) -> ()",
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, bool zero_centered, "
    "bool weights_static) -> (Tensor, Tensor)",
    "add_rms_norm_out(Tensor x, Tensor residual, Tensor? weight, float eps, bool zero_centered, "
    "bool weights_static, Tensor(a!) out, Tensor(b!) residual_out) -> ()",
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, float eps, "
    "bool weights_static) -> Tensor",
    "layer_norm_out(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "
    "float eps, bool weights_static, Tensor(a!) out) -> ()",
    "rms_norm_fp8(Tensor x, Tensor? weight, Tensor? scale, Tensor? shift, float eps, "
    "bool zero_centered, bool weights_static, Tensor? static_scale, Tensor(a!) out, "
    "Tensor(b!)? scale_out) -> ()",
    "add_rms_norm_fp8(Tensor x, Tensor residual, Tensor? weight, float eps, bool zero_centered, "
    "bool weights_static, Tensor? static_scale, Tensor(a!) out, Tensor(b!)? scale_out, "
    "Tensor(c!) residual_out) -> ()",
    "layer_norm_fp8(Tensor x, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? shift, "
    "float eps, bool weights_static, Tensor? static_scale, Tensor(a!) out, "
    "Tensor(b!)? scale_out) -> ()",
)


def _like_first(x, *arguments):
    return x.new_empty(x.shape)


def _like_first_twice(x, *arguments):
    return x.new_empty(x.shape), x.new_empty(x.shape)


_FAKES = {"rms_norm": _like_first, "add_rms_norm": _like_first_twice, "layer_norm": _like_first}

for _schema in _SCHEMAS:
    _name = _schema.partition("(")[0]
    define(_schema, getattr(reference, _name), _FAKES.get(_name, returns_nothing))


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale each row of ``x`` to unit root mean square, then by ``weight``.

    ``y = x * rsqrt(mean(x**2) + eps) * (1 + weight if zero_centered else weight)``
    ``out = y * (1 + scale) + shift``

    Args:
        x: ``[..., D]`` bf16, fp16 or fp32, last dim contiguous, leading dims at any strides,
            any D >= 1.
        weight: ``[D]`` contiguous, dtype of ``x`` or fp32; ``None`` for 1.
        eps: added to the mean square, in units of ``x**2``; finite and not negative.
        zero_centered: the stored weight is the distance from 1.
        scale, shift: broadcast over the leading dims of ``x`` (``[D]``, ``[B, 1, D]``, ...), last
            dim D and contiguous, dtype of ``x`` or fp32; ``None`` for 0.
        weights_static: ``weight`` is not written by work still queued, so the kernel may read it
            before the work in front of it on the stream has finished.
        out: shape and dtype of ``x``, last dim contiguous; may be ``x`` itself, and must not
            overlap any input otherwise.

    Returns:
        ``out``, or a new contiguous tensor of shape and dtype of ``x``. Sums and products are
        fp32, rounded once. The bits of a row depend on that row alone.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    check("rms_norm", x, eps, weight, None, scale, shift)
    if out is None:
        return ops.rms_norm(x, weight, scale, shift, eps, zero_centered, weights_static)
    checks.output("rms_norm", "out", out, x.shape, x.dtype, x.device)
    ops.rms_norm_out(x, weight, scale, shift, eps, zero_centered, weights_static, out)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``residual`` to ``x``, round, and norm the sum as :func:`rms_norm` does.

    ``r' = x + residual`` (rounded);  ``y = r' * rsqrt(mean(r'**2) + eps) * weight``

    Args:
        x: as in :func:`rms_norm`.
        residual: shape and dtype of ``x``, last dim contiguous.
        weight, eps, zero_centered, weights_static: as in :func:`rms_norm`.
        out: shape and dtype of ``x``, last dim contiguous; may be ``x`` itself.
        residual_out: the same; may be ``residual`` itself. Neither may overlap anything else.

    Returns:
        ``(y, r')`` in the shape and dtype of ``x``.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4.
    """
    op = "add_rms_norm"
    check(op, x, eps, weight, None, None, None)
    check_residual(op, residual, x)
    if out is None and residual_out is None:
        return ops.add_rms_norm(x, residual, weight, eps, zero_centered, weights_static)
    if out is None:
        out = x.new_empty(x.shape)
    if residual_out is None:
        residual_out = x.new_empty(x.shape)
    checks.output(op, "out", out, x.shape, x.dtype, x.device)
    checks.output(op, "residual_out", residual_out, x.shape, x.dtype, x.device)
    ops.add_rms_norm_out(x, residual, weight, eps, zero_centered, weights_static, out, residual_out)
    return out, residual_out


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    weights_static: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Shift each row of ``x`` to mean 0 and scale it to variance 1, then apply the affine map.

    ``y = (x - mean(x)) * rsqrt(mean((x - mean(x))**2) + eps) * weight + bias``
    ``out = y * (1 + scale) + shift``

    Args:
        x: as in :func:`rms_norm`.
        weight, bias: ``[D]`` contiguous, dtype of ``x`` or fp32; ``None`` for 1 and 0.
        eps: added to the variance, in units of ``x**2``; finite and not negative.
        scale, shift, weights_static, out: as in :func:`rms_norm`.

    Returns:
        ``out``, or a new contiguous tensor of shape and dtype of ``x``. Everything is fp32 up to
        one rounding. The bits of a row depend on that row alone.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 4; the modulated form is Peebles and
    Xie 2022, arXiv:2212.09748, section 3.2.
    """
    check("layer_norm", x, eps, weight, bias, scale, shift)
    if out is None:
        return ops.layer_norm(x, weight, bias, scale, shift, eps, weights_static)
    checks.output("layer_norm", "out", out, x.shape, x.dtype, x.device)
    ops.layer_norm_out(x, weight, bias, scale, shift, eps, weights_static, out)
    return out


def check(op, x, eps, weight, bias, scale, shift):
    checks.inference_only(op, x, weight, bias, scale, shift)
    checks.dims_at_least(op, "x", x, 1)
    checks.dtype_in(op, "x", x, DTYPES)
    checks.unit_stride(op, "x", x)
    if x.shape[-1] == 0:
        checks.fail(op, "x", "have at least 1 element in its last dim", f"shape {tuple(x.shape)}")
    checks.not_negative(op, "eps", eps)
    if weight is not None:
        _check_parameter(op, "weight", weight, x)
    if bias is not None:
        _check_parameter(op, "bias", bias, x)
    if scale is not None:
        _check_modulation(op, "scale", scale, x)
    if shift is not None:
        _check_modulation(op, "shift", shift, x)


def check_residual(op, residual, x):
    checks.inference_only(op, residual)
    checks.shape_is(op, "residual", residual, x.shape)
    checks.dtype_in(op, "residual", residual, (x.dtype,))
    checks.same_device(op, "residual", residual, x.device)
    checks.unit_stride(op, "residual", residual)


def _check_parameter(op, name, tensor, x):
    checks.shape_is(op, name, tensor, (x.shape[-1],))
    _check_operand(op, name, tensor, x)


def _check_modulation(op, name, tensor, x):
    shape, dims = tensor.shape, tensor.dim()
    fits = 0 < dims <= x.dim() and shape[-1] == x.shape[-1]
    if not fits or any(
        size not in (1, whole)
        for size, whole in zip(shape[:-1], x.shape[x.dim() - dims : -1], strict=True)
    ):
        checks.fail(op, name, f"broadcast to {tuple(x.shape)} with last dim equal", tuple(shape))
    _check_operand(op, name, tensor, x)


def _check_operand(op, name, tensor, x):
    if tensor.dtype != x.dtype and tensor.dtype != torch.float32:
        checks.dtype_in(op, name, tensor, (x.dtype, torch.float32))
    checks.same_device(op, name, tensor, x.device)
    checks.unit_stride(op, name, tensor)
