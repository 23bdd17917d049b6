"""What attach accepts and refuses, and the state of the host afterwards."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zoo
from comparing import deviation, portrait, same_bits
from torch import nn

from flash_rt import structures
from flash_rt.structures import plan as plan_function
from flash_rt.structures.decision import Bound, Kept, Refused


class Mlp(nn.Module):
    """A gated MLP as anyone would write it."""

    def __init__(self, width: int = 32, inner: int = 48, bias: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(width, inner, bias=bias)
        self.b = nn.Linear(width, inner, bias=bias)
        self.c = nn.Linear(inner, width, bias=bias)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.act(self.a(x)) * self.b(x))


class Model(nn.Module):
    """Two MLPs with norms, so that a region is never the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.first = Mlp()
        self.second = Mlp(bias=False)
        self.last = nn.RMSNorm(32, eps=1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return self.last(x + self.second(x))


def model() -> nn.Module:
    return zoo.redraw(Model())


def rows(plan: structures.Plan) -> dict[str, object]:
    return {row.path: row for row in plan.decisions}


def test_plan_is_a_dry_run() -> None:
    host = model()
    calls: list[str] = []
    host.first.a.register_forward_hook(lambda *_: calls.append("a"))
    host.first.register_forward_hook(lambda *_: calls.append("first"))
    before = portrait(host)
    plan = structures.plan(host)
    assert not plan.attached
    assert portrait(host) == before
    assert calls == []


def test_the_function_is_what_the_package_shows() -> None:
    assert plan_function is structures.plan
    assert all(
        isinstance(getattr(structures, n), (types.FunctionType, type)) for n in structures.__all__
    )


def test_attach_twice_returns_the_same_plan() -> None:
    host = model()
    plan = structures.attach(host, host.forward)
    assert structures.attach(host, host.forward) is plan
    assert structures.attach(host) is plan
    plan.detach()
    assert not plan.attached
    plan.detach()


def test_threads_that_attach_at_once_get_one_plan() -> None:
    host, plans = model(), []
    start = threading.Barrier(4)
    before = torch.backends.mkldnn.matmul.fp32_precision

    def run() -> None:
        start.wait()
        plans.append(structures.attach(host))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(plans) == 4
    assert len(set(map(id, plans))) == 1
    plans[0].detach()
    assert type(host) is Model
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_other_settings_ask_for_detach() -> None:
    host = model()
    plan = structures.attach(host)
    with pytest.raises(ValueError, match=r"attached with precision='auto'.*detach\(\)"):
        structures.attach(host, precision="bf16")
    assert structures.attach(host) is plan
    plan.detach()
    structures.attach(host.to(torch.bfloat16), precision="bf16").detach()


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_memory_is_free_after_detach_or_a_collection(no_collector: None) -> None:
    for detached in (True, False):
        host, x = model(), torch.randn(1, 3, 32)
        plan = structures.attach(host)
        with torch.no_grad():
            for _ in range(3):
                host(x)
        assert plan.captured is not None and plan.captured.stats.replays == 2
        weight = weakref.ref(host.first.a.weight)
        if detached:
            plan.detach()
        del host, plan
        assert (weight() is None) is detached
        gc.collect()
        assert weight() is None


def test_a_part_that_is_attached_blocks_the_whole() -> None:
    host = model()
    plan = structures.attach(host.first)
    with pytest.raises(ValueError, match=r"module 'first.* is attached already; call detach"):
        structures.attach(host)
    plan.detach()
    structures.attach(host).detach()


def test_handles_are_models_too() -> None:
    host = model()
    handle = types.SimpleNamespace(model=host, forward=host.forward)
    plan = structures.attach(handle, handle.forward)
    assert structures.attach(host, host.forward) is plan
    plan.detach()


def test_forward_of_a_module_inside() -> None:
    host = model()
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        wanted = host.first(x)
        plan = structures.attach(host, host.first.forward)
        for _ in range(3):
            assert deviation(host.first(x), wanted) < 1e-5
        assert plan.captured is not None and plan.captured.stats.replays == 2
        copied, loaded = copy.deepcopy(host), pickle.loads(pickle.dumps(host))
        for other in (copied, loaded):
            assert type(other) is Model and type(other.first) is Mlp
            assert vars(other).keys() == vars(model()).keys()
            assert torch.equal(other.first(x), wanted)
    plan.detach()
    assert type(host) is Model


@pytest.mark.parametrize("forward", [print, lambda x: x, nn.Linear(2, 2).forward])
def test_a_foreign_forward_is_an_error(forward: object) -> None:
    host = model()
    before = portrait(host)
    with pytest.raises(TypeError, match="attach: forward"):
        structures.attach(host, forward)  # type: ignore[arg-type]
    assert portrait(host) == before


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        structures.attach("Qwen/Qwen3-8B")


def test_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"precision must be one of .*got 'fp9'"):
        structures.plan(model(), precision="fp9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_of_other_weights_is_an_error(dtype: torch.dtype) -> None:
    host = model().to(dtype)
    before = portrait(host)
    text = rf"precision='bf16' must .*, got {dtype}; cast first with model.to\(torch.bfloat16\)"
    for call in (structures.plan, structures.attach):
        with pytest.raises(ValueError, match=text):
            call(host, precision="bf16")
    assert portrait(host) == before


def test_bf16_of_a_model_that_keeps_a_norm_in_fp32() -> None:
    host = model().to(torch.bfloat16)
    host.norm.float()
    found = rows(structures.plan(host, precision="bf16"))
    assert isinstance(found["first"], Bound) and found["first"].precision == "bf16"


def test_training_mode_is_an_error() -> None:
    host = model().train()
    before = portrait(host)
    with pytest.raises(ValueError, match=r"eval mode; call model.eval\(\)"):
        structures.attach(host)
    assert portrait(host) == before


def test_one_region_in_training_mode_is_refused_alone() -> None:
    host = model()
    host.first.train()
    decisions = rows(structures.plan(host))
    assert isinstance(decisions["first"], Refused)
    assert "training mode" in decisions["first"].reason
    assert isinstance(decisions["second"], Bound)


def test_threads_that_attach_one_model_get_one_plan() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        host, other = zoo.make("llama"), zoo.make("qwen3")
        before = portrait(host)
        with ThreadPoolExecutor(4) as pool:
            plans = [*pool.map(structures.attach, [host, other, host, host])]
        assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    assert plans[0] is plans[2] is plans[3]
    assert plans[1] is not plans[0]
    plans[1].detach()
    plans[0].detach()
    assert portrait(host) == before


def test_tensors_that_accelerate_offloads_are_an_error() -> None:
    accelerate = pytest.importorskip("accelerate")
    host, x = model(), torch.randn(1, 3, 32)
    accelerate.cpu_offload(host, execution_device="cpu")
    with pytest.raises(ValueError, match="module 'norm' has an offload hook; load it on one dev"):
        structures.attach(host)
    with torch.no_grad():
        assert torch.equal(host(x), model()(x))


def test_meta_tensors_are_an_error() -> None:
    with torch.device("meta"):
        host = Model().eval()
    with pytest.raises(ValueError, match="meta device; load its weights first"):
        structures.attach(host)


def test_two_devices_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host = model()
    # No second device on a CPU machine: one parameter says it is elsewhere.
    elsewhere = _OnCuda(host.first.a.weight.detach())
    host.first.a._parameters["weight"] = elsewhere  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"one device, got cpu, cuda:0"):
        structures.attach(host)


