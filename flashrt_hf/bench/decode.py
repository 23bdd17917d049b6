"""Part ``decode``: greedy decode of one request, FlashRT and the peers interleaved in one run.

Order: attach and first token (time and peak memory, before anything else has allocated),
correctness gate, warm-up of every peer, timings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from . import flashrt, models, precisions, rule, timing
from .fidelity import compare_steps
from .peers import HostRunner, Runner, make_peer
from .quantised_peers import is_quantised
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
    """Run the part; raises SystemExit where the gate fails, after the record has the errors.

    What is said of the first precision stands in the part itself, of others in ``others``.
    """
    options = session.options
    ids = session.prompt(options.prompt)
    result: dict[str, Any] = dict(
        prompt_tokens=options.prompt, new_tokens=options.new, cache_tokens=options.cache
    )
    started: list[flashrt.Started] = []
    try:
        for precision in options.precision:
            entry = result if not started else {}
            started.append(_begin(session, precision, ids, entry))
            if entry is not result:
                result.setdefault("others", {})[started[-1].runner.name] = entry
            session.finish_part("decode", result)
            broken = entry["gate"]["broken"]
            say(f"decode {started[-1].runner.name}: gate " + ("; ".join(broken) or "passed"))
            if not entry["gate"]["passed"] and not options.no_gate:
                raise SystemExit(f"bench: the correctness gate failed: {broken}")
            entry["host_us_per_step"] = flashrt.host_us_per_step(
                started[-1].runner, ids, options.new
            )
        ours = {s.runner.name: precisions.step_weight_bytes(session, s.plan) for s in started}
        runners: list[Runner] = [s.runner for s in started]
        peers = [
            make_peer(
                name, session.host, cache_tokens=options.cache, backend=options.compile_backend
            )
            for name in options.peers
        ]
        runners += peers
        theirs = {peer.name: models.traffic(peer.model).weight_bytes for peer in peers}
        result["runs"] = time_runners(session, runners, ids, ours, theirs)
    finally:
        for one in started:
            one.plan.detach()
    return result


def _begin(
    session: Session, precision: str, ids: torch.Tensor, entry: dict[str, Any]
) -> flashrt.Started:
    """Attach one precision and pass it through the gate; what was found goes into ``entry``."""
    from flash_rt import structures

    cache_tokens = session.options.cache
    say(f"decode: attaching {precision}")
    started = flashrt.start(
        precisions.entry_model(session, precision),
        ids,
        cache_tokens=cache_tokens,
        precision=precision,
        min_cosine=session.options.min_cosine,
    )
    costs = started.costs
    say(
        f"decode {precision}: {costs['bound_regions']} of {costs['regions']} regions bound, "
        f"attach and first token {costs['total_s']:.2f} s"
    )
    try:
        entry |= dict(
            precision=precision,
            start=costs,
            explain=str(structures.explain(started.plan)),
            weights=precisions.summary(started.plan),
            gate=gate(session, started, ids),
        )
    except BaseException:
        started.plan.detach()
        raise
    return started


def gate(session: Session, started: flashrt.Started, ids: torch.Tensor) -> dict[str, Any]:
    """Apply the fidelity rule to the logits after the prompt and after each forced token.

    Quantised weights are compared with a host that has the same values, and the prompt is read as
    a decode step would, so that the rule judges the kernels and not the format.
    """
    from flash_rt.structures.products import as_decoded

    forced = session.prompt(session.options.forced, seed=2)
    cache = session.options.cache
    exact = precisions.reference_dtype(session.host)
    reference = precisions.dequantised(session.host, started.plan, exact)
    host = session.host
    if started.plan.packing is not None:
        host = precisions.dequantised(session.host, started.plan, next(host.parameters()).dtype)
        started.runner.loop.reset()  # the prefill of the first token was recorded as it is
    with as_decoded():
        errors = compare_steps(
            HostRunner("reference", reference, cache_tokens=cache),
            {
                "flashrt": started.runner,
                "host": HostRunner("host", host, cache_tokens=cache),
            },
            ids,
            forced,
        )
    if started.plan.packing is not None:
        started.runner.loop.reset()  # its prefill was recorded as decoded
    del reference, host
    if session.device.type == "cuda":
        torch.cuda.empty_cache()
    verdict = rule.judge(errors["flashrt"], errors["host"], with_top1=False)
    return dict(
        passed=verdict.passed,
        broken=list(verdict.broken),
        **{name: error.summary() for name, error in errors.items()},
    )


def time_runners(
    session: Session,
    runners: list[Runner],
    ids: torch.Tensor,
    ours: dict[str, int],
    theirs: dict[str, int],
) -> dict[str, Any]:
    """Warm every runner up, then time first token and inter-token time, interleaved.

    A peer that fails is recorded with its error and leaves; there is no ratio then. An entry with
    the model's own weights is compared with peers that have them too, a quantised one with all.

    Args:
        ours: names of FlashRT's runners, and the bytes of weights that their steps read.
        theirs: the same of the peers.
    """
    options, device = session.options, session.device
    result, tokens = warm_up(session, runners, ids, ours)
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
    weight_bytes = ours | theirs
    cache_bytes = session.traffic.cache_bytes_per_position * (options.prompt + options.new / 2)
    for name, found in samples.items():
        step_bytes = weight_bytes[name] + cache_bytes
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
    peers = [runner.name for runner in running if runner.name not in ours]
    plain = precisions.entry_name(precisions.PLAIN)
    for name in ours if len(running) == len(runners) else ():
        fair = [p for p in peers if name != plain or not is_quantised(p)]
        if fair:
            best = min(samples[peer].median_ms for peer in fair)
            result[name]["ratio_to_best_peer"] = best / samples[name].median_ms
    return result


def warm_up(
    session: Session, runners: list[Runner], ids: torch.Tensor, ours: dict[str, int]
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
            if runner.name in ours:
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
