"""Time calls on cold inputs, as they are deployed: in CUDA graphs, alternatives in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

ROUNDS = 20

Call = Callable[..., object]


def time_interleaved(*alternatives: list[Call]) -> list[float]:
    """Median microseconds of one call of each alternative, replayed in turns.

    Args:
        alternatives: calls without arguments that become one graph; on different inputs, together
            larger than the L2 cache, where each call is to read from memory.
    """
    graphs = [record(calls) for calls in alternatives]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, samples in zip(graphs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3)
    return [
        statistics.median(samples) / len(calls)
        for samples, calls in zip(times, alternatives, strict=True)
    ]


def record(calls: list[Call]) -> torch.cuda.CUDAGraph:
    """A graph of all calls, replayed once."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph
