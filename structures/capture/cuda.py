"""Recording with ``torch.cuda.CUDAGraph``."""

from __future__ import annotations

from contextlib import suppress

import torch

from .protocol import CaptureError, Graph, Pool, Step, check_warmups
from .streams import collector_paused, is_recording, recording_thread


class CudaPool:
    """A graph memory pool, the side stream that records into it, and the stream used last.

    cuBLAS keeps a workspace per stream, so graphs recorded on one stream share it. A stream per
    pool keeps models that replay at the same time apart.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._index: int = device.index
        self._last_raw: int | None = None
        self._last: torch.cuda.Stream | None = None

    def join(self) -> None:
        """Order the current stream after the last one that joined."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        if raw == self._last_raw:
            return
        current = torch.cuda.current_stream(self.device)
        if self._last is not None:
            current.wait_stream(self._last)
        self._last, self._last_raw = current, raw


class CudaGraph:
    """A recorded step; ``replay`` is CUDAGraph's own method, without a Python frame around it."""

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._pool = pool
        self.replay = graph.replay

    def release(self) -> None:
        """Destroy the graph. Its memory goes back to the pool when its tensors are gone."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self.replay = _replay_released
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
                    for _ in range(warmups):
                        step()
                    graph = self._capture(step, pool)
            finally:
                current.wait_stream(pool.stream)
        return CudaGraph(graph, pool)

    def _capture(self, step: Step, pool: CudaPool) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        try:
            step()
        except RuntimeError as error:
            self._abandon(graph, pool)
            raise CaptureError(f"record: the step failed: {error}") from error
        except BaseException:
            self._abandon(graph, pool)
            raise
        try:
            graph.capture_end()
        except RuntimeError as error:
            self._close_pool(pool)
            graph.reset()
            raise CaptureError(f"record: the step cannot be recorded: {error}") from error
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: CudaPool) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._close_pool(pool)
        graph.reset()

    def _close_pool(self, pool: CudaPool) -> None:
        # When ending the stream's capture fails, capture_end leaves the allocator routing into the
        # pool, and the next empty_cache or out-of-memory retry hits an internal assert.
        index = self.device.index
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, pool.handle)
            torch._C._cuda_releasePool(index, pool.handle)
