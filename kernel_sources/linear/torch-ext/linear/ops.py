"""The public functions of the family."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import arguments
from ._common import checks
from ._common.activations import activation_number
from .packed import PackedWeight
from .route import apply
from .schema import ops
from .steps import Epilogue

_SPLIT_NAMES = (
    ("weights[0]", "weights[1]", "weights[2]"),
    ("biases[0]", "biases[1]", "biases[2]"),
)
_GATED_NAMES = ("gate", "up"), ("gate_bias", "up_bias")
_NO_EPILOGUE = Epilogue(None, 0, False, 1.0, 0.0)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    branch: torch.Tensor | None = None,
    branch_norm_weight: torch.Tensor | None = None,
    branch_norm_eps: float | None = None,
    residual_out: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """A matrix product with what surrounds it in a decoder layer, one kernel for 1..8 rows.

    ``out = residual + cap(scale * activation(norm(r) @ weight.T + bias))`` with
    ``cap(y) = soft_cap * tanh(y / soft_cap)``, ``norm(r) = r * rsqrt(mean(r**2) + norm_eps) * w``
    (``w = norm_weight``, or ``1 + norm_weight`` when zero-centred), and ``r = x``, or with a branch
    ``r = x + branch_norm(branch)``, which is also written to ``residual_out``. What is not given is
    left out. Odd sizes and any strides of ``weight`` are allowed, the latter at a lower speed.

    A quantised weight is multiplied in its exact values, each sum then by its scale, up to 8 rows.
    More rows: FP8 with a scale for each row of W runs as E4M3 times E4M3 where the GPU can (compute
    capability 8.9, N and K multiples of 16); anything else is as before up to 32 rows, and from
    there on W is rounded to the dtype of ``x`` first.

    Args:
        x: ``[..., K]`` bf16 or fp16, on the CPU also fp32; unit stride along K. ``...`` is M rows.
            With FP8 weights and no norm or branch also float8_e4m3fn with ``input_scale``; it is
            multiplied as it is where the product runs in E4M3, else first rounded to the dtype of
            the result (16 bits if that is fp32). For what is not given that dtype is bf16.
        weight: ``[N, K]``, dtype of ``x``, or a ``PackedWeight``; ``bias``: ``[N]``.
        residual: ``[..., N]``, dtype of ``x``; may be ``out`` itself.
        activation: identity, silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid or tanh.
        scale: factor after the activation; ``soft_cap``: bound above 0 on the scaled value.
        norm_weight, branch_norm_weight: ``[K]``, each with its eps (in units of ``x**2``);
            ``norm_zero_centered`` holds for both.
        branch, residual_out: ``[..., K]``, given together; ``residual_out`` overlaps no input.
        input_scale: with FP8 weights, fp32 ``[1]``: the scale of ``x`` after its norm where the
            product runs in E4M3; by default each row has its own, ``max(abs(row)) / 448``. With an
            E4M3 ``x``: its scale, ``[1]`` or ``[M]``.
        weights_static: no running work writes weight, bias or norm weights, so that they may be
            read before the preceding kernel ends. True is for captured steps.
        out_dtype: dtype of ``x`` (the default) or fp32; ``out``: ``[..., N]`` of that dtype.

    Returns:
        ``[..., N]``, ``out`` if given. Up to 8 rows, everything is fp32 with a rounding of
        branch_norm(branch), of r, of norm(r) and of the result; the bits of a row depend on that
        row alone. More rows run as separate torch operations, rounded like eager torch.

    Raises:
        ValueError: a dtype, shape, stride, device or number outside the ranges above.
        RuntimeError: an input requires grad in grad mode; an output overlaps an operand.

    Source: RMS norm is Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; the soft cap is Gemma Team
    2024, arXiv:2408.00118, section 2.
    """
    number = 0 if activation is None else activation_number("linear", activation)
    if soft_cap is not None and not 0.0 < soft_cap < float("inf"):
        checks.fail("linear", "soft_cap", "be finite and above 0", soft_cap)
    norm = (norm_weight, norm_eps, norm_zero_centered)
    add = (branch, branch_norm_weight, branch_norm_eps, residual_out)
    epilogue = Epilogue(residual, number, False, scale, soft_cap or 0.0)
    names = ("weight",), ("bias",)
    [result] = apply(
        "linear",
        x,
        (weight,),
        (bias,),
        names,
        norm,
        add,
        epilogue,
        weights_static,
        out_dtype,
        out,
        input_scale,
    )
    return result


def linear_split(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor | PackedWeight],
    biases: Sequence[torch.Tensor | None] | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    branch: torch.Tensor | None = None,
    branch_norm_weight: torch.Tensor | None = None,
    branch_norm_eps: float | None = None,
    residual_out: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """``norm(r) @ weights[i].T + biases[i]`` for each i, as one product: queries, keys and values.

    Args:
        x: ``[..., K]`` as in ``linear``, like everything that is not named here.
        weights: one to three ``[N_i, K]`` of one column stride, or as many ``PackedWeight`` of one
            format; ``biases``: as many ``[N_i]``, each perhaps None.
        out: ``[..., N_0 + N_1 + N_2]``; the results are then its columns.

    Returns:
        ``[..., N_i]`` for each i. Up to 8 rows (and with ``out``) they are columns of one buffer.

    Raises: as ``linear``.
    """
    if biases is None:
        biases = (None,) * len(weights)
    if isinstance(weights, PackedWeight):
        checks.fail("linear_split", "weights", "be a list of weights", "one PackedWeight")
    if not 1 <= len(weights) <= 3:
        checks.fail("linear_split", "weights", "be one to three tensors", len(weights))
    if len(biases) != len(weights):
        checks.fail("linear_split", "biases", f"be {len(weights)}, one a weight", len(biases))
    norm = (norm_weight, norm_eps, norm_zero_centered)
    add = (branch, branch_norm_weight, branch_norm_eps, residual_out)
    results = apply(
        "linear_split",
        x,
        weights,
        biases,
        _SPLIT_NAMES,
        norm,
        add,
        _NO_EPILOGUE,
        weights_static,
        out_dtype,
        out,
        input_scale,
    )
    if len(results) == len(weights):
        return tuple(results)
    return torch.split_with_sizes(results[0], [weight.shape[0] for weight in weights], -1)


def gated_linear(
    x: torch.Tensor,
    gate: torch.Tensor | PackedWeight,
    up: torch.Tensor | PackedWeight,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_zero_centered: bool = False,
    branch: torch.Tensor | None = None,
    branch_norm_weight: torch.Tensor | None = None,
    branch_norm_eps: float | None = None,
    residual_out: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
    weights_static: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``activation(norm(r) @ gate.T + gate_bias) * (norm(r) @ up.T + up_bias)``.

    Args:
        x: ``[..., K]`` as in ``linear``, like everything that is not named here.
        gate, up: ``[N, K]`` of one column stride (halves of one tensor are fine), or both a
            ``PackedWeight`` of one format; ``gate_bias``, ``up_bias``: ``[N]``.
        activation: as in ``linear``.

    Returns:
        ``[..., N]``, ``out`` if given.

    Raises: as ``linear``.

    Source: Shazeer 2020, arXiv:2002.05202, eq. 6.
    """
    number = activation_number("gated_linear", activation)
    if gate.shape != up.shape:
        checks.shape_is("gated_linear", "up", up, gate.shape)
    norm = (norm_weight, norm_eps, norm_zero_centered)
    add = (branch, branch_norm_weight, branch_norm_eps, residual_out)
    [result] = apply(
        "gated_linear",
        x,
        (gate, up),
        (gate_bias, up_bias),
        _GATED_NAMES,
        norm,
        add,
        Epilogue(None, number, True, 1.0, 0.0),
        weights_static,
        out_dtype,
        out,
        input_scale,
    )
    return result


