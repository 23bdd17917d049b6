"""Drafts out of a sequence's own text: `lookup_drafts`."""

from __future__ import annotations

import torch

from . import arguments, schema  # noqa: F401  schema defines the ops
from ._common import checks
from ._ops import ops

MOST_DRAFTS = 512  # as in csrc/lookup_drafts.h


def lookup_drafts(
    prompt: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """What may come next, judged by what followed the last tokens at an earlier place of the text.

    With ``P = lengths + 1 - counts``, ``n = lengths`` and a sequence's text of ``n + 1`` tokens::

        text = prompt[:P] followed by tokens[:counts]
        agreement[i] = sum(weight[a] * (text[i - 1 - a] == text[n - a]) for a in 0 .. 7)
        i = the largest of the places 1 .. n that agree most
        out[j] = text[i + j mod (n + 1 - i)]    or -1 when agreement[i] < weight[0]

    ``weight[a] = round(1000 * 0.7**a)``, and nothing stands before place 0. So the newest token
    alone is enough for drafts, and so are older ones together without it: a copy in which a token
    or two were replaced goes on behind them. Drafts may run into what they predict.

    Args:
        prompt: int64 ``[B, S]``, last dim contiguous, S at least every P.
        tokens: int64 ``[B, L]``, last dim contiguous, L at least every count.
        counts: int32 ``[B]``, tokens generated, at least 0.
        lengths: int32 ``[B]``, positions in the cache: all of the text but its last token.
        out: int64 ``[B, N]``, contiguous, N at most 512; written, -1 where there is no draft.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above. Values are on the device and
            are not looked at.

    Source: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
    """
    op, device = "lookup_drafts", out.device
    if out.dim() != 2 or out.shape[1] > MOST_DRAFTS:
        checks.fail(op, "out", f"have shape [B, N] with N at most {MOST_DRAFTS}", tuple(out.shape))
    rows = out.shape[0]
    arguments.check_vector(op, "out", out, out.shape, torch.int64, device)
    for name, text in (("prompt", prompt), ("tokens", tokens)):
        if text.dim() != 2:
            checks.fail(op, name, "have shape [B, S]", tuple(text.shape))
        checks.shape_is(op, name, text, (rows, text.shape[1]))
        checks.dtype_in(op, name, text, (torch.int64,))
        checks.same_device(op, name, text, device)
        checks.unit_stride(op, name, text)
    arguments.check_vector(op, "counts", counts, (rows,), torch.int32, device)
    arguments.check_vector(op, "lengths", lengths, (rows,), torch.int32, device)
    ops.lookup_drafts(prompt, tokens, counts, lengths, out)
