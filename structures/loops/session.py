"""A request's state with the graphs recorded on it, and how requests share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isclose
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..binding import PLAN, host_class
from ..capture import Graph, Watch, backend_for
from ..capture.watch import plain_attributes
from ..catalogue.attention import Attention
from ..catalogue.head import propose_head, read_embedding
from ..catalogue.layer_math import Families
from ..discover import FLOATS
from ..kv_format import KVCache
from ..weights import Copies
from .cache import EOS_SLOTS, StaticState
from .controls import ADJUSTED, DRAWN, GREEDY, Controls, way_of
from .decoder import DecoderSpec
from .prefill import Prefill
from .prefix import Prefixes
from .report import Reports
from .request import Request
from .step import Arena, BoundDecoder, Step
from .verify import Verifier

SLOT_GROUP = 256  # caches are whole groups of what prefill pads to and attention splits at


class LoopRefused(RuntimeError):
    """The model is in a state that the loop cannot run; the text says what."""


def token_table(model: nn.Module, spec: DecoderSpec) -> torch.Tensor:
    """The embedding ``[V, D]`` as it is now.

    Raises:
        LoopRefused: something else is in its place.
    """
    try:
        return spec.embedding.table(model.get_submodule(spec.form.base))
    except (AttributeError, KeyError):
        path = f"{spec.form.base}.{spec.form.embedding}"
        raise LoopRefused(f"{path} was an embedding and holds no table of its own now") from None


def decoder_device(model: nn.Module, spec: DecoderSpec) -> torch.device:
    """Where the decoder runs; weights that have a packed copy may be elsewhere."""
    return spec.head.norm.weight(model).device


@contextmanager
def plain_tensors(device: torch.device) -> Iterator[None]:
    """No grad, no autocast, and tensors that later calls may write whatever mode they are in."""
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


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

    def warm_up(self) -> None:
        """Record every step for every number of rows, and prompts that replay graphs.

        What the rows hold is lost.
        """
        self._last = ()
        self.prefixes.forget()
        self.pool.join()
        self.state.begin(max_new=0, eos=())
        _ = self.controls
        for rows in range(self.batch, 0, -1):  # the largest first: the others fit its memory
            for way in (ADJUSTED, DRAWN, GREEDY):
                self.advance(way, rows)
        self.prefill.warm_up(self.batch)
        self.state.begin(max_new=0, eos=())

    def is_recorded(self, key: tuple[object, ...]) -> bool:
        """Whether ``replay`` has a graph for this key."""
        return key in self._recorded

    @property
    def verifier(self) -> Verifier:
        """Verification of drafts of the first row."""
        if self._verifier is None:
            self._verifier = Verifier(self)
        return self._verifier

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
            rest = torch.tensor(prompt[match.length :], dtype=torch.int64, device="cpu")
            self.prefill.run(row, rest.to(self.state.tokens.device), match.length)
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
        checks = 0 if self._verifier is None else self._verifier.memory_bytes
        return self.state.memory_bytes + self._arena.memory_bytes + settings + checks


class Sessions:
    """Makes sessions, keeps the last two, and lets one request at a time have one.

    Requests of other threads wait. A request from inside another one (a streamer that generates)
    gets a session of its own, so that neither disturbs the other.
    """

    def __init__(
        self, model: nn.Module, spec: DecoderSpec, families: Families, kv_cache: KVCache = None
    ) -> None:
        from .. import kernels

        self.kv_cache = kv_cache
        self._model, self.spec, self._families = model, spec, families
        self._sampling = kernels.family("sampling")
        self._lock = threading.RLock()
        self._busy: set[int] = set()
        self._kept: dict[int, Session] = {}
        self._watch = Watch(model)
        self._generation = self._watch.generation
        self._kinds = {name: host_class(module) for name, module in model.named_modules()}
        self._attributes = self._read_attributes()
        self._buffers = [*model.buffers()]
        self._written = self._writes()
        self._fingerprint: tuple[int, list[int]] = (0, [])
        self._copies = Copies(model)

    @contextmanager
    def use(self, batch: int, max_len: int) -> Iterator[Session]:
        """A session of ``batch`` rows with room for at least ``max_len`` positions.

        Raises:
            LoopRefused: a hook, training mode, an adapter or another dtype, none of which the
                loop would honour.
        """
        with self._lock:
            if batch in self._busy:
                yield self._make(batch, max_len)
                return
            self._look_again()
            self._forget_other_weights()
            kept = self._kept.pop(batch, None)
            if kept is None or kept.max_len < max_len:
                del kept
                kept = self._make(batch, max_len)
            self._kept[batch] = kept  # the last one used is the last one given up
            for other in [b for b in self._kept if b not in self._busy and b != batch][:-1]:
                del self._kept[other]
            self._busy.add(batch)
            try:
                yield kept
            finally:
                self._busy.discard(batch)

    def _forget_other_weights(self) -> None:
        """Keys and values that other weights have made are no prefix of anything."""
        print_of = (id(vars(self._model).get(PLAN)), self._watch.versions())
        if print_of != self._fingerprint or self._untracked():
            for session in self._kept.values():
                session.prefixes.forget()
        self._fingerprint = print_of

    def _untracked(self) -> bool:
        """Whether a weight can change unseen: inference tensors count no writes."""
        return any(p.is_inference() for p in self._model.parameters())

    def _look_again(self) -> None:
        """Drop sessions whose addresses are stale; refuse a model that is another one now."""
        if self._writes() != self._written:  # rotary tables and factors are made from buffers
            self._watch.bump()
        if not self._copies.refresh():
            self._watch.bump()
        reason = self._watch.check() or self._other_head()
        if self._watch.generation != self._generation:
            self._kept.clear()
            self._buffers = [*self._model.buffers()]
            self._written = self._writes()
            self._copies = Copies(self._model)
            reason = reason or self._changed()
            if reason is None:
                self._generation = self._watch.generation
        if reason is not None:
            raise LoopRefused(reason)

    def _read_attributes(self) -> dict[str, Any]:
        """Plain attributes by path, and the fields of the configuration that masks follow.

        Those of the rotary are read again for every session.
        """
        form, found = self.spec.form, {}
        rotary = None if form.rotary is None else f"{form.base}.{form.rotary}"
        for name, module in self._model.named_modules():
            if name != rotary:
                for attribute, value in plain_attributes(module).items():
                    found[f"{name}.{attribute}" if name else attribute] = value
        config = getattr(self._model.get_submodule(form.base), "config", None)
        for field in sorted(Attention.config_reads | {"layer_types"}):
            found[f"config.{field}"] = getattr(config, field, None)
        return found

    def _writes(self) -> list[int]:
        """Counts of in-place writes to every buffer; 0 for inference tensors."""
        return [0 if b.is_inference() else b._version for b in self._buffers]

    def _other_head(self) -> str | None:
        """Why the configuration now says something else of the logits than the proof found."""
        head = self.spec.head
        if head not in propose_head(self._model, head.norm, getattr(self._model, "config", None)):
            return "the configuration gives the logits another scale or cap than was proven"
        return None

    def _changed(self) -> str | None:
        """What is no longer as it was when the loop was proven: an adapter, another dtype."""
        modules = dict(self._model.named_modules())
        for name, module in modules.items():
            if "forward" in vars(module):
                return f"{name or type(module).__name__} carries its own instance forward"
        for name, kind in self._kinds.items():
            now = modules.pop(name, None)
            if now is None or host_class(now) is not kind:
                found = "gone" if now is None else f"a {host_class(now).__name__}"
                return f"{name} was a {kind.__name__} when the loop was proven and is {found}"
        if modules:
            return f"{next(iter(modules))} was not there when the loop was proven"
        return self._other_numbers() or self._other_dtype()

    def _other_numbers(self) -> str | None:
        now, then = self._read_attributes(), self._attributes
        for name, proven in then.items():
            if now.get(name) != proven:
                return f"{name} was {proven!r} when the loop was proven and is {now.get(name)!r}"
        base = self._model.get_submodule(self.spec.form.base)
        factor = read_embedding(base, self.spec.form.embedding).scale
        if not isclose(factor, self.spec.embedding.scale, rel_tol=1e-2):
            return (
                f"the embedding's factor was {self.spec.embedding.scale} when the loop was proven "
                f"and is {factor}"
            )
        return None

    def _other_dtype(self) -> str | None:
        dtypes = {p.dtype for p in self._model.parameters()}
        if len(dtypes) > 1 or not dtypes <= set(FLOATS):
            return f"parameters are {', '.join(sorted(map(str, dtypes)))}"
        if torch.float32 in dtypes and any(p.is_cuda for p in self._model.parameters()):
            return "fp32 weights on CUDA; cast with model.to(torch.bfloat16)"
        return None

    @property
    def device(self) -> torch.device:
        """Where the decoder runs."""
        return decoder_device(self._model, self.spec)

    @property
    def vocabulary(self) -> int:
        """Logits of a position."""
        return self.spec.head.projection.bound(self._model).weight.shape[0]

    def clear(self) -> None:
        """Give caches and graphs back."""
        with self._lock:
            self._kept.clear()

    @property
    def memory_bytes(self) -> int:
        """Of the sessions kept."""
        return sum(session.memory_bytes for session in self._kept.values())

    def _make(self, batch: int, max_len: int) -> Session:
        try:
            return Session(
                self._model,
                self.spec,
                self._families,
                self._sampling,
                batch=batch,
                max_len=max_len,
                kv_cache=self.kv_cache,
            )
        except torch.OutOfMemoryError:
            raise LoopRefused(
                f"the device has no memory for a cache of {batch} rows of {max_len} positions"
            ) from None
