"""What attach takes for a mistake of the caller."""

from __future__ import annotations

import pytest
import torch
from comparing import portrait
from gated_models import Model, model, rows
from torch import nn

from flash_rt import structures
from flash_rt.structures.decision import Bound


@pytest.mark.parametrize("forward", [print, lambda x: x, nn.Linear(2, 2).forward])
def test_a_foreign_forward_is_an_error(forward: object) -> None:
    host = model()
    before = portrait(host)
    with pytest.raises(TypeError, match="attach: forward"):
        structures.attach(host, forward)  # type: ignore[arg-type]
    assert portrait(host) == before


def test_what_is_no_module_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        structures.attach("Qwen/Qwen3-8B")


def test_unknown_precision_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"precision must be one of .*got 'fp9'"):
        structures.plan(model(), precision="fp9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_of_other_weights_is_an_error(dtype: torch.dtype) -> None:
    host = model().to(dtype)
    before = portrait(host)
    text = rf"precision='bf16' must .*, got {dtype}; cast first with model.to\(torch.bfloat16\)"
    for call in (structures.plan, structures.attach):
        with pytest.raises(ValueError, match=text):
            call(host, precision="bf16")
    assert portrait(host) == before


def test_bf16_of_a_model_that_keeps_a_norm_in_fp32() -> None:
    host = model().to(torch.bfloat16)
    host.norm.float()
    found = rows(structures.plan(host, precision="bf16"))
    assert isinstance(found["first"], Bound) and found["first"].precision == "bf16"


def test_training_mode_is_an_error() -> None:
    host = model().train()
    before = portrait(host)
    with pytest.raises(ValueError, match=r"eval mode; call model.eval\(\)"):
        structures.attach(host)
    assert portrait(host) == before


def test_tensors_that_accelerate_offloads_are_an_error() -> None:
    accelerate = pytest.importorskip("accelerate")
    host, x = model(), torch.randn(1, 3, 32)
    accelerate.cpu_offload(host, execution_device="cpu")
    with pytest.raises(ValueError, match="module 'norm' has an offload hook; load it on one dev"):
        structures.attach(host)
    with torch.no_grad():
        assert torch.equal(host(x), model()(x))


def test_meta_tensors_are_an_error() -> None:
    with torch.device("meta"):
        host = Model().eval()
    with pytest.raises(ValueError, match="meta device; load its weights first"):
        structures.attach(host)


def test_two_devices_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    host = model()
    # No second device on a CPU machine: one parameter says it is elsewhere.
    elsewhere = _OnCuda(host.first.a.weight.detach())
    host.first.a._parameters["weight"] = elsewhere  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"one device, got cpu, cuda:0"):
        structures.attach(host)


class _OnCuda(nn.Parameter):
    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_offload_hooks_are_an_error() -> None:
    from accelerate import cpu_offload

    host = model()
    cpu_offload(host, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"meta device|offload hook"):
        structures.attach(host)
