"""Tables of cosines and sines by position, made by the host's own rotary module."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..catalogue.spec import NotThisForm

Table = tuple[torch.Tensor, torch.Tensor]


def rotary_table(
    rotary: nn.Module, layer_type: str | None, positions: int, like: torch.Tensor
) -> Table:
    """``cos, sin [positions, R]`` in the dtype that the host's rotary returns for ``like``.

    One call for all positions, accepted when it equals calls of a single position bit for bit at
    the ends and in between: decoding asks for one position at a time. A copy of the module runs.

    Raises:
        NotThisForm: values depend on how many positions a call has.
    """
    rotary = copy.deepcopy(rotary)
    x = like.new_zeros(1, 1, 1)
    arguments = {} if layer_type is None else {"layer_type": layer_type}

    def call(wanted: torch.Tensor) -> Table:
        with torch.no_grad():
            cos, sin = rotary(x, position_ids=wanted[None], **arguments)
        return cos[0], sin[0]

    every = torch.arange(positions, device=like.device)
    cos, sin = call(every)
    if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != positions:
        raise NotThisForm(f"the rotary returns {tuple(cos.shape)} for {positions} positions")
    for position in sorted({0, 1, positions // 2, positions - 1} & set(range(positions))):
        one_cos, one_sin = call(every[position : position + 1])
        same = torch.equal(one_cos[0], cos[position]) and torch.equal(one_sin[0], sin[position])
        if not same:
            raise NotThisForm(
                f"the rotary depends on the length of its call: position {position} alone differs "
                f"from position {position} of {positions}; a smaller max_len may avoid it"
            )
    return cos.contiguous(), sin.contiguous()


def extended(table: Table, slots: int) -> Table:
    """The table with as many rows as the cache has slots; those beyond the last are never used."""
    cos, sin = (
        torch.cat([t, t[-1:].expand(slots - t.shape[0], -1)]) if t.shape[0] < slots else t
        for t in table
    )
    return cos, sin
