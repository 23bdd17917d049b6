"""The ops of this family in plain torch: their CPU implementation and the truth of their tests."""

from __future__ import annotations

import torch

from . import choose


def argmax(logits: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor) -> None:
    if logits.numel() > 0:
        out.copy_(choose.largest(logits.float()))


def greedy_step(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    pad_id: int,
    workspace: torch.Tensor,
) -> None:
    if logits.numel() == 0:
        return
    chosen = choose.largest(logits.float())
    active = _has_room(tokens, counts, finished, max_new)
    _append(chosen, active, tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id)


def sample_step(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    *rest: torch.Tensor | int | None,
) -> None:
    *settings, pad_id, _workspace = rest
    if logits.numel() == 0:
        return
    controls = choose.Controls(*settings)
    chosen = choose.chosen(logits, controls, counts, lengths, eos)
    active = _has_room(tokens, counts, finished, max_new)
    _append(chosen, active, tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id)
    _count(controls.occurrences, chosen, active)


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
    draft_probs: torch.Tensor | None,
    *rest: torch.Tensor | int | None,
) -> None:
    *settings, pad_id, _workspace = rest
    if logits.numel() == 0:
        return
    controls = choose.Controls(*settings)
    accepted.zero_()
    going = _has_room(tokens, counts, finished, max_new)
    # A sequence that may not go on is finished; one that stops at a rejected draft is not.
    finished.copy_(~going)
    next_ids.masked_fill_(~going, pad_id)
    for t in range(logits.shape[1]):
        here = controls
        if controls.allowed is not None:
            here = choose.Controls(*settings)
            here.allowed = controls.allowed[:, t]
        draft = drafts[:, t] if t < drafts.shape[1] else torch.full_like(next_ids, -1)
        probs = draft_probs[:, t] if draft_probs is not None and t < drafts.shape[1] else None
        chosen = _verified(logits[:, t], draft, probs, here, counts, lengths, eos)
        before = next_ids.clone(), finished.clone()
        _append(chosen, going, tokens, counts, lengths, finished, next_ids, eos, max_new, pad_id)
        for state, old in zip((next_ids, finished), before, strict=True):
            state.copy_(torch.where(going, state, old))
        _count(controls.occurrences, chosen, going)
        accepted.add_(going)
        going = going & (chosen == draft) & ~finished


def _verified(
    logits: torch.Tensor,
    draft: torch.Tensor,
    probs: torch.Tensor | None,
    controls: choose.Controls,
    counts: torch.Tensor,
    positions: torch.Tensor,
    eos: torch.Tensor,
) -> torch.Tensor:
    """The token of this place: equal to ``draft`` where the draft is accepted."""
    chosen = choose.chosen(logits, controls, counts, positions, eos)
    if probs is None:
        return chosen
    scores = choose.adjusted(logits, controls, counts, eos)
    hot = choose.tempered(scores, controls)
    applies = ~choose.is_greedy(controls) & (draft >= 0) & (draft < logits.shape[-1])
    applies &= hot.amax(-1).isfinite()
    verdict = choose.by_rejection(hot, controls, draft, probs, positions.long(), chosen)
    return torch.where(applies, verdict, chosen)


def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    workspace: torch.Tensor,
    chosen: torch.Tensor,
    top_ids: torch.Tensor,
    top: torch.Tensor,
) -> None:
    if logits.numel() == 0:
        return
    log_softmax = logits.double().log_softmax(-1).float()
    inside = (ids >= 0) & (ids < logits.shape[-1])
    value = log_softmax.gather(-1, torch.where(inside, ids, 0)[..., None])[..., 0]
    chosen.copy_(torch.where(inside, value, -torch.inf))
    # A stable sort keeps equal logits in the order of their ids; a NaN is the largest.
    order = logits.float().sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : top.shape[-1]]
    top_ids.copy_(order)
    top.copy_(log_softmax.gather(-1, order))


LOOKUP_WEIGHTS = tuple(round(1000 * 0.7**age) for age in range(8))


def lookup_drafts(
    prompt: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> None:
    if out.numel() == 0:
        return
    context = len(LOOKUP_WEIGHTS)
    # Behind marks that equal no token and, shifted, not one another: nothing stands before a text.
    size = prompt.shape[1] + tokens.shape[1]
    text = prompt.new_zeros(prompt.shape[0], context + size)
    text[:, :context] = torch.arange(-1 - context, -1, device=text.device)
    text[:, context : context + prompt.shape[1]] = prompt
    start = lengths[:, None] + 1 - counts[:, None]
    text.scatter_(1, context + start + torch.arange(tokens.shape[1], device=text.device), tokens)
    places = torch.arange(size, device=text.device)
    last = text.gather(1, lengths[:, None] + 1 + torch.arange(context, device=text.device))
    same = text.unfold(1, context, 1)[:, :size] == last[:, None]
    agreement = (same * torch.tensor(LOOKUP_WEIGHTS[::-1], device=text.device)).sum(-1)
    keys = (agreement * size + places).masked_fill(places > lengths[:, None], -1)
    best, place = keys.max(1, keepdim=True)
    ahead = torch.arange(out.shape[1], device=text.device)
    source = place + ahead % (lengths[:, None] + 1 - place)
    found = text.gather(1, context + source)
    out.copy_(found.masked_fill(best < LOOKUP_WEIGHTS[0] * size, -1))


def _has_room(
    tokens: torch.Tensor, counts: torch.Tensor, finished: torch.Tensor, max_new: torch.Tensor
) -> torch.Tensor:
    return ~finished & (counts < max_new.clamp(max=tokens.shape[1]))


def _append(
    chosen: torch.Tensor,
    active: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    finished: torch.Tensor,
    next_ids: torch.Tensor,
    eos: torch.Tensor,
    max_new: torch.Tensor,
    pad_id: int,
) -> None:
    column = torch.arange(tokens.shape[1], device=tokens.device)
    here = active[:, None] & (column == counts[:, None])
    tokens.copy_(torch.where(here, chosen[:, None], tokens))
    next_ids.copy_(torch.where(active, chosen, pad_id))
    counts.add_(active)
    lengths.add_(active)
    stops = (chosen[:, None] == eos).any(-1) | (counts >= max_new.clamp(max=tokens.shape[1]))
    finished.copy_(~active | stops)


def _count(occurrences: torch.Tensor | None, chosen: torch.Tensor, active: torch.Tensor) -> None:
    if occurrences is not None:
        occurrences.scatter_add_(1, chosen[:, None], 2 * active[:, None].to(occurrences.dtype))
