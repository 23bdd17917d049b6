"""Part ``rows``: a step of several rows against a step of one, in time and in bits.

Row 0 continues the prompt that the single request continues; every row is then repeated alone, and
its tokens and the logits after its prompt and forced tokens must be the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from . import precisions, timing
from .decode import inter_token_ms
from .flashrt import FlashRTRunner
from .session import Session, say

LARGEST_RATIO = 1.12


def run(session: Session) -> dict[str, Any]:
    """Time ``--rows`` rows against one and compare each row's bits with its lone run.

    The first precision's values are the part's own; those of others stand in ``others``.
    """
    first, *others = (_run(session, precision) for precision in session.options.precision)
    if others:
        first["others"] = {precisions.entry_name(o["precision"]): o for o in others}
    return first


def _run(session: Session, precision: str) -> dict[str, Any]:
    options = session.options
    prompts = session.prompt(options.prompt, rows=options.rows)
    forced = session.prompt(options.forced, rows=options.rows, seed=2)
    model = precisions.entry_model(session, precision)
    plan = precisions.attach(model, precision)
    try:
        one = FlashRTRunner(model, cache_tokens=options.cache)
        many = FlashRTRunner(model, cache_tokens=options.cache, rows=options.rows)
        bits = compare_bits(one, many, prompts, forced, new_tokens=options.new)
        same = "same bits" if all(bits.values()) else f"BITS DIFFER {bits}"
        say(f"rows {precision}: {same}")
        samples = timing.interleave(
            {
                "one": inter_token_ms(one, prompts[:1], options.new, session.device),
                "many": inter_token_ms(many, prompts, options.new, session.device),
            },
            rounds=options.repeats,
        )
    finally:
        plan.detach()
    many_ms, one_ms = samples["many"].median_ms, samples["one"].median_ms
    ratio = many_ms / one_ms
    timed = min(many_ms, one_ms) > 0  # differences of times: noise can turn them negative
    return dict(
        precision=precision,
        rows=options.rows,
        **bits,
        one_ms=one_ms,
        many_ms=many_ms,
        one_values_ms=list(samples["one"].values_ms),
        many_values_ms=list(samples["many"].values_ms),
        ratio=ratio,
        passed=timed and ratio <= LARGEST_RATIO and bits["same_tokens"] and bits["same_logits"],
    )


def compare_bits(
    one: FlashRTRunner,
    many: FlashRTRunner,
    prompts: torch.Tensor,
    forced: torch.Tensor,
    *,
    new_tokens: int,
) -> dict[str, bool]:
    """Whether every row's tokens and logits are the bits of its lone run."""
    together = many.generate(prompts, new_tokens)
    logits = [step.clone() for step in many.forced_steps(prompts, forced)]
    same_tokens = same_logits = True
    for row in range(prompts.shape[0]):
        alone = one.generate(prompts[row : row + 1], new_tokens)
        same_tokens &= torch.equal(alone[0], together[row])
        lone = one.forced_steps(prompts[row : row + 1], forced[row : row + 1])
        equal = [torch.equal(a[0], b[row]) for a, b in zip(lone, logits, strict=True)]
        same_logits &= all(equal)
    return dict(same_tokens=same_tokens, same_logits=same_logits)
