"""An engine without a model: tokens at a given pace, as many and as wrong as a test needs."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from flash_rt.structures.loops.generation import GenerationRequest, TokenEvent


class FakeEngine:
    """Writes token ``65 + position % 26`` for every answer.

    Attributes:
        delay_s: how long a step takes.
        gate: steps wait while it is not set.
        fail: raised by the next steps, one entry each.
        refuse: raised by the next submit.
        most: most answers that ran at a time.
        started: requests in the order in which they were submitted.
    """

    def __init__(self, *, slots: int = 2, max_len: int = 100_000, delay_s: float = 0.0) -> None:
        self.slots, self.max_len, self.delay_s = slots, max_len, delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.fail: deque[BaseException] = deque()
        self.refuse: BaseException | None = None
        self.most, self.steps = 0, 0
        self.started: list[GenerationRequest] = []
        self._running: dict[tuple[int, int], list[Any]] = {}

    @property
    def free(self) -> int:
        return self.slots - len(self._running)

    @property
    def idle(self) -> bool:
        return not self._running

    def submit(self, request: GenerationRequest, inputs: Any) -> int:
        if self.refuse is not None:
            refuse, self.refuse = self.refuse, None
            raise refuse
        self.started.append(request)
        handle = len(self.started)
        for index in range(request.n):
            self._running[handle, index] = [request, 0]
        return handle

    def step(self) -> list[TokenEvent]:
        self.steps += 1
        self.most = max(self.most, len(self._running))
        time.sleep(self.delay_s)
        assert self.gate.wait(20)
        if self.fail:
            raise self.fail.popleft()
        events = []
        for (handle, index), state in list(self._running.items()):
            request, count = state
            state[1] = count + 1
            finish = "length" if count + 1 == request.max_new_tokens else None
            token = 32 + (count + len(request.prompt_ids) + index) % 26
            events.append(TokenEvent(handle, index, token, finish_reason=finish))
            if finish:
                del self._running[handle, index]
        return events

    def cancel(self, handle: Any, index: int | None = None) -> None:
        for key in list(self._running):
            if key[0] == handle and index in (None, key[1]):
                del self._running[key]

    def counters(self) -> dict[str, float]:
        return {"graph_captures": 3, "fallbacks": self.steps}
