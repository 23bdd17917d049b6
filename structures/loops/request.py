"""What a caller asks for, checked once before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .cache import EOS_SLOTS
from .sampling import SEEDS, Sampling

WHERE = "decode_loop.generate"


@dataclass(frozen=True)
class Request:
    """A checked request: ``input_ids [B, P]`` with ``lengths[b]`` tokens at the end of row b.

    Attributes:
        copies: so many rows in a row have the same prompt.
        seed: of the first row's draws; the others' follow from it.
        whole_rows: a repetition penalty counts the padding of a prompt too.
        pads_rows: a row that the host ends is padded.
        reuse: a row may use what the request before left in it.
        drafts: tokens of its one row may be verified in groups.
    """

    input_ids: torch.Tensor
    lengths: tuple[int, ...]
    max_new: int
    eos: tuple[int, ...]
    pad: int
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    copies: int = 1
    whole_rows: bool = False
    pads_rows: bool = True
    reuse: bool = False
    drafts: bool = False

    @property
    def batch(self) -> int:
        """B."""
        return self.input_ids.shape[0]

    def rows(self) -> Iterator[torch.Tensor]:
        """Each row's tokens without padding."""
        width = self.input_ids.shape[1]
        for ids, length in zip(self.input_ids, self.lengths, strict=True):
            yield ids[width - length :]

    def seen(self, row: int) -> torch.Tensor:
        """What a repetition penalty of ``row`` counts."""
        start = 0 if self.whole_rows else self.input_ids.shape[1] - self.lengths[row]
        return self.input_ids[row, start:]


def read_request(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    batch_size: int,
    max_len: int,
    max_new: int | None,
    eos: int | Sequence[int] | None,
    pad: int | None,
    vocabulary: int,
    sampling: Sampling,
    copies: int,
    reuse: bool,
    drafts: bool,
) -> Request:
    """Check a call of ``DecodeLoop.generate``; see there for what is raised."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if not isinstance(value, torch.Tensor) and (name == "input_ids" or value is not None):
            raise TypeError(f"{WHERE}: {name} must be a tensor, got {type(value).__name__}")
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        got = f"{input_ids.dtype} of shape {tuple(input_ids.shape)}"
        raise ValueError(f"{WHERE}: input_ids must be int64 [B, P], got {got}")
    batch, width = input_ids.shape
    copies = integer(WHERE, "num_return_sequences", copies)
    if copies < 1:
        raise ValueError(f"{WHERE}: num_return_sequences must be at least 1, got {copies}")
    if not 1 <= batch * copies <= batch_size:
        times = f" times num_return_sequences = {copies}" if copies > 1 else ""
        raise ValueError(f"{WHERE}: input_ids must have 1 to {batch_size} rows, got {batch}{times}")
    if width == 0:
        raise ValueError(f"{WHERE}: the prompt must have at least one token, got 0")
    if width >= max_len:
        raise ValueError(
            f"{WHERE}: the prompt and one new token must fit max_len = {max_len}, got {width} "
            "tokens; make the loop with a larger max_len"
        )
    room = max_len - width
    max_new = room if max_new is None else integer(WHERE, "max_new_tokens", max_new)
    if max_new < 1:
        raise ValueError(f"{WHERE}: max_new_tokens must be at least 1, got {max_new}")
    if max_new > room:
        raise ValueError(
            f"{WHERE}: prompt and max_new_tokens must fit max_len = {max_len}, got {width} + "
            f"{max_new}; make the loop with a larger max_len"
        )
    lowest, highest = (int(n) for n in torch.aminmax(input_ids))
    if lowest < 0 or highest >= vocabulary:
        bad = lowest if lowest < 0 else highest
        raise ValueError(f"{WHERE}: input_ids must be from 0 to {vocabulary - 1}, got {bad}")
    ends = () if eos is None else _ends(eos)
    if len(ends) > EOS_SLOTS:
        raise ValueError(f"{WHERE}: eos_token_id must be at most {EOS_SLOTS} ids, got {len(ends)}")
    if pad is None:
        pad = ends[0] if ends else 0
    pad = integer(WHERE, "pad_token_id", pad)
    largest = max(sampling.logit_bias, default=0)
    if largest >= vocabulary:
        raise ValueError(
            f"{WHERE}: logit_bias must have ids from 0 to {vocabulary - 1}, got {largest}"
        )
    lengths = tuple(n for n in _lengths(input_ids, attention_mask) for _ in range(copies))
    ids = input_ids.long().repeat_interleave(copies, 0)
    seed = 0
    if sampling.temperature > 0:
        seed = draw_seed() if sampling.seed is None else sampling.seed
    if not isinstance(reuse, bool):
        raise TypeError(f"{WHERE}: reuse_prefix must be True or False, got {reuse!r}")
    request = Request(ids, lengths, max_new, ends, pad, sampling, seed, copies, reuse=reuse)
    return replace(request, drafts=drafts and request.batch == 1)


def draw_seed() -> int:
    """A seed from torch's own generator, so that ``torch.manual_seed`` decides it."""
    return int(torch.randint(SEEDS - 1, (), dtype=torch.int64, device="cpu"))


def integer(where: str, name: str, value: Any) -> int:
    """``value`` as an int: of Python, numpy or a tensor of one element.

    Raises:
        TypeError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {name} must be an integer, got {value!r}") from None


def _ends(eos: Any) -> tuple[int, ...]:
    if isinstance(eos, torch.Tensor):
        eos = eos.tolist()
    several = isinstance(eos, Iterable) and not isinstance(eos, str)
    return tuple(integer(WHERE, "eos_token_id", e) for e in (eos if several else (eos,)))


def _lengths(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[int, ...]:
    batch, width = input_ids.shape
    if attention_mask is None:
        return (width,) * batch
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"{WHERE}: attention_mask must have the shape {tuple(input_ids.shape)} of input_ids, "
            f"got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask.bool().cpu()
    if not padded_on_the_left(mask):
        raise ValueError(
            f"{WHERE}: attention_mask must have its zeros on the left of every row, got a 0 behind "
            "a 1 or an empty row"
        )
    return tuple(int(n) for n in mask.sum(-1))


def padded_on_the_left(mask: torch.Tensor) -> bool:
    """Whether every row of ``mask [B, P]`` is zeros, then at least one 1."""
    mask = mask.bool()
    return bool(mask[:, -1].all()) and not bool((mask[:, :-1] & ~mask[:, 1:]).any())
