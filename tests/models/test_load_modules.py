"""load_model of everything that answers in one call: encoders, vision models, any module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import flash_rt
from flash_rt import structures
from flash_rt.flashrt_hf.load import ModuleHandle


def loaded(folder: Path, name: str, **options: Any) -> Any:
    zoo.make(name).save_pretrained(folder)
    return flash_rt.load_model(folder, **{"device": "cpu", "progress": False, **options})


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_an_encoder_replays_a_graph_for_each_shape(tmp_path: Path) -> None:
    with loaded(tmp_path, "bert") as handle:
        assert isinstance(handle, ModuleHandle)
        assert structures.attach(handle, handle.forward) is handle.plan
        for batch, tokens in ((2, 7), (1, 5), (2, 7), (2, 7)):
            ids = zoo.ids(batch, tokens)
            mask = torch.ones_like(ids)
            mask[0, -2:] = 0
            with torch.no_grad():
                wanted = zoo.shared("bert")(input_ids=ids, attention_mask=mask)
            found = handle.predict(input_ids=ids, attention_mask=mask)
            assert type(found) is type(wanted)
            close(found.last_hidden_state, wanted.last_hidden_state)
            assert not found.last_hidden_state.requires_grad
        stats = handle.plan.captured.stats
        assert (stats.captures, stats.replays, sum(stats.fallbacks.values())) == (2, 2, 0)


@pytest.mark.parametrize("name", ["vit", "siglip", "clip"])
def test_vision_models(name: str, tmp_path: Path) -> None:
    with loaded(tmp_path, name) as handle, torch.no_grad():
        wanted = zoo.shared(name)(**zoo.inputs(name))
        for _ in range(2):
            found = handle.predict(**zoo.inputs(name))
            for key, tensor in wanted.items():
                if isinstance(tensor, torch.Tensor):
                    close(found[key], tensor)
        assert handle.plan.captured.stats.replays == 1


def test_pixels_come_in_the_models_dtype(tmp_path: Path) -> None:
    with loaded(tmp_path, "vit", dtype="bf16") as handle:
        wanted = zoo.make("vit", torch.bfloat16)(**zoo.inputs("vit", torch.bfloat16))
        found = handle.predict(**zoo.inputs("vit")).last_hidden_state
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, wanted.last_hidden_state, rtol=0.05, atol=0.05)


def test_a_decoder_without_a_head_makes_no_cache(tmp_path: Path) -> None:
    zoo.shared("llama").model.save_pretrained(tmp_path)
    with flash_rt.load_model(tmp_path, device="cpu", progress=False) as handle:
        assert type(handle.model).__name__ == "LlamaModel"
        ids = zoo.ids()
        for _ in range(2):
            found = handle.predict(input_ids=ids)
        assert found.past_key_values is None
        with torch.no_grad():
            close(found.last_hidden_state, zoo.shared("llama").model(ids).last_hidden_state)
        assert handle.plan.captured.stats.replays == 1
        assert handle.predict(ids, use_cache=True).past_key_values is not None


def test_positional_and_plain_arguments_pass() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, scale: float = 1.0, **named: Any) -> torch.Tensor:
            return self.inner(x) * scale + sum(named.values())

    module = Scaled().eval()
    x = torch.randn(3, 8)
    with flash_rt.load_model(module) as handle:
        assert handle.model is module
        assert handle.name == "Scaled"
        with torch.no_grad():
            wanted = module.inner(x) * 2.0 + 5
        close(handle.predict(x, 2.0, shift=5), wanted)
        close(handle.predict(x, shift=torch.tensor(5.0), scale=2.0), wanted)
        close(handle(x, 2.0, shift=5), wanted)


def test_arguments_that_forward_does_not_have_are_named(tmp_path: Path) -> None:
    with loaded(tmp_path, "bert") as handle:
        with pytest.raises(TypeError, match=r"BertModel\.forward: .* got 'pixels', 'tempo'"):
            handle.predict(input_ids=zoo.ids(), pixels=1, tempo=2)
        found = handle.predict(input_ids=zoo.ids(), output_hidden_states=True, return_dict=False)
        assert isinstance(found, tuple)
        assert len(found[2]) == 3
    with flash_rt.load_model(nn.Linear(4, 4).eval()) as handle:
        with pytest.raises(TypeError, match=r"predict: Linear\.forward: .* got 'pixels'"):
            handle.predict(torch.zeros(1, 4), pixels=1)
        with pytest.raises(TypeError, match=r"predict: Linear\.forward: missing .*'input'"):
            handle.predict()


def test_a_module_is_cast_and_moved_when_asked() -> None:
    module = nn.Linear(4, 4).eval()
    with flash_rt.load_model(module, device="cpu", dtype=torch.bfloat16) as handle:
        assert handle.model.weight.dtype is torch.bfloat16


def test_diffusers_modules_are_modules() -> None:
    model = zoo.make("wan")
    with torch.no_grad():
        wanted = model(**zoo.inputs("wan"))[0]
    with flash_rt.load_model(model) as handle:
        for _ in range(2):
            close(handle.predict(**zoo.inputs("wan"))[0], wanted)
        assert handle.plan.captured.stats.replays == 1
