"""Layers under kernels' own ``kernelize``, in hosts of the usual form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import kernels
import linear_cases as cases
import pytest
import torch
import torch.nn.functional as F
from _common.tolerance import assert_accurate
from torch import nn


class NewGELUActivation(nn.Module):
    """Written out as transformers does, under the same name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


class Host(nn.Module):
    """A gated MLP as models have it."""

    def __init__(self, act_fn: Callable[[torch.Tensor], torch.Tensor], *, bias: bool) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(64, 96, bias=bias)
        self.up_proj = nn.Linear(64, 96, bias=bias)
        self.down_proj = nn.Linear(96, 64, bias=bias)
        self.act_fn = act_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


def make_host(act_fn: object, device: str, dtype: torch.dtype, *, bias: bool = False) -> Host:
    torch.manual_seed(0)
    return Host(act_fn, bias=bias).to(device, dtype).eval()


def kernelized(family: ModuleType, layer: str, host: nn.Module, device: str) -> nn.Module:
    """The host with its forward replaced as ``kernels`` does it, by the variant under test."""
    name = f"Test{layer}"
    kernels.replace_kernel_forward_from_hub(type(host), name)
    variant = Path(family.__file__).parent
    repository = kernels.LocalLayerRepository(variant, layer_name=layer)
    with kernels.use_kernel_mapping({name: {device: repository}}, inherit_mapping=False):
        return kernels.kernelize(
            host, mode=kernels.Mode.INFERENCE, device=device, use_fallback=False
        )


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("layer", "act_fn"),
    [
        ("SwiGLUMLP", nn.SiLU()),
        ("SwiGLUMLP", F.silu),
        ("GeGLUMLP", nn.GELU()),
        ("GeGLUMLP", nn.GELU(approximate="tanh")),
        ("GeGLUMLP", NewGELUActivation()),
    ],
    ids=["silu", "silu_function", "gelu", "gelu_tanh", "new_gelu"],
)
def test_gated_mlp(
    family: ModuleType,
    device: str,
    dtype: torch.dtype,
    layer: str,
    act_fn: Callable[[torch.Tensor], torch.Tensor],
    bias: bool,
    rows: int,
) -> None:
    host = make_host(act_fn, device, dtype, bias=bias)
    x = cases.normal((1, rows, 64), dtype, device, seed=0)
    eager = host(x)
    exact = make_host(act_fn, device, dtype, bias=bias).double()(x.double())
    names = set(host.state_dict())
    replaced = kernelized(family, layer, host, device)
    assert replaced.forward.__func__ is getattr(family.layers, layer).forward
    assert_accurate(replaced(x), exact, eager)
    assert set(replaced.state_dict()) == names


def test_linear(family: ModuleType, device: str, dtype: torch.dtype) -> None:
    class Projection(nn.Linear):
        pass

    torch.manual_seed(0)
    host = Projection(64, 33).to(device, dtype).eval()
    x = cases.normal((2, 3, 64), dtype, device, seed=0)
    eager = host(x)
    exact = F.linear(x.double(), host.weight.double(), host.bias.double())
    assert_accurate(kernelized(family, "Linear", host, device)(x), exact, eager)


def test_activation_named_by_configuration(family: ModuleType, device: str) -> None:
    """``hidden_act`` decides where a host has no ``act_fn``."""
    host = make_host(None, device, torch.bfloat16)
    x = cases.normal((2, 64), torch.bfloat16, device, seed=0)
    for name, function in (("gelu", nn.GELU()), ("gelu_pytorch_tanh", nn.GELU("tanh"))):
        host.act_fn, host.hidden_act = function, name
        exact = make_host(function, device, torch.bfloat16).double()(x.double())
        eager = host(x)
        host.act_fn = None
        assert_accurate(family.layers.GeGLUMLP.forward(host, x), exact, eager)


@pytest.mark.parametrize(
    ("layer", "act_fn"),
    [
        ("SwiGLUMLP", nn.GELU()),
        ("SwiGLUMLP", F.relu),
        ("GeGLUMLP", nn.SiLU()),
        ("GeGLUMLP", None),
        ("GeGLUMLP", nn.Mish()),
    ],
)
def test_other_activations_are_refused(family: ModuleType, layer: str, act_fn: object) -> None:
    host = make_host(act_fn, "cpu", torch.bfloat16)
    x = cases.normal((2, 64), torch.bfloat16, "cpu", seed=0)
    with pytest.raises(
        TypeError, match=r"^gated MLP: act_fn must be (silu|gelu or gelu_tanh), got"
    ):
        getattr(family.layers, layer).forward(host, x)


def test_other_projections_are_refused(family: ModuleType) -> None:
    host = make_host(nn.SiLU(), "cpu", torch.bfloat16)
    host.up_proj = nn.Sequential(host.up_proj)
    x = cases.normal((2, 64), torch.bfloat16, "cpu", seed=0)
    with pytest.raises(TypeError, match=r"projections must be nn\.Linear, got Sequential"):
        family.layers.SwiGLUMLP.forward(host, x)


@pytest.mark.parametrize("layer", ["SwiGLUMLP", "GeGLUMLP", "Linear"])
def test_form_that_kernelize_demands(family: ModuleType, layer: str) -> None:
    """No constructor, no member beyond nn.Module's but the two flags."""
    cls = getattr(family.layers, layer)
    assert cls.__init__ is nn.Module.__init__
    assert set(dir(cls)) - set(dir(nn.Module)) <= {"can_torch_compile", "has_backward"}
    assert cls.can_torch_compile
    assert not cls.has_backward


def test_layer_compiles(family: ModuleType, device: str) -> None:
    host = make_host(nn.SiLU(), device, torch.bfloat16)
    x = cases.normal((2, 64), torch.bfloat16, device, seed=0)
    replaced = kernelized(family, "SwiGLUMLP", host, device)
    torch._dynamo.reset()
    compiled = torch.compile(replaced, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), replaced(x))
