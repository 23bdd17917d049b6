"""Greedy choice: `argmax`, `greedy_step` and their workspace."""

from __future__ import annotations

import torch

from . import arguments, schema  # noqa: F401  schema defines the ops
from ._common import checks
from ._ops import ops


def workspace(B: int, V: int, device: torch.device | str) -> torch.Tensor:
    """Scratch memory for :func:`argmax` and :func:`greedy_step` of ``B`` rows of ``V`` logits.

    A workspace serves any number of calls in one stream's order, captured or not, of these sizes or
    smaller ones, and each leaves it ready for the next; calls that may overlap need one each.

    Returns:
        Zeros, uint8 ``[bytes]`` on ``device``.

    Raises:
        ValueError: ``B`` is negative or ``V`` less than 1.
    """
    return arguments.new_workspace("workspace", B, V, device, arguments.argmax_bytes)


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
    arguments.check_logits(op, logits)
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
        eos: int64 ``[E]`` or ``[B, E]``, ids that end a row, E >= 0; entries below 0 match nothing.
        max_new: int32 ``[B]``, most tokens of a row.
        pad_id: what a finished row emits.
        workspace: as in :func:`argmax`.

    Tensors of one dim are contiguous. All are on one device, and the written ones do not overlap.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above.
        RuntimeError: ``logits`` requires grad while grad mode is on.
    """
    op = "greedy_step"
    arguments.check_logits(op, logits)
    if logits.dim() != 2:
        checks.fail(op, "logits", "have shape [B, V]", tuple(logits.shape))
    state = (tokens, counts, lengths, finished, next_ids, eos, max_new)
    arguments.check_state(op, logits.shape[:1], logits.device, *state)
    scratch = _workspace_for(op, logits, workspace)
    ops.greedy_step(logits, *state, pad_id, scratch)


def _workspace_for(op, logits, given):
    return arguments.workspace_for(op, logits, given, arguments.argmax_bytes, "workspace")