class _OnCuda(nn.Parameter):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_offload_hooks_are_an_error() -> None:
    from accelerate import cpu_offload

    host = model()
    cpu_offload(host, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"meta device|offload hook"):
        structures.attach(host)


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


def test_a_failed_attach_leaves_the_host_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_rt.structures.binding import Binder

    host = model()
    before = portrait(host)
    bind, calls = Binder.override, []

    def failing(self: Binder, *args: object, **methods: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError("third")
        bind(self, *args, **methods)  # type: ignore[arg-type]

    monkeypatch.setattr(Binder, "override", failing)
    with pytest.raises(MemoryError):
        structures.attach(host)
    assert portrait(host) == before
    monkeypatch.undo()
    structures.attach(host).detach()


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


def test_settings_of_torch_change_no_decision_and_come_back() -> None:
    host = model()
    plain = structures.plan(host).decisions
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            changed = structures.plan(host).decisions
            assert torch.empty(1).device.type == "meta"
        assert torch.get_default_dtype() == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "medium"
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
    assert [type(row) for row in changed] == [type(row) for row in plain]


def test_planning_leaves_the_random_state_alone() -> None:
    host = model()
    before = torch.get_rng_state()
    structures.attach(host).detach()
    assert torch.equal(torch.get_rng_state(), before)


def test_without_any_kernel_attach_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_rt.structures import kernels

    def family(name: str) -> types.ModuleType:
        raise kernels.KernelUnavailable(f"no variant of {name} fits this GPU")

    monkeypatch.setattr(kernels, "family", family)
    host = model()
    before = portrait(host)
    assert not structures.plan(host).bound()
    with pytest.raises(kernels.KernelUnavailable, match="attach: no variant of .* fits this GPU"):
        structures.attach(host)
    assert portrait(host) == before


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
