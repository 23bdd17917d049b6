"""A bound module behaves like the host's in everything but speed."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import zoo
from comparing import deviation, portrait, same_bits
from test_attach import Mlp, Model, model
from torch import nn

from flash_rt import structures
from flash_rt.structures.binding import Overridden

X = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def attached() -> object:
    host = model()
    with torch.no_grad():
        wanted = host(X)
    plan = structures.attach(host)
    yield host, wanted
    plan.detach()


def run(host: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return host(X)


def test_bound_modules_look_like_the_host(attached: tuple) -> None:
    host, _ = attached
    assert isinstance(host.first, Overridden)
    assert isinstance(host.first, Mlp)
    assert type(host.first).__name__ == "Mlp"
    assert type(host.first).__qualname__ == Mlp.__qualname__
    assert type(host.first).__module__ == Mlp.__module__
    assert inspect.signature(host.first.forward) == inspect.signature(Mlp().forward)
    assert host.first.forward.__doc__ == Mlp.forward.__doc__
    assert repr(host) == repr(model())


def test_layers_of_one_kind_share_one_class() -> None:
    host = zoo.shared("llama")
    plan = structures.attach(host)
    layers = host.model.layers
    assert type(layers[0].input_layernorm) is type(layers[1].input_layernorm)
    plan.detach()


def test_deepcopy_is_a_detached_host(attached: tuple) -> None:
    host, wanted = attached
    twin = copy.deepcopy(host)
    assert not any(isinstance(m, Overridden) for m in twin.modules())
    assert portrait(twin)["attributes"] == portrait(model())["attributes"]
    assert same_bits(run(twin), run(model()))
    assert deviation(run(twin), wanted) < 1e-5
    second = structures.attach(twin)
    assert deviation(run(twin), wanted) < 1e-5
    second.detach()


def test_pickle_and_torch_save_hold_the_host(attached: tuple) -> None:
    host, _ = attached
    buffer = io.BytesIO()
    torch.save(host, buffer)
    buffer.seek(0)
    for twin in (pickle.loads(pickle.dumps(host)), torch.load(buffer, weights_only=False)):
        assert type(twin) is Model
        assert not any(isinstance(m, Overridden) for m in twin.modules())
        assert same_bits(run(twin), run(model()))
    assert b"flash_rt" not in pickle.dumps(host.first)


def test_a_model_made_from_the_attached_ones_class_is_a_host_of_its_own() -> None:
    host, tokens = zoo.make("llama"), zoo.ids()
    kind, norm = type(host), type(host.model.norm)
    plan = structures.attach(host)
    assert type(host) is not kind
    other = zoo.redraw(type(host)(host.config), seed=8)
    assert type(other) is kind
    assert type(type(host.model.norm)(64)) is norm
    wanted = zoo.redraw(kind(host.config), seed=8)
    with torch.no_grad():
        for _ in range(2):
            host(input_ids=tokens, use_cache=False)
            ours, theirs = (m(input_ids=tokens, use_cache=False).logits for m in (other, wanted))
            assert torch.equal(ours, theirs)
    plan.detach()


def test_hooks_on_a_bound_region_fire(attached: tuple) -> None:
    host, wanted = attached
    seen: list[str] = []
    handles = [
        host.first.register_forward_pre_hook(lambda *_: seen.append("pre")),
        host.first.register_forward_hook(lambda *_: seen.append("post")),
    ]
    assert deviation(run(host), wanted) < 1e-5
    assert seen == ["pre", "post"]
    for handle in handles:
        handle.remove()


def test_hooks_inside_a_bound_region_fire(attached: tuple) -> None:
    host, _ = attached
    seen: list[torch.Tensor] = []
    handle = host.first.c.register_forward_hook(lambda m, a, out: seen.append(out))
    run(host)
    handle.remove()
    run(host)
    assert len(seen) == 1


def test_a_hook_may_change_the_result(attached: tuple) -> None:
    host, wanted = attached
    handle = host.first.c.register_forward_hook(lambda m, a, out: out + 1)
    changed = run(host)
    handle.remove()
    plain = model()
    plain.first.c.register_forward_hook(lambda m, a, out: out + 1)
    assert deviation(changed, run(plain)) < 1e-5
    assert deviation(changed, wanted) > 1e-2


def test_replaced_children_are_used(attached: tuple) -> None:
    host, wanted = attached

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.weight = base.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.base(x)

    original = host.first.c
    host.first.c = Adapter(original).eval()
    changed = run(host)
    host.first.c = original
    plain = model()
    plain.first.c = Adapter(plain.first.c).eval()
    assert deviation(changed, run(plain)) < 1e-5
    assert deviation(run(host), wanted) < 1e-5


def test_in_place_updates_and_loading_are_seen(attached: tuple) -> None:
    host, _ = attached
    other = zoo.redraw(Model(), seed=99)
    host.load_state_dict(other.state_dict())
    assert deviation(run(host), run(other)) < 1e-5
    with torch.no_grad():
        host.last.weight.mul_(2)
        other.last.weight.mul_(2)
    assert deviation(run(host), run(other)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_dtype_runs_the_hosts_code(attached: tuple, dtype: torch.dtype) -> None:
    host, _ = attached
    host.to(dtype)
    plain = model().to(dtype)
    with torch.no_grad():
        assert same_bits(host(X.to(dtype)), plain(X.to(dtype)))


def test_training_gives_the_host_back() -> None:
    host, plain = model(), model()
    plan = structures.attach(host)
    host.train(), plain.train()
    ours, hosts = host(X), plain(X)
    assert same_bits(ours, hosts)
    ours.sum().backward(), hosts.sum().backward()
    for mine, theirs in zip(host.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    host.eval()
    assert not host(X).requires_grad
    plan.detach()


def test_eval_results_carry_no_grad_unless_an_input_asks(attached: tuple) -> None:
    host, _ = attached
    assert not host(X).requires_grad
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    host(mine).square().sum().backward()
    model()(theirs).square().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_a_part_called_alone_keeps_its_gradients(attached: tuple) -> None:
    host, _ = attached
    mine, theirs = X.clone().requires_grad_(), X.clone().requires_grad_()
    host.first(mine).sum().backward()
    model().first(theirs).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_autocast_is_the_hosts(attached: tuple) -> None:
    host, plain = attached[0], model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(host.first(X), plain.first(X))


def test_keyword_and_strided_inputs(attached: tuple) -> None:
    host, wanted = attached
    with torch.no_grad():
        assert deviation(host(x=X), wanted) < 1e-5
        transposed = X.transpose(1, 2).contiguous().transpose(1, 2)
        assert transposed.stride(-1) != 1
        assert deviation(host(transposed), wanted) < 1e-5
        assert host(X[:, :0]).shape == (1, 0, 32)
        assert host.first(X[0, 0]).shape == (32,)


def test_wrong_calls_raise(attached: tuple) -> None:
    host, plain = attached[0], model()
    for arguments in ((), (X, X), (X[..., :5],)):
        with pytest.raises((TypeError, RuntimeError)):
            plain.first(*arguments)
        with pytest.raises((TypeError, RuntimeError, ValueError)):
            host.first(*arguments)


def test_detach_says_when_a_class_was_changed_after_attach() -> None:
    host = model()
    plan = structures.attach(host)

    class Other(Mlp):
        pass

    host.first.__class__ = Other
    with pytest.raises(RuntimeError, match="class of 1 modules was changed after attach"):
        plan.detach()
    assert type(host.first) is Other
    assert type(host.second) is Mlp
    assert type(host) is Model


def test_parametrised_after_attach(attached: tuple) -> None:
    from torch.nn.utils import parametrize

    class Double(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    host, plain = attached[0], model()
    for parent in (host, plain):
        parametrize.register_parametrization(parent.first.a, "weight", Double())
        parametrize.register_parametrization(parent.last, "weight", Double())
        parent.eval()
    assert deviation(run(host), run(plain)) < 1e-5
    for parent in (host, plain):
        parametrize.remove_parametrizations(parent.first.a, "weight", leave_parametrized=False)
        parametrize.remove_parametrizations(parent.last, "weight", leave_parametrized=False)
    assert deviation(run(host), run(plain)) < 1e-5


def test_torch_compile_of_an_attached_model() -> None:
    host = model()
    wanted = run(host)
    plan = structures.attach(host)
    compiled = torch.compile(host, backend="eager")
    with torch.no_grad():
        assert deviation(compiled(X), wanted) < 1e-5
    plan.detach()
    with torch.no_grad():
        assert deviation(compiled(X), wanted) < 1e-5
    torch.compiler.reset()


def test_in_inference_mode() -> None:
    host = model()
    wanted = run(host)
    with torch.inference_mode():
        plan = structures.attach(host)
        for _ in range(3):
            assert deviation(host(X), wanted) < 1e-5
    assert deviation(run(host), wanted) < 1e-5
    plan.detach()


def test_the_package_has_one_name() -> None:
    import importlib
    import sys
    from pathlib import Path

    import flash_rt

    sys.path.insert(0, str(Path(flash_rt.__file__).parent))
    try:
        with pytest.raises(ImportError, match="must be imported as flash_rt.structures"):
            importlib.import_module("structures")
    finally:
        sys.path.pop(0)
