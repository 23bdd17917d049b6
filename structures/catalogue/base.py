"""The structure protocol, and how to add a structure.

A structure is one file in this folder: a kind of region that FlashRT can execute. It has four
parts, in the order in which they are used:

1. ``propose(region, survey)`` looks at the *form* of a module, never at a model's name: its
   children, parameter shapes, activation, signature. It returns ``None`` (not this kind), a
   ``Refusal`` (this kind, but a rule forbids it: say rule and value), a *spec*, or a tuple of
   specs to try in this order. A wide structure asks ``survey.find(region.child("mlp"), "mlp")``
   for the proven spec of a part.
2. The spec is a frozen dataclass of ``Spec``: scalars read from the host (eps, activation,
   multipliers) and the *names* of children and parameters. It holds no module and no tensor, so
   equal specs mean equal code, and one bound class serves all layers of a model.
3. ``reference(spec, module, *args, dtype=..., **kwargs)`` computes the region in plain torch in
   ``dtype`` (fp32 or fp64) from the module's own parameters. It is what the spec *means*.
4. ``bind(spec)`` returns ``fast(self, *args, **kwargs)``, which runs the kernels and finds every
   parameter through ``self``: linear weights through ``bound`` of their spec, which is the packed
   copy where there is one (``weights`` names them). It may return ``NotImplemented`` for a call
   that it does not cover; the host's own forward then answers.

``flash_rt.structures.prove`` does the rest. *Meaning*, once per kind: on a copy with redrawn
parameters, the host's forward, ``reference`` and the bound forward must agree over ``probes``.
*Numbers*, per instance: on the real weights the bound forward's error against ``reference`` is at
most twice the host's own. A proposal may therefore be bold: what is wrong is Refused with the
measured difference.

Every scalar attribute of the proposed module and of the modules inside it must be named in
``reads`` (the spec carries it) or ``passive`` (it cannot change the result); any other is a
refusal.

To add one: write the file, add the instance to ``CATALOGUE`` in ``__init__.py`` (widest first)
and a test in ``tests/structures``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from ..products import MAX_FUSED_ROWS as MAX_FUSED_ROWS
from ..region import Region

Fast = Callable[..., Any]

PROOF_WIDTH = 128  # columns that a proof of meaning needs

# Attributes that describe sizes, places or training, and never the result of an eval forward.
PASSIVE = frozenset(
    {
        *("hidden_size", "intermediate_size", "hidden_dim", "dim", "inner_dim", "embed_dim"),
        *("in_features", "out_features", "normalized_shape", "elementwise_affine", "nx", "nf"),
        *("gradient_checkpointing", "layer_idx", "layer_type"),
    }
)
# Fields of a config that choose code paths of the host, all of which mean the same.
CONFIG_PASSIVE = frozenset({"_attn_implementation", "_attn_implementation_internal"})


@dataclass(frozen=True)
class Spec:
    """Base of all specs: hashable scalars and names, nothing that belongs to one instance."""


@dataclass(frozen=True)
class Part:
    """A linear weight of a region, for its packed copy.

    Attributes:
        path: of the module that owns it, from the region.
        transposed: it is stored ``[K, N]``.
        cuts: rows at which kernels read only a part of it.
    """

    path: str
    transposed: bool = False
    cuts: tuple[int, ...] = ()


Groups = tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Refusal:
    """A region has a structure's form, but ``reason`` (rule and value) forbids binding it."""

    reason: str


class Guess(tuple[Spec, ...]):
    """Specs from a form that other kinds of region share: when all fail, no refusal is reported."""


@dataclass(frozen=True)
class Found:
    """A region's structure with the spec whose meaning is proven."""

    structure: Structure
    spec: Any


class Survey(Protocol):
    """What ``propose`` may ask about other regions."""

    def find(self, region: Region, *names: str) -> Found | Refusal | None:
        """The proven spec of ``region`` as one of the named structures, widest first.

        The first refusal where none fits, ``None`` where the region has no such form.
        """


