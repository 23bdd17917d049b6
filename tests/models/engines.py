"""A slot engine over a small decoder, its requests and their answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from decoders import model

from flash_rt import structures
from flash_rt.structures import GenerationRequest

Answers = dict[tuple[Any, int], list[Any]]


@contextmanager
def engine_of(name: str, **sizes: int) -> Iterator[structures.Engine]:
    attached = structures.attach(model(name))
    try:
        yield structures.decode_engine(model(name), **{"max_len": 128, **sizes})
    finally:
        attached.detach()


def drain(engine: structures.Engine, found: Answers | None = None) -> Answers:
    """Step until nothing is left; events by answer."""
    found = defaultdict(list) if found is None else found
    while not engine.idle:
        for event in engine.step():
            found[event.handle, event.index].append(event)
    return found


def tokens(events: list[Any]) -> list[int]:
    return [event.token_id for event in events if event.token_id is not None]


def request(width: int, seed: int = 0, **options: Any) -> GenerationRequest:
    generator = torch.Generator().manual_seed(1000 * seed + width)
    ids = torch.randint(3, 97, (width,), generator=generator)
    return GenerationRequest(**{"prompt_ids": ids, "stop_token_ids": (), **options})


def alone(name: str, requests: list[GenerationRequest], **sizes: int) -> list[list[int]]:
    """What each request gets from the loop, greedily."""
    plan = structures.attach(model(name))
    try:
        loop = structures.decode_loop(model(name), **{"max_len": 128, **sizes})
        answers = []
        for wanted in requests:
            ids = torch.tensor([wanted.prompt_ids])
            limit, stops = wanted.max_new_tokens, wanted.stop_token_ids
            out = loop.generate(ids, max_new_tokens=limit, eos_token_id=stops)
            answers.append(out[0, ids.shape[1] :].tolist())
        return answers
    finally:
        plan.detach()
