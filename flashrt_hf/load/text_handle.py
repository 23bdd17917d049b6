"""A loaded language model: text in, text out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from flash_rt.structures.loops.decode import MAX_BATCH
from flash_rt.structures.loops.request import integer

from . import sampling
from .answer import Answer, AnswerDone, in_pieces
from .handle import Handle
from .loop_shelf import LoopShelf
from .prompts import Message, check_ids, messages, stop_strings

MAX_NEW_TOKENS = 512


class TextHandle(Handle):
    """A model that generates text.

    A request runs on the captured decode loop where the model has one, else through the model's own
    ``generate``; ``structures.explain(handle.plan)`` says which and why.

    Attributes:
        max_len: most positions of prompt and answer together; None where only the model's own
            limit holds, and the cache grows with the requests.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        tokenizer: Any = None,
        processor: Any = None,
        max_len: int | None = None,
        draft: Any = None,
    ) -> None:
        super().__init__(model, name=name, tokenizer=tokenizer, processor=processor)
        self.max_len = max_len
        self._shelf = LoopShelf(draft)

    def predict(
        self,
        prompt: str | Sequence[Message],
        *,
        images: Any = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """The model's answer.

        The next turn of a conversation, messages that go on from the last answer, computes its new
        tokens only.

        Args:
            prompt: messages (``{"role": ..., "content": ...}``), or a text. A text is one message
                of the user where the tokenizer has a chat template, and is continued as it stands
                where it has none.
            images: of a vision-language model; see ``VisionLanguageHandle``.
            max_new_tokens: the answer ends behind so many tokens, or at the model's end of text;
                None means 512, or as many as fit.
            stop: strings that end the answer; they are left out.
            raw: continue the text; no chat template.
            template: further variables of the chat template, such as ``enable_thinking`` or
                ``tools``.
            options: ``temperature`` (0, the default, takes the likeliest token), ``top_k``,
                ``top_p``, ``min_p`` (with any of them, and with ``do_sample=True``, temperature is
                1 unless given), ``seed``, ``repetition_penalty``, ``presence_penalty``,
                ``frequency_penalty``, ``logit_bias`` and ``min_new_tokens``, as in
                ``structures.loops.Sampling``.

        Raises:
            TypeError: a name that is no option; a prompt of another type.
            ValueError: an option out of its range or that this model cannot honour, a prompt that
                does not fit, no tokenizer.
        """
        pieces: list[str] = []

        def emit(text: str) -> bool:
            pieces.append(text)
            return True

        inputs = self._inputs("predict", prompt, images=images, raw=raw, template=template)
        answer = Answer(self._tokenizer("predict"), emit, stop=stop_strings("predict", stop))
        self._run("predict", inputs, answer, max_new_tokens, options)
        return "".join(pieces)

    def stream(
        self,
        prompt: str | Sequence[Message],
        *,
        images: Any = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """The answer of ``predict`` in pieces, as they come; closing the iterator ends the request.

        Arguments and errors are those of ``predict``; errors of the request come with the first
        piece.
        """
        inputs = self._inputs("stream", prompt, images=images, raw=raw, template=template)
        strings, tokenizer = stop_strings("stream", stop), self._tokenizer("stream")
        options = sampling.read("stream", options)

        def run(emit: Callable[[str], bool]) -> None:
            answer = Answer(tokenizer, emit, stop=strings)
            self._run("stream", inputs, answer, max_new_tokens, options)

        return in_pieces(run)

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        num_return_sequences: int = 1,
        stop_strings: str | Sequence[str] | None = None,
        streamer: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        """Continue token ids.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            attention_mask: ``[B, P]``, 0 at padding; None means no padding.
            max_new_tokens: at most so many more; None means 512, or as many as fit.
            eos_token_id: a row stops behind one of these; None takes the model's, ``()`` none.
            pad_token_id: fills rows that stopped; None takes the model's, else the first eos.
            num_return_sequences: n answers to every prompt, in neighbouring rows.
            stop_strings: a row stops behind the token that completes one of these.
            streamer: as in transformers.
            options: as in ``predict``.

        Returns:
            int64 ``[B * n, P + new]`` on the device of ``input_ids``.

        Raises:
            TypeError, ValueError: as ``predict``; see also ``structures.DecodeLoop.generate``.
        """
        check_ids("generate", input_ids)
        given = sampling.read("generate", options)
        rest: dict[str, Any] = dict(
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            num_return_sequences=integer("generate", "num_return_sequences", num_return_sequences),
        )
        if stop_strings:
            rest |= dict(stop_strings=stop_strings, tokenizer=self._tokenizer("generate"))
        rest = {name: value for name, value in rest.items() if value is not None}
        inputs = dict(input_ids=input_ids, attention_mask=attention_mask)
        return self._generate("generate", inputs, max_new_tokens, given, streamer, rest)

    def _forget(self) -> None:
        self._shelf.clear()

    def _run(
        self,
        where: str,
        inputs: dict[str, Any],
        answer: Answer,
        max_new: int | None,
        options: Mapping[str, Any],
    ) -> None:
        given = sampling.read(where, options)
        with contextlib.suppress(AnswerDone):
            self._generate(where, inputs, max_new, given, answer, {}, reuse=True)

    def _generate(
        self,
        where: str,
        inputs: dict[str, Any],
        max_new: int | None,
        options: dict[str, Any],
        streamer: Any,
        rest: dict[str, Any],
        *,
        reuse: bool = False,
    ) -> torch.Tensor:
        """On the loop where it can be, else by the model's own ``generate``."""
        ids = inputs["input_ids"]
        rows = ids.shape[0] * rest.get("num_return_sequences", 1)
        refusal = self._refusal(inputs, rows)
        max_new = self._room(where, ids.shape[1], max_new)
        with self._running():
            if refusal is None:
                loop = self._shelf.get(
                    self.model,
                    rows=rows,
                    needed=ids.shape[1] + max_new,
                    max_len=self.max_len,
                    limit=self.limit,
                )
                mask = inputs["attention_mask"]
                return loop.generate(
                    ids,
                    mask,
                    max_new_tokens=max_new,
                    reuse_prefix=reuse,
                    streamer=streamer,
                    **rest,
                    **options,
                )
            told = sampling.for_host(where, options, why=refusal)
            given = {k: _on(self.device, v) for k, v in inputs.items() if v is not None}
            with sampling.seeded(options.get("seed"), self.device):
                out: torch.Tensor = self.model.generate(
                    **given, max_new_tokens=max_new, streamer=streamer, **told, **rest
                )
        return out.to(ids.device)

    @property
    def loop_refusal(self) -> str | None:
        """Why the decode loop cannot run any request; None where it can."""
        plan = self.plan
        if plan is None:
            return "nothing is attached"
        if plan.generation is None:
            return f"{type(self.model).__name__} has no generate"
        return plan.generation.refusal

    def _refusal(self, inputs: Mapping[str, Any], rows: int) -> str | None:
        """Why the decode loop cannot run a request."""
        if self.loop_refusal is not None:
            return self.loop_refusal
        others = sorted(set(inputs) - {"input_ids", "attention_mask"})
        if others:
            return f"the loop does not read {', '.join(others)}"
        if rows > MAX_BATCH:
            return f"the loop runs up to {MAX_BATCH} rows, and there are {rows}"
        return None

    def _room(self, where: str, width: int, max_new: int | None) -> int:
        """How many tokens may follow a prompt.

        Raises:
            ValueError: not as many as asked for, or none at all.
        """
        limit = self.max_len or self.limit
        whose = "max_len" if self.max_len else "the model's limit"
        room = MAX_NEW_TOKENS if limit is None else limit - width
        if max_new is None and room > 0:
            return min(MAX_NEW_TOKENS, room)
        wanted = 1 if max_new is None else integer(where, "max_new_tokens", max_new)
        if wanted < 1:
            raise ValueError(f"{where}: max_new_tokens must be at least 1, got {wanted}")
        if limit is not None and wanted > room:
            raise ValueError(
                f"{where}: prompt and max_new_tokens must fit {whose} = {limit}, got {width} + "
                f"{wanted}"
            )
        return wanted

    @property
    def limit(self) -> int | None:
        """Positions that the model was made for; None where its configuration names none."""
        config = getattr(self.model, "config", None)
        text = config.get_text_config() if config is not None else None
        found = getattr(text, "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else None

    def _tokenizer(self, where: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{where}: {self.name} must have a tokenizer, and has no files of one")
        return self.tokenizer

    def _inputs(
        self,
        where: str,
        prompt: str | Sequence[Message],
        *,
        images: Any,
        raw: bool,
        template: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        """Token ids of a prompt, ``input_ids [1, P]`` and ``attention_mask``."""
        if images is not None:
            raise ValueError(f"{where}: images need a vision-language model, got {self.name}")
        tokenizer = self._tokenizer(where)
        chat = messages(where, prompt, raw=raw, has_template=bool(tokenizer.chat_template))
        if chat is None:
            if template:
                raise ValueError(f"{where}: template needs a chat template, got {template!r}")
            encoded = tokenizer(prompt, return_tensors="pt")
        else:
            encoded = tokenizer.apply_chat_template(
                chat,
                **{"add_generation_prompt": True, **(template or {})},
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
            )
        ids = encoded["input_ids"]
        if ids.shape[1] == 0:
            raise ValueError(f"{where}: prompt must have at least one token, got {prompt!r}")
        return {"input_ids": ids, "attention_mask": encoded.get("attention_mask")}


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
