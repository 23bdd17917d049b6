"""The ops of this family in plain torch: their CPU implementation and the truth of their tests."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor) -> None:
    """Lowest index of the largest value; torch.argmax leaves the index among equals open."""
    if logits.numel() == 0:
        return
    values = logits.float()
    # A NaN is the largest of all; torch.amax returns NaN for a row that has one.
    largest = values.amax(-1, keepdim=True)
    is_largest = torch.where(largest.isnan(), values.isnan(), values == largest)
    # argmax over 0 and 1 would be ambiguous again: count down from V at the candidates instead.
    size = values.shape[-1]
    countdown = torch.arange(size, 0, -1, device=values.device)
    out.copy_(size - torch.where(is_largest, countdown, 0).amax(-1))


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
    chosen = torch.empty_like(next_ids)
    argmax(logits, workspace, chosen)
    limits = max_new.clamp(max=tokens.shape[1])
    active = ~finished & (counts < limits)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    here = active[:, None] & (column == counts[:, None])
    tokens.copy_(torch.where(here, chosen[:, None], tokens))
    next_ids.copy_(torch.where(active, chosen, pad_id))
    counts.add_(active)
    lengths.add_(active)
    stops = torch.isin(chosen, eos) | (counts >= limits)
    finished.copy_(~active | stops)
