"""Drawing the next token: `sample_step`, its workspace and the table of occurrences."""

from __future__ import annotations

import torch

from . import arguments, schema  # noqa: F401  schema defines the ops
from ._common import checks
from ._ops import ops


def sample_workspace(B: int, V: int, device: torch.device | str) -> torch.Tensor:
    """Scratch memory for :func:`sample_step` of ``B`` rows of ``V`` logits, or for
    :func:`accept_drafts` and :func:`logprobs` of ``B`` rows in all (``B * T`` of them).

    About 8 bytes a logit. It serves :func:`argmax` and :func:`greedy_step` as well, and any number
    of calls in one stream's order, captured or not, of these sizes or smaller ones; each leaves it
    ready for the next. Calls that may overlap need one each.

    Returns:
        Zeros, uint8 ``[bytes]`` on ``device``.

    Raises:
        ValueError: ``B`` is negative or ``V`` less than 1.
    """
    return arguments.new_workspace("sample_workspace", B, V, device, arguments.sample_bytes)


def record_prompt(
    occurrences: torch.Tensor, prompt_ids: torch.Tensor, prompt_lengths: torch.Tensor
) -> None:
    """Start the table of occurrences of each sequence from its prompt.

    ``occurrences[b, i] = 1 if i in prompt_ids[b, :prompt_lengths[b]] else 0``

    Bit 0 says that the prompt has token i; the bits above count how often it was generated, which
    :func:`sample_step` keeps up to date. For one sequence of a batch pass slices of one row.

    Args:
        occurrences: int32 ``[B, V]``; written.
        prompt_ids: int64 ``[B, P]``; ids outside [0, V) are left out.
        prompt_lengths: int32 or int64 ``[B]``.

    Raises:
        ValueError: a shape, dtype or device outside the above.
    """
    op = "record_prompt"
    if occurrences.dim() != 2:
        checks.fail(op, "occurrences", "have shape [B, V]", tuple(occurrences.shape))
    B, V = occurrences.shape
    checks.output(op, "occurrences", occurrences, (B, V), torch.int32, occurrences.device)
    if prompt_ids.dim() != 2 or prompt_ids.shape[0] != B:
        checks.fail(op, "prompt_ids", f"have shape ({B}, P)", tuple(prompt_ids.shape))
    checks.dtype_in(op, "prompt_ids", prompt_ids, (torch.int64,))
    checks.same_device(op, "prompt_ids", prompt_ids, occurrences.device)
    checks.shape_is(op, "prompt_lengths", prompt_lengths, (B,))
    checks.dtype_in(op, "prompt_lengths", prompt_lengths, (torch.int32, torch.int64))
    checks.same_device(op, "prompt_lengths", prompt_lengths, occurrences.device)
    column = torch.arange(prompt_ids.shape[1], device=prompt_ids.device)
    counts = (column < prompt_lengths[:, None]) & (prompt_ids >= 0) & (prompt_ids < V)
    table = occurrences.new_zeros(B, V + 1)
    table.scatter_(1, torch.where(counts, prompt_ids, V), 1)
    occurrences.copy_(table[:, :V])


