"""What was decided for a region: ``Bound``, ``Kept`` or ``Refused``, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """Errors measured on one region, root mean square relative to the output's own.

    Attributes:
        bound: error of FlashRT's output against the high-precision reference.
        host: error of the host's own output against the same reference.
    """

    bound: float
    host: float

    def __str__(self) -> str:
        return f"{self.bound:.1e} (host {self.host:.1e})"


@dataclass(frozen=True)
class Cost:
    """What one call costs: operators launched, views aside, and bytes of results written."""

    launches: int
    written_bytes: int


@dataclass(frozen=True)
class Decision:
    """One row of a plan.

    Attributes:
        path: dotted path of the region; ``""`` is the model itself.
        reason: why this was decided: the proof that passed, or the rule and value that refused.
        structure: name of the structure, or ``""`` where no structure has the region's form.
        covers: paths of the modules, each directly owning parameters or buffers, that this row
            answers for. Over all rows of a plan every such module appears exactly once.
        aliases: other paths to the same module.
        tied: other paths of parameters in this region that the model holds only once.
        kind: class name of the host's module.
    """

    path: str
    reason: str
    structure: str = ""
    covers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    kind: str = ""


@dataclass(frozen=True)
class Bound(Decision):
    """FlashRT runs this region.

    Attributes:
        precision: storage format of the weights that are read, e.g. ``"bf16"``.
        kernels: ``"norm v1"`` for each kernel family used.
        error: what the numbers proof measured on this instance.
        packed_bytes: of the packed copies that the region reads; 0 where it reads the host's own.
        cost, host_cost: of one call on a few tokens, bound and as the host.
    """

    precision: str = ""
    kernels: tuple[str, ...] = ()
    packed_bytes: int = 0
    error: Measured | None = None
    cost: Cost | None = None
    host_cost: Cost | None = None


@dataclass(frozen=True)
class Kept(Decision):
    """The host runs this region, because no structure is better here."""


@dataclass(frozen=True)
class Refused(Decision):
    """A structure has this region's form, but a rule or a proof forbids it."""
