"""Recording with ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from weakref import WeakSet

import torch

from .protocol import CaptureError, Graph, Pool, Step, check_warmups
from .streams import collector_paused, is_recording, recording_thread
from .syncs import HostReads, Preflight

_ABORTED: list[torch.cuda.CUDAGraph] = []


class CudaPool:
    """A graph memory pool, the side stream that records into it, and the stream used last.

    cuBLAS keeps a workspace per stream, so graphs recorded on one stream share it. A stream per
    pool keeps models that replay at the same time apart.

    ``graphs`` are those alive that were recorded under ``handle``. torch takes a handle for dead
    once the last of its graphs is, and refuses to record under it again.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.recorded = 0
        self.renew()
        self._index: int = device.index
        self._last_raw: int | None = None
        self._last: torch.cuda.Stream | None = None

    @property
    def unshared_bytes(self) -> int:
        """Nothing: graphs under one handle share their memory."""
        return 0

    def renew(self) -> None:
        """Take another handle; graphs recorded so far keep theirs, and its memory."""
        self.handle = torch.cuda.graph_pool_handle()
        self.graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    def join(self) -> None:
        """Order the current stream after the last one that joined."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self._last_raw = current, raw

    def memory(self) -> AbstractContextManager[object]:
        """Allocations of the side stream; only recordings, which are ordered, reuse them."""
        return torch.cuda.stream(self.stream)


class CudaGraph:
    """A recorded step; ``replay`` is torch's C++ method, without a Python frame around it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        # CUDAGraph.replay is a Python method that only looks for a debugging aid first.
        self.replay = super(torch.cuda.CUDAGraph, graph).replay

    def release(self) -> None:
        """Destroy the graph. Its memory goes back to the pool when its tensors are gone."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self.replay = _replay_released
            self._pool.graphs.discard(graph)
            graph.reset()


def _replay_released() -> None:
    raise RuntimeError("replay: the graph must not be released, got a released graph")


class CudaBackend:
    """Records in ``thread_local`` mode, on the pool's side stream.

    Other threads may therefore use the GPU during a recording. Nothing waits for the device and
    no cached memory is given back, so a ladder of prefill graphs records quickly.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)

    def new_pool(self) -> CudaPool:
        """A new memory pool."""
        return CudaPool(self.device)

    def record(self, step: Step, *, warmups: int = 1, pool: Pool | None = None) -> Graph:
        """See :meth:`Backend.record`."""
        check_warmups(warmups)
        if pool is None:
            pool = self.new_pool()
        if not isinstance(pool, CudaPool):
            raise TypeError(f"record: pool must come from this backend, got {type(pool).__name__}")
        if is_recording() or torch.cuda.is_current_stream_capturing():
            raise CaptureError("record: the current stream must not be capturing, but it is")
        with torch.cuda.device(self.device), torch.no_grad():
            current = torch.cuda.current_stream()
            pool.join()
            pool.stream.wait_stream(current)
            try:
                with torch.cuda.stream(pool.stream), recording_thread(), collector_paused():
                    self._warm_up(step, warmups)
                    graph = self._capture(step, pool, check=not warmups)
            finally:
                current.wait_stream(pool.stream)
        return CudaGraph(graph, pool)

    def _warm_up(self, step: Step, warmups: int) -> None:
        for i in range(warmups):
            with _checks(i == 0):
                step()

    def _capture(self, step: Step, pool: CudaPool, *, check: bool) -> torch.cuda.CUDAGraph:
        alive = [*pool.graphs]  # until the end, so that the handle stays usable
        if not alive:
            pool.renew()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        except RuntimeError as error:
            _close(graph, pool)
            raise CaptureError(f"record: the recording cannot begin: {error}") from error
        try:
            with _checks(check):
                step()
        except BaseException as error:
            _abandon(graph, pool)
            if isinstance(error, RuntimeError) and not isinstance(error, CaptureError):
                raise CaptureError(f"record: the step failed: {error}") from error
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            _close(graph, pool)
            raise CaptureError(f"record: the step cannot be recorded: {error}") from error
        pool.graphs.add(graph)
        pool.recorded += 1
        return graph


@contextmanager
def _checks(wanted: bool) -> Iterator[None]:
    """Refuse what a capture would break on; only the first run of a step needs it."""
    if not wanted:
        yield
        return
    with HostReads("cuda"), Preflight("cuda"):
        yield


def _abandon(graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
    """End a capture whose step has raised."""
    try:
        graph.capture_end()
    except RuntimeError:
        _close(graph, pool)
    else:
        graph.reset()


def _close(graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
    """Tidy up after a capture that the CUDA runtime aborted.

    ``capture_end`` then leaves both allocators routed into the pool. The device's is told here; the
    pinned one cannot be, and it refuses to begin again with the same pool and keeps a pointer to
    the graph. So the pool goes on under another handle, and the graph object stays.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(pool.device.index, pool.handle)
        torch._C._cuda_releasePool(pool.device.index, pool.handle)
    graph.reset()
    _ABORTED.append(graph)
    pool.renew()
    _release_generator(pool.device)


def _release_generator(device: torch.device) -> None:
    """Make the device's random numbers usable again, on a stream that can record.

    ``capture_begin`` marks the default generator as capturing, and then random numbers outside a
    capture are an error. In torch 2.11 only a ``capture_end`` that succeeds takes the mark away,
    which leaves the seed and the offset as they are.
    """
    written = torch.zeros(1, device=device)  # an empty graph would be warned of
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    written.zero_()
    graph.capture_end()
    graph.reset()
