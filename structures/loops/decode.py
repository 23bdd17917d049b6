"""The loop that people call: a request checked, run on captured steps, and joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import kv_format
from ..attach import attach
from ..binding import PLAN
from ..catalogue.base import MAX_FUSED_ROWS
from ..catalogue.layer_math import Families
from ..catalogue.spec import NotThisForm
from ..kv_format import KVCache
from ..plan import Plan, host_of
from .controls import way_of
from .decoder import read_decoder
from .depth import Depth, Yields
from .draft import DraftModel, FromModel
from .options import StopStrings, read_options, read_stops
from .request import WHERE, Request, integer, read_request
from .run import StepLogprobs, Streamer, run_steps
from .sampling import Sampling
from .session import Session
from .sessions import Sessions, decoder_device, plain_tensors, token_table
from .speculate import Counts, FromLookup, run_speculative
from .step import BoundDecoder

MAX_BATCH = MAX_FUSED_ROWS  # a decode step has one row for each of a request


class Generated(NamedTuple):
    """Tokens with the logarithms of their probabilities.

    Attributes:
        sequences: int64 ``[B, P + new]``, prompt and answer.
        logprobs: fp32 ``[B, new]``, of the tokens of the answer; what lies behind a row's last
            token means nothing.
        top_ids, top_logprobs: int64 and fp32 ``[B, new, K]``, the likeliest from the top down.
    """

    sequences: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def decode_loop(
    model: Any,
    *,
    max_len: int,
    batch_size: int = 1,
    draft: Any = None,
    kv_cache: KVCache = None,
) -> DecodeLoop:
    """A loop that generates from ``model`` with one captured graph a token.

    Args:
        model: a decoder in eval mode on one device, or a handle with ``.model``; attached first
            when it is not yet.
        max_len: most positions of a row, prompt and new tokens together.
        batch_size: most rows of a request, 1 to 8.
        draft: drafts tokens of requests of one row, which are verified several at a time.
            "lookup" takes what followed the last tokens the last time; a smaller decoder with the
            same vocabulary, on the same device, says what it would say (it is attached when it is
            not yet). The answer is the same, greedy or drawn; only how fast it comes depends on
            it, and where drafts do not pay they stop.
        kv_cache: "fp8" stores keys and values in half the bytes of bf16, so that twice as many
            positions fit and long contexts are read in less time. An element is off by up to 1/16
            of itself, so answers differ from those of a cache in the model's dtype; how much is
            the model's to say: compare them on text of yours. Scales are measured when the cache
            is made and depend on the model alone. None takes what ``attach`` was told.

    Raises:
        ValueError: a size out of range, or a model that the loop cannot run; the text lists the
            regions that are not bound and why, or says that its rotary does not allow ``max_len``.
            A model that came unattached leaves unattached after any error.
        TypeError: a size that is no integer.
    """
    max_len = integer("decode_loop", "max_len", max_len)
    batch_size = integer("decode_loop", "batch_size", batch_size)
    if not 1 <= batch_size <= MAX_BATCH:
        raise ValueError(f"decode_loop: batch_size must be 1 to {MAX_BATCH}, got {batch_size}")
    if isinstance(draft, str) and draft != "lookup":
        raise ValueError(f'decode_loop: draft must be "lookup" or a model, got {draft!r}')
    if draft is not None and not isinstance(draft, (str, nn.Module)):
        raise TypeError(f'decode_loop: draft must be "lookup" or a model, got {draft!r}')
    host, sessions = open_decoder("decode_loop", model, max_len, kv_cache)
    loop = DecodeLoop(host, sessions, max_len=max_len, batch_size=batch_size, draft=draft)
    if draft is not None and draft != "lookup":
        loop.draft_sessions = _open_draft(draft, max_len, sessions)
    return loop


def _open_draft(draft: Any, max_len: int, target: Sessions) -> Sessions:
    host, sessions = open_decoder("decode_loop", draft, max_len, None)
    mine, theirs = sessions.vocabulary, target.vocabulary
    if mine != theirs:
        raise ValueError(f"decode_loop: draft must have the model's {theirs} ids, got {mine}")
    if decoder_device(host, sessions.spec) != target.device:
        raise ValueError(
            f"decode_loop: draft must be on {target.device}, "
            f"got {decoder_device(host, sessions.spec)}"
        )
    return sessions


def open_decoder(
    where: str, model: Any, max_len: int, kv_cache: KVCache
) -> tuple[nn.Module, Sessions]:
    """The host, attached where it was not, and sessions of its decoder; see ``decode_loop``."""
    kv_cache = kv_format.checked(where, kv_cache)
    if max_len < 2:
        raise ValueError(f"{where}: max_len must be at least 2, got {max_len}")
    host = host_of(model)
    attached: Plan | None = vars(host).get(PLAN)
    plan = attached or attach(model)
    try:
        known = None if plan.generation is None else plan.generation.spec
        spec = known or read_decoder(host, plan)
        with plain_tensors(decoder_device(host, spec)):
            BoundDecoder.of(host, spec, max_len=max_len, slots=max_len)
    except BaseException as error:
        if attached is None:
            plan.detach()
        if not isinstance(error, NotThisForm):
            raise
        name = type(host).__name__
        raise ValueError(f"{where}: {name} cannot run on the loop: {error}") from None
    return host, Sessions(host, spec, Families.load(), kv_cache or plan.settings.kv_cache)


class DecodeLoop:
    """Generates from one model; made by ``decode_loop``."""

    def __init__(
        self,
        model: nn.Module,
        sessions: Sessions,
        *,
        max_len: int,
        batch_size: int,
        draft: Any,
    ) -> None:
        self.max_len, self.batch_size, self.draft = max_len, batch_size, draft
        self.draft_sessions: Sessions | None = None
        self._draft_model: DraftModel | None = None
        self.speculation = Counts()
        self._depth, self._yields = Depth(), Yields()
        self._model, self._sessions = model, sessions

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
        tokenizer: Any = None,
        reuse_prefix: bool = False,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """Continue every prompt, greedily or by draws.

        Args:
            input_ids: int64 ``[B, P]``, padded on the left.
            attention_mask: ``[B, P]``, 0 at padding; None means no padding.
            max_new_tokens: None fills the cache.
            eos_token_id: a row stops behind one of these; None takes the model's, ``()`` none.
            pad_token_id: fills rows that stopped; None takes the model's, else the first eos.
            num_return_sequences: n answers to every prompt, in neighbouring rows; B * n is at most
                ``batch_size``.
            stop_strings: a row stops behind the token that completes one of these; needs the
                ``tokenizer``.
            reuse_prefix: a prompt that goes on from where the request before ended (the next turn
                of a conversation) computes the new tokens only. The answer is as exact as a cold
                one, and the same prompt again repeats it bit for bit.
            streamer: gets the prompt, then the tokens of every step, as in transformers; ``end``
                also when the request fails behind the prompt.
            options: ``do_sample`` (False), with it ``temperature`` (1.0), ``top_k``, ``top_p``,
                ``min_p`` and ``seed`` (None draws one from torch's generator); and in any case
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
                ``logit_bias`` and ``min_new_tokens``, as in ``Sampling``. The draws of a row
                depend on its seed and its own positions alone; row 0 has ``seed``, the others
                have seeds that follow from it.

        Returns:
            int64 ``[B * n, P + new]`` on the device of ``input_ids``.

        Raises:
            ValueError: a prompt that is empty, too long, not padded on the left or of ids outside
                the vocabulary; more rows than ``batch_size``; new tokens beyond ``max_len``; a
                setting out of its range, or one that needs ``do_sample=True`` without it.
            TypeError: an option that the loop does not have, by name; an argument of another type
                than asked for.
            LoopRefused: the model has since got a hook, training mode, an adapter or another
                dtype, or the device has no memory for the cache.
        """
        request = self._read(
            input_ids,
            attention_mask,
            max_new=max_new_tokens,
            eos=eos_token_id,
            pad=pad_token_id,
            copies=num_return_sequences,
            sampling=read_options(WHERE, options),
            reuse=reuse_prefix,
        )
        stops = read_stops(WHERE, stop_strings, tokenizer, request.batch)
        new, _ = self._run(request, streamer, stops, logprobs=False)
        return _joined(input_ids, new, request)

    def generate_with_logprobs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        top_logprobs: int = 0,
        max_new_tokens: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        num_return_sequences: int = 1,
        stop_strings: str | Sequence[str] | None = None,
        tokenizer: Any = None,
        reuse_prefix: bool = False,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> Generated:
        """As ``generate``, with log-probabilities under the model's own softmax.

        They are of the untouched logits, before bias, penalties and temperature; ``top_logprobs``,
        0 to 20, says how many of the likeliest come with every token.
        """
        sampling = read_options(WHERE, options | {"logprobs": True, "top_logprobs": top_logprobs})
        request = self._read(
            input_ids,
            attention_mask,
            max_new=max_new_tokens,
            eos=eos_token_id,
            pad=pad_token_id,
            copies=num_return_sequences,
            sampling=sampling,
            reuse=reuse_prefix,
        )
        stops = read_stops(WHERE, stop_strings, tokenizer, request.batch)
        new, found = self._run(request, streamer, stops, logprobs=True)
        assert found is not None
        device, top, rows = input_ids.device, sampling.top_logprobs, request.batch
        parts = (found.chosen, found.top_ids[..., :top], found.top[..., :top])
        chosen, ids, values = (
            t[: new.shape[1], :rows].transpose(0, 1).to(device, copy=True) for t in parts
        )
        return Generated(_joined(input_ids, new, request), chosen, ids, values)

    def _read(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        max_new: int | None,
        eos: Any,
        pad: Any,
        copies: int,
        sampling: Sampling,
        reuse: bool,
    ) -> Request:
        defaults = getattr(self._model, "generation_config", None)
        return read_request(
            input_ids,
            attention_mask,
            batch_size=self.batch_size,
            max_len=self.max_len,
            max_new=max_new,
            eos=getattr(defaults, "eos_token_id", None) if eos is None else eos,
            pad=getattr(defaults, "pad_token_id", None) if pad is None else pad,
            vocabulary=token_table(self._model, self._sessions.spec).shape[0],
            copies=copies,
            sampling=sampling,
            reuse=reuse,
            drafts=self.draft is not None,
        )

    def _run(
        self,
        request: Request,
        streamer: Streamer | None,
        stops: StopStrings | None,
        *,
        logprobs: bool,
    ) -> tuple[torch.Tensor, StepLogprobs | None]:
        listening: Streamer | None = None  # from the prompt on, when it is owed an end
        try:
            with (
                plain_tensors(decoder_device(self._model, self._sessions.spec)),
                self._sessions.use(self.batch_size, self.max_len) as session,
            ):
                if streamer is not None:
                    streamer.put(request.input_ids[:: request.copies].cpu())
                    listening = streamer
                if request.drafts and not logprobs:
                    return self._speculate(session, request, streamer, stops), None
                found = StepLogprobs.empty(session, request.max_new) if logprobs else None
                return run_steps(session, request, streamer, observe=stops, logprobs=found), found
        finally:
            if listening is not None:
                listening.end()

    def _speculate(
        self,
        session: Session,
        request: Request,
        streamer: Streamer | None,
        stops: StopStrings | None,
    ) -> torch.Tensor:
        way = way_of(request.sampling)
        if self.draft_sessions is None:
            return run_speculative(
                session,
                request,
                FromLookup(session, way, next(request.rows()), self._yields),
                streamer,
                observe=stops,
                counts=self.speculation,
            )
        with self.draft_sessions.use(1, self.max_len) as draft_session:
            made = self._take_draft_model(session, draft_session)
            try:
                return run_speculative(
                    session,
                    request,
                    FromModel(made, request, self._depth),
                    streamer,
                    observe=stops,
                    counts=self.speculation,
                )
            finally:
                if self._sessions.keeps(session):  # not within another request, nor after a reset
                    self._draft_model = made

    def _take_draft_model(self, session: Session, draft_session: Session) -> DraftModel:
        """The one of the request before, or a new one; a request inside this one makes its own."""
        made, self._draft_model = self._draft_model, None
        if made is not None and (made.target, made.session) == (session, draft_session):
            return made
        if made is not None:
            made.release()
        return DraftModel(session, draft_session)

    def reset(self) -> None:
        """Give caches and graphs back; the next call makes them again."""
        self._sessions.clear()
        if self.draft_sessions is not None:
            self.draft_sessions.clear()
        self._draft_model = None  # behind a request of another thread, which keeps its own

    @property
    def memory_bytes(self) -> int:
        """Device memory of caches and buffers held now."""
        drafts = 0 if self.draft_sessions is None else self.draft_sessions.memory_bytes
        return self._sessions.memory_bytes + drafts


def _joined(input_ids: torch.Tensor, new: torch.Tensor, request: Request) -> torch.Tensor:
    prompts = input_ids.repeat_interleave(request.copies, 0)
    return torch.cat([prompts, new.to(input_ids.device)], dim=1)
