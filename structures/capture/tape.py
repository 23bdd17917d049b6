"""The rules of a CUDA graph on the CPU.

Recording runs the step under a dispatch mode and keeps every operation with the tensors and numbers
it got. A replay dispatches the same operations on the same storages and copies their results to the
recorded addresses: no Python of the step runs, so a number that changed, a tensor that was replaced
and a branch that would now go the other way are all as stale as on a GPU.

Three things are stricter than a GPU. Everything a graph produced is poisoned (NaN, or a number that
indexes nothing) after recording, before each replay, and whenever another graph of the pool runs. A
replay that would read memory freed since the recording raises StaleAddressError. Operations that
would wait for a device raise CaptureError.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .protocol import CaptureError, Graph, Pool, StaleAddressError, Step, check_warmups
from .storage import Aliases, poison, storage_of, whole
from .streams import is_recording, recording_thread
from .syncs import HostReads, refuse_unrecordable

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_permuted.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}


@dataclass
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, torch.Tensor]]  # position among the leaves of func's result, address

    def run(self) -> None:
        if self.func in _ALLOCATIONS:
            return
        result = self.func(*self.args, **self.kwargs)
        if self.results:
            leaves = tree_leaves(result)
            for position, address in self.results:
                address.copy_(leaves[position])


class _Recorder(TorchDispatchMode):
    def __init__(self, aliases: Aliases) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.inside: dict[int, torch.Tensor] = {}  # storages the step allocated, whole
        self.outside: dict[int, torch.Tensor] = {}  # storages that were there before
        self.constants: set[int] = set()
        self._saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._aliases = aliases

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        refuse_unrecordable(func, args, kwargs, "cpu")
        leaves, spec = tree_flatten((args, kwargs))
        frozen_leaves = [self._frozen(x) if isinstance(x, torch.Tensor) else x for x in leaves]
        given = {storage_of(x) for x in frozen_leaves if isinstance(x, torch.Tensor)}
        if func is _aten.lift_fresh.default:
            self.constants |= given
        writes = _written(func, args, kwargs)
        for tensor in writes:
            self._save(tensor)
        result = func(*args, **kwargs)
        fresh = self._fresh(result, given)
        if fresh or writes or not given:
            frozen_args, frozen_kwargs = tree_unflatten(frozen_leaves, spec)
            self.calls.append(_Call(func, frozen_args, frozen_kwargs, fresh))
        return result

    def _frozen(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CaptureError(
                f"record: tensors must be plain, got {type(tensor).__name__}, a subclass"
            )
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            raise CaptureError(
                f"record: tensors must be strided on cpu, got {tensor.layout} on {tensor.device}"
            )
        alias = self._aliases.alias(tensor)
        storage = storage_of(alias)
        if storage not in self.inside:
            self.outside.setdefault(storage, alias)
        return alias

    def _save(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage in self.inside or storage in self._saved:
            return
        every_byte = whole(tensor)
        self._saved[storage] = (every_byte, every_byte.clone())

    def _fresh(self, result: Any, given: set[int]) -> list[tuple[int, torch.Tensor]]:
        fresh = []
        for position, leaf in enumerate(tree_leaves(result)):
            if not isinstance(leaf, torch.Tensor) or storage_of(leaf) in given:
                continue
            alias = self._aliases.alias(leaf)
            self.inside.setdefault(storage_of(leaf), alias)
            fresh.append((position, alias))
        return fresh

    def restore(self) -> None:
        """Undo what the recorded run wrote to tensors that were there before."""
        for every_byte, content in self._saved.values():
            every_byte.copy_(content)
        self._saved.clear()


class TapeGraph:
    """A recorded step on the CPU.

    Attributes:
        memory_bytes: everything it has allocated, which it keeps until it is released.
    """

    def __init__(self, recorder: _Recorder, pool: TapePool) -> None:
        self._calls: list[_Call] | None = recorder.calls
        self._inside = recorder.inside
        self._outside = {
            storage: tensor
            for storage, tensor in recorder.outside.items()
            if storage not in recorder.constants
        }
        self._pool = pool
        self._aliases = recorder._aliases
        self.memory_bytes = sum(t.untyped_storage().nbytes() for t in self._inside.values())
        pool.graphs.add(self)

    def replay(self) -> None:
        """Run the recorded operations on the recorded addresses."""
        if self._calls is None:
            raise RuntimeError("replay: the graph must not be released, got a released graph")
        if is_recording():
            raise CaptureError("record: a step must not replay another graph, but it did")
        self.check_addresses()
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView():
            self._pool.poison(keep=self._outside)
            for call in self._calls:
                call.run()

    def check_addresses(self) -> None:
        """Raise StaleAddressError when the owner of something this graph reads has freed it."""
        for storage, tensor in self._outside.items():
            if not self._aliases.has_owner(storage):
                raise StaleAddressError(
                    "replay: everything the step reads must stay alive, but a tensor of shape "
                    f"{tuple(tensor.shape)} and {tensor.dtype} was freed after recording"
                )

    def release(self) -> None:
        """Forget the recorded operations and their memory."""
        self._calls = None
        self._inside, self._outside = {}, {}
        self._pool.graphs.discard(self)

    def poison(self, keep: Iterable[int]) -> None:
        """Overwrite everything this graph allocated, except the storages in ``keep``."""
        for storage, tensor in self._inside.items():
            if storage not in keep:
                poison(tensor)


class TapePool:
    """The graphs that would share memory on a GPU."""

    def __init__(self) -> None:
        self.graphs: WeakSet[TapeGraph] = WeakSet()
        self.recorded = 0

    def join(self) -> None:
        """Nothing to order: the CPU has one stream."""

    def memory(self) -> AbstractContextManager[object]:
        """Ordinary memory."""
        return nullcontext()

    @property
    def unshared_bytes(self) -> int:
        """What the recorded operations wrote to memory of their own."""
        return sum(graph.memory_bytes for graph in self.graphs)

    def poison(self, keep: Iterable[int]) -> None:
        """Overwrite what the graphs of this pool produced, as another graph's run may."""
        for graph in self.graphs:
            graph.poison(keep)