def sample_step(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
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
    """Draw the next token of every row, append it, advance the row, and test whether it stops.

    The steps on a row of logits, in this order::

        s_i = logits_i + bias_i
        if i occurred in prompt or output:  s_i = s_i * r if s_i < 0 else s_i / r
        s_i -= frequency_penalty * n_i + (presence_penalty if n_i > 0);  n_i times generated
        s_i = -inf where allowed has bit 0, or i is in eos and counts < min_new
        z_i = s_i / temperature
        keep i while fewer than top_k tokens have a higher z,
             while the tokens that top-k kept and that have a higher z have less than top_p of the
             probability of all that top-k kept,
             and while probability_i >= min_p * (largest probability)
        id = argmax over the kept of z_i + Gumbel(seed, lengths, i)

    which is a draw from softmax(z) over the kept tokens. A row with temperature 0 (or below 1e-5)
    takes ``argmax(s)``, as `argmax` does. ``tokens``, ``counts``, ``lengths``, ``finished`` and
    ``next_ids`` then move as in :func:`greedy_step`, and the count of the id in ``occurrences``
    goes up by one. All settings are read on the device in every call: one captured graph serves
    any mix of them.

    A draw depends on the row's logits, settings, seed and length only: the same token on every
    processor and in every batch. Scores are fp32, each operation rounded; top-p sums probabilities
    exactly, in steps of 2**-40 of the largest, and noise is that of 32 random bits a token. Where a
    threshold falls on equal scores, all of them stay. A NaN among the scores wins, the first one;
    so does +inf; of a row without any token left the id is 0.

    Args:
        logits: fp32 ``[B, V]``, last dim contiguous, 1 <= V <= 2**22.
        tokens, counts, lengths, finished, next_ids, eos, max_new: as in :func:`greedy_step`.
        temperature: fp32 ``[B]``.
        seed: int64 ``[B]``, all 64 bits count.
        top_k: int32 ``[B]``; below 1 or at least V: off.
        top_p: fp32 ``[B]``; at least 1: off; the most likely token stays in any case.
        min_p: fp32 ``[B]``; 0 or below: off; the most likely token stays in any case.
        min_new: int32 ``[B]``, tokens before which no id of ``eos`` is chosen.
        repetition_penalty (r above), presence_penalty, frequency_penalty: fp32 ``[B]``; neutral
            are 1, 0 and 0. They need ``occurrences``.
        occurrences: int32 ``[B, V]``, last dim contiguous, from :func:`record_prompt`; written.
        bias_ids, bias_values: int64 and fp32 ``[B, C]``, given together, C >= 0; ids below 0 or
            from V on are left out, equal ids add up; -inf bans a token.
        allowed: int32 ``[B, ceil(V / 32)]``; bit ``i % 32`` of word ``i // 32`` allows token i
            (the bitmask of xgrammar and llguidance).
        pad_id: what a finished row emits.
        workspace: from :func:`sample_workspace` for at least as many rows and logits; allocated
            when absent, which a captured step should not do.

    Tensors of one dim are contiguous. All are on one device, and the written ones do not overlap.

    Raises:
        ValueError: a shape, stride, dtype or device outside the above, or a setting without the
            one that it needs. Values are on the device and are not looked at.
        RuntimeError: ``logits`` requires grad while grad mode is on.

    Sources: Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition penalty; over prompt and
    output as transformers and vLLM have it); the OpenAI API reference (presence and frequency
    penalties, over the output only); Fan et al. 2018, arXiv:1805.04833 (top-k); Holtzman et al.
    2019, arXiv:1904.09751 (top-p); Nguyen et al. 2024, arXiv:2407.01082 (min-p); the order is that
    of transformers' logits processors. Philox 4x32-10: Salmon et al. 2011. Gumbel-max: Maddison et
    al. 2014, arXiv:1411.0030.
    """
    op = "sample_step"
    arguments.check_logits(op, logits, (torch.float32,), arguments.MAX_SAMPLED_VOCAB, "2**22")
    if logits.dim() != 2:
        checks.fail(op, "logits", "have shape [B, V]", tuple(logits.shape))
    state = (tokens, counts, lengths, finished, next_ids, eos, max_new)
    rows, size = logits.shape[:1], logits.shape[1]
    arguments.check_state(op, rows, logits.device, *state)
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
    words = (*rows, (size + 31) // 32)
    arguments.check_settings(op, rows, size, words, logits.device, **settings)
    scratch = arguments.workspace_for(
        op, logits, workspace, arguments.sample_bytes, "sample_workspace"
    )
    ops.sample_step(logits, *state, *settings.values(), pad_id, scratch)
