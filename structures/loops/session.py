"""A request's state with the graphs recorded on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import nn

from ..capture import Graph, backend_for
from ..catalogue.layer_math import Families
from ..kv_format import KVCache
from .cache import EOS_SLOTS, StaticState
from .controls import ADJUSTED, DRAWN, GREEDY, Controls, way_of
from .decoder import DecoderSpec
from .prefill import Prefill
from .prefix import Prefixes
from .repeats import Repeats
from .report import Reports
from .request import Request
from .staging import on_device
from .step import Arena, BoundDecoder, Step
from .verify import Verifier

SLOT_GROUP = 256  # caches are whole groups of what prefill pads to and attention splits at


class Session:
    """Static buffers for B rows of up to ``max_len`` positions, and graphs that work on them."""

    def __init__(
        self,
        model: nn.Module,
        spec: DecoderSpec,
        families: Families,
        sampling: ModuleType,
        *,
        batch: int,
        max_len: int,
        kv_cache: KVCache = None,
    ) -> None:
        slots = -(-max_len // SLOT_GROUP) * SLOT_GROUP
        decoder = self.decoder = BoundDecoder.of(model, spec, max_len=max_len, slots=slots)
        kv = [(layer.kv_heads, layer.spec.attention.head_dim) for layer in decoder.layers]
        self.batch, self.max_len, self._sampling = batch, max_len, sampling
        self.state = StaticState(kv, batch=batch, slots=slots, like=decoder.like, kv_cache=kv_cache)
        self._arena = Arena(decoder.like, batch)
        self.make_step = partial(Step, families, sampling, decoder)
        self.step = self.make_step(self.state, arena=self._arena)
        self._steps = {batch: self.step}
        self.reports = Reports(self.state.report, batch)
        self._backend = backend_for(decoder.like.device)
        self.pool = self._backend.new_pool()
        self.prefill = Prefill(self.step, self._backend, self.pool)
        self.prefixes = Prefixes(batch)
        self._last: tuple[tuple[int, ...], ...] = ()
        self._graphs: dict[str, Graph] = {}
        self._recorded: dict[tuple[object, ...], Graph] = {}
        self._verifier: Verifier | None = None
        self._repeats: Repeats | None = None
        if kv_cache is not None:
            self.prefill.measure_scales(max_len)

    def graph(self, name: str) -> Graph:
        """The recording of a method of the step, such as ``greedy``; get it before ``fill``."""
        if name not in self._graphs:
            if name in (DRAWN, ADJUSTED):
                _ = self.controls
            self._last = ()
            self.prefixes.forget()  # the warm-up writes the first slot of every row
            self.pool.join()
            self.state.begin(max_new=1, eos=())
            step = getattr(self.step, name)
            self._graphs[name] = self._backend.record(step, warmups=1, pool=self.pool)
        return self._graphs[name]

    @property
    def controls(self) -> Controls:
        """Sampling settings by row; made when they are first wanted."""
        if self.step.controls is None:
            columns = self.step.logits.shape[1]
            made = Controls(self._sampling, self.batch, columns, self.state.lengths)
            for rows, step in self._steps.items():
                step.controls = made.rows_of(slice(0, rows))
        found = self.step.controls
        assert found is not None
        return found

    def step_of(self, rows: int) -> Step:
        """The step of the first ``rows`` rows."""
        if rows not in self._steps:
            made = self.make_step(self.state.first(rows), arena=self._arena)
            if self.step.controls is not None:
                made.controls = self.step.controls.rows_of(slice(0, rows))
            self._steps[rows] = made
        return self._steps[rows]

    def advance(self, name: str, rows: int) -> None:
        """One ``step.greedy`` or the like of the first ``rows`` rows."""
        self.replay((name, rows), lambda: getattr(self.step_of(rows), name)())

    def replay(self, key: tuple[object, ...], work: Callable[[], None]) -> None:
        """``work``, recorded the first time.

        That time it runs as it is, so that a recording in between disturbs no row.
        """
        graph = self._recorded.get(key)
        if graph is not None:
            graph.replay()
            return
        work()
        self._recorded[key] = self._backend.record(work, warmups=0, pool=self.pool)

    def warm_up(self, *, repeats: bool = False) -> None:
        """Record every step for every number of rows, and prompts that replay graphs.

        With ``repeats`` also verifications of the first row. What the rows hold is lost.
        """
        self._last = ()
        self.prefixes.forget()
        self.pool.join()
        self.state.begin(max_new=0, eos=())
        _ = self.controls
        for rows in range(self.batch, 0, -1):  # the largest first: the others fit its memory
            for way in (ADJUSTED, DRAWN, GREEDY):
                self.advance(way, rows)
        if repeats:
            self.repeats.warm_up()
        self.prefill.warm_up(self.batch)
        self.state.begin(max_new=0, eos=())

    def drop_recordings(self, name: str) -> None:
        """Give back what ``replay`` recorded under keys that begin with ``name``."""
        for key in [key for key in self._recorded if key[0] == name]:
            self._recorded.pop(key).release()

    def is_recorded(self, key: tuple[object, ...]) -> bool:
        """Whether ``replay`` has a graph for this key."""
        return key in self._recorded

    @property
    def verifier(self) -> Verifier:
        """Verification of drafts of the first row."""
        if self._verifier is None:
            self._verifier = Verifier(self)
        return self._verifier

    @property
    def repeats(self) -> Repeats:
        """Drafts for the first row out of its own text."""
        if self._repeats is None:
            self._repeats = Repeats(self)
        return self._repeats

    def begin_row(self, row: int, *, length: int, max_new: int) -> None:
        """``row`` holds a prompt of ``length`` tokens, whose logits are the step's."""
        state = self.state
        # Choosing the first token advances by one: a token is stored when it is read.
        state.lengths[row].fill_(length - 1)
        state.counts[row].zero_()
        state.max_new[row].fill_(max_new)
        state.finished[row].zero_()

    def choose_row(self, row: int, way: str) -> None:
        """The first token of ``row``, from its logits."""
        self.step.draw(way, slice(row, row + 1))

    def copy_positions(self, source: int, target: int, length: int) -> None:
        """A row's first ``length`` keys and values to another place."""
        state = self.state
        for cache in (*state.k, *state.v):
            cache[target, :, :length].copy_(cache[source, :, :length])

    def move_row(self, source: int, target: int, length: int) -> None:
        """All that a running row of ``length`` positions has; it takes the target's place.

        What the target holds for later goes the other way.
        """
        state, kept = self.state, self.prefixes.length(target)
        if kept == 0:
            self.copy_positions(source, target, length)
        else:
            for cache in (*state.k, *state.v):
                aside = cache[target, :, :kept].clone()
                cache[target, :, :length].copy_(cache[source, :, :length])
                cache[source, :, :kept].copy_(aside)
        for values in self._by_row():
            values[target].copy_(values[source])
        self.prefixes.swap(source, target)

    def _by_row(self) -> list[torch.Tensor]:
        controls = self.step.controls
        return [*self.state.by_row(), *([] if controls is None else controls.by_row())]

    def fill(self, request: Request) -> None:
        """Prompts into the cache; logits of each row's last token into the step's logits."""
        state, way = self.state, way_of(request.sampling)
        self._note_last()
        self.pool.join()
        state.begin(max_new=request.max_new, eos=request.eos)
        self.prefixes.drop(range(request.batch, self.batch))  # idle rows write their first slot
        prompts = [tuple(ids.tolist()) for ids in request.rows()] if request.reuse else []
        for row, ids in enumerate(request.rows()):
            if row % request.copies:
                self.copy_positions(row - 1, row, request.lengths[row])
                self.step.logits[row].copy_(self.step.logits[row - 1])
            elif request.reuse:
                self._fill_rest(row, prompts[row])
            else:
                self.prefixes.drop([row])
                self.prefill.run(row, ids.to(state.tokens.device))
            if way != GREEDY or request.drafts:
                self.controls.set_row(
                    row,
                    request.sampling,
                    seed=request.sampling.seed_of(row, request.seed),
                    stops=request.eos[:EOS_SLOTS],
                    prompt=request.seen(row).to(state.tokens.device),
                )
        for row, length in enumerate(request.lengths):  # see begin_row
            state.lengths[row].fill_(length - 1)
        state.finished[request.batch :].fill_(True)
        self._last = tuple(prompts)

    def _fill_rest(self, row: int, prompt: tuple[int, ...]) -> None:
        """What of a prompt the row does not hold yet."""
        match = self.prefixes.match(prompt, [row])
        logits = self.step.logits[row]
        if match.logits is None:
            self.prefixes.drop([row])
            rest = on_device(prompt[match.length :], torch.int64, self.state.tokens.device)
            self.prefill.run(row, rest, match.length)
            self.prefixes.hold(row, prompt, prompt=len(prompt), logits=logits.clone())
            return
        if match.source != row:
            self.copy_positions(match.source, row, match.length)
        logits.copy_(match.logits)
        self.prefixes.hold(row, prompt, prompt=len(prompt), logits=match.logits)

    def _note_last(self) -> None:
        """What the rows of the request before hold: its prompts, and tokens that were read."""
        last, self._last = self._last, ()
        if not last:
            return
        counts = self.state.counts.tolist()
        for row, prompt in enumerate(last):
            read = self.state.tokens[row, : max(counts[row] - 1, 0)].tolist()
            self.prefixes.hold(row, (*prompt, *read))

    @property
    def memory_bytes(self) -> int:
        """Caches and buffers; what graphs own beside them is not counted."""
        controls = self.step.controls
        settings = 0 if controls is None else controls.memory_bytes
        drafting = (self._verifier, self._repeats)
        checks = sum(part.memory_bytes for part in drafting if part is not None)
        return self.state.memory_bytes + self._arena.memory_bytes + settings + checks