@dataclass(frozen=True)
class Probe:
    """One call that host, reference and bound forward must answer alike.

    Attributes:
        label: what this probe is for, quoted in a refusal.
        args, kwargs: the call's arguments.
        added_to: subtracted from the output before comparing, for regions that return
            ``residual + branch``, so that an identity cannot pass.
    """

    label: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    added_to: torch.Tensor | None = None


@dataclass(frozen=True)
class Draw:
    """Makes probe inputs: seeded normal values of one dtype on one device."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal values times ``scale``, drawn on the CPU so that every device gets the same."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        values *= scale
        return values.to(self.device, self.dtype)


class Structure(ABC):
    """A kind of region; see the module's docstring for how the parts work together.

    Class attributes:
        name: the word explain uses, e.g. ``"rms_norm"``.
        families: kernel families that ``bind`` loads.
        reads: scalar attributes of the region's modules that the spec carries.
        passive: scalar attributes that cannot change the result, beyond ``PASSIVE``.
        config_reads: fields of the module's ``config`` that the spec carries or that are passive.
        multiplies: whether the region multiplies matrices; fp32 then stays with the host on CUDA.
        unary: whether the region is a function of one hidden-state tensor; calls with further
            arguments are then the host's.
    """

    name: ClassVar[str]
    families: ClassVar[tuple[str, ...]]
    reads: ClassVar[frozenset[str]] = frozenset()
    passive: ClassVar[frozenset[str]] = frozenset()
    config_reads: ClassVar[frozenset[str]] = frozenset()
    multiplies: ClassVar[bool] = False
    unary: ClassVar[bool] = False

    @abstractmethod
    def propose(self, region: Region, survey: Survey) -> Spec | tuple[Spec, ...] | Refusal | None:
        """Read specs from the form of ``region``, or say why not."""

    @abstractmethod
    def reference(
        self, spec: Any, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> Any:
        """What the spec means, in plain torch, computed and returned in ``dtype``."""

    @abstractmethod
    def bind(self, spec: Any) -> Fast:
        """The fast forward ``fast(self, *args, **kwargs)``; loads kernels, holds no module."""

    @abstractmethod
    def width(self, spec: Any, module: nn.Module) -> int:
        """Size of the last dimension of the region's input."""

    def weights(self, spec: Any, module: nn.Module) -> Groups:
        """The linear weights of a region, in the groups that one kernel reads; precision is theirs.

        Default: none, and the region always reads the host's own tensors.
        """
        return ()

    def keep(self, spec: Any) -> str | None:
        """Why a proven region had better stay the host's; ``None`` to bind it."""
        return None

    def crop(self, spec: Any, module: nn.Module) -> Mapping[str, tuple[int, ...]]:
        """Smaller shapes, by parameter name, that mean the same to the meaning proof."""
        return {}

    def probes(self, spec: Any, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        """Calls of the meaning proof. Default: one hidden-state tensor, T = 1, 5 and 12, 3 scales.

        Twelve rows take the way of many rows.
        """
        width = self.width(spec, module)
        for scale in (0.01, 1.0, 30.0):
            for tokens in (1, 5, 12):
                label = f"{tokens} tokens, input scale {scale:g}"
                yield Probe(label, (draw(1, tokens, width, scale=scale),))

    def number_probe(self, spec: Any, module: nn.Module, draw: Draw) -> Probe:
        """The call of the numbers proof. Default: one hidden-state argument of 5 tokens."""
        return Probe("5 tokens", (draw(1, 5, self.width(spec, module)),))

    def call_host(self, spec: Any, module: nn.Module, probe: Probe) -> Any:
        """Run the host on a probe. Override together with the two below for call sequences."""
        return type(module).forward(module, *probe.args, **probe.kwargs)

    def call_bound(self, spec: Any, module: nn.Module, fast: Fast, probe: Probe) -> Any:
        """Run the bound forward on a probe."""
        return fast(module, *probe.args, **probe.kwargs)

    def call_reference(self, spec: Any, module: nn.Module, probe: Probe, dtype: torch.dtype) -> Any:
        """Run the reference on a probe."""
        return self.reference(spec, module, *probe.args, dtype=dtype, **probe.kwargs)
