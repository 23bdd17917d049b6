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

    One call for all positions, accepted when it equals single-position calls bit for bit at the ends and in between:
    decoding asks for one position a time. The host's module is not touched; a copy runs.

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
    if cos.ndim != 2 or cos.shape != sin.shape or cos.shape[0] != positions:
        raise NotThisForm(
            f"rotary returns {tuple(cos.shape)} for {positions} positions, [positions, R] is needed"
        )
    for position in sorted({0, 1, positions // 2, positions - 1} & set(range(positions))):
        one_cos, one_sin = call(every[position : position + 1])
        if not (torch.equal(one_cos[0], cos[position]) and torch.equal(one_sin[0], sin[position])):
            raise NotThisForm(
                f"rotary depends on the length of its call: position {position} alone differs from the same "
                f"position among {positions}; a smaller max_len may keep it in one range"
            )
    return cos.contiguous(), sin.contiguous()
