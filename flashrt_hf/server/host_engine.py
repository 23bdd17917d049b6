"""The host's own ``generate``, one answer at a time: for images, and for what no loop runs."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from flash_rt.structures.loops.generation import (
    FinishReason,
    GenerationRequest,
    TokenEvent,
    TokenMask,
)

from .engine import MODEL_ERRORS

REFUSED = ("presence_penalty", "frequency_penalty", "logprobs")
PATIENCE_S = 0.05  # how long ``step`` waits for a token before it lets others speak


class _Ended(Exception):
    """Raised out of a streamer to end a generation that nobody wants any more."""


class HostEngine:
    """An engine of one slot around ``model.generate``.

    Sampling draws from torch's generator, seeded for each answer; a request with penalties or
    logprobs that transformers does not have is refused by name.
    """

    slots = 1

    def __init__(self, model: Any, *, max_len: int, reason: str) -> None:
        """``reason`` says why no loop runs this model."""
        self.max_len, self.reason = max_len, reason
        self._model = model
        self._waiting: deque[tuple[_Job, int]] = deque()
        self._current: _Run | None = None
        self._requests = 0

    @property
    def free(self) -> int:
        """1 while nothing runs."""
        return 0 if self._waiting or self._current else 1

    @property
    def idle(self) -> bool:
        """Whether ``step`` has nothing to do."""
        return self.free == 1

    def submit(self, request: GenerationRequest, inputs: Mapping[str, Any] | None) -> Hashable:
        """Start a request.

        Raises:
            ValueError: it asks for what ``generate`` does not have.
        """
        for name in REFUSED:
            if getattr(request.sampling, name):
                raise ValueError(f"Unsupported parameter: {name!r}: {self.reason}")
        job = _Job(request, dict(inputs or {}))
        self._requests += 1
        self._waiting.extend((job, index) for index in range(request.n))
        return job

    def step(self) -> Sequence[TokenEvent]:
        """The tokens that have come, at least one unless the model is slow."""
        if self._current is None:
            if not self._waiting:
                return ()
            self._current = _Run(self._model, *self._waiting.popleft())
        events = self._current.take(PATIENCE_S)
        if self._current.ended:
            self._current.close()
            self._current = None
        return events

    def cancel(self, handle: Hashable, index: int | None = None) -> None:
        """End a request, or one answer of it."""
        wanted = [(j, i) for j, i in self._waiting if not (j is handle and index in (None, i))]
        self._waiting = deque(wanted)
        run = self._current
        if run is not None and run.job is handle and index in (None, run.index):
            run.close()
            self._current = None

    def counters(self) -> Mapping[str, float]:
        """Every request is a fallback."""
        return {"graph_captures": 0, "fallbacks": self._requests}


@dataclasses.dataclass(eq=False)
class _Job:
    request: GenerationRequest
    inputs: dict[str, Any]


class _Run:
    """One answer in a thread of its own; it is the streamer of its generation."""

    def __init__(self, model: Any, job: _Job, index: int) -> None:
        self.job, self.index, self.ended = job, index, False
        self._model = model
        self._events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._unwanted = False
        self._prompt_seen = False
        self._count = 0
        self._mask = job.request.mask() if job.request.mask else None
        self._complete = False
        self._thread = threading.Thread(target=self._generate, name="flash-rt host", daemon=True)
        self._thread.start()

    def take(self, seconds: float) -> list[TokenEvent]:
        """What has come; waits for the first at most ``seconds``."""
        found = []
        try:
            found.append(self._events.get(timeout=seconds))
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            pass
        self.ended = any(event.finish_reason is not None for event in found)
        return found

    def close(self) -> None:
        """End the generation, behind the token that it is at."""
        self._unwanted = True
        self._thread.join()

    def put(self, value: torch.Tensor) -> None:
        """As a streamer: the prompt, then each token."""
        if self._unwanted:
            raise _Ended
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            self._count += 1
            request = self.job.request
            reason: FinishReason | None = None
            if self._mask is not None and self._mask.accept(token):
                self._complete, reason = True, "stop"
            if token in (request.stop_token_ids or ()):
                reason = "stop"
            elif reason is None and self._count == request.max_new_tokens:
                reason = "length"
            self._events.put(TokenEvent(self.job, self.index, token, finish_reason=reason))
            if reason is not None:
                raise _Ended

    def end(self) -> None:
        """As a streamer: no more tokens."""

    def _generate(self) -> None:
        request = self.job.request
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        ids = torch.tensor([request.prompt_ids], device=device)
        dtype = self._model.dtype
        inputs = {
            name: value.to(device, dtype if value.is_floating_point() else value.dtype)
            for name, value in self.job.inputs.items()
        }
        inputs.setdefault("attention_mask", torch.ones_like(ids))
        processors = LogitsProcessorList([_Bias(request, device, self._mask)])
        error: BaseException | None = None
        try:
            devices = [device] if device.type == "cuda" else []
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                torch.manual_seed(request.sampling.seed_of(self.index, drawn=0))
                self._model.generate(
                    input_ids=ids,
                    **inputs,
                    **_options(request),
                    logits_processor=processors,
                    streamer=self,
                )
        except _Ended:
            return
        except MODEL_ERRORS as raised:
            error = raised
        self._events.put(
            TokenEvent(
                self.job,
                self.index,
                None,
                finish_reason="length" if error is None else "error",
                error=error,
            )
        )


def _options(request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    found: dict[str, Any] = {
        "max_new_tokens": request.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens or None,
        "eos_token_id": list(request.stop_token_ids or ()) or None,
        "repetition_penalty": sampling.repetition_penalty,
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        found |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return found


class _Bias(LogitsProcessor):  # type: ignore[misc]
    """``logit_bias``, and the grammar's mask in front of all that draws."""

    def __init__(
        self, request: GenerationRequest, device: torch.device, mask: TokenMask | None
    ) -> None:
        self._bias = dict(request.sampling.logit_bias)
        self._device, self._mask = device, mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._bias:
            scores = scores.clone()
            ids = torch.tensor([*self._bias], device=scores.device)
            scores[:, ids] += torch.tensor([*self._bias.values()], device=scores.device)
        allowed = None if self._mask is None else self._mask.allowed()
        if allowed is None:
            return scores
        bits = (allowed[:, None] >> torch.arange(32)) & 1
        mask = bits.flatten().bool()[: scores.shape[-1]].to(scores.device)
        missing = scores.shape[-1] - mask.numel()
        mask = torch.nn.functional.pad(mask, (0, max(0, missing)))
        return scores.masked_fill(~mask, float("-inf"))
