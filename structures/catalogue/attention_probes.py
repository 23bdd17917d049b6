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
    """A sequence of calls on one cache; everything is made before, so that calls can be counted.

    Attributes:
        chunks: hidden states ``[1, T, D]`` of each call.
        rotations: cosines and sines ``[1, T, R]`` of each call.
        seen: what each chunk may see, bool ``[T, N]``.
        masks: ``seen`` as numbers to add to scores; None leaves it to the host's attention
            implementation, which then looks back only, or everywhere, by itself.
    """

    chunks: tuple[torch.Tensor, ...]
    rotations: tuple[Rotation, ...]
    seen: tuple[torch.Tensor, ...]
    masks: tuple[torch.Tensor | None, ...]

    def steps(self, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, Rotation, torch.Tensor]]:
        """Input, rotation and what is seen of each call, in ``dtype``."""
        for x, (cos, sin), seen in zip(self.chunks, self.rotations, self.seen, strict=True):
            yield x.to(dtype), (cos.to(dtype), sin.to(dtype)), seen


def rotation(spec: AttentionLike, position: int, x: torch.Tensor) -> Rotation:
    """Cosines and sines for ``x [1, T, D]``, rounded to its dtype as hosts do."""
    half = spec.head_dim // 2
    speed = 1e4 ** (-torch.arange(half, device=x.device) / half)
    places = torch.arange(position, position + x.shape[1], device=x.device)
    angles = places[:, None] * speed
    if spec.rotary == "interleaved":
        angles = angles.repeat_interleave(2, -1)
    else:
        angles = torch.cat([angles, angles], -1)
    return angles.cos()[None].to(x.dtype), angles.sin()[None].to(x.dtype)


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
    yield _probe("padded mask", spec, (x,), seen=padded)
    yield _probe("bidirectional mask", spec, (x,), seen=torch.ones_like(padded))
    yield numbers(spec, width, draw)


def numbers(spec: AttentionLike, width: int, draw: Draw) -> Probe:
    """Five tokens without a cache, and without a mask where the window allows that."""
    x = draw(1, 5, width)
    if spec.window is not None and spec.window < 5:
        return _probe("5 tokens", spec, (x,))
    seen = visible(5, 5, None, x.device)
    seen = seen if spec.causal else torch.ones_like(seen)
    return _probe("5 tokens, no mask", spec, (x,), seen=seen, masked=False)


def _probe(
    label: str,
    spec: AttentionLike,
    chunks: tuple[torch.Tensor, ...],
    start: int = 0,
    seen: torch.Tensor | None = None,
    masked: bool = True,
) -> Probe:
    """``seen`` is for a single chunk, else it is causal with the window; the host gets a mask or,
    where not ``masked``, decides by itself."""
    rotations, views, keys = [], [], 0
    for x in chunks:
        rotations.append(rotation(spec, start + keys, x))
        keys += x.shape[1]
        views.append(visible(x.shape[1], keys, spec.window, x.device) if seen is None else seen)
    masks = tuple(
        additive(view, x.dtype) if masked else None for view, x in zip(views, chunks, strict=True)
    )
    return Probe(label, (AttentionProbe(chunks, tuple(rotations), tuple(views), masks),))


def run(
    spec: AttentionLike, module: nn.Module, probe: Probe, call: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Make the calls of a probe as the host's model would; what ``call`` returned, in order."""
    made: AttentionProbe = probe.args[0]
    cache = _Cache() if len(made.chunks) > 1 else None
    outputs = []
    with _runnable(module, made.chunks[0]) as implementation:
        for x, turn, seen, mask in zip(
            made.chunks, made.rotations, made.seen, made.masks, strict=True
        ):
            if mask is None and implementation == "eager":  # eager attention knows only masks
                mask = additive(seen, x.dtype)
            arguments: dict[str, Any] = {"attention_mask": mask, spec.cache: cache}
            outputs.append(call(hidden_states=x, position_embeddings=turn, **arguments))
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
