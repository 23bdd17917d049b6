"""One recorded call: static inputs, a graph, and outputs in the host's own type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .externals import Externals
from .protocol import Backend, Graph, Pool
from .signature import NotCapturableError
from .trees import flatten

Call = Callable[[list[torch.Tensor]], Any]
Take = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class RecordedCall:
    """Replays one call on other data.

    Args:
        backend, pool: where to record.
        call: runs the host's forward on the tensors it is given, in the order of the key.
        tensors: of the call that is recorded; only their content is copied.
        owned: ``data_ptr`` of the memory of the module's own parameters and buffers.

    Raises:
        NotCapturableError: the call writes an argument in place, or an argument's memory overlaps.
        CaptureError: see ``Backend.record``.
        NotATreeError: the output's type is unknown.
    """

    def __init__(
        self,
        backend: Backend,
        pool: Pool,
        call: Call,
        tensors: list[torch.Tensor],
        owned: set[int],
    ) -> None:
        self.replays = 0
        pool.join()
        with pool.memory():
            self._static = _static_inputs(tensors)
        self._copy_in(tensors)
        outputs: list[Any] = [None]

        externals = Externals(owned | {s.untyped_storage().data_ptr() for s in self._static})
        runs: list[AbstractContextManager[Any]] = [
            externals,
            nullcontext(),
        ]  # of the warm-up and of the recording

        def step() -> None:
            outputs[0] = None
            with runs.pop(0):
                outputs[0] = call(self._static)

        versions = [s._version for s in self._static]
        self._graph: Graph = backend.record(step, warmups=1, pool=pool)
        self._kept = externals.take()
        written = [i for i, s in enumerate(self._static) if s._version != versions[i]]
        if written:
            self._graph.release()
            raise NotCapturableError(f"the call writes its tensor argument {written[0]} in place")
        self.leaves, self._build = flatten(outputs[0])
        self._sources, self._takes = _takes(self.leaves, self._static, owned)

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """Copy ``tensors`` in, replay, and return clones."""
        self._copy_in(tensors)
        self._graph.replay()
        self.replays += 1
        made = [source.clone() for source in self._sources]
        made += tensors
        return self._build([take(made) for take in self._takes])

    def release(self) -> None:
        """Give the graph and its tensors back."""
        self._graph.release()
        self._static, self.leaves, self._sources, self._kept = [], [], [], []

    def _copy_in(self, tensors: list[torch.Tensor]) -> None:
        for static, tensor in zip(self._static, tensors, strict=True):
            if 0 in static.stride() and static.numel() > 1:
                static, tensor = _once(static), _once(tensor)
            static.copy_(tensor)


def _static_inputs(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Buffers with the shapes and strides of ``tensors``; one tensor passed twice gets one."""
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) in made:
            continue
        if tensor.is_contiguous():
            static = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        else:
            _check_overlap(tensor)
            static = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        made[id(tensor)] = static
    return [made[id(tensor)] for tensor in tensors]


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without its expanded dimensions, so that each address appears once."""
    sizes = [
        1 if stride == 0 else size
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    return tensor.as_strided(sizes, tensor.stride())


def _check_overlap(tensor: torch.Tensor) -> None:
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride < reach:
            raise NotCapturableError(
                f"an argument of shape {tuple(tensor.shape)} and strides {tensor.stride()} "
                "overlaps itself"
            )
        reach = stride * (size - 1) + reach


def _takes(
    leaves: list[torch.Tensor], static: list[torch.Tensor], owned: set[int]
) -> tuple[list[torch.Tensor], list[Take]]:
    """What to clone after a replay, and how each output is taken from the clones and inputs.

    An output that is an argument, or a view of one, is taken from the caller's own tensor, and one
    that lives in the module's own memory is that tensor: as the host would return it.
    """
    clones: dict[int, int] = {}
    sources: list[torch.Tensor] = []
    found: list[tuple[str, Any]] = []
    places = {s.untyped_storage().data_ptr(): i for i, s in enumerate(static) if s.numel()}
    for leaf in leaves:
        memory = leaf.untyped_storage().data_ptr()
        argument = places.get(memory)
        if argument is not None and _same_form(leaf, static[argument]):
            found.append(("argument", (argument, leaf)))
        elif memory in owned and leaf.numel():
            found.append(("own", leaf))
        else:
            if id(leaf) not in clones:
                clones[id(leaf)] = len(sources)
                sources.append(leaf)
            found.append(("clone", clones[id(leaf)]))
    return sources, [_take(kind, what, len(sources), static) for kind, what in found]


def _same_form(leaf: torch.Tensor, static: torch.Tensor) -> bool:
    """Whether ``leaf`` is reachable from ``static`` by sizes and strides alone."""
    return (
        0 not in static.stride()
        and leaf.dtype is static.dtype
        and leaf.is_conj() == static.is_conj()
        and leaf.is_neg() == static.is_neg()
    )


def _take(kind: str, what: Any, count: int, static: list[torch.Tensor]) -> Take:
    if kind == "clone":
        return lambda made: made[what]
    if kind == "own":
        own: torch.Tensor = what
        return lambda made: own
    argument: int = what[0]
    leaf: torch.Tensor = what[1]
    position = count + argument
    source = static[argument]
    if leaf is source:
        return lambda made: made[position]
    size, stride = leaf.size(), leaf.stride()
    offset = leaf.storage_offset() - source.storage_offset()

    def view(made: Sequence[torch.Tensor]) -> torch.Tensor:
        tensor = made[position]
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)

    return view