class TapeBackend:
    """Records on the CPU; see the module's text for what is stricter than on a GPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._aliases = Aliases()

    def new_pool(self) -> TapePool:
        """A new set of graphs that poison each other."""
        return TapePool()

    def record(self, step: Step, *, warmups: int = 1, pool: Pool | None = None) -> Graph:
        """See :meth:`Backend.record`."""
        check_warmups(warmups)
        if pool is None:
            pool = self.new_pool()
        if not isinstance(pool, TapePool):
            raise TypeError(f"record: pool must come from this backend, got {type(pool).__name__}")
        if is_recording():
            raise CaptureError("record: a step must not record another graph, but it did")
        with torch.no_grad(), recording_thread():
            for _ in range(warmups):
                step()
            random_state = torch.get_rng_state()
            recorder = _Recorder(self._aliases)
            try:
                with HostReads("cpu"), recorder:
                    step()
            except CaptureError:
                raise
            except RuntimeError as error:
                raise CaptureError(
                    f"record: the step failed while it was recorded: {error}"
                ) from error
            finally:
                torch.set_rng_state(random_state)
                with torch._C._AutoDispatchBelowADInplaceOrView():
                    recorder.restore()
            graph = TapeGraph(recorder, pool)
            try:
                graph.check_addresses()
            except StaleAddressError as error:
                graph.release()
                raise CaptureError(
                    "record: the step must not read tensors made from host data, " + str(error)
                ) from error
            with torch._C._AutoDispatchBelowADInplaceOrView():
                pool.poison(keep=())
        pool.recorded += 1
        return graph


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]
    return written
