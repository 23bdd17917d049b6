"""A watch notices what moves or replaces the tensors of a module, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_support import Host, host
from torch import nn

from flash_rt.structures.capture import GraphCache, Watch

CPU = torch.device("cpu")


def replace_parameter(m: Host) -> None:
    m.inner.weight = nn.Parameter(m.inner.weight.detach().clone())


def move_data(m: Host) -> None:
    m.inner.weight.data = m.inner.weight.data.clone()


def replace_module(m: Host) -> None:
    m.inner = nn.Linear(8, 16)


def replace_buffer(m: Host) -> None:
    m.shift = torch.zeros(8)


def replace_one_element_by_its_equal(m: Host) -> None:
    m.gain = m.gain.clone()


def cast(m: Host) -> None:
    m.to(torch.float64)


def add_module(m: Host) -> None:
    m.extra = nn.Linear(2, 2)


def override_forward(m: Host) -> None:
    m.inner.forward = lambda x: x  # type: ignore[method-assign]


def assign_state(m: Host) -> None:
    m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        replace_parameter,
        move_data,
        replace_module,
        replace_buffer,
        replace_one_element_by_its_equal,
        cast,
        add_module,
        override_forward,
        assign_state,
    ],
)
def test_changes_are_noticed_once(change: Callable[[Host], None]) -> None:
    m = host(CPU)
    watch = Watch(m)
    watch.check()
    assert watch.generation == 0
    change(m)
    watch.check()
    watch.check()
    assert watch.generation == 1


def test_a_number_is_noticed_unless_calls_change_it_themselves() -> None:
    m = host(CPU)
    watch = Watch(m)
    m.inner.scale = 2.0  # new, so that nothing has read it
    assert watch.check() is None
    watch = Watch(m)
    m.inner.scale = 3.0
    watch.check()
    assert watch.generation == 1
    watch.apart_from_own_writes(m, torch.zeros(3, 8))
    m.calls += 1
    watch.check()
    assert watch.generation == 1
    m.inner.scale = 2.0
    m.calls += 1
    watch.check()
    assert watch.generation == 2


def test_in_place_writes_matter_only_to_packed_copies() -> None:
    m = host(CPU)
    watch, packed = Watch(m), Watch(m, versions=True)
    with torch.no_grad():
        m.inner.weight.mul_(2)
    m.load_state_dict(m.state_dict())
    for _ in range(2):
        watch.check()
        packed.check()
    assert (watch.generation, packed.generation) == (0, 1)


def test_bump_advances_the_generation() -> None:
    watch = Watch(host(CPU))
    watch.bump()
    assert watch.generation == 1


def test_hooks_and_training_are_reasons_to_run_eagerly() -> None:
    m = host(CPU)
    watch = Watch(m)
    assert watch.check() is None
    handle = m.inner.register_forward_hook(lambda *_: None)
    assert watch.check() == "a forward hook is registered on inner"
    handle.remove()
    assert watch.check() is None
    handle = m.register_forward_pre_hook(lambda *_: None)
    assert watch.check() == "a forward hook is registered on Host"
    handle.remove()
    m.outer.train()
    assert watch.check() == "a submodule is in training mode"
    m.eval()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert watch.check() == "a global forward hook is registered"
    handle.remove()
    assert watch.check() is None


def test_the_device_is_that_of_all_tensors() -> None:
    m = host(CPU)
    assert Watch(m).device == CPU
    m.shift = torch.zeros(8, device="meta")
    assert Watch(m).device is None
    assert Watch(nn.Tanh()).device is None


class Entry:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_the_least_recently_used_entry_is_released_first() -> None:
    cache: GraphCache[Entry] = GraphCache(2)
    a, b, c, d = (Entry() for _ in range(4))
    cache.put("a", a)
    cache.put("b", b)
    assert cache.get("a") is a
    assert cache.put("c", c) == [b]
    assert cache.get("b") is None
    assert [a.released, b.released, c.released] == [0, 1, 0]
    assert cache.put("c", d) == [c]
    assert [*cache] == ["a", "c"]
    cache.clear()
    assert [a.released, d.released, len(cache)] == [1, 1, 0]
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        GraphCache(0)
