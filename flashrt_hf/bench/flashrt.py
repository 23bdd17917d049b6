"""FlashRT as a runner, and what its start and its host side cost.

``forced_steps`` and ``host_us_per_step`` look inside the loop: what they measure is not public.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import models, precisions, timing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flash_rt import structures
    from flash_rt.structures.loops.session import Session


class FlashRTRunner:
    """``structures.decode_loop`` behind the interface of the peers."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache_tokens: int,
        rows: int = 1,
        name: str = "flashrt",
        kv_cache: Literal["fp8"] | None = None,
        reuse_prefix: bool = False,
    ) -> None:
        from flash_rt import structures

        self.name = name
        self._reuse_prefix = reuse_prefix
        self.loop = structures.decode_loop(
            model, max_len=cache_tokens, batch_size=rows, kv_cache=kv_cache
        )

    def generate(self, ids: torch.Tensor, new_tokens: int) -> torch.Tensor:
        """See ``peers.Runner.generate``."""
        out: torch.Tensor = self.loop.generate(
            ids, max_new_tokens=new_tokens, eos_token_id=(), reuse_prefix=self._reuse_prefix
        )
        return out[:, ids.shape[1] :]

    def _session(self) -> AbstractContextManager[Session]:
        """The loop's buffers and graphs, for as long as the block lasts."""
        return self.loop._sessions.use(self.loop.batch_size, self.loop.max_len)

    @torch.no_grad()
    def forced_steps(self, ids: torch.Tensor, continuation: torch.Tensor) -> Iterator[torch.Tensor]:
        """See ``peers.Runner.forced_steps``: replays of the captured step, without its choice."""
        from flash_rt.structures.loops.request import Request

        steps = continuation.shape[1]
        lengths = (ids.shape[1],) * ids.shape[0]
        request = Request(ids, lengths, max_new=steps + 1, eos=(), pad=0)
        rows = ids.shape[0]
        with self._session() as session:
            graph = session.graph("forward")
            session.fill(request)
            yield session.step.logits[:rows]
            for index in range(steps):
                session.state.next_ids[:rows].copy_(continuation[:, index])
                session.state.lengths.add_(1)
                graph.replay()
                yield session.step.logits[:rows]


@dataclasses.dataclass(frozen=True)
class Started:
    """An attached model with its loop, and what it cost to get there."""

    plan: structures.Plan
    runner: FlashRTRunner
    costs: dict[str, Any]


def start(
    model: PreTrainedModel,
    ids: torch.Tensor,
    *,
    cache_tokens: int,
    precision: str = precisions.PLAIN,
    min_cosine: float | None = None,
) -> Started:
    """Attach, make the loop and generate one token; measure time and peak memory on the way.

    What is on the device beside the model's weights when this is called does not count.
    """
    begun = time.perf_counter()
    from flash_rt import structures  # noqa: F401

    imported = time.perf_counter()
    cuda, others = ids.is_cuda, 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = max(0, torch.cuda.memory_allocated() - models.parameter_bytes(model))
    marks = [time.perf_counter()]
    plan = precisions.attach(model, precision, min_cosine=min_cosine)
    marks.append(time.perf_counter())
    name = precisions.entry_name(precision)
    runner = FlashRTRunner(model, cache_tokens=cache_tokens, name=name)
    marks.append(time.perf_counter())
    runner.generate(ids, 1)
    timing.synchronize(ids.device)
    marks.append(time.perf_counter())
    costs: dict[str, Any] = dict(
        import_s=imported - begun,
        attach_s=marks[1] - marks[0],
        loop_s=marks[2] - marks[1],
        first_token_s=marks[3] - marks[2],
        total_s=marks[3] - marks[0],
        bound_regions=len(plan.bound()),
        regions=len(plan.decisions),
    )
    if cuda:
        row = models.traffic(model).cache_bytes_per_position
        packed = 0 if plan.packing is None else plan.packing.memory_bytes
        needed = models.parameter_bytes(model) + packed + cache_tokens * row
        peak = torch.cuda.max_memory_allocated() - others
        costs |= dict(
            weights_and_cache_bytes=needed,
            peak_bytes=peak,
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            peak_ratio=peak / needed,
            peak_beyond_mb=(peak - needed) / 2**20,
        )
    return Started(plan, runner, costs)


def host_us_per_step(
    runner: FlashRTRunner, ids: torch.Tensor, new_tokens: int, *, rounds: int = 7
) -> float:
    """Microseconds of host time an iteration of the loop, its replay replaced by a no-op.

    The median over ``rounds`` of ``(time(N) - time(1)) / (N - 1)``.
    """
    with runner._session() as session:
        graph: Any = session.graph("greedy")
    kept = graph.replay
    graph.replay = _no_replay
    try:
        runner.generate(ids, new_tokens)
        found = []
        for _ in range(rounds):
            one = timing.wall_ms(lambda: runner.generate(ids, 1), ids.device)
            whole = timing.wall_ms(lambda: runner.generate(ids, new_tokens), ids.device)
            found.append((whole - one) / (new_tokens - 1) * 1e3)
    finally:
        graph.replay = kept
    return statistics.median(found)


def _no_replay() -> None:
    return None
