"""Inputs that a graph could get wrong without anyone noticing."""

from __future__ import annotations

import pytest
import torch
from capture_support import Custom, agree, batch, captured, counts, custom, host, reasons, same

DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_dtypes(device: torch.device, dtype: torch.dtype) -> None:
    def make(seed: int) -> tuple[torch.Tensor]:
        return (batch(device, seed=seed).mul(3).abs().to(dtype),)

    c = agree(device, lambda m, x: x.repeat(2, 1), make)
    assert counts(c) == (1, 2, 0)


LAYOUTS = {
    "transposed": lambda x: x.t(),
    "rows of a wider tensor": lambda x: x[:, 2:5],
    "every other row": lambda x: x[::2],
    "expanded": lambda x: x[:1].expand(4, 8),
    "expanded and sliced": lambda x: x[:, :1].expand(6, 5)[1:],
    "channels last": lambda x: x.reshape(1, 2, 3, 8).to(memory_format=torch.channels_last),
    "one row of a wider tensor": lambda x: x[:1, :3],
    "no dimensions": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
    "conjugated": lambda x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: torch.device, layout: str) -> None:
    def make(seed: int) -> tuple[torch.Tensor]:
        return (LAYOUTS[layout](batch(device, 6, seed)),)

    c = agree(device, lambda m, x: x * 2 + x.abs(), make)
    assert c.stats.replays == 2


def test_the_host_sees_the_strides_of_the_caller(device: torch.device) -> None:
    _, c = custom(device, lambda m, x: x.view(-1) + 1)
    same(c(batch(device)), batch(device).view(-1) + 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            c(batch(device).t())
    same(c(batch(device)), batch(device).view(-1) + 1)


def test_memory_that_overlaps_itself_runs_eagerly(device: torch.device) -> None:
    c = agree(
        device,
        lambda m, x: x.sum(1),
        lambda seed: (batch(device, 8, seed).view(-1).as_strided((5, 4), (2, 1)),),
    )
    assert c.stats.captures == 0
    assert "overlaps itself" in reasons(c)[0]


def test_inputs_that_share_memory(device: torch.device) -> None:
    def make(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = batch(device, 6, seed)
        return x[:4], x[2:]

    assert agree(device, lambda m, a, b: a * 2 - b, make).stats.replays == 2


def test_the_same_tensor_twice_and_writes_through_it(device: torch.device) -> None:
    def function(m: Custom, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + 1 if a is b else a - b

    _, c = custom(device, function)
    for seed in (1, 2, 3):
        x, y = batch(device, seed=seed), batch(device, seed=seed + 1)
        same(c(x, x), x + 1)
        same(c(x, y), x - y)

    def write(m: Custom, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a + b

    _, c = custom(device, write)
    x = torch.zeros(1, 8, device=device)
    assert c(x, x).tolist() == [[2.0] * 8]
    assert c(x, x).tolist() == [[4.0] * 8]
    assert x.tolist() == [[2.0] * 8]


def test_a_parameter_as_an_argument(device: torch.device) -> None:
    m, c = custom(device, lambda m, x: x * m.weight)
    with torch.no_grad():
        for value in (2.0, 3.0, 4.0):
            m.weight.fill_(value)
            same(c(m.weight), m.weight.detach() ** 2)
    assert c.stats.replays == 2


def test_inputs_that_require_grad_get_their_gradient(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    c(batch(device))
    c(batch(device))
    for _ in range(2):
        x = batch(device).requires_grad_()
        c(x).sum().backward()
        assert x.grad is not None
        y = batch(device).requires_grad_()
        m(y).sum().backward()
        same(x.grad, y.grad)
    assert reasons(c) == ["argument x requires grad"]
    with torch.no_grad():
        same(c(x), m(x))
    assert c.stats.replays == 2


def test_tensor_subclasses_run_the_host(device: torch.device) -> None:
    class Named(torch.Tensor):
        pass

    m = host(device)
    c = captured(m)
    for _ in range(2):
        result = c(batch(device).as_subclass(Named))
        assert type(result) is Named
    assert reasons(c) == ["argument x is neither a tensor nor an immutable constant (Named)"]


def test_a_number_that_changes_with_every_call_is_never_stale(device: torch.device) -> None:
    _, c = custom(device, lambda m, x, step: x * step)
    x = torch.ones(2, device=device)
    for step in range(40):
        assert c(x, step).tolist() == [float(step)] * 2
        assert c(x, float(step)).tolist() == [float(step)] * 2
    assert len(c._graphs) <= 8
    assert c.stats.captures < 30
