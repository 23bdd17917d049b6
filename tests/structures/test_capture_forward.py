"""A captured forward returns what the host returns, and says when it let the host run."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_support import Custom, Host, batch, captured, counts, custom, host, reasons, same
from torch import nn

from flash_rt.structures.capture import Watch


def test_later_calls_replay_with_their_own_inputs(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    results = [c(batch(device, seed=seed)) for seed in range(4)]
    ran = m.calls
    for seed, result in enumerate(results):
        same(result, m(batch(device, seed=seed)).detach())
    assert counts(c) == (1, 3, 0)
    c(batch(device))
    assert m.calls == ran + 4


def test_shapes_dtypes_constants_and_spelling_make_the_key(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x, mask = batch(device), torch.ones(8, device=device)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x,), {}),
        ((batch(device, 5),), {}),
        ((x, mask), {}),
        ((x,), {"scale": 2.0}),
        ((x,), {"scale": 2}),
    ]
    for args, kwargs in calls * 2:
        same(c(*args, **kwargs), m(*args, **kwargs).detach())
    assert counts(c) == (5, 5, 0)
    same(c(mask=mask, x=x, scale=1.0), m(x, mask).detach())
    same(c(x, None), m(x).detach())
    assert c.stats.captures == 5


def test_graphs_are_bounded_and_the_oldest_goes_first(device: torch.device) -> None:
    m = host(device)
    c = captured(m, max_graphs=2)
    for rows in (1, 2, 1, 3, 1, 2):
        same(c(batch(device, rows)), m(batch(device, rows)).detach())
    assert (c.stats.captures, c.stats.replays, c.stats.evictions) == (4, 2, 2)


def test_shapes_that_never_come_back_stop_being_recorded(device: torch.device) -> None:
    m = host(device)
    c = captured(m, max_graphs=2)
    for rows in range(1, 12):
        same(c(batch(device, rows)), m(batch(device, rows)).detach())
    assert c.stats.captures == 5  # two that fit and three evicted unused
    assert reasons(c) == ["the call's shapes were new, and earlier graphs were not used again"]
    c(batch(device, 11))
    assert c.stats.captures == 6


def test_in_place_updates_of_weights_are_seen_without_a_new_graph(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    c(x)
    with torch.no_grad():
        m.inner.weight.mul_(-3)
        m.shift.add_(1)
    same(c(x), m(x).detach())
    m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()})
    same(c(x), m(x).detach())
    assert counts(c) == (1, 2, 0)


@pytest.mark.parametrize("change", ["parameter", "data", "module", "dtype", "buffer"])
def test_replaced_tensors_drop_the_graphs(device: torch.device, change: str) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    c(x)
    c(x)
    if change == "parameter":
        m.inner.weight = nn.Parameter(torch.ones_like(m.inner.weight))
    elif change == "data":
        m.inner.weight.data = torch.ones_like(m.inner.weight)
    elif change == "module":
        m.inner = nn.Linear(8, 16, device=device).eval()
    elif change == "buffer":
        m.shift = torch.ones_like(m.shift)
    else:
        m.to(torch.float64)
        x = x.double()
    for seed in (1, 2):
        y = batch(device, seed=seed).to(x.dtype)
        same(c(y), m(y).detach())
    assert (c.stats.captures, c.stats.invalidations) == (2, 1)


def test_a_changed_field_of_the_config_is_honoured(device: torch.device) -> None:
    m = host(device)
    m.config = types.SimpleNamespace(double=False)
    m.forward = types.MethodType(  # type: ignore[method-assign]
        lambda self, x: Host.forward(self, x, scale=2.0 if self.config.double else 1.0), m
    )
    c = captured(m)
    x = batch(device)
    for double in (False, True, False):
        m.config.double = double
        for _ in range(3):
            same(c(x), m(x).detach())
    assert counts(c) == (3, 6, 0)
    assert c.stats.invalidations == 2


def test_a_bumped_watch_drops_the_graphs(device: torch.device) -> None:
    m = host(device)
    watch = Watch(m)
    c = captured(m, watch=watch)
    c(batch(device))
    watch.bump()
    c(batch(device))
    assert (c.stats.captures, c.stats.invalidations) == (2, 1)


def test_training_gives_the_host_back(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    c(x)
    m.train()
    assert c(x).requires_grad
    c(x).sum().backward()
    assert m.inner.weight.grad is not None
    m.eval()
    assert not c(x).requires_grad
    m.inner.train()
    assert c(x).requires_grad
    assert reasons(c) == ["a submodule is in training mode"]


def test_hooks_run(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    plain = c(x)
    c(x)
    handle = m.inner.register_forward_hook(lambda module, args, output: output * 0)
    assert not torch.equal(c(x), plain)
    assert reasons(c) == ["a forward hook is registered on inner"]
    handle.remove()
    same(c(x), plain)


class Cache:
    """By name and interface what transformers calls a cache."""

    def get_seq_length(self) -> int:
        return 0


class CacheHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any = None, use_cache: bool = True) -> Any:
        return self.linear(x), (cache or Cache()) if use_cache else None


def test_calls_with_state_run_the_host(device: torch.device) -> None:
    torch.manual_seed(0)
    m = CacheHost().to(device).eval()
    c = captured(m)
    x = batch(device)
    cache = Cache()
    assert c(x, cache)[1] is cache
    assert isinstance(c(x)[1], Cache)
    assert c(x)[1] is not c(x)[1]
    assert counts(c) == (0, 0, 4)
    assert c.stats.fallbacks == {
        "the call creates state (Cache); use_cache=False makes it capturable": 3,
        "argument cache carries state (Cache)": 1,
    }
    assert c(x)[0].requires_grad
    for _ in range(2):
        same(c(x, use_cache=False)[0], m(x)[0].detach())
    assert c.stats.replays == 1


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: x.add_(1), "the call writes its tensor argument 0 in place"),
        (
            lambda m, x: m.count.add_(1) + x,
            "the call writes the module's own parameters or buffers",
        ),
        (lambda m, x: x * x.sum().item(), "record: the step"),
        (lambda m, x: x[x > 0], "record: the step"),
        (lambda m, x: {"s": {1, 2}, "x": x}, "the call returns set, which is no container"),
        (lambda m, x: torch.cat([x] * 64), "the call returns 6144 bytes, more than 4096"),
    ],
)
def test_what_cannot_be_captured_runs_eagerly_with_its_reason(
    device: torch.device, function: Callable[..., Any], reason: str
) -> None:
    m, _ = custom(device, function)
    c = captured(m, max_output_bytes=4096)
    expected, _ = custom(device, function)
    for seed in (1, 2, 3):
        got, want = c(batch(device, seed=seed)), expected(batch(device, seed=seed))
        assert repr(got) == repr(want)
    assert counts(c) == (0, 0, 3)
    assert reasons(c)[0].startswith(reason)
    assert torch.equal(m.count, expected.count)


def test_errors_of_the_host_pass_through_and_leave_the_forward_usable(
    device: torch.device,
) -> None:
    m = host(device)
    c = captured(m)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        c(torch.zeros(3, 9, device=device))
    with pytest.raises(TypeError, match="unexpected keyword"):
        c(batch(device), colour="red")
    with pytest.raises(TypeError):
        c()
    same(c(batch(device)), m(batch(device)).detach())
    same(c(batch(device)), m(batch(device)).detach())


def test_a_host_that_fails_only_while_it_is_recorded_still_answers(device: torch.device) -> None:
    def function(m: Custom, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or recording():
            raise KeyError("not under capture")
        return x * m.weight

    from flash_rt.structures.capture.streams import is_recording as recording

    _, c = custom(device, function)
    for _ in range(2):
        same(c(batch(device)), batch(device) * 2)
    assert reasons(c) == ["KeyError: 'not under capture'"]


def test_no_arguments_and_no_tensors(device: torch.device) -> None:
    m, c = custom(device, lambda m: m.weight + 1)
    for value in (2.0, 5.0):
        with torch.no_grad():
            m.weight.fill_(value)
        assert c().tolist() == [value + 1] * 8
    assert counts(c) == (1, 1, 0)


def test_varargs_and_kwargs_reach_the_host_in_place(device: torch.device) -> None:
    def function(m: Custom, *xs: torch.Tensor, **named: Any) -> torch.Tensor:
        return xs[0] - 2 * xs[1] + named["gain"] * named["more"][0]["z"]

    _, c = custom(device, function)
    for seed in (1, 2, 3):
        a, b, z = (batch(device, seed=seed + i) for i in range(3))
        same(c(a, b, more=[{"z": z}], gain=3), a - 2 * b + 3 * z)
    assert c.stats.replays == 2


def test_release_gives_graphs_back_and_the_next_call_starts_afresh(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    c(batch(device))
    c.release()
    same(c(batch(device)), m(batch(device)).detach())
    assert counts(c) == (2, 0, 0)


def test_a_module_on_two_devices_is_refused_aloud() -> None:
    m = host(torch.device("cpu"))
    m.register_buffer("far", torch.zeros(1, device="meta"))
    c = captured(m)
    same(c(batch(torch.device("cpu"))), m(batch(torch.device("cpu"))))
    assert reasons(c) == [
        "the module's tensors are on several devices, or on one that has no graphs"
    ]


def test_the_lines_for_explain(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    for _ in range(3):
        c(batch(device))
    m.inner.register_forward_hook(lambda *_: None)
    c(batch(device))
    assert c.stats.lines() == [
        "graphs: 1 recorded, 2 replays, 0 evicted, 0 times invalidated",
        "eager: 1 calls, a forward hook is registered on inner",
    ]


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        captured(Host().eval(), max_graphs=0)
