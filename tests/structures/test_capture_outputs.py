"""Results of a captured forward: the host's types and sharing, and the caller's own memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from capture_support import Custom, batch, captured, custom, host, same


def test_results_are_the_callers_own(device: torch.device) -> None:
    m = host(device)
    c = captured(m)
    x = batch(device)
    c(x)
    first = c(x)
    expected = first.clone()
    second = c(batch(device, seed=9))
    same(first, expected)
    second.zero_()
    same(c(x), expected)


def test_an_in_place_write_reaches_the_callers_tensor_every_time(device: torch.device) -> None:
    _, c = custom(device, lambda m, x: x.add_(1))
    x = torch.zeros(1, 8, device=device)
    for _ in range(3):
        assert c(x) is x
    assert x.tolist() == [[3.0] * 8]


@dataclass
class Result:
    value: torch.Tensor
    parts: list[torch.Tensor]
    note: str


def test_outputs_keep_type_and_shared_tensors(device: torch.device) -> None:
    def function(m: Custom, x: torch.Tensor) -> Result:
        y = x * m.weight
        return Result(y, [y, y + 1], "done")

    _, c = custom(device, function)
    for seed in (1, 2, 3):
        x = batch(device, seed=seed)
        result = c(x)
        assert type(result) is Result
        assert result.note == "done"
        same(result.value, x * 2)
        same(result.parts[1], x * 2 + 1)
        assert result.parts[0] is result.value
    assert c.stats.replays == 2


def test_outputs_that_are_inputs_or_weights_are_those_objects(device: torch.device) -> None:
    _, c = custom(device, lambda m, x: (x, x[1:, ::2], m.weight, m.count[2:4], x.view(torch.int32)))
    m = c._module
    for seed in (1, 2, 3):
        x = batch(device, seed=seed)
        whole, part, weight, count, bits = c(x)
        assert whole is x
        same(part, x[1:, ::2])
        assert part.stride() == x[1:, ::2].stride()
        part.zero_()
        assert x[1, 0].item() == 0
        assert weight is m.weight
        assert count.data_ptr() == m.count[2:].data_ptr()
        assert bits.dtype is torch.int32
    assert c.stats.replays == 2


def test_a_view_of_an_offset_input_lands_in_the_input(device: torch.device) -> None:
    _, c = custom(device, lambda m, x: x[1:])
    for seed in (1, 2, 3):
        wide = batch(device, 6, seed)
        x = wide[2:5]
        view = c(x)
        same(view, wide[3:5])
        assert view.data_ptr() == wide[3:].data_ptr()
