"""Schemas, fakes and public functions of the `sampling` family; see reference.py for the CPU."""

from __future__ import annotations

import torch

from . import reference
from ._common import checks
from ._ops import add_op_namespace_prefix, ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# As in csrc/sampling.h: a counter and at most 128 keys, 8 bytes each.
WORKSPACE_BYTES_PER_ROW = (1 + 128) * 8

_LIB = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "DEF")


def _nothing(*arguments):
    return None


def _define(schema, implementation):
    name = schema.partition("(")[0]
    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(name, implementation, "CPU")
    torch.library.register_fake(add_op_namespace_prefix(name), _nothing, lib=_LIB)


_define("argmax(Tensor logits, Tensor(a!) workspace, Tensor(b!) out) -> ()", reference.argmax)
_define(
    "greedy_step(Tensor logits, Tensor(a!) tokens, Tensor(b!) counts, Tensor(c!) lengths, "
    "Tensor(d!) finished, Tensor(e!) next_ids, Tensor eos, Tensor max_new, int pad_id, "
    "Tensor(f!) workspace) -> ()",
    reference.greedy_step,
)


def workspace(B: int, V: int, device: torch.device | str) -> torch.Tensor:
    """Scratch memory for :func:`argmax` and :func:`greedy_step` of ``B`` rows of ``V`` logits.

    A workspace serves any number of calls in one stream's order, captured or not, of these sizes or
    smaller ones, and each leaves it ready for the next; calls that may overlap need one each.

    Returns:
        Zeros, uint8 ``[bytes]`` on ``device``.

    Raises:
        ValueError: ``B`` is negative or ``V`` less than 1.
    """
    if B < 0:
        checks.fail("workspace", "B", "not be negative", B)
    if V < 1:
        checks.fail("workspace", "V", "be at least 1", V)
    return torch.zeros(B * WORKSPACE_BYTES_PER_ROW, dtype=torch.uint8, device=device)


def argmax(
    logits: torch.Tensor,
    *,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Index of the largest logit of each row.

    ``out[...] = min(i for which logits[..., i] == max(logits[..., :]))``

    A NaN counts as larger than every number, as in ``torch.argmax``, and the first NaN wins; -0
    equals +0. The result is the same in every run and does not depend on the other rows.

    Args:
        logits: ``[..., V]`` bf16, fp16 or fp32, last dim contiguous, leading dims at any strides,
            1 <= V <= 2**30.
        workspace: from :func:`workspace` for at least as many rows and logits; allocated when
            absent, which a captured step should not do.
        out: int64 ``[...]``, contiguous.

    Returns:
        ``out``, or a new int64 ``[...]``.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.
        RuntimeError: ``logits`` requires grad while grad mode is on.
    """
    op = "argmax"
    _check_logits(op, logits)
    shape = logits.shape[:-1]
    if out is None:
        out = torch.empty(shape, dtype=torch.int64, device=logits.device)
    else:
        checks.output(op, "out", out, shape, torch.int64, logits.device)
        checks.contiguous(op, "out", out)
    ops.argmax(logits, _workspace_for(op, logits, workspace), out)
    return out


def greedy_step(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    *,
    pad_id: int,
    workspace: torch.Tensor | None = None,
) -> None:
    """Choose the next token of every row, append it, advance the row, and test whether it stops.

    For a row that is not finished and has room (``counts < min(max_new, L)``)::

        id = argmax(logits);  tokens[counts] = id;  next_ids = id;  counts += 1;  lengths += 1
        finished = id in eos or counts == min(max_new, L)

    Any other row becomes finished and gets ``next_ids = pad_id``; nothing else of it changes.

    Args:
        logits: ``[B, V]`` as in :func:`argmax`.
        tokens: int64 ``[B, L]``, last dim contiguous; written at ``counts``.
        counts: int32 ``[B]``, tokens generated so far; written.
        lengths: int32 ``[B]``, positions in the cache; written.
        finished: bool ``[B]``; written.
        next_ids: int64 ``[B]``; written.
        eos: int64 ``[E]``, ids that end a row, E >= 0; entries below 0 match nothing.
        max_new: int32 ``[B]``, most tokens of a row.
        pad_id: what a finished row emits.
        workspace: as in :func:`argmax`.

    Tensors of one dim are contiguous. All are on one device, and the written ones do not overlap.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.
        RuntimeError: ``logits`` requires grad while grad mode is on.
    """
    op = "greedy_step"
    _check_logits(op, logits)
    if logits.dim() != 2:
        checks.fail(op, "logits", "have shape [B, V]", tuple(logits.shape))
    rows, device = logits.shape[:1], logits.device
    if tokens.dim() != 2:
        checks.fail(op, "tokens", "have shape [B, L]", tuple(tokens.shape))
    checks.output(op, "tokens", tokens, (rows[0], tokens.shape[1]), torch.int64, device)
    if eos.dim() != 1:
        checks.fail(op, "eos", "have shape [E]", tuple(eos.shape))
    _check_vector(op, "counts", counts, rows, torch.int32, device)
    _check_vector(op, "lengths", lengths, rows, torch.int32, device)
    _check_vector(op, "finished", finished, rows, torch.bool, device)
    _check_vector(op, "next_ids", next_ids, rows, torch.int64, device)
    _check_vector(op, "eos", eos, eos.shape, torch.int64, device)
    _check_vector(op, "max_new", max_new, rows, torch.int32, device)
    scratch = _workspace_for(op, logits, workspace)
    ops.greedy_step(
        logits, tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id, scratch
    )


def _check_logits(op, logits):
    checks.inference_only(op, logits)
    checks.dims_at_least(op, "logits", logits, 1)
    checks.dtype_in(op, "logits", logits, DTYPES)
    checks.unit_stride(op, "logits", logits)
    if not 1 <= logits.shape[-1] <= 2**30:
        checks.fail(op, "logits", "have 1 to 2**30 elements in its last dim", tuple(logits.shape))


def _check_vector(op, name, tensor, shape, dtype, device):
    checks.shape_is(op, name, tensor, shape)
    checks.dtype_in(op, name, tensor, (dtype,))
    checks.same_device(op, name, tensor, device)
    checks.contiguous(op, name, tensor)


def _workspace_for(op, logits, given):
    size = logits.shape[-1]
    rows = logits.numel() // size
    if given is None:
        return workspace(rows, size, logits.device)
    checks.dtype_in(op, "workspace", given, (torch.uint8,))
    checks.same_device(op, "workspace", given, logits.device)
    checks.contiguous(op, "workspace", given)
    needed = rows * WORKSPACE_BYTES_PER_ROW
    if given.numel() < needed:
        checks.fail(
            op,
            "workspace",
            f"have at least {needed} bytes, as workspace({rows}, {size}, device) makes",
            given.numel(),
        )
    return given
