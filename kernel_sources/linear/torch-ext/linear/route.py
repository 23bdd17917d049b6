"""One call of a public function: checks, then the kernel for up to 8 rows or torch for more.

Quantised weights that torch has no product for take up to 32, in several launches. Rows of more
than ``MAX_COLUMNS`` elements go to torch too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import arguments, many_rows, packed_arguments, packed_products
from ._common import checks
from ._common.fp8 import FP8
from .packed import PackedWeight
from .reference import NO_NORM, RMS_NORM, ZERO_CENTERED_RMS_NORM
from .schema import ops
from .steps import Epilogue, Maybe, Prologue

MAX_ROWS = 8  # kMaxRows in csrc/linear.h
# Rows of a call whose weights torch could only multiply dequantised: reading them quantised for
# every 8 rows moves fewer bytes than writing and reading them in 16 bits, up to five or six times.
MAX_PACKED_ROWS = 32
# One row of x beside a block's sums within the 99 KB of shared memory that every supported GPU has.
MAX_COLUMNS = 48 * 1024

_NO_SCALES = (None, None, None)


def apply(
    op: str,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | PackedWeight],
    biases: Sequence[Maybe],
    names: tuple[Sequence[str], Sequence[str]],
    norm: tuple[Maybe, float | None, bool],
    add: tuple[Maybe, Maybe, float | None, Maybe],
    epilogue: Epilogue,
    weights_static: bool,
    out_dtype: torch.dtype | None,
    out: Maybe,
    input_scale: Maybe,
) -> Sequence[torch.Tensor]:
    """Check everything and compute.

    Args:
        names: of ``weights`` and ``biases`` in messages.
        norm: weight, eps, zero-centred.
        add: branch, its norm's weight and eps, residual_out.
        epilogue: as given, not checked yet.

    Returns:
        One ``[..., N]`` (``out`` if given), or beyond 8 rows perhaps one ``[..., N_i]`` a weight.
    """
    given, residual = x, epilogue.residual
    if x.dtype is FP8:
        packed_arguments.check_quantized_input(op, x, input_scale, weights, (*norm[:2], *add))
        element = packed_arguments.element_dtype(x, out_dtype, (out, residual, *biases))
        x = packed_arguments.stand_in(x, element)
        k = x.shape[-1]
    else:
        k = arguments.check_input(op, x)
        if input_scale is not None:
            packed_arguments.check_input_scale(op, x, input_scale, weights)
    n, weights, scales = _parts(op, x, k, weights, biases, names)
    if torch.is_grad_enabled():
        inputs = (x, *weights, *scales, *biases, norm[0], *add[:2], residual)
        checks.inference_only(op, *inputs)
    prologue = _prologue(op, x, norm, add)
    if epilogue.gated:
        n = n // 2
    epilogue, dtype, target = _results(op, x, n, epilogue, out_dtype, out)

    rows = arguments.rows_of(given)
    results: Sequence[torch.Tensor]
    if _one_kernel(x, k, weights, scales):
        if given is not x:
            rows = packed_products.dequantize_rows(rows.view(-1, k), input_scale, x.dtype)
        operands = (*_three(weights), *_three(scales), *_three(biases))
        results = (_launch(rows, operands, prologue, epilogue, n, dtype, target, weights_static),)
    else:
        results = many_rows.apply(
            rows, weights, scales, biases, prologue, epilogue, dtype, target, x.dtype, input_scale
        )
    if out is not None:
        return (out,)
    if results[0].dim() == x.dim():
        return results
    return [result.view(*x.shape[:-1], result.shape[-1]) for result in results]


def _prologue(
    op: str,
    x: torch.Tensor,
    norm: tuple[Maybe, float | None, bool],
    add: tuple[Maybe, Maybe, float | None, Maybe],
) -> Prologue:
    """``norm`` and ``add`` of ``apply``, checked; the branch and ``residual_out`` as rows."""
    norm_weight, norm_eps, zero_centered = norm
    branch, branch_norm_weight, branch_norm_eps, residual_out = add
    if not (norm_weight is norm_eps is None):
        arguments.check_norm(op, "norm", norm_weight, norm_eps, x)
    if not (branch is branch_norm_weight is branch_norm_eps is residual_out is None):
        arguments.check_norm(op, "branch_norm", branch_norm_weight, branch_norm_eps, x)
        branch, residual_out = arguments.branch_rows(op, branch, residual_out, x)
    return Prologue(
        branch,
        branch_norm_weight,
        branch_norm_eps or 0.0,
        residual_out,
        norm_weight,
        norm_eps or 0.0,
        ZERO_CENTERED_RMS_NORM if zero_centered else RMS_NORM,
    )


def _results(
    op: str,
    x: torch.Tensor,
    n: int,
    epilogue: Epilogue,
    out_dtype: torch.dtype | None,
    out: Maybe,
) -> tuple[Epilogue, torch.dtype, Maybe]:
    """The epilogue with its residual as rows, the dtype of the result, and ``out`` as rows."""
    dtype, target = x.dtype, out
    if out is not None or out_dtype is not None:
        dtype = arguments.output_dtype(op, x, out_dtype, out)
    shape = (*x.shape[:-1], n)
    if epilogue.residual is not None:
        residual = arguments.operand_rows(op, "residual", epilogue.residual, x, shape)
        epilogue = epilogue._replace(residual=residual)
    if out is not None:
        target = arguments.output_rows(op, "out", out, x, shape, dtype)
    return epilogue, dtype, target


def _launch(
    rows: torch.Tensor,
    operands: tuple[Maybe, ...],
    prologue: Prologue,
    epilogue: Epilogue,
    n: int,
    dtype: torch.dtype,
    target: Maybe,
    weights_static: bool,
) -> torch.Tensor:
    """``[..., N]`` from the kernel; ``operands``: three weights, their scales and biases."""
    branch, branch_norm_weight, branch_norm_eps, residual_out, norm_weight, norm_eps, kind = (
        prologue
    )
    norm_kind = NO_NORM if norm_weight is None else kind
    inputs = (rows, *operands, norm_weight, norm_eps, norm_kind, *epilogue, weights_static)
    if target is None and branch is None:
        return ops.linear(*inputs, dtype is torch.float32)
    if target is None:
        target = rows.new_empty((*rows.shape[:-1], n), dtype=dtype)
    branch_kind = NO_NORM if branch_norm_weight is None else kind
    branch_arguments = (branch, branch_norm_weight, branch_norm_eps, branch_kind)
    ops.linear_out(target, residual_out, *branch_arguments, *inputs)
    return target


def _one_kernel(
    x: torch.Tensor, k: int, weights: Sequence[torch.Tensor], scales: Sequence[Maybe]
) -> bool:
    """Whether the rows of ``x`` are few and short enough for the kernel."""
    most = MAX_ROWS if scales[0] is None else _most_packed_rows(x, weights, scales)
    return 0 < x.numel() <= most * k and k <= MAX_COLUMNS


def _most_packed_rows(
    x: torch.Tensor, weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]
) -> int:
    """Rows that the kernel takes, in several launches if torch has no product of such weights."""
    in_fp8 = packed_products.multiplies_in_fp8(x, weights, scales)
    return MAX_ROWS if in_fp8 else MAX_PACKED_ROWS


def _parts(
    op: str,
    x: torch.Tensor,
    k: int,
    weights: Sequence[torch.Tensor | PackedWeight],
    biases: Sequence[Maybe],
    names: tuple[Sequence[str], Sequence[str]],
) -> tuple[int, Sequence[torch.Tensor], Sequence[Maybe]]:
    """The sum of N_i, and of each weight what the operators take: itself and None, or its parts."""
    if isinstance(weights[0], PackedWeight):
        n = packed_arguments.check_packed_weights(op, x, k, weights, biases, names)
        return n, [weight.data for weight in weights], [weight.scale for weight in weights]
    return arguments.check_weights(op, x, k, weights, biases, names), weights, _NO_SCALES


def _three(tensors: Sequence[Maybe]) -> tuple[Maybe, Maybe, Maybe]:
    """Padded with None to the three operands of the schema."""
    if len(tensors) == 1:
        return tensors[0], None, None
    return tensors[0], tensors[1], tensors[2] if len(tensors) == 3 else None
