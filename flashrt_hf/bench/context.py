"""Part ``context``: what the length of the cache and the number of live tokens cost.

Every case is a cache length and a live length, with ``fp8`` where keys and values are stored so.
The prompt fills the cache up to half the new tokens below the live length, so that the mean live
length of the timed steps is the one named. It is computed once and used again by every measurement.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from . import timing
from .decode import inter_token_ms
from .flashrt import FlashRTRunner
from .session import Session, say


@dataclasses.dataclass(frozen=True)
class Case:
    """``cache_tokens:live_tokens``, or ``cache_tokens:live_tokens:fp8``."""

    cache_tokens: int
    live_tokens: int
    kv_cache: Literal["fp8"] | None = None

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``CACHE:LIVE`` or ``CACHE:LIVE:fp8``.

        Raises:
            ValueError: the text is neither, or the live length does not fit the cache.
        """
        cache, _, rest = text.partition(":")
        live, _, kv_cache = rest.partition(":")
        numbers = cache.isdigit() and live.isdigit() and int(live) <= int(cache)
        if not numbers or (text.count(":") > 1 and kv_cache != "fp8"):
            raise ValueError(
                f"bench: case must be CACHE:LIVE or CACHE:LIVE:fp8 with LIVE <= CACHE, got {text!r}"
            )
        return cls(int(cache), int(live), "fp8" if kv_cache else None)

    def __str__(self) -> str:
        parts = (self.cache_tokens, self.live_tokens, self.kv_cache)
        return ":".join(str(part) for part in parts if part is not None)


def run(session: Session) -> dict[str, Any]:
    """Time every case of ``--cases``, interleaved."""
    from flash_rt import structures

    options = session.options
    cases = [Case.parse(text) for text in options.cases]
    plan = structures.attach(session.model, session.model.forward)
    try:
        measures = {}
        for case in cases:
            prompt = session.prompt(max(case.live_tokens - options.new // 2, 1))
            if prompt.shape[1] + options.new > case.cache_tokens:
                raise ValueError(
                    f"bench: case {case} must leave room for half of {options.new} new tokens"
                )
            runner = FlashRTRunner(
                session.model,
                cache_tokens=case.cache_tokens,
                kv_cache=case.kv_cache,
                reuse_prefix=True,
            )
            say(f"context {case}: warming up")
            runner.generate(prompt, options.new)
            measures[str(case)] = inter_token_ms(runner, prompt, options.new, session.device)
        samples = timing.interleave(measures, rounds=options.repeats)
    finally:
        plan.detach()
    first = samples[str(cases[0])].median_ms
    result = {}
    for case in cases:
        found = samples[str(case)]
        result[str(case)] = dict(
            cache_tokens=case.cache_tokens,
            live_tokens=case.live_tokens,
            ms_per_token=found.median_ms,
            tokens_per_s=1e3 / found.median_ms,
            values_ms=list(found.values_ms),
            ratio_to_first=found.median_ms / first,
            kv_cache=case.kv_cache,
            bytes_per_s=_step_bytes(session, case) / found.median_ms * 1e3,
        )
        say(f"context {case}: {found.median_ms:.3f} ms/token")
    return dict(new_tokens=options.new, cases=result)


def _step_bytes(session: Session, case: Case) -> float:
    """Weights and live rows of the cache, in the bytes that they are stored in."""
    weights, whole = session.traffic.weight_bytes, session.traffic.step_bytes(case.live_tokens)
    if case.kv_cache is None:
        return whole
    size: int = next(session.model.parameters()).element_size()
    return weights + (whole - weights) / size
