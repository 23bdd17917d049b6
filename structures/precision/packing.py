"""The packed copies of one attached model: made unit by unit, changed, and undone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import nn

from .. import lending
from ..binding import Binder, host_class
from ..decision import Bound, Decision
from ..discover import Candidate
from ..kernels import label
from ..progress import watched
from ..weights import COPY, PackedCopy, own_copy, refuse_released
from .check import packed_disproof
from .choice import Chosen, assign
from .embedding import bind_embedding
from .fidelity import Fidelity
from .formats import packer
from .host_weights import HostWeights, KeepHost
from .prices import Prices
from .promote import Promotion
from .quantising import Quantising
from .units import Leaf, Unit, find_units

PLACE_WORDS: dict[KeepHost, str] = {
    "cpu": "on the CPU until detach (keep_host='cpu')",
    "gpu": "where they were (keep_host='gpu')",
    False: "released (keep_host=False)",
}


@dataclass(eq=False)
class Packing:
    """Units of a model with their precisions, and the copies that exist now.

    Attributes:
        units: every linear weight of the bound regions.
        hosts: where the full-precision weights are.
        scales: static scale of a unit's input, by its name, where there was calibration data.
        importance: mean square of each input column, by unit, for NVFP4's search.
        prices: loss of cosine by unit and precision, where it was measured.
        fidelity: of the whole model, where it was measured.
        promotions: what was promoted for the floor, in order.
        seconds: what statistics, packing, measuring and promoting took.
        notes: lines for explain.
    """

    units: Sequence[Unit]
    hosts: HostWeights
    device: torch.device
    scales: dict[str, float] = field(default_factory=dict)
    importance: dict[str, torch.Tensor] = field(default_factory=dict)
    prices: Prices = field(default_factory=dict)
    fidelity: Fidelity | None = None
    promotions: list[Promotion] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def quantised(self) -> list[Unit]:
        """Units that a packed copy is read of."""
        return [unit for unit in self.units if unit.quantised]

    def weights(self) -> list[torch.Tensor]:
        """The host's own tensors of all quantised units."""
        return [leaf.parameter for unit in self.quantised for leaf in unit.leaves]

    def bring(self, model: nn.Module) -> Callable[[], None]:
        """Move everything that stays in full precision to where the model is to run.

        Returns:
            What undoes that.
        """
        by_id = {id(weight): weight for weight in self.weights()}  # tied ones once
        away = [weight for weight in by_id.values() if lending.is_away(weight, self.device)]
        undo = lending.move(model, self.device, stay=away)
        self.hosts.adopt(away)

        def take_back() -> None:
            self.hosts.disown(away)
            for weight in away:
                weight.data = weight.data.to("cpu")
            undo()

        return take_back

    def pack(self, unit: Unit) -> None:
        """Bring the copies of a unit to its precision; the host's weights then move away.

        A unit whose copies the numbers do not prove gets the host's own precision.
        """
        wrong = self._pack(unit)
        if wrong is not None:
            unit.reason = f"not {unit.precision}: {wrong}"
            unit.precision = "bf16"
            self._pack(unit)

    def _pack(self, unit: Unit) -> str | None:
        """Make or remove the copies of a unit; why one of them is not to be trusted, if so."""
        for leaf in unit.leaves:
            parameter = leaf.parameter
            existing = own_copy(parameter)
            if not unit.quantised:
                parameter.__dict__.pop(COPY, None)
                self.hosts.back(parameter)
            elif existing is None or existing.precision != unit.precision:
                parameter.__dict__.pop(COPY, None)  # before its successor, for the memory
                del existing
                made = self._copy(unit, leaf)
                for run in made.runs:
                    wrong = packed_disproof(run, parameter.dtype)
                    if wrong is not None:
                        return f"{leaf.path}: {wrong}"
                parameter.__dict__[COPY] = made
                self.hosts.move(parameter)
        return None

    def _copy(self, unit: Unit, leaf: Leaf) -> PackedCopy:
        importance = self.importance.get(unit.name)
        made = PackedCopy(
            leaf.parameter,
            precision=unit.precision,
            pack=packer(unit.precision, importance=importance),
            device=self.device,
            transposed=leaf.transposed,
            cuts=tuple(leaf.cuts),
        )
        scale = self.scales.get(unit.name)
        if scale is not None and unit.precision == "fp8":
            made.input_scale = torch.tensor([scale], dtype=torch.float32, device=self.device)
        return made

    def pack_all(self) -> None:
        """Bring every unit to its precision."""
        for unit in watched(self.units, "Packing weights"):
            self.pack(unit)

    def bind(self, model: nn.Module, binder: Binder) -> None:
        """Override what moved weights would mislead: tied embeddings, and the model's device."""
        for unit in self.quantised:
            for path, factor in unit.embeddings:
                bind_embedding(model, path, binder, factor)
        device = self.device
        if self.hosts.keep_host == "gpu" or (self.hosts.keep_host and device.type == "cpu"):
            return
        for module in model.modules():
            if isinstance(getattr(host_class(module), "device", None), property):
                binder.override(module, ("device", device), device=property(lambda self: device))

    def copies(self) -> Iterator[tuple[torch.Tensor, PackedCopy]]:
        """Every parameter that has a copy."""
        seen: set[int] = set()
        for unit in self.units:
            for leaf in unit.leaves:
                parameter = leaf.parameter
                packed = own_copy(parameter)
                if packed is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter, packed

    def owners(self, model: nn.Module) -> list[nn.Module]:
        """Modules that own a parameter with a copy."""
        return [
            module
            for module in model.modules()
            if any(p is not None and own_copy(p) is not None for p in module._parameters.values())
        ]

    def undo(self) -> None:
        """Remove every copy and put the host's weights back.

        Raises:
            RuntimeError: they were released.
        """
        if self.hosts.released:
            refuse_released()
        for parameter, _ in [*self.copies()]:
            parameter.__dict__.pop(COPY, None)
        self.hosts.restore()

    @property
    def memory_bytes(self) -> int:
        """Of all copies."""
        return sum(packed.memory_bytes for _, packed in self.copies())

    def lines(self) -> list[str]:
        """For explain: what was not quantised and why, memory, and what was measured."""
        done = self.quantised
        lines = [
            f"{unit.name}: {unit.precision}, {unit.reason}" for unit in self.units if unit.reason
        ]
        size, full = sum(u.packed_bytes for u in done), sum(u.size("bf16") for u in done)
        lines.append(
            f"packed: {size} bytes in place of {full}; full-precision weights: "
            f"{PLACE_WORDS[self.hosts.keep_host]}"
        )
        repacked = sum(packed.repacked for _, packed in self.copies())
        if repacked:
            lines.append(
                f"packed again after the host's weights were written to: {repacked} times; what "
                "was measured at attach does not cover that"
            )
        lines += [*self.notes, *(f"promoted: {step}" for step in self.promotions)]
        return lines + [self._price(unit) for unit in self.units if unit.name in self.prices]

    def _loss(self, units: Sequence[Unit]) -> str:
        """What a region's quantised weights cost, where it was measured."""
        costs = [self.prices.get(unit.name, {}).get(unit.precision) for unit in units]
        known = [cost for cost in costs if cost is not None]
        return f"; quantised for {sum(known):.1e} of cosine" if known else ""

    def _price(self, unit: Unit) -> str:
        """Loss of cosine and bytes of one unit in every precision."""
        costs = {**self.prices[unit.name], "bf16": 0.0}
        each = [f"{name} {cost:.1e} {unit.size(name)} B" for name, cost in costs.items()]
        return f"price of {unit.name} ({unit.precision}): {', '.join(each)}"

    def rows(self, decisions: Sequence[Decision]) -> tuple[Decision, ...]:
        """The decisions as they are read now: precision, bytes, embeddings tied to a copy."""
        return tuple(self._row(decision) for decision in decisions)

    def _row(self, row: Decision) -> Decision:
        if isinstance(row, Bound):
            units = [unit for unit in self.units if row.path in unit.regions]
            if any(unit.quantised for unit in units):
                kernels = tuple(dict.fromkeys((*row.kernels, label("linear"))))
                own = [u for u in units if u.regions[0] == row.path]  # bytes that are shared, once
                size = sum(unit.packed_bytes for unit in own if unit.quantised)
                text = described(units, row.precision)
                reason = row.reason + self._loss(own)
                return replace(
                    row, precision=text, packed_bytes=size, kernels=kernels, reason=reason
                )
            return row
        for unit in self.quantised:
            if row.path in dict(unit.embeddings):
                names = {f.name: getattr(row, f.name) for f in fields(Decision)}
                names |= {
                    "reason": f"reads the packed copy of {unit.name}; rows were the host's own",
                    "structure": "embedding",
                }
                return Bound(**names, precision=unit.precision, kernels=(label("linear"),))
        return row


def described(units: Sequence[Unit], host: str) -> str:
    """``fp8``, or the most common precision and the units that have another: ``fp8, down bf16``.

    Args:
        host: name of the precision that is not packed.
    """
    names = [unit.precision if unit.quantised else host for unit in units]
    common = Counter(names).most_common(1)[0][0]
    odd = [
        f"{unit.short} {name}" for unit, name in zip(units, names, strict=True) if name != common
    ]
    return ", ".join([common, *odd])


def make_packing(
    model: nn.Module,
    candidates: Sequence[Candidate],
    chosen: Chosen,
    settings: Quantising,
    device: torch.device,
) -> Packing:
    """The units of the bound regions with the precisions asked for; nothing is packed yet.

    Args:
        device: where the copies will be.

    Raises:
        ValueError: a pattern that matches no weight, or splits what one kernel reads.
    """
    units = find_units(model, candidates)
    assign(model, units, chosen)
    return Packing(units, HostWeights(settings.keep_host, device), device)
