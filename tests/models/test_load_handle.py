"""What load_model gives: a model with a plan, of the checkpoint's dtype, that close frees."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch

import flash_rt
from flash_rt import structures


def test_the_handle_is_a_model_with_a_plan(handle: Any, chat_folder: Path) -> None:
    assert type(handle.model).__name__ == "LlamaForCausalLM"
    assert handle.plan.attached
    assert handle.device == torch.device("cpu")
    assert handle.model.dtype is torch.float32
    assert not any(p.requires_grad for p in handle.model.parameters())
    assert handle.tokenizer.eos_token == "<end>"
    assert handle.processor is None
    saved = checkpoints.text_model().state_dict()
    for name, tensor in handle.model.state_dict().items():
        assert torch.equal(tensor, saved[name])
    assert structures.attach(handle, handle.forward) is handle.plan
    assert structures.attach(handle) is handle.plan


def test_detached_the_host_answers(chat_folder: Path) -> None:
    handle = flash_rt.load_model(chat_folder, device="cpu", progress=False)
    bound = handle.predict("Why?", max_new_tokens=9)
    handle.detach()
    assert handle.plan is None
    assert "closed" not in repr(handle)
    assert handle.predict("Why?", max_new_tokens=9) == bound
    assert "".join(handle.stream("Why?", max_new_tokens=9)) == bound
    with pytest.raises(ValueError, match=r"logit_bias needs the decode loop, .* nothing is att"):
        handle.predict("Why?", logit_bias={5: 1.0})
    again = structures.attach(handle)
    assert handle.plan is again
    handle.close()
    assert not again.attached
    assert repr(handle).endswith("closed)")
    for use in (lambda: handle.model, lambda: handle.plan, lambda: handle.predict("x")):
        with pytest.raises(RuntimeError, match="is closed; load it again"):
            use()
    handle.close()


def test_unattached_on_request(chat_folder: Path) -> None:
    with flash_rt.load_model(chat_folder, device="cpu", attach=False, progress=False) as plain:
        assert plain.plan is None
        answer = plain.predict("Why?", max_new_tokens=9)
        plan = structures.attach(plain, plain.forward)
        assert plain.plan is plan
        assert plain.predict("Why?", max_new_tokens=9) == answer


def test_dtype_is_the_checkpoints_unless_said(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, checkpoints.text_model(dtype=torch.bfloat16))
    for dtype, wanted in ((None, torch.bfloat16), ("fp32", torch.float32)):
        with flash_rt.load_model(tmp_path, device="cpu", dtype=dtype, progress=False) as loaded:
            assert {p.dtype for p in loaded.model.parameters()} == {wanted}


def test_shards_and_tied_weights(tmp_path: Path) -> None:
    model = checkpoints.text_model(tie_word_embeddings=True)
    checkpoints.save(tmp_path, model, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    with flash_rt.load_model(str(tmp_path), device="cpu", progress=False) as loaded:
        assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
        ids = torch.tensor([[72, 105]])
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None)
        assert torch.equal(loaded.generate(ids, max_new_tokens=5, eos_token_id=()), wanted)


def test_a_module_stays_the_users() -> None:
    model = checkpoints.text_model()
    with flash_rt.load_model(model, tokenizer=checkpoints.tokenizer()) as handle:
        assert handle.model is model
        assert handle.predict("Why?", max_new_tokens=9) == checkpoints.host_text(
            "[user]Why?[assistant]", 9
        )
    assert torch.equal(model.lm_head.weight, checkpoints.text_model().lm_head.weight)
    with flash_rt.load_model(model) as handle, pytest.raises(ValueError, match="must have a token"):
        handle.predict("Why?")


def test_encoder_decoders_answer_through_the_host() -> None:
    import zoo

    model: Any = zoo.make("t5")
    model.resize_token_embeddings(checkpoints.BYTES)
    model.generation_config.eos_token_id = 0
    tokenizer = checkpoints.tokenizer()
    ids = tokenizer("Why?", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=6, do_sample=False)
    wanted = tokenizer.decode(out[0], skip_special_tokens=True)
    with flash_rt.load_model(model, tokenizer=tokenizer) as handle:
        assert handle.predict("Why?", raw=True, max_new_tokens=6) == wanted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": "lookup"},
        {"precision": "int8", "min_cosine": None},
        {"precision": "int8", "min_cosine": None, "keep_host": False},
    ],
)
def test_a_closed_handle_frees_its_model(chat_folder: Path, options: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()
    try:
        handle = flash_rt.load_model(chat_folder, device="cpu", progress=False, **options)
        handle.predict("Why?", max_new_tokens=5)
        list(handle.stream("Why?", max_new_tokens=5))
        model = weakref.ref(handle.model)
        handle.close()
        assert model() is None
    finally:
        gc.enable()
