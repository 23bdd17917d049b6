"""``explain``: a plan as a complete table."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass

from .decision import Bound, Decision
from .plan import Plan

COLUMNS = (
    "region",
    "decision",
    "structure",
    "precision",
    "packed bytes",
    "kernels",
    "launches",
    "bytes saved",
    "error",
    "reason",
)


@dataclass(frozen=True)
class Table:
    """Rows of a plan: text by ``str``, HTML in a notebook, data by iteration or ``rows``.

    Attributes:
        rows: the plan's decisions.
        notes: lines about the whole model.
    """

    rows: tuple[Decision, ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text, one tuple of ``COLUMNS`` for each row."""
        return [_cells(row) for row in self.rows]

    def __str__(self) -> str:
        lines = [COLUMNS, *self.cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS) - 1)]
        text = []
        for line in lines:
            padded = [c.ljust(w) for c, w in zip(line, widths, strict=False)]
            text.append("  ".join([*padded, line[-1]]).rstrip())
        return "\n".join([*text, *self.notes])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{c}</th>" for c in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in line) + "</tr>"
            for line in self.cells()
        )
        notes = "".join(f"<p>{html.escape(n)}</p>" for n in self.notes)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{notes}"


def explain(plan: Plan) -> Table:
    """What runs where, and why: every module that owns a parameter or buffer is in one row.

    Raises:
        TypeError: not a plan.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"explain: plan must be what attach returned, got {type(plan).__name__}")
    notes = list(plan.notes)
    if plan.packing is not None:
        notes.extend(plan.packing.lines())
    if plan.captured is not None:
        notes.append(
            "in eval mode results carry no grad; a call with an input that requires grad, and "
            "train(), run the host's own code"
        )
        notes.extend(plan.captured.stats.lines())
    if plan.generation is not None:
        notes.extend(plan.generation.lines())
    return Table(plan.decisions, tuple(notes))


def _cells(row: Decision) -> tuple[str, ...]:
    path = row.path or "(model)"
    if row.aliases:
        path += " = " + " = ".join(row.aliases)
    if row.tied:
        path += f" (tied with {', '.join(row.tied)})"
    head = (path, type(row).__name__, row.structure or row.kind)
    if not isinstance(row, Bound):
        return (*head, "", "", "", "", "", "", row.reason)
    launches = saved = ""
    if row.cost and row.host_cost:
        launches = f"{row.host_cost.launches} -> {row.cost.launches}"
        saved = str(row.host_cost.written_bytes - row.cost.written_bytes)
    error = str(row.error) if row.error else ""
    packed = str(row.packed_bytes) if row.packed_bytes else ""
    kernels = ", ".join(row.kernels)
    return (*head, row.precision, packed, kernels, launches, saved, error, row.reason)
