"""Regions that a plan keeps or refuses, each with its reason."""

from __future__ import annotations

import threading
import types

import pytest
import torch
import zoo
from comparing import deviation, same_bits
from gated_models import Mlp, model, rows
from torch import nn

from flash_rt import structures
from flash_rt.structures.decision import Bound, Kept, Refused


def test_one_region_in_training_mode_is_refused_alone() -> None:
    host = model()
    host.first.train()
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "training mode" in decisions["first"].reason
    assert isinstance(decisions["second"], Bound)


def test_a_region_with_an_instance_forward_is_refused() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    host = model()
    add_hook_to_module(host.second, ModelHook())
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["second"], Refused)
    assert "carries its own instance forward" in decisions["second"].reason
    assert isinstance(decisions["first"], Bound)


def test_an_inner_hook_refuses_the_region_around_it() -> None:
    host = model()
    host.first.b.register_forward_hook(lambda *_: None)
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "module 'b' inside carries a forward hook" in decisions["first"].reason
    assert isinstance(decisions["first.b"], Bound), "its own hook still fires around the bound one"


def test_quantised_modules_are_refused_or_kept() -> None:
    host = model()
    int8 = nn.Parameter(torch.zeros(48, 32, dtype=torch.int8), requires_grad=False)
    host.first.a.weight = int8
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first.a"], Refused)
    assert "dtype torch.int8" in decisions["first.a"].reason
    assert isinstance(decisions["second"], Bound)


def test_a_scalar_that_nobody_reads_is_refused() -> None:
    host = model()
    host.first.temperature = 0.5
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "attribute temperature = 0.5" in decisions["first"].reason


def test_fp64_is_refused() -> None:
    decisions = rows(structures.plan(model().double()))
    assert all(not isinstance(row, Bound) for row in decisions.values())
    assert "torch.float64" in decisions["first"].reason  # type: ignore[attr-defined]


def test_tied_parameters_are_named_on_both_rows() -> None:
    host = model()
    host.second.a.weight = host.first.a.weight
    decisions = rows(structures.plan(host))
    assert decisions["first"].tied == ("second.a.weight",)  # type: ignore[attr-defined]
    assert decisions["second"].tied == ("first.a.weight",)  # type: ignore[attr-defined]


def test_a_shared_module_has_one_row_with_both_paths() -> None:
    host = model()
    host.second = host.first
    x = torch.randn(1, 2, 32)
    with torch.no_grad():
        wanted = host(x)
        plan = structures.attach(host)
        assert deviation(host(x), wanted) < 1e-5
        plan.detach()
    decisions = rows(plan)
    assert decisions["first"].aliases == ("second",)  # type: ignore[attr-defined]
    assert "second" not in decisions


def test_a_missing_kernel_family_is_a_refusal_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flash_rt.structures import kernels

    real = kernels.family

    def family(name: str) -> types.ModuleType:
        if name == "norm":
            raise kernels.KernelUnavailable("no variant of norm fits this GPU")
        return real(name)

    monkeypatch.setattr(kernels, "family", family)
    decisions = rows(structures.plan(model()))
    assert isinstance(decisions["norm"], Refused)
    assert decisions["norm"].reason == "no variant of norm fits this GPU"
    assert isinstance(decisions["first"], Bound)


def test_a_model_that_is_one_region() -> None:
    host = zoo.redraw(Mlp())
    x = torch.randn(1, 2, 32)
    with torch.no_grad():
        wanted = host(x)
        plan = structures.attach(host)
        assert [type(row) for row in plan.decisions] == [Bound]
        for _ in range(3):
            assert deviation(host(x), wanted) < 1e-5
        plan.detach()
        assert same_bits(host(x), wanted)


def test_embeddings_are_kept() -> None:
    decisions = rows(structures.plan(zoo.shared("llama")))
    assert isinstance(decisions["model.embed_tokens"], Kept)


def test_a_config_field_that_nobody_reads_is_refused() -> None:
    class Configured(Mlp):
        def __init__(self, config: types.SimpleNamespace) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.clamp(-self.config.limit, self.config.limit)

    class Config:
        def __init__(self) -> None:
            self.limit = 1e9
            self.unused = 3.0

    host = model()
    host.first = Configured(Config())  # type: ignore[arg-type]
    zoo.redraw(host)
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "config field limit = 1000000000.0 is read by the host" in decisions["first"].reason
    assert isinstance(decisions["second"], Bound)


def test_layers_that_compute_by_their_index_are_proven_one_by_one() -> None:
    class Indexed(Mlp):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) / max(1, self.layer_idx - 1)

    host = zoo.redraw(nn.Sequential(*(Indexed(i) for i in range(5))))
    decisions = rows(structures.plan(host))
    kinds = [type(decisions[str(i)]) for i in range(5)]
    assert kinds == [Bound, Bound, Bound, Refused, Refused]


def test_one_layer_that_differs_by_its_index_is_refused() -> None:
    class Odd(Mlp):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.1 if self.layer_idx == 2 else 1.0)

    host = zoo.redraw(nn.Sequential(*(Odd(i) for i in range(4))))
    decisions = rows(structures.plan(host))
    assert [type(decisions[str(i)]) for i in range(4)] == [Bound, Bound, Refused, Bound]
    assert "here the host differs from its kind" in decisions["2"].reason


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    host = model()
    host.first.act.lock = threading.Lock()
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "no copy to prove it on: cannot pickle" in decisions["first"].reason
    assert isinstance(decisions["second"], Bound)
