"""Surroundings and threads that a graph could get wrong without anyone noticing."""

from __future__ import annotations

import copy
import gc
import threading

import pytest
import torch
from capture_support import Custom, batch, captured, counts, custom, host, same

from flash_rt.structures.capture import CaptureError, capture


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_and_its_end(device: torch.device, first: bool) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    results = []
    for inside in (first, not first, first, not first):
        with torch.inference_mode(inside):
            results.append(c(x))
    with torch.no_grad():
        for result in results:
            same(result.clone(), m(x))
    assert c.stats.captures == 1
    outside = results[1 if first else 0]
    weight = torch.ones(8, device=device, requires_grad=True)
    (outside * weight).sum().backward()
    m.train()
    c(x).sum().backward()


def test_inference_tensors_as_inputs_and_weights(device: torch.device) -> None:
    with torch.inference_mode():
        m = host(device)
        x = batch(device)
    c = captured(m)
    for _ in range(3):
        with torch.no_grad():
            same(c(x).clone(), m(x).clone())
    assert c.stats.replays == 2


def test_autocast_is_part_of_the_key_and_leaves_no_stale_copies(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    for _ in range(3):
        with torch.no_grad():
            m.inner.weight.mul_(1.5)
            with torch.autocast(device.type, torch.bfloat16):
                got, want = c(x), m(x)
            same(got, want)
            gc.collect()
            same(c(x), m(x))
    assert counts(c) == (2, 4, 0)


def test_default_dtype_is_part_of_the_key(device: torch.device) -> None:
    _, c = custom(device, lambda m, x: x + torch.ones(8, device=x.device))
    assert c(batch(device)).dtype is torch.float32
    assert c(batch(device)).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert c(batch(device)).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert c(batch(device)).dtype is torch.float32


def test_a_plain_attribute_that_is_replaced_reads_old_content_not_freed_memory(
    device: torch.device,
) -> None:
    m, c = custom(device, lambda m, x: x + m.table)
    m.table = torch.full((8,), 3.0, device=device)
    same(c(torch.zeros(2, 8, device=device)), torch.full((2, 8), 3.0, device=device))
    m.table = None
    gc.collect()
    noise = [torch.full((8,), 7.0, device=device) for _ in range(50)]
    assert c(torch.zeros(2, 8, device=device)).tolist() == [[3.0] * 8] * 2
    assert len(noise) == 50


def test_a_table_made_on_first_use_is_right_for_the_host_afterwards(device: torch.device) -> None:
    def function(m: Custom, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        if rows not in m.tables:
            m.tables[rows] = torch.arange(8.0, device=x.device) * rows
        return x + m.tables[rows]

    m, c = custom(device, function)
    m.tables = {}
    x = torch.zeros(2, 8, device=device)
    for _ in range(3):
        assert c(x)[0].tolist() == [2.0 * i for i in range(8)]
    assert m.tables[2].tolist() == [2.0 * i for i in range(8)]


def test_random_forwards_draw_new_numbers_and_follow_the_seed(device: torch.device) -> None:
    m, c = custom(device, lambda m, x: x + torch.rand_like(x))
    x = torch.zeros(4, 8, device=device)
    torch.manual_seed(3)
    host_draws = [m(x) for _ in range(3)]
    torch.manual_seed(3)
    draws = [c(x) for _ in range(3)]
    assert not torch.equal(draws[1], draws[2])
    for got, want in zip(draws, host_draws, strict=True):
        same(got, want)


def test_threads_get_their_own_results(device: torch.device) -> None:
    m = host(device)
    c = captured(m, max_graphs=2)
    wanted = {
        (rows, seed): m(batch(device, rows, seed)).detach()
        for rows in (1, 2, 3)
        for seed in range(4)
    }
    failures: list[str] = []

    def work(offset: int) -> None:
        for i in range(24):
            rows, seed = (i + offset) % 3 + 1, (i + offset) % 4
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                got = c(batch(device, rows, seed))
                if not torch.equal(got, wanted[rows, seed]):
                    failures.append(f"rows {rows} seed {seed}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert c.stats.captures >= 3
    assert c.stats.captures + c.stats.replays + sum(c.stats.fallbacks.values()) == 96


def test_two_models_recorded_at_once_in_two_threads(device: torch.device) -> None:
    original = torch.cuda.is_current_stream_capturing
    models = [host(device) for _ in range(4)]
    failures: list[str] = []

    def work(m: torch.nn.Module) -> None:
        c = captured(m)
        for rows in range(1, 6):
            for seed in range(2):
                x = batch(device, rows, seed)
                if not torch.equal(c(x), m(x)):
                    failures.append(f"rows {rows}")

    threads = [threading.Thread(target=work, args=(m,)) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert torch.cuda.is_current_stream_capturing is original


def test_captured_inside_captured(device: torch.device) -> None:
    m, c = custom(device, lambda m, x: m.inner_call(x) * 2)
    inner, inner_c = custom(device, lambda m, x: x + m.weight)
    m.__dict__["inner_call"] = inner_c
    for seed in (1, 2, 3):
        x = batch(device, seed=seed)
        same(c(x), (x + 2) * 2)
    same(inner_c(x), x + 2)
    assert c.stats.replays == 2
    assert inner is inner_c._module


def test_recursion(device: torch.device) -> None:
    def function(m: Custom, x: torch.Tensor, depth: int) -> torch.Tensor:
        return x if depth == 0 else m.again(x + depth, depth - 1)

    m, c = custom(device, function)
    m.__dict__["again"] = c
    for _ in range(3):
        assert c(torch.zeros(2, device=device), 3).tolist() == [6.0, 6.0]


def test_under_other_observers_the_host_runs(device: torch.device) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    m = host(device)
    c = captured(m)
    x = batch(device)
    c(x)
    replays = c.stats.replays
    graph = make_fx(lambda value: c(value))(x)
    assert any("mm" in str(node.target) for node in graph.graph.nodes)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert c(mode.from_tensor(x)).shape == (3, 8)
    mapped = torch.vmap(lambda row: c(row))(x)
    torch.testing.assert_close(mapped, m(x))
    gradient = torch.func.grad(lambda value: c(value).sum())(x)
    assert gradient.shape == x.shape
    m.requires_grad_(False)
    traced = torch.jit.trace(lambda value: c(value), (x,), check_trace=False)
    same(traced(batch(device, seed=8)).detach(), m(batch(device, seed=8)).detach())
    compiled = torch.compile(lambda value: c(value) * 2, fullgraph=True, backend="eager")
    same(compiled(x), m(x) * 2)
    assert c.stats.replays == replays


def test_what_the_caller_does_to_results_and_arguments_stays_there(device: torch.device) -> None:
    _, c = custom(device, lambda m, parts: {"sum": parts[0] + parts[1], "list": [parts[0] * 1]})
    for seed in (1, 2, 3):
        a, b = batch(device, seed=seed), batch(device, seed=seed + 5)
        parts = [a, b]
        result = c(parts)
        same(result["sum"], a + b)
        result["list"].append("extra")
        result["sum"].fill_(float("nan"))
        parts.clear()
    assert c.stats.replays == 2


def test_a_failed_recording_does_not_cost_a_good_graph(device: torch.device) -> None:
    m, _ = custom(device, lambda m, x, wait: x * (x.sum().item() if wait else 2.0))
    c = captured(m, max_graphs=1)
    x = batch(device)
    c(x, False)
    for rows in range(1, 5):
        c(batch(device, rows), True)
    same(c(x, False), x * 2)
    assert (c.stats.captures, c.stats.replays) == (1, 1)


# capture(), the public door for plain functions


def test_capture_of_a_module(device: torch.device) -> None:
    m = host(device)
    c = capture(m, batch(device))
    assert c.stats.captures == 1
    same(c(batch(device, seed=4)), m(batch(device, seed=4)).detach())
    m.inner.weight.data = m.inner.weight.data * 2
    same(c(batch(device)), m(batch(device)).detach())
    assert c.stats.invalidations == 1
    m.train()
    assert c(batch(device)).requires_grad
    m.eval()
    c.release()
    same(c(batch(device)), m(batch(device)).detach())


def test_capture_of_a_function_watches_the_modules_it_closes_over(device: torch.device) -> None:
    m = host(device)

    def twice(x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        """Doc."""
        return m(m(x)) + shift

    c = capture(twice, batch(device), shift=1.0)
    assert (c.__name__, c.__doc__) == ("twice", "Doc.")
    same(c(batch(device, seed=2), shift=1.0), twice(batch(device, seed=2), shift=1.0).detach())
    m.inner.weight = torch.nn.Parameter(m.inner.weight.detach() * 2)
    same(c(batch(device), shift=1.0), twice(batch(device), shift=1.0).detach())
    assert c.stats.invalidations == 1
    method = capture(m.forward, batch(device))
    m.shift = m.shift + 1
    same(method(batch(device)), m(batch(device)).detach())


def test_capture_says_why_it_cannot(device: torch.device) -> None:
    x = batch(device)
    with pytest.raises(CaptureError, match="the example call must be capturable, but record: the"):
        capture(lambda x: x[x > 0], x)
    with pytest.raises(TypeError, match="target must be callable, got int"):
        capture(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs an example tensor, or a module"):
        capture(lambda x: x)
    with pytest.raises(CaptureError, match="a submodule is in training mode"):
        capture(host(device).train(), x)
    lazy = capture(host(device))
    assert lazy.stats.captures == 0
    lazy(x)
    assert lazy.stats.captures == 1


def test_copies_of_a_host_are_free_of_graphs(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    c(batch(device))
    other = copy.deepcopy(m)
    with torch.no_grad():
        other.inner.weight.zero_()
    same(c(batch(device)), m(batch(device)).detach())
