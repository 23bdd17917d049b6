"""``layer_mapping`` gives kernelize FlashRT's layers, wherever the builds are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from flash_rt.structures import layer_mapping
from flash_rt.structures.mapping import LAYERS

kernels = pytest.importorskip("kernels")
ROOT = Path(__file__).parents[2]


def local_folder(family: str) -> Path:
    entries = dict(e.split("=", 1) for e in os.environ["LOCAL_KERNELS"].split(":") if e)
    return Path(entries[f"flashrt/{family}"])


def test_layers_come_from_local_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", "flashrt/norm=/tmp/somewhere:other/linear=/tmp/x")
    mapping = layer_mapping(trust_remote_code=True)
    assert set(mapping) == set(LAYERS)
    assert all(set(devices) == {"cuda", "cpu"} for devices in mapping.values())
    here = kernels.LocalLayerRepository(Path("/tmp/somewhere"), layer_name="RMSNorm")
    assert mapping["RMSNorm"]["cpu"] == here
    hub = mapping["Linear"]["cuda"]
    assert isinstance(hub, kernels.LayerRepository)
    assert (hub.layer_name, hub._repo_id, hub._version) == ("Linear", "flashrt/linear", 1)


def test_a_local_folder_must_hold_every_family(tmp_path: Path) -> None:
    (tmp_path / "norm").mkdir()
    with pytest.raises(FileNotFoundError, match=r"none for \['activation', 'linear'\]"):
        layer_mapping(local=tmp_path)
    for family in ("linear", "activation"):
        (tmp_path / family).mkdir()
    mapping = layer_mapping(local=tmp_path)
    expected = kernels.LocalLayerRepository(tmp_path / "linear", layer_name="SwiGLUMLP")
    assert mapping["SwiGLUMLP"]["cuda"] == expected


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_loads_and_passes_the_rules_of_kernelize(layer: str) -> None:
    repository = kernels.LocalLayerRepository(local_folder(LAYERS[layer]), layer_name=layer)
    loaded = repository.load()
    assert loaded.__init__ is nn.Module.__init__
    known = {*dir(nn.Module), "__annotations__", "can_torch_compile", "has_backward"}
    assert set(dir(loaded)) <= known


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 12), nn.Linear(8, 12)
        self.down_proj = nn.Linear(12, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(8)), 1e-3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (8,), 1 + self.weight, self.eps)


def own(base: type[nn.Module]) -> type[nn.Module]:
    """A class of our own, because registering a layer name is for a whole class."""
    return type("Own" + base.__name__, (base,), {"forward": base.forward})


HOSTS = {
    "LayerNorm": lambda cls: cls(8),
    "RMSNorm": lambda cls: cls(8, eps=1e-4),
    "Linear": lambda cls: cls(8, 5),
    "SwiGLUMLP": lambda cls: cls(),
    "RMSNormZeroCentered": lambda cls: cls(),
    "SiLU": lambda cls: cls(),
    "GeluTanh": lambda cls: cls(approximate="tanh"),
}
CLASSES = {
    "LayerNorm": nn.LayerNorm,
    "RMSNorm": nn.RMSNorm,
    "Linear": nn.Linear,
    "SwiGLUMLP": GatedMLP,
    "RMSNormZeroCentered": Centered,
    "SiLU": nn.SiLU,
    "GeluTanh": nn.GELU,
}


@pytest.mark.parametrize("layer", HOSTS)
def test_kernelized_layers_compute_what_the_host_does(layer: str) -> None:
    cls = own(CLASSES[layer])
    kernels.replace_kernel_forward_from_hub(cls, layer)
    torch.manual_seed(0)
    host = HOSTS[layer](cls).eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = host(x)
        with kernels.use_kernel_mapping(layer_mapping(), inherit_mapping=False):
            kernels.kernelize(nn.Sequential(host), mode=kernels.Mode.INFERENCE, device="cpu")
        assert "torch.nn" not in host.forward.__func__.__module__
        torch.testing.assert_close(host(x), expected, rtol=1e-5, atol=1e-6)


def test_the_example_replaces_every_marked_layer() -> None:
    utils = pytest.importorskip("transformers.utils")
    # In a process of its own: the example marks a class of transformers for good.
    command = [sys.executable, str(ROOT / "examples" / "kernelize.py")]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    # Per layer: two norms, q and k norm, the MLP and its activation; and the last norm. A
    # transformers that wants another version of kernels marks nothing; the MLP we mark ourselves.
    replaced = 13 if utils.is_kernels_available() else 2
    assert out.startswith(f"{replaced} layers replaced on ")
    # On a GPU two ways to round the bf16 of a few layers are compared.
    assert float(out.split("logits: ")[1]) < (1e-5 if "on cpu" in out else 2e-2)
