"""What a caller asks for, checked once before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Limits(Protocol):
    max_len: int
    batch_size: int


@dataclass(frozen=True)
class Request:
    """A checked request: ``input_ids [B, P]`` with ``lengths[b]`` real tokens at the end of row b."""

    input_ids: torch.Tensor
    lengths: tuple[int, ...]
    max_new: int
    eos: tuple[int, ...]
    pad: int

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    def rows(self) -> Iterator[torch.Tensor]:
        """Each row's tokens without padding."""
        width = self.input_ids.shape[1]
        for ids, length in zip(self.input_ids, self.lengths, strict=True):
            yield ids[width - length :]


def read_request(
    limits: Limits,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    max_new: int | None,
    eos: int | Sequence[int] | None,
    pad: int | None,
    defaults: object,
    unsupported: Mapping[str, Any],
) -> Request:
    """Check a call of ``DecodeLoop.generate``; see there for what is raised."""
    if unsupported:
        name, value = next(iter(unsupported.items()))
        raise TypeError(
            f"decode_loop.generate: {name} is not supported, got {value!r}; decoding is greedy, "
            "model.generate runs other options on the host's path"
        )
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"decode_loop.generate: input_ids must be int64 [B, P], got {input_ids.dtype} {tuple(input_ids.shape)}"
        )
    batch, width = input_ids.shape
    if not 1 <= batch <= limits.batch_size:
        raise ValueError(f"decode_loop.generate: input_ids must have 1 to {limits.batch_size} rows, got {batch}")
    if width == 0:
        raise ValueError("decode_loop.generate: the prompt must have at least one token, got 0")
    if width > limits.max_len:
        raise ValueError(f"decode_loop.generate: the prompt must fit max_len = {limits.max_len}, got {width} tokens")
    lengths = _lengths(input_ids, attention_mask)
    room = limits.max_len - width + 1  # the last token is not fed back and needs no slot
    max_new = room - 1 or 1 if max_new is None else max_new
    if max_new < 1:
        raise ValueError(f"decode_loop.generate: max_new_tokens must be at least 1, got {max_new}")
    if max_new > room:
        raise ValueError(
            f"decode_loop.generate: prompt and new tokens must fit max_len = {limits.max_len}, "
            f"got {width} and {max_new}"
        )
    eos_ids = _ids(getattr(defaults, "eos_token_id", None) if eos is None else eos)
    if len(eos_ids) > 8:
        raise ValueError(f"decode_loop.generate: at most 8 values of eos_token_id, got {len(eos_ids)}")
    pad = getattr(defaults, "pad_token_id", None) if pad is None else pad
    if pad is None:
        pad = eos_ids[0] if eos_ids else 0
    return Request(input_ids.long(), lengths, max_new, eos_ids, int(pad))


def _ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(int(v) for v in value)


def _lengths(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[int, ...]:
    batch, width = input_ids.shape
    if attention_mask is None:
        return (width,) * batch
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"decode_loop.generate: attention_mask must have the shape of input_ids {tuple(input_ids.shape)}, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool().cpu()
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
        raise ValueError("decode_loop.generate: rows must be padded on the left only, got a 0 behind a 1")
    return tuple(int(n) for n in mask.sum(-1))
