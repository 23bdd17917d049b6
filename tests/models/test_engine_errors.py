"""Requests, settings and hosts that the slot engine refuses."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import pytest
from decoders import model
from engines import drain, engine_of, request, tokens

from flash_rt import structures
from flash_rt.structures import GenerationRequest
from flash_rt.structures.loops.joining import Joining
from flash_rt.structures.loops.outbox import Outbox
from flash_rt.structures.loops.prefix import Prefixes
from flash_rt.structures.loops.report import Reports
from flash_rt.structures.loops.session import Session


def test_a_hook_is_refused_by_name() -> None:
    with engine_of("llama") as engine:
        module = model("llama").model.layers[0].mlp
        removable = module.register_forward_hook(lambda *a: None)
        try:
            handle = engine.submit(request(6, max_new_tokens=4))
            events = drain(engine)[handle, 0]
        finally:
            removable.remove()
        assert [e.finish_reason for e in events] == ["error"]
        assert "a forward hook is registered" in str(events[0].error)
        again = engine.submit(request(6, max_new_tokens=4))
        assert len(tokens(drain(engine)[again, 0])) == 4


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": ()}, "prompt_ids must have at least one id"),
    ({"prompt_ids": (3, -1)}, "prompt_ids must be ids of at least 0, got -1"),
    ({"prompt_ids": "text"}, "prompt_ids must be a list of ids"),
    ({"prompt_ids": (0.5,)}, "prompt_ids must be a list of integers, got (0.5,)"),
    ({"max_new_tokens": 0}, "max_new_tokens must be 1 to 2147483647, got 0"),
    ({"n": 129}, "n must be 1 to 128, got 129"),
    ({"sampling": 3}, "sampling must be a Sampling"),
    ({"mask": 3}, "mask must be callable"),
    ({"reuse_prefix": 1}, "reuse_prefix must be True or False, got 1"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_wrong_requests_say_what_is_wrong(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        GenerationRequest(**{"prompt_ids": (5,), **fields})


WRONG_SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
    ({"min_p": 1.5}, "min_p must be at least 0 and at most 1, got 1.5"),
    ({"top_k": -1}, "top_k must be 0 to 2147483647, got -1"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
    ({"presence_penalty": float("inf")}, "presence_penalty must be finite, got inf"),
    ({"seed": -1}, "seed must be 0 to"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs must be 0 to 20, got 21"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs=True"),
    ({"logit_bias": {-3: 1.0}}, "logit_bias must have ids of at least 0, got -3"),
    ({"logit_bias": {3: float("nan")}}, "logit_bias must be finite or -inf, got nan"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG_SAMPLING)
def test_wrong_sampling_says_what_is_wrong(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        structures.Sampling(**fields)


def test_what_does_not_fit_is_refused_at_once() -> None:
    with engine_of("llama", max_len=32, slots=2) as engine:
        with pytest.raises(ValueError, match="must fit max_len = 32, got 30 \\+ 3"):
            engine.submit(request(30, max_new_tokens=3))
        with pytest.raises(ValueError, match="must fit max_len = 32, got 32 \\+ 1"):
            engine.submit(request(32))
        with pytest.raises(ValueError, match="ids must be from 0 to 127, got 128"):
            engine.submit(GenerationRequest((5, 128)))
        assert engine.idle and engine.step() == []
        handle = engine.submit(request(6, max_new_tokens=3))
        with pytest.raises(ValueError, match="cancel: index must be 0 to 0, got 1"):
            engine.cancel(handle, 1)
        assert len(tokens(drain(engine)[handle, 0])) == 3
    with pytest.raises(ValueError, match="slots must be 1 to 8, got 9"):
        structures.decode_engine(model("llama"), max_len=32, slots=9)
    with pytest.raises(ValueError, match="decode_engine: max_len must be at least 2, got 1"):
        structures.decode_engine(model("llama"), max_len=1)


PLACES: list[tuple[type, str]] = [
    *((Session, name) for name in ("advance", "move_row", "choose_row", "copy_positions")),
    *((Outbox, "post"), (Outbox, "take"), (Reports, "take"), (Prefixes, "match")),
    *((Joining, "read"), (Joining, "choose")),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory")], ids=repr)
@pytest.mark.parametrize(("kind", "name"), PLACES)
def test_a_step_that_fails_anywhere_leaves_no_answer_open_and_none_wrong(
    kind: type, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, calls, stop = getattr(kind, name), 0, 0

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop:
            raise error
        found = method(self, *args, **kwargs)
        if calls == stop + 1:
            raise error
        return found

    with engine_of("llama", slots=2, draft="lookup") as engine:
        limits = (3, 9, 14)
        items = [request(6, i, max_new_tokens=n, reuse_prefix=False) for i, n in enumerate(limits)]
        wanted = []
        for item in items:
            handle = engine.submit(item)
            wanted.append(tokens(drain(engine)[handle, 0]))
        monkeypatch.setattr(kind, name, interrupted)
        for stop in (1, 3):
            calls, found = 0, defaultdict(list)
            handles = [engine.submit(item) for item in items]
            while not engine.idle:
                try:
                    drain(engine, found)
                except (KeyboardInterrupt, RuntimeError) as raised:
                    assert raised is error
            assert calls >= 1
            for handle, right in zip(handles, wanted, strict=True):
                events = found[handle, 0]
                ended = [e for e in events if e.finish_reason is not None]
                assert ended == events[-1:] and handle.done
                assert tokens(events) == right[: len(tokens(events))]
                if events[-1].error is None:
                    assert tokens(events) == right
                else:
                    assert events[-1].error is error
            stop = calls + 10**6
            again = [engine.submit(item) for item in items]
            answers = drain(engine)
            assert [tokens(answers[handle, 0]) for handle in again] == wanted
