"""A loaded vision-language model: messages with images in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .preprocessing import Unavailable
from .prompts import Message, messages
from .text_handle import TextHandle


class VisionLanguageHandle(TextHandle):
    """A model that generates text about images.

    ``predict`` and ``stream`` take images inside messages, as the processor's chat template has
    them (``{"type": "image", "image": ...}``), or beside a text as ``images``, one or a list. An
    image is a ``PIL.Image``, a path or an http address. The attached model's ``generate`` runs the
    request.
    """

    def _inputs(
        self,
        where: str,
        prompt: str | Sequence[Message],
        *,
        images: Any,
        raw: bool,
        template: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """What the processor makes of prompt and images, floats in the model's dtype."""
        processor = self._processor(where)
        has_template = bool(getattr(processor, "chat_template", None))
        given = [] if images is None else list(images) if _several(images) else [images]
        chat = messages(where, prompt, raw=raw, has_template=has_template)
        if chat is None:
            if template:
                raise ValueError(f"{where}: template needs a chat template, got {template!r}")
            encoded = processor(text=prompt, images=given or None, return_tensors="pt")
        else:
            if given and not isinstance(prompt, str):
                raise ValueError(f"{where}: images belong into the messages, got both")
            encoded = processor.apply_chat_template(
                _with_content(chat, given),
                **{"add_generation_prompt": True, **(template or {})},
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        dtype = self.model.dtype
        return {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in encoded.items()
            if name != "labels"  # of training, which some processors add
        }

    def _processor(self, where: str) -> Any:
        if isinstance(self.processor, Unavailable):
            raise ImportError(f"{where}: {self.processor.reason}") from self.processor.reason
        if self.processor is None:
            raise ValueError(f"{where}: {self.name} must have a processor, and has no files of one")
        return self.processor


def _several(images: Any) -> bool:
    return isinstance(images, Sequence) and not isinstance(images, (str, bytes))


def _with_content(chat: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Messages whose content is a list of parts, the images in front of the last one's text."""
    parts = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if isinstance(m.get("content"), str)
        else m
        for m in chat
    ]
    if images:
        found = [{"type": "image", "image": image} for image in images]
        parts[-1] = {**parts[-1], "content": [*found, *parts[-1]["content"]]}
    return parts
