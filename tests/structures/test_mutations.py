"""A host that computes something else than its form promises is refused, with the difference.

Each mutation changes what one class of the zoo computes and leaves its attributes, children and
parameters alone, so that only the proof by numbers can notice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from comparing import FP32_TOLERANCE, deviation
from torch import nn

from flash_rt import structures
from flash_rt.structures.catalogue import CATALOGUE
from flash_rt.structures.decision import Bound, Refused
from flash_rt.structures.discover import Candidate, Discovery, Rejected
from flash_rt.structures.region import Region

Forward = Callable[..., Any]


def identity(forward: Forward) -> Forward:
    return lambda self, x, *a, **k: x


def scaled(forward: Forward) -> Forward:
    return lambda self, x, *a, **k: 1.01 * forward(self, x, *a, **k)


def shifted(forward: Forward) -> Forward:
    """A residual that the form does not have."""

    def mutant(self: nn.Module, x: torch.Tensor, *a: Any, **k: Any) -> torch.Tensor:
        y = forward(self, x, *a, **k)
        return y + x.mean()

    return mutant


def mixes_tokens(forward: Forward) -> Forward:
    return lambda self, x, *a, **k: forward(self, x.roll(1, dims=1), *a, **k)


def saturates(forward: Forward) -> Forward:
    """Right for everyday inputs, clipped for large ones."""
    return lambda self, x, *a, **k: forward(self, x.clamp(-20, 20), *a, **k)


def no_bias(forward: Forward) -> Forward:
    def mutant(self: nn.Module, x: torch.Tensor, *a: Any, **k: Any) -> torch.Tensor:
        biases = [m for m in self.modules() if m._parameters.get("bias") is not None]
        kept = [m._parameters["bias"] for m in biases]
        for module in biases:
            module._parameters["bias"] = nn.Parameter(torch.zeros_like(module.bias))
        try:
            return forward(self, x, *a, **k)
        finally:
            for module, bias in zip(biases, kept, strict=True):
                module._parameters["bias"] = bias

    return mutant


def other_eps(forward: Forward) -> Forward:
    def mutant(self: nn.Module, x: torch.Tensor, *a: Any, **k: Any) -> torch.Tensor:
        name = next(n for n in ("variance_epsilon", "eps") if hasattr(self, n))
        eps = getattr(self, name)
        setattr(self, name, 3 * eps)
        try:
            return forward(self, x, *a, **k)
        finally:
            setattr(self, name, eps)

    return mutant


def no_weight(forward: Forward) -> Forward:
    def mutant(self: nn.Module, x: torch.Tensor, *a: Any, **k: Any) -> torch.Tensor:
        weight = self._parameters["weight"]
        self._parameters["weight"] = nn.Parameter(torch.ones_like(weight))
        try:
            return forward(self, x, *a, **k)
        finally:
            self._parameters["weight"] = weight

    return mutant


def rounds_inside(forward: Forward) -> Forward:
    return lambda self, x, *a, **k: forward(self, x.bfloat16().float(), *a, **k)


def another_activation(forward: Forward) -> Forward:
    """Gates, or activates, with tanh; the activation object is left as it is."""

    def mutant(self: nn.Module, x: torch.Tensor, *a: Any, **k: Any) -> torch.Tensor:
        handles = [
            m.register_forward_hook(lambda m, args, out: torch.tanh(args[0]))
            for m in activation_objects(self)
        ]
        try:
            return forward(self, x, *a, **k)
        finally:
            for handle in handles:
                handle.remove()

    return mutant


def activation_objects(module: nn.Module) -> list[nn.Module]:
    children = (m for m in module.children() if not isinstance(m, (nn.Dropout, nn.ModuleList)))
    return [m for m in children if not list(m.parameters())]


NORM = (identity, scaled, shifted, mixes_tokens, no_weight, other_eps, rounds_inside)
MLP = (identity, scaled, shifted, mixes_tokens, saturates, another_activation, rounds_inside)
MUTATIONS = {
    "rms_norm": NORM,
    "layer_norm": (*NORM, no_bias),
    "gated_mlp": MLP,
    "mlp": (*MLP, no_bias),
}
# Every model of the zoo that has such a region.
MODELS = {
    "rms_norm": "llama mistral qwen2 qwen3 qwen3_moe mixtral gemma gemma2 gemma3 phi3 olmo2 "
    "granite smollm3 mamba2 deepseek_v3 qwen3_5 t5 qwen3_vl paligemma pi0 wan",
    "layer_norm": "gpt_neox opt starcoder2 falcon gpt2 bert vit siglip clip whisper qwen3_vl "
    "paligemma pi0 wan",
    "gated_mlp": "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 olmo2 granite smollm3 "
    "deepseek_v3 qwen3_5 t5 qwen3_vl paligemma pi0",
    "mlp": "gpt2 gpt_neox starcoder2 falcon vit siglip clip qwen3_vl paligemma pi0 wan",
}


def regions(model: nn.Module, name: str) -> list[Region]:
    """Regions of one structure, found without their wider surroundings."""
    structure = next(s for s in CATALOGUE if s.name == name)
    discovery = Discovery()
    found = (
        discovery.settle(Region(path, module), structure)
        for path, module in model.named_modules()
        if not isinstance(module, (nn.ModuleList, nn.Sequential))
    )
    return [f.region for f in found if isinstance(f, Candidate)]


@pytest.mark.parametrize("structure", MUTATIONS)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_mutants_are_refused(name: str, structure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in MODELS[structure].split():
        assert regions(zoo.shared(name), structure) == []
        return
    model = zoo.shared(name)
    places = regions(model, structure)
    assert places
    for mutate in MUTATIONS[structure]:
        mutants = [place for place in places if applies(mutate, place.module)]
        with monkeypatch.context() as patch:
            for cls in {type(place.module) for place in mutants}:
                patch.setattr(cls, "forward", like(cls.forward, mutate(cls.forward)))
            check_refused(structure, mutants)


def applies(mutate: Callable[[Forward], Forward], module: nn.Module) -> bool:
    """Whether a module has what the mutation leaves out."""
    names = [name.rpartition(".")[2] for name, _ in module.named_parameters()]
    if mutate is another_activation:
        return len(activation_objects(module)) == 1
    needed = {no_bias: "bias", no_weight: "weight"}.get(mutate)
    return needed is None or needed in names


def check_refused(structure: str, places: list[Region]) -> None:
    discovery = Discovery()
    kind = next(s for s in CATALOGUE if s.name == structure)
    for place in places:
        found = discovery.settle(place, kind)
        # A guess at a form that others share leaves no refusal behind.
        assert found is None or isinstance(found, Rejected)
        assert found is None or found.reason.startswith("meaning: ")


@pytest.mark.parametrize(
    ("name", "structure"),
    [("llama", "rms_norm"), ("gpt2", "mlp"), ("t5", "gated_mlp"), ("whisper", "layer_norm")],
)
def test_around_a_mutant_the_model_still_agrees(
    name: str, structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = zoo.shared(name), zoo.inputs(name)
    places = regions(model, structure)
    for cls in {type(place.module) for place in places}:
        monkeypatch.setattr(cls, "forward", like(cls.forward, shifted(cls.forward)))
    with torch.no_grad():
        host = model(**inputs)
        plan = structures.attach(model)
        ours = model(**inputs)
    rows = [row for row in plan.decisions if row.path in {place.path for place in places}]
    plan.detach()
    assert deviation(ours, host) < FP32_TOLERANCE
    assert len(rows) == len(places)
    assert all(
        isinstance(row, Refused) and "differs from the host by" in row.reason for row in rows
    )


def like(host: Forward, mutant: Forward) -> Forward:
    """The mutant under the host's signature."""
    return functools.wraps(host)(mutant)


