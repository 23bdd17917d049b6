"""``flash-rt bench serve``: streaming through HTTP against the bare loop, and many clients at once.

The bare loop is measured in this process, which then lets go of the model; the server runs in a
process of its own on the same random weights, with the same cache, and without reuse of prefixes,
so that every prompt is computed.

The time to the first token through HTTP counts all that a client waits for: its new connection
(``connect_ms`` of it), the request, the server's work, the first event with text, and the client's
own reading of it. The bare loop's counts ``generate``, from ids on an idle device to the streamer.
A client asks again at once, so what the server still does for the request before counts too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from ..host import DTYPES, load_host
from . import models, record
from .abuse import Abuse
from .http_client import Answer, ask
from .server_process import ServerProcess, server_process
from .session import default_path, say

LEAST_STREAMING = 0.95  # of the bare loop's tokens a second
MOST_FIRST_MS = 5.0  # above the bare loop's time to the first token
LEAST_CLIENTS = 5.0  # times the tokens a second of a single client
LEAST_SHARE = 0.7  # of the mean client's tokens a second, for the slowest
KEY = "bench"


def parser() -> argparse.ArgumentParser:
    """Build the argument parser; unknown options are errors."""
    made = argparse.ArgumentParser(prog="flash-rt bench serve", description=__doc__)
    add = made.add_argument
    add("--model", required=True, choices=[*models.CONFIGS], help="true shape, random weights")
    add("--prompt", type=int, default=128, help="prompt tokens; default %(default)s")
    add("--new", type=int, default=256, help="new tokens; default %(default)s")
    add("--cache", type=int, default=1024, help="tokens of the cache; default %(default)s")
    add("--clients", type=int, default=8, help="at once; default %(default)s")
    add("--repeats", type=int, default=5, help="rounds, median reported; default %(default)s")
    add("--abuse", type=int, default=0, help="requests of the load and abuse part; default none")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=default, help="cpu, cuda or cuda:N; default here %(default)s")
    add("--dtype", choices=[*DTYPES], default="bf16", help="default %(default)s")
    add("--precision", default="auto", help="default %(default)s")
    add("--commit", help="recorded where the run is no git checkout")
    add("--json", help="the record's path; default a file in build/records")
    return made


def main(options: argparse.Namespace) -> tuple[dict[str, Any], Path]:
    """Run; the record and where it is."""
    device = torch.device(options.device)
    settings = {key: value for key, value in vars(options).items() if key not in ("json", "commit")}
    begun = record.start("serve", device, settings=settings, commit_id=options.commit)
    begun["model"] = dict(name=options.model)
    path = Path(options.json) if options.json else default_path(options.model, ["serve"], device)
    prompts = [_prompt(options, seed) for seed in range(options.repeats + 1)]
    say("serve: the bare loop")
    bare = bare_loop(options, device, prompts)
    arguments = [
        *(options.model, "--name", options.model, "--device", options.device),
        *("--dtype", options.dtype, "--precision", options.precision, "--api-key", KEY),
        *("--min-cosine", "0"),
        *("--max-len", str(options.cache), "--no-prefix-reuse"),
        *("--max-body", "0.1" if options.abuse else "4"),
    ]
    with server_process(arguments) as server:
        say(f"serve: listening on port {server.port}")
        begun["parts"]["serve"] = asyncio.run(_through_http(options, server.port, prompts, bare))
        record.write(begun, path)
        if options.abuse:
            begun["parts"]["abuse"] = asyncio.run(_abuse(options, server))
            record.write(begun, path)
    return begun, path


def _prompt(options: argparse.Namespace, seed: int) -> list[int]:
    vocabulary = models.config(options.model).get_text_config().vocab_size
    cpu = torch.device("cpu")
    ids = models.prompt_ids(vocabulary, options.prompt, device=cpu, seed=100 + seed)
    found: list[int] = ids[0].tolist()
    return found


class _Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ids: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt, then each token."""
        if self._prompt_seen:
            self.times.append(time.perf_counter())
            self.ids += value.tolist()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing."""


def bare_loop(
    options: argparse.Namespace, device: torch.device, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Times of ``decode_loop.generate`` with a streamer; the first prompt only warms up."""
    from flash_rt import structures

    from ..server.stand_in import stand_in_tokenizer

    model = load_host(options.model, device=device, dtype=DTYPES[options.dtype])
    plan = structures.attach(model, model.forward, precision=options.precision, min_cosine=None)
    loop = structures.decode_loop(model, max_len=options.cache)
    tokenizer = stand_in_tokenizer(models.config(options.model).vocab_size)
    rates, firsts, texts = [], [], []
    for prompt in prompts:
        clock, ids = _Clock(), torch.tensor([prompt], device=device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        loop.generate(ids, max_new_tokens=options.new, eos_token_id=(), streamer=clock)
        rates.append((options.new - 1) / (clock.times[-1] - clock.times[0]))
        firsts.append(1e3 * (clock.times[0] - start))
        texts.append(tokenizer.decode(clock.ids, skip_special_tokens=True))
    plan.detach()
    del model, loop, plan
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return dict(
        rate=statistics.median(rates[1:]),
        first_ms=statistics.median(firsts[1:]),
        rates=rates[1:],
        firsts_ms=firsts[1:],
        texts=texts,
    )


async def _through_http(
    options: argparse.Namespace, port: int, prompts: Sequence[list[int]], bare: dict[str, Any]
) -> dict[str, Any]:
    async def stream(prompt: list[int]) -> Answer:
        body = {"model": options.model, "prompt": prompt, "max_tokens": options.new}
        answer = await ask(
            port,
            body | {"temperature": 0, "stream": True, "ignore_eos": True},
            key=KEY,
        )
        if not answer.whole or answer.status != 200 or answer.error:
            raise RuntimeError(f"bench: the server failed: {answer.status} {answer.error}")
        return answer

    texts = bare.pop("texts")
    single = [await stream(prompt) for prompt in prompts]
    same = [answer.text for answer in single] == texts
    say(f"serve: answers {'equal' if same else 'DIFFER FROM'} the bare loop's")
    rates = [answer.rate(options.new) for answer in single[1:]]
    rate = statistics.median(rates)
    first_ms = 1e3 * statistics.median(answer.first_s for answer in single[1:])
    connect_ms = 1e3 * statistics.median(answer.connected - answer.start for answer in single[1:])
    many = await _many_clients(options, stream)
    ratio, extra_ms = rate / bare["rate"], first_ms - bare["first_ms"]
    say(f"serve: {rate:.1f} tok/s, {ratio:.3f} of the bare loop; first token +{extra_ms:.2f} ms")
    return dict(
        prompt_tokens=options.prompt,
        new_tokens=options.new,
        bare=bare,
        http=dict(rate=rate, first_ms=first_ms, connect_ms=connect_ms, rates=rates),
        streaming_ratio=ratio,
        first_extra_ms=extra_ms,
        same_as_bare=same,
        many=many,
        passed=ratio >= LEAST_STREAMING
        and extra_ms <= MOST_FIRST_MS
        and same
        and many["total_ratio"] >= LEAST_CLIENTS
        and many["same_as_single"]
        and many["slowest_share"] >= LEAST_SHARE,
    )


async def _many_clients(options: argparse.Namespace, stream: Any) -> dict[str, Any]:
    """Clients at once against the same clients one behind the other."""
    prompts = [_prompt(options, 1000 + client) for client in range(options.clients)]
    await asyncio.gather(*map(stream, prompts))  # graphs of every batch are recorded now
    rounds = []
    for _ in range(options.repeats):
        alone = [await stream(prompt) for prompt in prompts]
        together = await asyncio.gather(*map(stream, prompts))
        rounds.append((alone, together))
    ratios, totals, singles, shares, gaps = [], [], [], [], []
    for alone, together in rounds:
        one = options.clients * options.new / sum(answer.end - answer.start for answer in alone)
        wall = max(a.end for a in together) - min(a.start for a in together)
        all_ = options.clients * options.new / wall
        speeds = [options.new / (answer.end - answer.start) for answer in together]
        ratios.append(all_ / one)
        totals.append(all_)
        singles.append(one)
        shares.append(min(speeds) / statistics.mean(speeds))
        gaps.append(max(b - a for x in together for a, b in pairwise(x.times)))
    found = dict(
        clients=options.clients,
        total_rate=statistics.median(totals),
        single_rate=statistics.median(singles),
        total_ratio=statistics.median(ratios),
        slowest_share=min(shares),
        longest_gap_ms=1e3 * max(gaps),
        same_as_single=all(
            [a.text for a in alone] == [b.text for b in together] for alone, together in rounds
        ),
    )
    say(
        f"serve: {options.clients} clients {found['total_rate']:.1f} tok/s, "
        f"{found['total_ratio']:.2f} times one; slowest {found['slowest_share']:.2f} of the mean"
    )
    return found


async def _abuse(options: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """The load, fault and abuse part."""
    abuse = Abuse(server.port, model=options.model, key=KEY)
    await abuse.learn()
    await abuse.run(min(200, options.abuse), 32)
    before = server.resident_bytes
    report = await abuse.run(options.abuse, 32)
    await abuse.check()
    grown = server.resident_bytes - before
    for line in report.wrong[:20]:
        say(f"abuse: WRONG {line}")
    say(f"abuse: {sum(report.kinds.values())} requests, {len(report.wrong)} wrong, {grown} bytes")
    return dict(
        requests=dict(report.kinds),
        statuses=dict(report.statuses),
        wrong=report.wrong,
        grown_bytes=grown,
        passed=not report.wrong,
    )
