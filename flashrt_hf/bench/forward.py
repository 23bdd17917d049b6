"""Part ``forward``: the attached, uncaptured forward against the host's eager one.

An attached model must not be slower where nothing is captured: one token over a ``StaticCache``,
and a prefill of 128 tokens into one. Both models share their weights; the calls alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from . import timing
from .session import Session, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LARGEST_RATIO = 1.02
LEAST_ROUNDS = 15  # both sides are bound by the host, whose times scatter


class _Steps:
    """``steps`` forwards of ``T`` tokens into a static cache, as one measurement."""

    def __init__(self, model: PreTrainedModel, *, cache_tokens: int, start: torch.Tensor) -> None:
        from transformers import StaticCache

        self._model = model
        self._start = start
        self._cache: Any = StaticCache(config=model.config, max_cache_len=cache_tokens)
        self._call(start)

    @torch.no_grad()
    def _call(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._model(
            input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return out.logits  # type: ignore[no-any-return]

    def decode_ms(self, ids: torch.Tensor, steps: int, device: torch.device) -> float:
        """Milliseconds a step of one token after the start."""
        self._cache.reset()
        self._call(self._start)

        def run() -> None:
            for _ in range(steps):
                self._call(ids)

        return timing.wall_ms(run, device) / steps

    def prefill_ms(self, ids: torch.Tensor, repeats: int, device: torch.device) -> float:
        """Milliseconds a prefill of ``ids`` into the emptied cache."""

        def run() -> None:
            for _ in range(repeats):
                self._cache.reset()
                self._call(ids)

        return timing.wall_ms(run, device) / repeats


def run(session: Session) -> dict[str, Any]:
    """Attach, then time both sides of both cases; the model is detached at the end."""
    from flash_rt import structures

    options = session.options
    prompt = session.prompt(options.prompt)
    token = prompt[:, :1]
    plan = structures.attach(session.model, session.model.forward)
    try:
        sides = {
            "host": _Steps(session.host, cache_tokens=options.cache, start=prompt),
            "attached": _Steps(session.model, cache_tokens=options.cache, start=prompt),
        }
        steps = options.forward_steps
        cases: dict[str, Callable[[_Steps], float]] = {
            "one_token": lambda side: side.decode_ms(token, steps, session.device),
            "prefill": lambda side: side.prefill_ms(prompt, max(steps // 4, 1), session.device),
        }
        result: dict[str, Any] = dict(prompt_tokens=options.prompt, steps=steps)
        for case, measure in cases.items():
            result[case] = _compare(sides, measure, max(options.repeats, LEAST_ROUNDS))
            attached, host = result[case]["attached_ms"], result[case]["host_ms"]
            say(f"forward {case}: attached {attached:.3f} ms, host {host:.3f} ms")
        return result
    finally:
        plan.detach()


def _compare(
    sides: dict[str, _Steps], measure: Callable[[_Steps], float], rounds: int
) -> dict[str, Any]:
    for side in sides.values():
        measure(side)
    samples = timing.interleave(
        {name: partial(measure, side) for name, side in sides.items()}, rounds=rounds
    )
    ratio = samples["attached"].median_ms / samples["host"].median_ms
    return dict(
        host_ms=samples["host"].median_ms,
        attached_ms=samples["attached"].median_ms,
        host_values_ms=list(samples["host"].values_ms),
        attached_values_ms=list(samples["attached"].values_ms),
        ratio=ratio,
        passed=ratio <= LARGEST_RATIO,
    )
