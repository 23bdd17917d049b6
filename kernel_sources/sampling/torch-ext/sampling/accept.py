"""Acceptance of drafted tokens: `accept_drafts`."""

from __future__ import annotations

import torch

from . import arguments, schema  # noqa: F401  schema defines the ops
from ._common import checks
from ._ops import ops


def accept_drafts(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    accepted: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    min_new: torch.Tensor | None = None,
    repetition_penalty: torch.Tensor | None = None,
    presence_penalty: torch.Tensor | None = None,
    frequency_penalty: torch.Tensor | None = None,
    occurrences: torch.Tensor | None = None,
    bias_ids: torch.Tensor | None = None,
    bias_values: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    pad_id: int,
    workspace: torch.Tensor | None = None,
) -> None:
    """Take as many drafted tokens as the model agrees with, and one token of its own.

    The model has run on ``next_ids`` and the drafts after it, at positions ``lengths`` to
    ``lengths + T - 1``; ``logits[:, t]`` follow draft t - 1. For a sequence that is not finished
    and has room::

        for t in 0 .. T-1:
            id_t = the token that sample_step would choose from logits[:, t]
            append id_t: tokens, counts += 1, lengths += 1, next_ids, finished, occurrences
            stop unless id_t == drafts[:, t], or when finished

    so ``accepted`` in 1..T tokens are appended, the last of them not yet in the cache. Because a
    draw depends on logits, settings, seed and position only, **the tokens are those of as many
    calls of sample_step**, greedy or sampled: drafts never change the text. A draft d is accepted
    with probability p(d), and otherwise the token follows p without d, renormalised, which is the
    rejection rule for drafts that are certain (prompt lookup). The drafts of a model are accepted
    more often when they too are drawn by :func:`sample_step`, with the same seeds and lengths.

    With ``draft_probs`` (q) drafts are accepted by the usual rejection rule instead: d with
    probability min(1, p(d) / q(d)), otherwise a draw from max(p - q, 0), renormalised. The
    distribution is the same, the tokens are others. It holds when d was drawn from q independently
    of what is drawn here; :func:`sample_step` with the same seed is, since the test and the redraw
    use other random words. p is what bias, penalties, temperature, top-k, top-p and min-p make of
    the logits, in steps of 2**-40 of its largest.

    Args:
        logits: fp32 ``[B, T, V]``, last dim contiguous, T >= 1, 1 <= V <= 2**22.
        drafts: int64 ``[B, T - 1]``; an entry below 0 is no draft: its place is drawn and ends the
            step.
        tokens, counts, lengths, finished, next_ids, eos, max_new: as in :func:`greedy_step`.
        accepted: int32 ``[B]``, tokens appended, 0 for a finished sequence; written.
        draft_probs: fp32 ``[B, T - 1, V]``, contiguous.
        allowed: int32 ``[B, T, ceil(V / 32)]``, one bitmask for each place.
        temperature, seed, top_k, top_p, min_p, min_new, repetition_penalty, presence_penalty,
            frequency_penalty, occurrences, bias_ids, bias_values, pad_id: per sequence, as in
            :func:`sample_step`. Occurrences and ``min_new`` take the drafts before a place as
            generated.
        workspace: from :func:`sample_workspace` for at least ``B * T`` rows.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above, or a setting without the
            one that it needs. Values are on the device and are not looked at.
        RuntimeError: ``logits`` requires grad while grad mode is on.

    Sources: Leviathan, Kalman and Matias 2022, arXiv:2211.17192, and Chen et al. 2023,
    arXiv:2302.01318 (the rejection rule); Daliri, Musco and Suresh 2024, arXiv:2408.07978 (equal
    noise for draft and model).
    """
    op = "accept_drafts"
    arguments.check_logits(op, logits, (torch.float32,), arguments.MAX_SAMPLED_VOCAB, "2**22")
    if logits.dim() != 3 or logits.shape[1] < 1:
        checks.fail(op, "logits", "have shape [B, T, V] with T at least 1", tuple(logits.shape))
    B, T, V = logits.shape
    device = logits.device
    arguments.check_vector(op, "drafts", drafts, (B, T - 1), torch.int64, device)
    state = (tokens, counts, lengths, finished, next_ids)
    arguments.check_state(op, (B,), device, *state, eos, max_new)
    arguments.check_vector(op, "accepted", accepted, (B,), torch.int32, device)
    if draft_probs is not None:
        shape = (B, T - 1, V)
        arguments.check_vector(op, "draft_probs", draft_probs, shape, torch.float32, device)
    settings = dict(
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        min_new=min_new,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        occurrences=occurrences,
        bias_ids=bias_ids,
        bias_values=bias_values,
        allowed=allowed,
    )
    arguments.check_settings(op, (B,), V, (B, T, (V + 31) // 32), device, **settings)
    scratch = arguments.workspace_for(
        op, logits, workspace, arguments.sample_bytes, "sample_workspace"
    )
    more = (accepted, eos, max_new, draft_probs, *settings.values(), pad_id, scratch)
    ops.accept_drafts(logits, drafts, *state, *more)
