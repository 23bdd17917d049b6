"""Calls that tell one attention from another: lengths, starts, scales, masks, a cache between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .base import Draw, Probe

Rotation = tuple[torch.Tensor, torch.Tensor]
WIDEST_WINDOW = 64  # a wider window is the mask's business alone, and the mask is proven elsewhere


class AttentionLike(Protocol):
    """What the probes need to know of a spec."""

    @property
    def head_dim(self) -> int: ...
    @property
    def rotary(self) -> str | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def cache(self) -> str: ...
    @property
    def causal(self) -> bool: ...


@dataclass(frozen=True)
class AttentionProbe:
    """A sequence of calls on one cache.

    Attributes:
        chunks: hidden states ``[1, T, D]`` of each call.
        start: position of the first token.
        masks: for each chunk what it may see, bool ``[T, N]``; None leaves it to the host's
            attention implementation, which then looks back only, or everywhere (``causal``).
    """

    chunks: tuple[torch.Tensor, ...]
    start: int
    masks: tuple[torch.Tensor | None, ...]
    head_dim: int
    rotary: str | None
    causal: bool

    def steps(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, Rotation]]:
        """Input and rotation of each call, in ``dtype``."""
        position = self.start
        for x in self.chunks:
            yield x.to(dtype), self._rotation(position, x, dtype)
            position += x.shape[1]

    def visible(self) -> Iterator[torch.Tensor]:
        """What each chunk may see, bool ``[T, N]``."""
        for x, mask in zip(self.chunks, self.masks, strict=True):
            yield self.without_mask(x) if mask is None else mask

    def without_mask(self, x: torch.Tensor) -> torch.Tensor:
        """What a chunk without a mask may see."""
        mask = visible(x.shape[1], x.shape[1], None, x.device)
        return mask if self.causal else torch.ones_like(mask)

    def _rotation(self, position: int, x: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Angles rounded to the dtype of the inputs, which is what a host hands to its layers."""
        half = self.head_dim // 2
        speed = 1e4 ** (-torch.arange(half, device=x.device) / half)
        places = torch.arange(position, position + x.shape[1], device=x.device)
        angles = places[:, None] * speed
        if self.rotary == "interleaved":
            angles = angles.repeat_interleave(2, -1)
        else:
            angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos()[None], angles.sin()[None]
        return cos.to(x.dtype).to(dtype), sin.to(x.dtype).to(dtype)


class _Cache:
    """The one method of a cache that attention calls."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept:
            key_states = torch.cat([self.kept[0], key_states], 2)
            value_states = torch.cat([self.kept[1], value_states], 2)
        self.kept = [key_states, value_states]
        return key_states, value_states


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """``[queries, keys]`` bool: causal, the last query at the last key, at most ``window`` back."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def meaning(spec: AttentionLike, width: int, draw: Draw) -> Iterator[Probe]:
    """One token, five, many, more than the window; two starts, three scales, masks, a cache."""
    longest = 5 if spec.window is None else min(spec.window, WIDEST_WINDOW) + 3
    for scale in (0.01, 1.0, 30.0):
        yield _probe(f"5 tokens, input scale {scale:g}", spec, (draw(1, 5, width, scale=scale),))
    for tokens, start in ((1, 0), (12, 0), (longest, 0), (longest, 1000)):
        label = f"{tokens} tokens from position {start}"
        yield _probe(label, spec, (draw(1, tokens, width),), start)
    chunks = (draw(1, longest, width), draw(1, 1, width), draw(1, 2, width))
    yield _probe("prefill, then decode", spec, chunks, 7)
    x = draw(1, 5, width)
    padded = visible(5, 5, spec.window, x.device)
    padded[:, :2] = torch.eye(5, 2, dtype=torch.bool, device=x.device)
    yield _probe("padded mask", spec, (x,), masks=(padded,))
    yield _probe("bidirectional mask", spec, (x,), masks=(torch.ones_like(padded),))
    if spec.window is None or spec.window >= 5:
        yield _probe("no mask", spec, (x,), masks=(None,))


def numbers(spec: AttentionLike, width: int, draw: Draw) -> Probe:
    """Five tokens, then one on their cache."""
    return _probe("5 tokens, then 1", spec, (draw(1, 5, width), draw(1, 1, width)))


def _probe(
    label: str,
    spec: AttentionLike,
    chunks: tuple[torch.Tensor, ...],
    start: int = 0,
    masks: tuple[torch.Tensor | None, ...] | None = None,
) -> Probe:
    if masks is None:
        seen, made = 0, []
        for x in chunks:
            seen += x.shape[1]
            made.append(visible(x.shape[1], seen, spec.window, x.device))
        masks = tuple(made)
    probe = AttentionProbe(chunks, start, masks, spec.head_dim, spec.rotary, spec.causal)
    return Probe(label, (probe,))


def run(
    spec: AttentionLike, module: nn.Module, probe: Probe, call: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Make the calls of a probe as the host's model would; what ``call`` returned, in order."""
    made: AttentionProbe = probe.args[0]
    cache = _Cache() if len(made.chunks) > 1 else None
    outputs = []
    with _runnable(module, made.chunks[0]) as implementation:
        for (x, rotation), mask in zip(made.steps(made.chunks[0].dtype), made.masks, strict=True):
            if mask is None and implementation == "eager":
                mask = made.without_mask(x)
            added = None if mask is None else additive(mask, x.dtype)
            arguments: dict[str, Any] = {"attention_mask": added, spec.cache: cache}
            outputs.append(call(hidden_states=x, position_embeddings=rotation, **arguments))
    return tuple(outputs)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A bool mask ``[T, N]`` as numbers ``[1, 1, T, N]`` that eager attention adds to scores."""
    lowest = torch.finfo(dtype).min
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, lowest)[None, None]


@contextmanager
def _runnable(module: nn.Module, x: torch.Tensor) -> Iterator[str]:
    """Let attention run in fp32, which flash attention cannot; the configuration is put back."""
    configs = [getattr(m, "config", None) for m in module.modules()]
    config: Any = next((c for c in configs if hasattr(c, "_attn_implementation")), None)
    chosen = "" if config is None else str(config._attn_implementation)
    if config is None or chosen in ("eager", "sdpa") or x.dtype != torch.float32:
        yield chosen
        return
    config._attn_implementation = "sdpa"
    try:
        yield "sdpa"
    finally:
        config._attn_implementation = chosen