def embedding(
    ids: torch.Tensor,
    table: torch.Tensor | PackedWeight,
    *,
    scale: float = 1.0,
    weights_static: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``out[..., :] = scale * table[ids[...], :]``, rounded once.

    Args:
        ids: ``[...]`` int64, in ``[0, V)``. Outside, CUDA gives a row of NaN (a captured graph
            cannot raise) and the CPU raises IndexError.
        table: ``[V, D]`` bf16, fp16 or fp32, unit stride along D; or a ``PackedWeight`` of that
            shape, whose rows are dequantised in fp32.
        scale: factor in fp32. Models that keep it in the table's dtype round it first.
        weights_static: no running work writes ``table``, see ``linear``.
        out_dtype: of a quantised table's rows, bf16 (the default), fp16 or fp32.
        out: ``[..., D]`` contiguous, dtype of ``table``, or of ``out_dtype`` if that is given.

    Returns:
        ``[..., D]``, ``out`` if given.

    Raises:
        ValueError: a dtype, shape, stride or device outside the ranges above.
        RuntimeError: ``table`` requires grad in grad mode.
    """
    op = "embedding"
    if ids.dtype != torch.int64:
        checks.dtype_in(op, "ids", ids, (torch.int64,))
    packed = isinstance(table, PackedWeight)
    dtype = arguments.check_table(op, table, out_dtype, out)
    data, table_scale = (table.data, table.scale) if packed else (table, None)
    checks.same_device(op, "ids", ids, data.device)
    checks.inference_only(op, data, table_scale)
    if not ids.is_contiguous():
        ids = ids.contiguous()
    if out is None and not packed:
        return ops.embedding(ids, data, scale, weights_static)
    shape = (*ids.shape, table.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=data.device)
    checks.output(op, "out", out, shape, dtype, data.device)
    checks.contiguous(op, "out", out)
    ops.embedding_out(out, ids, data, table_scale, scale, weights_static)
    return out
