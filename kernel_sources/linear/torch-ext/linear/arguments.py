"""What the public functions ask of their arguments, and the rows they hand on.

The conditions are written out in the hot path and the messages come from ``_common.checks``: a
call costs the host microseconds, and a captured graph nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from ._common import checks
from .packed import PackedWeight
from .packed_arguments import check_like, check_packed, check_vector

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if it is rows as the operators take them, else as ``[M, ...]``, perhaps copied.

    Rows are a matrix whose last dim has unit stride, or a contiguous tensor of any dims: the common
    cases without the cost of a view.
    """
    if tensor.dim() == 2 or tensor.is_contiguous():
        return tensor
    return tensor.reshape(-1, tensor.shape[-1])


def check_input(op: str, x: torch.Tensor) -> int:
    """``x [..., K]`` of a dtype that its device takes; returns K."""
    checks.dims_at_least(op, "x", x, 1)
    dtype = x.dtype
    if dtype not in _DTYPES:
        checks.dtype_in(op, "x", x, _DTYPES)
    if dtype is torch.float32 and x.is_cuda:
        rule = "be bfloat16 or float16 on CUDA: cast x and the weights with .to(torch.bfloat16)"
        checks.fail(op, "x", rule, "float32")
    k = x.shape[-1]
    if k == 0:
        checks.fail(op, "x", "have at least one column", f"shape {tuple(x.shape)}")
    if not x.is_contiguous():
        checks.unit_stride(op, "x", x)
    return k


def check_weights(
    op: str,
    x: torch.Tensor,
    k: int,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    names: tuple[Sequence[str], Sequence[str]],
) -> int:
    """``weights[i] [N_i, K]`` of one column stride, ``biases[i] [N_i]``; returns the sum of N_i."""
    dtype, device, total = x.dtype, x.device, 0
    for i, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            rule = f"be a tensor, as {names[0][0]} is" if i > 0 else "be a tensor or PackedWeight"
            checks.fail(op, names[0][i], rule, type(weight).__name__)
        shape = weight.shape
        if len(shape) != 2 or shape[1] != k or shape[0] == 0:
            checks.fail(op, names[0][i], f"have shape (N, {k}) with N at least 1", tuple(shape))
        total += shape[0]
        if weight.dtype is not dtype or weight.device != device:
            check_like(op, names[0][i], weight, x)
        if i > 0 and k > 1 and weight.stride()[1] != weights[0].stride()[1]:
            rule = f"have the column stride of {names[0][0]}, {weights[0].stride(1)}"
            checks.fail(op, names[0][i], rule, weight.stride(1))
        bias = biases[i]
        if bias is not None:
            check_vector(op, names[1][i], bias, shape[0], x)
    return total


def check_table(
    op: str,
    table: torch.Tensor | PackedWeight,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.dtype:
    """An embedding table ``[V, D]``, plain with unit stride along D or quantised.

    Returns:
        The dtype of the result: the table's own, or what ``out_dtype`` or ``out`` asks for.
    """
    if isinstance(table, PackedWeight):
        check_packed(op, "table", table, table.data.device)
        allowed: tuple[torch.dtype, ...] = _DTYPES
        if out_dtype is None and out is not None:
            checks.dtype_in(op, "out", out, allowed)
            return out.dtype
    else:
        if table.dim() != 2 or table.shape[0] == 0 or table.shape[1] == 0:
            checks.fail(op, "table", "have shape (V, D), both at least 1", tuple(table.shape))
        checks.dtype_in(op, "table", table, _DTYPES)
        checks.unit_stride(op, "table", table)
        allowed = (table.dtype,)
    if out_dtype is not None and out_dtype not in allowed:
        names = " or ".join(checks.short_dtype(dtype) for dtype in allowed)
        checks.fail(op, "out_dtype", f"be {names}", checks.short_dtype(out_dtype))
    return out_dtype or allowed[0]


def operand_rows(
    op: str, name: str, tensor: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """Rows of a read operand."""
    if tensor.shape != shape:
        checks.shape_is(op, name, tensor, shape)
    if tensor.dtype is not x.dtype or tensor.device != x.device:
        check_like(op, name, tensor, x)
    if tensor.is_contiguous():
        return tensor
    checks.unit_stride(op, name, tensor)
    return rows_of(tensor)


def output_rows(
    op: str,
    name: str,
    tensor: torch.Tensor,
    x: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows of a written operand, never a copy."""
    good = tensor.shape == shape and tensor.dtype is dtype and tensor.device == x.device
    if good and tensor.is_contiguous():
        return tensor
    checks.output(op, name, tensor, shape, dtype, x.device)
    if tensor.dim() == 2:
        return tensor
    if not _mergeable(tensor):
        checks.fail(op, name, "have rows at one distance", f"strides {tensor.stride()}")
    return tensor.view(-1, shape[-1])


def output_dtype(
    op: str, x: torch.Tensor, out_dtype: torch.dtype | None, out: torch.Tensor | None
) -> torch.dtype:
    """The dtype asked for by ``out_dtype`` or ``out``: that of ``x``, or fp32."""
    dtype = out_dtype if out_dtype is not None else (x.dtype if out is None else out.dtype)
    if dtype is not x.dtype and dtype is not torch.float32:
        name = "out" if out_dtype is None else "out_dtype"
        rule = f"be {checks.short_dtype(x.dtype)} (as x) or float32"
        checks.fail(op, name, rule, checks.short_dtype(dtype))
    return dtype


def check_norm(
    op: str, name: str, weight: torch.Tensor | None, eps: float | None, x: torch.Tensor
) -> None:
    """A norm's weight ``[K]`` and eps, given together or not at all."""
    if weight is None:
        if eps is not None:
            checks.fail(op, f"{name}_weight", f"be given with {name}_eps", None)
    elif eps is None:
        checks.fail(op, f"{name}_eps", f"be given with {name}_weight", None)
    else:
        if not 0.0 <= eps < float("inf"):
            checks.not_negative(op, f"{name}_eps", eps)
        check_vector(op, f"{name}_weight", weight, x.shape[-1], x)


def branch_rows(
    op: str, branch: torch.Tensor | None, residual_out: torch.Tensor | None, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the branch and of the new residual stream; each needs the other."""
    if branch is None:
        checks.fail(op, "branch", "be given with residual_out or a branch norm", None)
    if residual_out is None:
        checks.fail(op, "residual_out", "be given with branch (torch.empty_like(x))", None)
    rows = operand_rows(op, "branch", branch, x, x.shape)
    return rows, output_rows(op, "residual_out", residual_out, x, x.shape, x.dtype)


def _mergeable(tensor: torch.Tensor) -> bool:
    """Whether all dims but the last are one dim of constant stride."""
    sizes, strides = tensor.shape[:-1], tensor.stride()[:-1]
    dims = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in itertools.pairwise(dims))
