"""A module's forward that replays graphs where it can and calls the host where it cannot."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .backends import backend_for
from .context import observed, settings, uncached_autocast
from .graph_cache import GraphCache
from .protocol import Backend, CaptureError, Pool
from .recorded_call import RecordedCall
from .signature import NotCapturableError, OtherDeviceError, Signature, carries_state, read
from .trees import NotATreeError, flatten
from .watch import Watch

MAX_OUTPUT_BYTES = 256 * 1024 * 1024  # a call with more to return is not bound by launches
_REMEMBERED_KEYS = 64
# The call has just succeeded eagerly: whatever goes wrong now is a reason not to capture it.
_RECORDING_ERRORS = (
    NotCapturableError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


@dataclass
class CaptureStats:
    """What happened to the calls of one forward.

    Attributes:
        captures: graphs recorded.
        replays: calls answered by a graph.
        evictions: graphs released to make room.
        invalidations: times that all graphs were dropped because the module had changed.
        fallbacks: eager calls, by reason.
    """

    captures: int = 0
    replays: int = 0
    evictions: int = 0
    invalidations: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """The counters in words, one line for graphs and one for each fallback reason."""
        graphs = (
            f"graphs: {self.captures} recorded, {self.replays} replays, {self.evictions} evicted, "
            f"{self.invalidations} times invalidated"
        )
        return [graphs, *(f"eager: {n} calls, {why}" for why, n in self.fallbacks.most_common())]


class CapturedForward:
    """Calls ``forward``, through a graph whenever that changes nothing but the time.

    A call is captured when no argument carries state, it creates none, every tensor argument is on
    the module's device, and everything else is an immutable constant. The first such call runs
    eagerly and is then recorded; later ones with the same key copy their tensors in, replay, and
    return clones in the host's own output type, without grad. All other calls run ``forward`` as
    it is, and ``stats.fallbacks`` says why.

    Nothing is captured in training mode, with forward hooks, under torch.compile, inside another
    capture, or under a dispatch mode. Captured calls are serialised by a lock.

    Args:
        module: whose parameters the graphs read; only weakly part of the key, see ``Watch``.
        forward: what to call, bound.
        watch: shared with other graphs of the same module; a new one when None.
        device: where the graphs run; that of the module's parameters when None.
        signature: whose parameter names and defaults the calls have; ``forward`` when None.
        max_graphs: at least 1; the least recently used graph is released for a new one.
        max_output_bytes: calls that return more run eagerly.

    Raises:
        ValueError: ``max_graphs`` below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        *,
        watch: Watch | None = None,
        device: torch.device | None = None,
        signature: Callable[..., Any] | None = None,
        max_graphs: int = 8,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        self.stats = CaptureStats()
        self.watch = watch if watch is not None else Watch(module)
        self._module = module
        self._forward = forward
        self._signature = Signature(signature if signature is not None else forward)
        self._given_device = device
        self._max_output_bytes = max_output_bytes
        self._lock = threading.RLock()
        self._graphs: GraphCache[RecordedCall] = GraphCache(max_graphs)
        self._refused: OrderedDict[Hashable, str] = OrderedDict()
        self._seen_once: OrderedDict[Hashable, None] = OrderedDict()
        self._pool: Pool | None = None
        self._unused_evictions = 0
        self._settle()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as ``forward``."""
        if torch.compiler.is_compiling() or self._module.training or observed(self._device.type):
            return self._forward(*args, **kwargs)
        named = self._signature.named(args, kwargs)
        grad = torch.is_grad_enabled()
        try:
            try:
                key, tensors = read(named, self._device, grad=grad)
            except OtherDeviceError:
                self.watch.check()
                if not self._renew():
                    raise
                key, tensors = read(named, self._device, grad=grad)
        except NotCapturableError as error:
            return self._eager(str(error), args, kwargs)
        with self._lock:
            reason = self.watch.check()
            self._renew()
            if reason is not None:
                return self._eager(reason, args, kwargs)
            key = (settings(self._device.type), key)
            return self._captured(key, named, tensors, args, kwargs)

    def release(self) -> None:
        """Drop every graph and what was learned about keys. The next call starts afresh."""
        with self._lock:
            self._graphs.clear()
            self._refused.clear()
            self._seen_once.clear()
            self._pool = None

    def _captured(
        self,
        key: Hashable,
        named: list[tuple[str, Any]],
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        recorded = self._graphs.get(key)
        if recorded is not None:
            self.stats.replays += 1
            self._pool_of().join()
            return recorded(tensors)
        reason = self._refused.get(key)
        if self._backend is None:
            reason = "the module's tensors are on several devices, or on one that has no graphs"
        if reason is None and not self._worth_recording(key):
            reason = "the call's shapes were new, and earlier graphs were not used again"
        if reason is not None:
            return self._eager(reason, args, kwargs)
        return self._first(key, named, tensors, args, kwargs)

    def _first(
        self,
        key: Hashable,
        named: list[tuple[str, Any]],
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        before = self.watch.versions()
        result = self.watch.apart_from_own_writes(self._forward, *args, **kwargs)
        try:
            if self.watch.versions() != before:
                raise NotCapturableError("the call writes the module's own parameters or buffers")
            leaves, build = _output(result)
            size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
            if size > self._max_output_bytes:
                raise NotCapturableError(
                    f"the call returns {size} bytes, more than {self._max_output_bytes}"
                )
            recorded = self._record(named, tensors, args, kwargs)
            if [_form(leaf) for leaf in recorded.leaves] != [_form(leaf) for leaf in leaves]:
                recorded.release()
                raise NotCapturableError(
                    "the recorded call returned other shapes than the eager one"
                )
        except _RECORDING_ERRORS as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, (NotCapturableError, CaptureError)):
                reason = str(error).splitlines()[0]
            _remember(self._refused, key, reason)
            self.stats.fallbacks[reason] += 1
            return result
        self.stats.captures += 1
        for evicted in self._graphs.put(key, recorded):
            self.stats.evictions += 1
            self._unused_evictions += not evicted.replays
        return build(_without_grad(leaves))

    def _record(
        self,
        named: list[tuple[str, Any]],
        tensors: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RecordedCall:
        assert self._backend is not None
        _, build = flatten([value for _, value in named])
        call = self._signature.rebuilder(named, args, kwargs)

        def run(static: list[torch.Tensor]) -> Any:
            static_args, static_kwargs = call(build(static))
            return self._forward(*static_args, **static_kwargs)

        device = self._backend.device
        devices = [device.index] if device.type == "cuda" else []
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            uncached_autocast(),
        ):
            return RecordedCall(self._backend, self._pool_of(), run, tensors, self.watch.storages())

    def _worth_recording(self, key: Hashable) -> bool:
        """Whether graphs get used again; if not, a key is recorded when it comes a second time."""
        if self._unused_evictions <= self._graphs.capacity or key in self._seen_once:
            return True
        _remember(self._seen_once, key, None)
        return False

    def _eager(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.stats.fallbacks[reason] += 1
        return self._forward(*args, **kwargs)

    def _renew(self) -> bool:
        """Drop every graph when the module has changed since they were recorded."""
        with self._lock:
            if self.watch.generation == self._generation:
                return False
            if len(self._graphs):
                self.stats.invalidations += 1
            self.release()
            self._settle()
            return True

    def _settle(self) -> None:
        self._generation = self.watch.generation
        device = self._given_device if self._given_device is not None else self.watch.device
        self._backend: Backend | None = None
        self._pool = None
        self._device = torch.device("cpu")
        if device is not None and device.type in ("cuda", "cpu"):
            self._backend = backend_for(device)
            self._device = self._backend.device

    def _pool_of(self) -> Pool:
        pool = self._pool
        if pool is None:
            assert self._backend is not None
            pool = self._pool = self._backend.new_pool()
        return pool


def _output(result: Any) -> Any:
    try:
        return flatten(result)
    except NotATreeError as error:
        name = type(error.value).__name__
        if carries_state(error.value):
            raise NotCapturableError(
                f"the call creates state ({name}); use_cache=False makes it capturable"
            ) from error
        raise NotCapturableError(
            f"the call returns {name}, which is no container of tensors"
        ) from error


def _without_grad(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """As a replay returns them; parameters stay themselves, and one tensor stays one."""
    detached = {id(x): x.detach() for x in leaves if x.requires_grad and not x.is_leaf}
    return [detached.get(id(x), x) for x in leaves]


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype


def _remember(keys: OrderedDict[Hashable, Any], key: Hashable, value: Any) -> None:
    keys[key] = value
    while len(keys) > _REMEMBERED_KEYS:
        keys.popitem(last=False)
