"""load_model of vision-language models: images in messages and beside a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import zoo

import flash_rt
from flash_rt import structures
from flash_rt.flashrt_hf.load import VisionLanguageHandle

Image = pytest.importorskip("PIL.Image", reason="images need pillow")
CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def tokenizer() -> Any:
    """Bytes, and a token for an image."""
    made = checkpoints.tokenizer.__wrapped__()
    made.add_special_tokens({"additional_special_tokens": ["<image>"]})
    made.chat_template = None
    made.bos_token = "<end>"  # which PaliGemma's processor writes behind the images
    return made


def picture(seed: int, size: tuple[int, int] = (20, 40)) -> Any:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator)
    return Image.fromarray(pixels.numpy())


def text_config(**fields: Any) -> dict[str, Any]:
    ends = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    return {**zoo.TEXT, "vocab_size": 258, "head_dim": 16, **ends, **fields}


def llava() -> tuple[Any, Any]:
    """A model with a CLIP tower and a Llama, and a processor with a chat template."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    vision = {**zoo.VISION, "model_type": "clip_vision_model", "projection_dim": 64}
    config = LlavaConfig(
        text_config=text_config(model_type="llama"),
        vision_config=vision,
        image_token_index=257,
        image_seq_length=4,
    )
    size = {"height": 32, "width": 32}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    processor = LlavaProcessor(
        images,
        tokenizer(),
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )
    return zoo.redraw(LlavaForConditionalGeneration(config)), processor


def paligemma() -> tuple[Any, Any]:
    """A model with a SigLIP tower and a Gemma, and a processor without a chat template."""
    from transformers import (
        PaliGemmaConfig,
        PaliGemmaForConditionalGeneration,
        PaliGemmaProcessor,
    )
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    config = PaliGemmaConfig(
        text_config=text_config(model_type="gemma"),
        vision_config={**zoo.VISION, "model_type": "siglip_vision_model", "projection_dim": 64},
        projection_dim=64,
        image_token_id=257,
    )
    images = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    images.image_seq_length = 4
    return (
        zoo.redraw(PaliGemmaForConditionalGeneration(config)),
        PaliGemmaProcessor(images, tokenizer()),
    )


def saved(folder: Path, made: tuple[Any, Any]) -> Path:
    model, processor = made
    model.generation_config.bos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = saved(tmp_path_factory.mktemp("llava"), llava())
    with flash_rt.load_model(folder, device="cpu", progress=False) as loaded:
        yield loaded


def host_text(made: tuple[Any, Any], text: str, images: Any, new: int) -> str:
    """What the unattached model says to a text with image tokens in it."""
    model, processor = made
    inputs = processor(text=text, images=images, return_tensors="pt")
    inputs.pop("labels", None)
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    said: str = processor.tokenizer.decode(
        out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return said


def test_messages_with_images(handle: Any) -> None:
    assert isinstance(handle, VisionLanguageHandle)
    assert handle.plan.attached
    assert "LlavaProcessor" in type(handle.processor).__name__
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture(1)},
                {"type": "text", "text": "Why?"},
            ],
        }
    ]
    wanted = host_text(llava(), "[user]<image>Why?[assistant]", [picture(1)], 9)
    assert handle.predict(chat, max_new_tokens=9) == wanted
    assert "".join(handle.stream(chat, max_new_tokens=9)) == wanted
    assert handle.predict("Why?", images=picture(1), max_new_tokens=9) == wanted
    other = handle.predict("Why?", images=picture(2), max_new_tokens=9)
    assert other != wanted
    assert other == host_text(llava(), "[user]<image>Why?[assistant]", [picture(2)], 9)


def test_two_images_and_none(handle: Any) -> None:
    both = [picture(1), picture(2)]
    wanted = host_text(llava(), "[user]<image><image>Why?[assistant]", both, 9)
    assert handle.predict("Why?", images=both, max_new_tokens=9) == wanted
    said = handle.predict("Why?", max_new_tokens=9)
    assert said == host_text(llava(), "[user]Why?[assistant]", None, 9)


def test_attach_of_the_handle_is_the_plan(handle: Any) -> None:
    assert structures.attach(handle, handle.forward) is handle.plan
    bound = {row.path for row in handle.plan.bound()}
    assert any("vision_tower" in path for path in bound)
    assert any("language_model" in path for path in bound)


def test_a_processor_without_a_chat_template(tmp_path: Path) -> None:
    folder = saved(tmp_path, paligemma())
    wanted = host_text(paligemma(), "<image>Why?", picture(1), 9)
    with flash_rt.load_model(folder, device="cpu", progress=False) as loaded:
        assert loaded.predict("<image>Why?", images=picture(1), max_new_tokens=9) == wanted
        with pytest.raises(ValueError, match="messages need a chat template"):
            loaded.predict([{"role": "user", "content": "Why?"}])


def test_images_beside_messages_are_refused(handle: Any) -> None:
    chat = [{"role": "user", "content": "Why?"}]
    with pytest.raises(ValueError, match="images belong into the messages, got both"):
        handle.predict(chat, images=picture(1))


def test_a_bf16_model_gets_bf16_pixels(tmp_path: Path) -> None:
    model, processor = llava()
    folder = saved(tmp_path, (model.to(torch.bfloat16), processor))
    with flash_rt.load_model(folder, device="cpu", progress=False) as loaded:
        seen = []
        tower = loaded.model.get_submodule("model.vision_tower")
        hook = tower.register_forward_pre_hook(
            lambda _, args, kw: seen.append((*args, *kw.values())), with_kwargs=True
        )
        loaded.predict("Why?", images=picture(1), max_new_tokens=1)
        hook.remove()
        assert seen[0][0].dtype is torch.bfloat16


def test_a_processor_that_cannot_be_made_here_is_told_when_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoProcessor

    folder = saved(tmp_path, llava())

    def missing(*args: Any, **kwargs: Any) -> None:
        raise ImportError("LlavaProcessor requires the Imaginary library")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", missing)
    with flash_rt.load_model(folder, device="cpu", progress=False) as loaded:
        with pytest.raises(ImportError, match="predict: .*requires the Imaginary library"):
            loaded.predict("Why?", images=picture(1))
        ids = torch.tensor([[72, 105]])
        assert loaded.generate(ids, max_new_tokens=3, eos_token_id=()).shape == (1, 5)
