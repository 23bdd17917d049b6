"""Who has a session when, and whether the model is still the one that it was made for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import isclose
from typing import Any

import torch
from torch import nn

from ..binding import PLAN, host_class
from ..capture import Watch
from ..capture.watch import plain_attributes
from ..catalogue.attention import Attention
from ..catalogue.head import propose_head, read_embedding
from ..catalogue.layer_math import Families
from ..discover import FLOATS
from ..kv_format import KVCache
from ..weights import Copies
from .decoder import DecoderSpec
from .session import Session


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
        return any(t.is_inference() for t in self._watch.tensors)

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

    def keeps(self, session: Session) -> bool:
        """Whether a later request may get this one."""
        return any(kept is session for kept in self._kept.values())

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
