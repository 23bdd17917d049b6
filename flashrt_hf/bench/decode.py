"""Part ``decode``: greedy decode of one request, FlashRT and the peers interleaved in one run.

Order: attach and first token (time and peak memory, before anything else has allocated),
correctness gate, warm-up of every peer, timings.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import flashrt, rule, timing
from .fidelity import compare_steps
from .peers import HostRunner, Runner, make_peer
from .session import Session, say


def inter_token_ms(
    runner: Runner, ids: torch.Tensor, new_tokens: int, device: torch.device
) -> Callable[[], float]:
    """A measurement of milliseconds between tokens: ``(time(N) - time(1)) / (N - 1)``.

    Both times are whole calls of ``generate`` from an idle device to an idle device, so prefill and
    everything else that a call does once cancels, and everything that a token costs the host
    counts.
    """
    if new_tokens < 2:
        raise ValueError(f"bench: new tokens must be at least 2, got {new_tokens}")

    def measure() -> float:
        one = timing.wall_ms(lambda: runner.generate(ids, 1), device)
        all_of_them = timing.wall_ms(lambda: runner.generate(ids, new_tokens), device)
        return (all_of_them - one) / (new_tokens - 1)

    return measure


def run(session: Session) -> dict[str, Any]:
    """Run the part; raises SystemExit where the gate fails, after the record has the errors."""
    from flash_rt import structures

    options = session.options
    ids = session.prompt(options.prompt)
    result: dict[str, Any] = dict(
        prompt_tokens=options.prompt, new_tokens=options.new, cache_tokens=options.cache
    )
    say("decode: attaching")
    started = flashrt.start(session.model, ids, cache_tokens=options.cache)
    try:
        result["start"] = started.costs
        costs = started.costs
        say(
            f"decode: {costs['bound_regions']} of {costs['regions']} regions bound, "
            f"attach and first token {costs['total_s']:.2f} s"
        )
        result["explain"] = str(structures.explain(started.plan))
        result["gate"] = gate(session, started.runner, ids)
        session.finish_part("decode", result)
        say("decode: gate " + ("; ".join(result["gate"]["broken"]) or "passed"))
        if not result["gate"]["passed"] and not options.no_gate:
            raise SystemExit(f"bench: the correctness gate failed: {result['gate']['broken']}")
        result["host_us_per_step"] = flashrt.host_us_per_step(started.runner, ids, options.new)
        runners: list[Runner] = [started.runner]
        runners += [
            make_peer(
                name, session.host, cache_tokens=options.cache, backend=options.compile_backend
            )
            for name in options.peers
        ]
        result["runs"] = time_runners(session, runners, ids)
    finally:
        started.plan.detach()
    return result


def gate(session: Session, ours: Runner, ids: torch.Tensor) -> dict[str, Any]:
    """Apply the fidelity rule to the logits after the prompt and after each forced token."""
    forced = session.prompt(session.options.forced, seed=2)
    cache = session.options.cache
    reference = copy.deepcopy(session.host).float()
    errors = compare_steps(
        HostRunner("fp32", reference, cache_tokens=cache),
        {"flashrt": ours, "host": HostRunner("host", session.host, cache_tokens=cache)},
        ids,
        forced,
    )
    del reference
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    verdict = rule.judge(errors["flashrt"], errors["host"], with_top1=False)
    return dict(
        passed=verdict.passed,
        broken=list(verdict.broken),
        **{name: error.summary() for name, error in errors.items()},
    )


def time_runners(session: Session, runners: list[Runner], ids: torch.Tensor) -> dict[str, Any]:
    """Warm every runner up, then time first token and inter-token time, interleaved.

    A peer that fails is recorded with its error and leaves; there is no ratio then.
    """
    options, device = session.options, session.device
    result, tokens = warm_up(session, runners, ids)
    running = [runner for runner in runners if runner.name in tokens]
    first = timing.interleave(
        {r.name: partial(timing.wall_ms, partial(r.generate, ids, 1), device) for r in running},
        rounds=options.repeats,
    )
    samples = timing.interleave(
        {r.name: inter_token_ms(r, ids, options.new, device) for r in running},
        rounds=options.repeats,
        budget_s=options.peer_seconds,
    )
    step_bytes = session.traffic.step_bytes(options.prompt + options.new / 2)
    for name, found in samples.items():
        result[name] |= dict(
            first_token_ms=first[name].median_ms,
            ms_per_token=found.median_ms,
            tokens_per_s=1e3 / found.median_ms,
            values_ms=list(found.values_ms),
            spread=found.spread,
            bytes_per_s=step_bytes / found.median_ms * 1e3,
            same_tokens_as_first=_equal_prefix(tokens[name], tokens[runners[0].name]),
        )
        say(f"decode {name}: {found.median_ms:.3f} ms/token")
    ours, *peers = (samples[runner.name].median_ms for runner in running)
    if peers and len(running) == len(runners):
        result[runners[0].name]["ratio_to_best_peer"] = min(peers) / ours
    return result


def warm_up(
    session: Session, runners: list[Runner], ids: torch.Tensor
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """First calls: what they cost or how they failed, and the tokens of those that run."""
    result: dict[str, Any] = {}
    tokens: dict[str, torch.Tensor] = {}
    for runner in runners:
        say(f"decode {runner.name}: warming up")
        try:
            # Twice: the first call compiles, the second records what the first left.
            first_call_ms = timing.wall_ms(partial(runner.generate, ids, 4), session.device)
            runner.generate(ids, 4)
            tokens[runner.name] = runner.generate(ids, session.options.new)
        except RuntimeError as error:  # of the compiler, of CUDA, out of memory
            if runner is runners[0]:
                raise
            result[runner.name] = dict(error=f"{type(error).__name__}: {error}"[:500])
            say(f"decode {runner.name}: FAILED {result[runner.name]['error']}")
            continue
        result[runner.name] = dict(first_call_ms=first_call_ms)
        say(f"decode {runner.name}: first call {first_call_ms / 1e3:.1f} s")
    return result, tokens


def _equal_prefix(tokens: torch.Tensor, other: torch.Tensor) -> int:
    """How many tokens agree before the first that differs."""
    same = (tokens == other).all(dim=0).long()
    return int(same.cumprod(0).sum())
