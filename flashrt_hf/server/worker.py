"""The one thread that drives the model, behind the queue in which clients take turns."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Hashable, Sequence

import torch

from flash_rt.structures.loops.generation import TokenEvent

from .engine import MODEL_ERRORS, Engine
from .errors import ApiError
from .fair_queue import FairQueue, QueueFull
from .grammar import GrammarError
from .metrics import Metrics
from .work import CallWork, Failed, Result, TextWork, Work

log = logging.getLogger("flash_rt.server")

LAST_STEP_SECONDS = 1.0  # how long the end waits for a step that runs
MAX_FAILED_STEPS = 3  # in a row; then the model is taken to be broken for good
Delivery = list[tuple[Work, object]]


class Worker:
    """Takes work from any coroutine of one event loop and reports into each work's ``events``."""

    def __init__(
        self,
        engine: Engine | None,
        *,
        max_queue: int,
        metrics: Metrics,
        device: torch.device | None = None,
    ) -> None:
        self.engine, self.metrics, self._device = engine, metrics, device
        self._queue: FairQueue[Work] = FairQueue(max_queue)
        self._changed = threading.Condition()
        self._running: dict[Hashable, TextWork] = {}
        self._current: CallWork | None = None
        self._state = "new"  # then "open", "draining" (no new work), "stopped" or "broken"
        self._failed_steps = 0
        self._seconds = 1.0  # of an average request, for Retry-After
        self._thread = threading.Thread(target=self._run, name="flash-rt worker", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; events are delivered on ``loop``."""
        self._loop, self._state = loop, "open"
        self._thread.start()

    @property
    def state(self) -> str:
        """``open``, ``draining``, ``stopped`` or ``broken``."""
        return self._state

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have a slot, and the call that runs."""
        return len(self._running) + (self._current is not None)

    def put(self, work: Sequence[Work]) -> None:
        """Queue the parts of one request, all or none.

        Raises:
            ApiError: 429 when the queue has no room, 503 when no more work is taken.
        """
        with self._changed:
            if self._state != "open":
                raise closed(self._state)
            try:
                self._queue.put([(each.client, each, each.cost) for each in work])
            except QueueFull:
                raise self._full(len(work)) from None
            self._changed.notify()

    def _full(self, count: int) -> ApiError:
        slots = self.engine.slots if self.engine else 1
        seconds = max(1, min(60, round(self._seconds * (len(self._queue) + 1) / slots)))
        return ApiError(
            429,
            f"The queue has room for {self._queue.capacity} prompts, {len(self._queue)} wait and "
            f"{count} came; retry in {seconds} s",
            code="queue_full",
            headers={"Retry-After": str(seconds)},
        )

    def cancel(self, work: Sequence[Work]) -> None:
        """No more of ``work``; the worker drops it before its next step."""
        for each in work:
            each.cancelled = True
        with self._changed:
            self._changed.notify()

    def enough(self, work: Work, index: int) -> None:
        """No more of one answer."""
        work.unwanted.add(index)

    async def drain(self, grace_s: float) -> None:
        """Take no more work, let what there is end within ``grace_s``, then fail what is left.

        Takes at most ``LAST_STEP_SECONDS`` more.
        """
        with self._changed:
            if self._state == "open":
                self._state = "draining"
            self._changed.notify()
        end = time.monotonic() + grace_s
        while self._thread.is_alive() and time.monotonic() < end:
            if self._state != "draining" or not (self.waiting or self.running):
                break
            await asyncio.sleep(0.02)
        with self._changed:
            if self._state == "draining":
                self._state = "stopped"
            self._changed.notify()
        while self._thread.is_alive() and time.monotonic() < end + LAST_STEP_SECONDS:
            await asyncio.sleep(0.02)

    # What follows runs on the worker's thread.

    def _run(self) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while self._turn():
                pass
        except BaseException:
            log.exception("the worker ended; the server takes no more requests")
            self._state = "broken"
            raise
        finally:
            self._fail_all()

    def _turn(self) -> bool:
        with self._changed:
            while self._idle() and self._state in ("open", "draining"):
                self._changed.wait()
            if self._state not in ("open", "draining"):
                return False
        delivery = self._drop()
        self._admit(delivery)
        if self.engine is not None and not self.engine.idle:
            self._step(delivery)
        self._deliver(delivery)
        return True

    def _idle(self) -> bool:
        return not self._queue and (self.engine is None or self.engine.idle)

    def _drop(self) -> Delivery:
        """Forget what was cancelled or is late."""
        now = time.monotonic()
        with self._changed:
            gone = self._queue.remove(lambda work: work.cancelled or work.deadline < now)
        for handle, work in list(self._running.items()):
            if work.cancelled or work.deadline < now:
                self._cancel(handle)
                gone.append(work)
            elif work.unwanted:
                self._drop_answers(work)
        self.metrics.cancelled.inc(sum(work.cancelled for work in gone))
        late = ApiError(504, "The request ran out of time", code="timeout")
        return [(work, Failed(late)) for work in gone if not work.cancelled]

    def _drop_answers(self, work: TextWork) -> None:
        assert self.engine is not None
        for index in work.unwanted & work.left:
            self.engine.cancel(work.handle, index)
            self._ended(work, index)

    def _cancel(self, handle: Hashable) -> None:
        assert self.engine is not None
        del self._running[handle]
        self.engine.cancel(handle)

    def _admit(self, delivery: Delivery) -> None:
        while True:
            with self._changed:
                room = self.engine.free if self.engine else 1
                if not self._queue or room <= 0:
                    return
                work = self._queue.pop()
                work.started = time.monotonic()
                self._current = work if isinstance(work, CallWork) else None
            self.metrics.queue_seconds.observe(work.started - work.arrived)
            if isinstance(work, CallWork):
                self._call(work, delivery)
            elif isinstance(work, TextWork):
                self._submit(work, delivery)

    def _call(self, work: CallWork, delivery: Delivery) -> None:
        try:
            delivery.append((work, Result(work.function())))
        except ApiError as error:
            delivery.append((work, Failed(error)))
        except MODEL_ERRORS as error:
            delivery.append((work, Failed(self._internal(error))))
        finally:
            self._current = None

    def _submit(self, work: TextWork, delivery: Delivery) -> None:
        assert self.engine is not None
        try:
            work.handle = self.engine.submit(work.request, work.inputs)
        except (ValueError, TypeError) as error:
            delivery.append((work, Failed(ApiError(400, str(error), code="invalid_request"))))
        except MODEL_ERRORS as error:
            delivery.append((work, Failed(self._internal(error))))
        else:
            work.left = set(range(work.request.n))
            self._running[work.handle] = work

    def _step(self, delivery: Delivery) -> None:
        assert self.engine is not None
        try:
            events = self.engine.step()
        except MODEL_ERRORS as error:
            failure = Failed(self._internal(error))
            for handle, work in list(self._running.items()):
                self._cancel(handle)
                delivery.append((work, failure))
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                self._deliver(delivery)
                raise
            return
        self._failed_steps = 0
        for event in events:
            self._take(event, delivery)

    def _take(self, event: TokenEvent, delivery: Delivery) -> None:
        work = self._running.get(event.handle)
        if work is None or event.index not in work.left:
            return
        if event.error is not None:
            self._cancel(event.handle)
            delivery.append((work, Failed(self._internal(event.error))))
            return
        delivery.append((work, event))
        if event.finish_reason is not None:
            self._ended(work, event.index)

    def _ended(self, work: TextWork, index: int) -> None:
        work.left.discard(index)
        if not work.left:
            del self._running[work.handle]
            self._seconds += 0.1 * (time.monotonic() - work.started - self._seconds)

    def _internal(self, error: BaseException) -> ApiError:
        """What the client of a failed request is told; the log is told everything."""
        if isinstance(error, GrammarError):
            text = f"The answer's grammar is too complex: {error}"
            return ApiError(400, text, code="grammar_too_complex")
        log.error("a request failed", exc_info=error)
        self.metrics.failures.labels(type(error).__name__).inc()
        if isinstance(error, torch.AcceleratorError):  # nothing runs on this context any more
            self._state = "broken"
        return ApiError(
            500, "The model failed on this request; the server's log says why", code="model_failed"
        )

    def _deliver(self, delivery: Delivery) -> None:
        if delivery:
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(_dispatch, delivery)
            except RuntimeError:  # the loop is closed, and nobody waits
                self._state = "stopped"

    def _fail_all(self) -> None:
        with self._changed:
            if self._state != "broken":
                self._state = "stopped"
            left: list[Work] = [*self._running.values(), *self._queue.remove(lambda work: True)]
        if self._state != "broken":
            for handle in list(self._running):
                self._cancel(handle)
        self._running.clear()
        failure = Failed(closed(self._state))
        self._deliver([(work, failure) for work in left if not work.cancelled])


def _dispatch(delivery: Delivery) -> None:
    for work, event in delivery:
        work.events.put_nowait((work, event))


def closed(state: str) -> ApiError:
    """Why a server that is not open takes no work."""
    if state == "broken":
        return ApiError(503, "The model is broken; restart the server", code="broken")
    return ApiError(
        503,
        "The server is shutting down",
        code="shutting_down",
        headers={"Retry-After": "10"},
    )
