"""Which precision every unit gets: one name for all, or globs over paths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from .formats import EIGHT_BITS, PRECISIONS
from .units import Unit

NAMES = ("auto", *PRECISIONS)
Precision: TypeAlias = "str | Mapping[str, str]"
Chosen: TypeAlias = "str | tuple[tuple[str, str], ...]"


def checked(precision: Precision) -> Chosen:
    """``precision`` as settings keep it.

    Raises:
        ValueError: a name that is none, or no patterns.
        TypeError: neither a name nor a mapping of patterns to names.
    """
    if isinstance(precision, str):
        _check_name(precision)
        return precision
    if not isinstance(precision, Mapping):
        raise TypeError(
            f"plan: precision must be a name or a dict of patterns, got {type(precision).__name__}"
        )
    for pattern, name in precision.items():
        if not isinstance(pattern, str) or not pattern:
            raise TypeError(f"plan: precision must have patterns as keys, got {pattern!r}")
        _check_name(name)
    if not precision:
        raise ValueError("plan: precision must have at least one pattern, got {}")
    return tuple(precision.items())


def _check_name(name: object) -> None:
    if name not in NAMES:
        raise ValueError(f"plan: precision must be one of {NAMES}, got {name!r}")


def quantises(chosen: Chosen) -> bool:
    """Whether a precision may make packed copies."""
    names = {chosen} if isinstance(chosen, str) else {name for _, name in chosen}
    return not names <= {"auto", "bf16"}


def describes(chosen: Chosen) -> str:
    """``chosen`` as the caller wrote it."""
    return repr(chosen if isinstance(chosen, str) else dict(chosen))


def wanted(chosen: Chosen, path: str) -> str:
    """The precision of the module at ``path``: the last pattern that matches it decides.

    A pattern matches a module by its path, or by the path of a module around it.
    """
    if isinstance(chosen, str):
        return chosen
    names = [name for pattern, name in chosen if _matches(pattern, path)]
    return names[-1] if names else "auto"


def _matches(pattern: str, path: str) -> bool:
    return any(fnmatchcase(place, pattern) for place in _around(path))


def _around(path: str) -> Iterator[str]:
    """``path`` and the paths of the modules around it, the model (``""``) excluded."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def assign(model: nn.Module, units: Sequence[Unit], chosen: Chosen) -> None:
    """Set the precision of every unit.

    Raises:
        ValueError: a pattern that no weight of a unit matches, or one that splits a unit.
    """
    for unit in units:
        asked = {wanted(chosen, leaf.path) for leaf in unit.leaves}
        if len(asked) > 1:
            each = ", ".join(f"{x.path}: {wanted(chosen, x.path)}" for x in unit.leaves)
            raise ValueError(
                f"plan: precision must be the same for weights that one kernel reads, got {each}"
            )
        name = asked.pop()
        if unit.reason and name not in ("auto", "bf16"):
            unit.reason = f"not {name}: {unit.reason}"
            name = "bf16"
        elif unit.vocabulary and (name == "nvfp4" or (name == "fp8" and not _named(unit, chosen))):
            unit.reason = f"a vocabulary keeps 8 bits, and {EIGHT_BITS} errs least"
            name = EIGHT_BITS
        unit.precision = name
    if not isinstance(chosen, str):
        for pattern, _ in chosen:
            _check_matched(model, units, pattern)


def _named(unit: Unit, chosen: Chosen) -> bool:
    """Whether a pattern without wildcards names a weight of the unit."""
    patterns = set() if isinstance(chosen, str) else {pattern for pattern, _ in chosen}
    return any(leaf.path in patterns for leaf in unit.leaves)


def _check_matched(model: nn.Module, units: Iterable[Unit], pattern: str) -> None:
    if any(_matches(pattern, leaf.path) for unit in units for leaf in unit.leaves):
        return
    paths = [path for path, _ in model.named_modules() if path and _matches(pattern, path)]
    if not paths:
        raise ValueError(f"plan: precision has the pattern {pattern!r}, which matches no module")
    raise ValueError(
        f"plan: precision has the pattern {pattern!r}, which matches {paths[0]} and no linear "
        "weight that FlashRT reads; explain(plan(model)) lists the bound regions"
    )