class Wrong(nn.Module):
    """An MLP by form, whose forward is given."""

    def __init__(self, compute: Callable[..., torch.Tensor], names: int = 3) -> None:
        super().__init__()
        self.one = nn.Linear(16, 16)
        self.two = nn.Linear(16, 16)
        if names == 3:
            self.three = nn.Linear(16, 16)
        self.act = nn.GELU()
        type(self).compute = staticmethod(compute)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self, x)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize(
    ("compute", "names", "bound"),
    [
        (lambda m, x: m.three(m.act(m.one(x)) * m.two(x)), 3, ["one", "two", "three"]),
        (lambda m, x: m.one(m.act(m.three(x)) * m.two(x)), 3, ["three", "two", "one"]),
        (lambda m, x: m.two(m.act(m.one(x))), 2, ["one", "two"]),
        (lambda m, x: m.one(m.act(m.two(x))), 2, ["two", "one"]),
        (lambda m, x: m.three(m.act(m.one(x)) + m.two(x)), 3, None),
        (lambda m, x: m.three(m.act(m.one(x) * m.two(x))), 3, None),
        (lambda m, x: m.three(m.act(m.one(x)) * m.two(x)) + x, 3, None),
        (lambda m, x: m.three(F.dropout(m.act(m.one(x)) * m.two(x), 0.5)), 3, None),
        (lambda m, x: m.two(m.act(m.one(x)) ** 2), 2, None),
        (lambda m, x: m.two(m.act(m.one(x))) if x.shape[1] == 1 else m.two(m.one(x)), 2, None),
    ],
)
def test_numbers_decide_which_part_plays_which_role(
    compute: Callable[..., torch.Tensor], names: int, bound: list[str] | None
) -> None:
    model = zoo.redraw(Wrong(compute, names))
    host = nn.ModuleDict({"region": model}).eval()
    plan = structures.plan(host)
    row = plan.decisions[0]
    assert row.path == "region"
    if bound is None:
        assert isinstance(row, Refused)
        assert "differs from the host by" in row.reason
        return
    assert isinstance(row, Bound)
    spec = plan.candidates["region"].spec
    parts = [spec.gate, spec.up, spec.down] if names == 3 else [spec.up, spec.down]
    assert [part.path for part in parts] == bound
