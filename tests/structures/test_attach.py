"""What attach makes, when it makes it again, and the state of the host afterwards."""

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
from comparing import deviation, portrait
from gated_models import Mlp, Model, model

from flash_rt import structures
from flash_rt.structures import plan as plan_function


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
    with pytest.raises(ValueError, match="attached on cpu, asked for meta; call detach"):
        structures.attach(host, device="meta")
    assert structures.attach(host) is plan
    assert structures.attach(host, device="cpu") is plan
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
