"""Copies to experiment on: cheap however large the host, and different in every parameter."""

from __future__ import annotations

import torch
from test_attach import Mlp, model
from torch import nn

from flash_rt.structures.twin import LARGE, Twin

CPU = torch.device("cpu")


def twin(module: nn.Module, **shapes: tuple[int, ...]) -> nn.Module:
    return Twin(module, CPU, shapes, seed=1).module


def test_a_large_weight_costs_little_and_repeats_no_row_or_column() -> None:
    with torch.device("meta"):
        host = nn.Linear(4096, 12288, bias=False, dtype=torch.bfloat16)
    weight = twin(host).weight
    assert weight.numel() > LARGE
    assert weight.untyped_storage().nbytes() < 1 << 20
    assert weight.dtype == torch.float32
    corner = weight[:300, :300]
    assert len(torch.unique(corner, dim=0)) == len(torch.unique(corner, dim=1)) == 300
    assert abs(float(weight[::97].std()) * 4096**0.5 - 1) < 0.02


def test_parameters_are_redrawn_and_the_host_is_untouched() -> None:
    host = model().to(torch.bfloat16)
    before = {name: value.clone() for name, value in host.state_dict().items()}
    copy = twin(host)
    for name, value in copy.named_parameters():
        assert value.dtype == torch.float32
        assert not torch.equal(value, before[name].float())
        assert not bool((value == 0).any() | (value == 1).any())
    assert all(torch.equal(v, before[n]) for n, v in host.state_dict().items())


def test_ties_shapes_hooks_and_modes() -> None:
    host = Mlp(bias=False).train()
    host.b.weight = host.a.weight
    host.c.register_forward_hook(lambda *_: None)
    copy = twin(host, **{"a.weight": (5, 32), "c.weight": (32, 5)})
    assert copy.a.weight is copy.b.weight
    assert copy.a.weight.shape == (5, 32)
    assert not copy.c._forward_hooks
    assert len(host.c._forward_hooks) == 1
    assert not copy.training
    assert host.training


def test_buffers_keep_their_values() -> None:
    host = nn.BatchNorm1d(4)
    host.running_mean.fill_(3.0)
    copy = twin(host)
    assert torch.equal(copy.running_mean, host.running_mean)
    assert copy.running_mean.data_ptr() != host.running_mean.data_ptr()
