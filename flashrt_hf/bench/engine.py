"""Part ``engine``: ``--rows`` requests at a time through the slot engine against one."""

from __future__ import annotations

import time
from typing import Any

from . import timing
from .session import Session, say

LEAST_RATIO = 5.0  # at eight requests


def run(session: Session) -> dict[str, Any]:
    """Time the engine with one request and with several, and compare every answer with it alone."""
    from flash_rt import structures

    options = session.options
    prompts = session.prompt(options.prompt, rows=options.rows).tolist()
    plan = structures.attach(session.model, session.model.forward)
    try:
        engine = structures.decode_engine(session.model, max_len=options.cache, slots=options.rows)

        def answer(rows: list[list[int]]) -> tuple[list[list[int]], float]:
            """Tokens of each, and milliseconds from the last prompt on to the end."""
            handles = [
                engine.submit(
                    structures.GenerationRequest(
                        ids, max_new_tokens=options.new, stop_token_ids=(), reuse_prefix=False
                    )
                )
                for ids in rows
            ]
            tokens: dict[Any, list[int]] = {handle: [] for handle in handles}
            begun, counted = 0.0, 0
            while not engine.idle:
                events = engine.step()
                for event in events:
                    tokens[event.handle].append(event.token_id or 0)
                if not begun and all(tokens.values()):
                    begun, counted = time.perf_counter(), sum(map(len, tokens.values()))
            milliseconds = (time.perf_counter() - begun) * 1e3
            done = sum(map(len, tokens.values())) - counted
            return [tokens[handle] for handle in handles], milliseconds / done

        alone = [answer([row])[0][0] for row in prompts]
        together = answer(prompts)[0]
        samples = timing.interleave(
            {
                "one": lambda: answer(prompts[:1])[1],
                "many": lambda: answer(prompts)[1],
            },
            rounds=options.repeats,
        )
    finally:
        plan.detach()
    same = alone == together
    ratio = samples["one"].median_ms / samples["many"].median_ms
    say(f"engine: {ratio:.2f}x the tokens, " + ("same answers" if same else "ANSWERS DIFFER"))
    return dict(
        rows=options.rows,
        same_tokens=same,
        one_tokens_per_s=1e3 / samples["one"].median_ms,
        many_tokens_per_s=1e3 / samples["many"].median_ms,
        ratio=ratio,
        passed=same and (options.rows < 8 or ratio >= LEAST_RATIO),
    )
