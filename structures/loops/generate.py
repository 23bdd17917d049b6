"""``model.generate`` of an attached transformers model, through the decode loop where it can be.

Overridden is ``_sample``, behind which transformers' own ``generate`` has already prepared inputs,
processors, stopping criteria and streamer. A request whose processors are settings of a step (see
``processors``) replays whole steps, and its stopping criteria look on from one step behind. With
processors of other kinds these run between replays of the forward, and the choice after them.
Everything else is the host's own ``_sample``, and ``explain`` says why. So is overridden what
transformers calls for ``prompt_lookup_num_tokens``, whose drafts the loop finds and verifies.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..binding import PLAN, Binder, host_class
from ..catalogue.layer_math import Families
from ..catalogue.spec import NotThisForm
from ..kernels import KernelUnavailable
from ..plan import Plan
from .cache import EOS_SLOTS
from .controls import way_of
from .decode import MAX_BATCH
from .decoder import DecoderSpec, read_decoder
from .depth import Yields
from .processors import ignores_padding, read_processors
from .request import Request, draw_seed, padded_on_the_left
from .run import run_steps
from .sampling import Sampling
from .session import Session
from .sessions import LoopRefused, Sessions, plain_tensors, token_table
from .speculate import FromLookup, run_speculative

CACHES = ("past_key_values", "cache")
READ = (
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"),
    "tokenizer",  # of stop strings, which are a criterion by now
)
OF_ASSISTANTS = ("assistant_model", "assistant_tokenizer", "inputs_tensor")
LENGTH_STEP = 1024  # a coarse step, so that a longer request seldom needs a new session

_own_cache: ContextVar[bool] = ContextVar("flashrt_own_cache", default=False)


class HostOnly(Exception):
    """A request that the host must answer; the text says why."""


@dataclass
class GenerateDoor:
    """What ``generate`` of one attached model does, and how often it did which.

    Attributes:
        refusal: why no request can run on the loop; None when requests can.
        looped, between, hosted: requests that ran on whole captured steps, on captured forwards
            with the host's processors between them, or on the host, by reason.
    """

    spec: DecoderSpec | None = None
    refusal: str | None = None
    looped: int = 0
    between: int = 0
    hosted: Counter[str] = field(default_factory=Counter)
    sessions: Sessions | None = None
    yields: Yields = field(default_factory=Yields)

    def lines(self) -> list[str]:
        """For explain."""
        if self.refusal is not None:
            return [f"generate: the host's own code, because {self.refusal}"]
        counts = f"{self.looped} requests so far, {self.between} with host code between steps"
        lines = [f"generate: requests run on the decode loop ({counts})"]
        for reason, count in self.hosted.items():
            lines.append(f"generate: {count} requests ran on the host, because {reason}")
        return lines

    def release(self) -> None:
        """Give caches and graphs back."""
        if self.sessions is not None:
            self.sessions.clear()


@dataclass(frozen=True)
class _Call:
    """A request that the loop can run.

    Attributes:
        whole_steps: nothing has to run between steps.
        draws: the choice behind the host's processors is a draw.
        watched: the stopping criteria have to see every step.
    """

    request: Request
    processors: Any
    criteria: Any
    whole_steps: bool
    draws: bool
    watched: bool

    def run(self, session: Session, streamer: Any, yields: Yields) -> torch.Tensor:
        """All new tokens, int64 ``[B, new]``; ``yields`` says how many drafts pay."""
        if not self.whole_steps:
            return run_between(
                session,
                self.request,
                streamer,
                processors=self.processors,
                criteria=self.criteria,
                draws=self.draws,
            )
        observe = _Criteria(self.request, self.criteria) if self.watched else None
        if not self.request.drafts:
            return run_steps(session, self.request, streamer, observe=observe)
        way, prompt = way_of(self.request.sampling), next(self.request.rows())
        drafter = FromLookup(session, way, prompt, yields)
        return run_speculative(session, self.request, drafter, streamer, observe=observe)


class _Criteria:
    """The host's stopping criteria, called with everything so far behind every step."""

    def __init__(self, request: Request, criteria: Any) -> None:
        self._criteria, self._ids = criteria, request.input_ids

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        column = ids[:, None].to(self._ids.device)
        self._ids = torch.cat([self._ids, column], dim=1)
        ended: torch.Tensor = self._criteria(self._ids, None)
        return ended


def open_door(plan: Plan, model: nn.Module, binder: Binder) -> GenerateDoor | None:
    """Override ``generate`` and ``_sample`` of a model that has them.

    Returns:
        What counts its requests; None for a model that does not generate.
    """
    if not callable(getattr(model, "_sample", None)):
        return None
    door = GenerateDoor()
    try:
        door.spec = read_decoder(model, plan)
        door.sessions = Sessions(model, door.spec, Families.load(), plan.settings.kv_cache)
    except (NotThisForm, KernelUnavailable) as reason:
        door.refusal = str(reason)
        return door
    host: Any = host_class(model)

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = any(kwargs.get(name) is not None for name in CACHES)
        token = _own_cache.set(given)
        try:
            return host.generate(self, *args, **kwargs)
        finally:
            _own_cache.reset(token)

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        found: Plan | None = vars(self).get(PLAN)
        current = None if found is None else found.generation
        if current is None or args[1:]:
            return host._sample(self, *args, **kwargs)
        try:
            return current_sample(current, self, *args, **kwargs)
        except HostOnly as reason:
            current.hosted[str(reason)] += 1
            return host._sample(self, *args, **kwargs)

    def _assisted_decoding(self: Any, *args: Any, **kwargs: Any) -> Any:
        found: Plan | None = vars(self).get(PLAN)
        current = None if found is None else found.generation
        config = kwargs.get("generation_config")
        wanted = getattr(config, "prompt_lookup_num_tokens", None)
        others = kwargs.get("assistant_model") is not None
        if current is None or args[1:] or others or not wanted:
            return host._assisted_decoding(self, *args, **kwargs)
        given = {name: value for name, value in kwargs.items() if name not in OF_ASSISTANTS}
        given["lookup"] = True
        try:
            return current_sample(current, self, *args, **given)
        except HostOnly as reason:
            current.hosted[str(reason)] += 1
            return host._assisted_decoding(self, *args, **kwargs)

    overrides: dict[str, Any] = {"generate": generate, "_sample": _sample}
    if callable(getattr(model, "_assisted_decoding", None)):
        overrides["_assisted_decoding"] = _assisted_decoding
    binder.override(model, "generate", **overrides)
    return door


def current_sample(
    door: GenerateDoor,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    lookup: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor:
    """``_sample`` on the loop; raises ``HostOnly`` before anything has run or been streamed.

    With ``lookup`` a request of one row gets drafts from its own text.
    """
    if synced_gpus:
        raise HostOnly("synced_gpus is set")
    if model.training:
        raise HostOnly("the model is in training mode")
    if torch.is_autocast_enabled(input_ids.device.type):
        raise HostOnly("autocast is on")
    assert door.spec is not None and door.sessions is not None
    try:
        vocabulary = token_table(model, door.spec).shape[0]
    except LoopRefused as reason:
        raise HostOnly(str(reason)) from None
    call = _read(
        *(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs),
        vocabulary=vocabulary,
        lookup=lookup,
    )
    length = input_ids.shape[1] + call.request.max_new
    length = -(-length // LENGTH_STEP) * LENGTH_STEP
    try:
        with (
            plain_tensors(input_ids.device),
            door.sessions.use(call.request.batch, length) as session,
        ):
            new = call.run(session, streamer, door.yields)
    except (LoopRefused, NotThisForm) as reason:
        raise HostOnly(str(reason)) from None
    except BaseException:
        if streamer is not None:  # transformers has given it the prompt
            streamer.end()
        raise
    if call.whole_steps:
        door.looped += 1
    else:
        door.between += 1
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, new.to(input_ids.device)], dim=1)


def _read(
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
    *,
    vocabulary: int,
    lookup: bool,
) -> _Call:
    """What transformers asks of ``_sample``, as a request of the loop."""
    if config.return_dict_in_generate:
        raise HostOnly("return_dict_in_generate=True: the loop returns ids only")
    if getattr(config, "is_assistant", False):
        raise HostOnly("the model is another one's assistant")
    if _own_cache.get():
        raise HostOnly("the caller passed a cache")
    if config.use_cache is False or model_kwargs.get("use_cache") is False:
        raise HostOnly("use_cache=False")
    if config.cache_implementation not in (None, "dynamic"):
        raise HostOnly(f"cache_implementation={config.cache_implementation!r}")
    for name, value in model_kwargs.items():
        if name not in READ + CACHES and value is not None:
            raise HostOnly(f"the loop does not read {name}")
    if getattr(config, "prefill_chunk_size", None) is not None:
        raise HostOnly(f"prefill_chunk_size={config.prefill_chunk_size!r}")
    _check_ids(input_ids, vocabulary)
    width = input_ids.shape[1]
    lengths = _lengths(input_ids, model_kwargs)
    limits = [c.max_length for c in criteria if type(c).__name__ == "MaxLengthCriteria"]
    if not limits or min(limits) <= width:
        raise HostOnly("no length limit beyond the prompt")
    ends = [c.eos_token_id for c in criteria if type(c).__name__ == "EosTokenCriteria"]
    eos = tuple(int(e) for tensor in ends for e in torch.as_tensor(tensor).flatten())
    pad = getattr(config, "_pad_token_tensor", None)
    if pad is None and _stops_rows(criteria):
        raise HostOnly("rows that stop have no padding id")
    pad_id = 0 if pad is None else int(pad)
    sampling = read_processors(
        processors, do_sample=config.do_sample, width=width, lengths=lengths, eos=eos
    )
    request = Request(
        input_ids.long(),
        lengths,
        min(limits) - width,
        eos if len(eos) <= EOS_SLOTS else (),
        pad_id,
        sampling=sampling or Sampling(),
        seed=draw_seed() if sampling is not None and config.do_sample else 0,
        whole_rows=not ignores_padding(processors),
        pads_rows=_stops_rows(criteria),
        drafts=lookup and input_ids.shape[0] == 1,
    )
    own = {"MaxLengthCriteria", "EosTokenCriteria"}
    return _Call(
        request,
        processors,
        criteria,
        whole_steps=sampling is not None,
        draws=config.do_sample,
        watched=len(eos) > EOS_SLOTS or not {type(c).__name__ for c in criteria} <= own,
    )


def _check_ids(input_ids: torch.Tensor, vocabulary: int) -> None:
    """What the host does with ids that are none is the host's to say."""
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise HostOnly("input_ids are not int64 [B, P]")
    batch, width = input_ids.shape
    if not 1 <= batch <= MAX_BATCH:
        raise HostOnly(f"a batch of {batch}; the loop runs up to {MAX_BATCH} rows")
    if width == 0:
        raise HostOnly("the prompt is empty")
    lowest, highest = (int(n) for n in torch.stack(torch.aminmax(input_ids)).tolist())
    if lowest < 0 or highest >= vocabulary:
        raise HostOnly("input_ids are outside the vocabulary")


def _stops_rows(criteria: Any) -> bool:
    """Whether rows that stop are padded: what transformers looks at, whoever's criterion it is."""
    return any(hasattr(c, "eos_token_id") for c in criteria)


def _lengths(input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> tuple[int, ...]:
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if mask is None:
        mask = torch.ones(input_ids.shape, dtype=torch.bool, device="cpu")
    elif not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        raise HostOnly("the attention mask has not the shape of the prompt")
    mask = mask.bool().cpu()
    if not padded_on_the_left(mask):
        raise HostOnly("the attention mask is not padding on the left")
    if positions is not None:
        wanted = mask.long().cumsum(-1) - 1
        shapes = (mask.shape, (1, mask.shape[1]))
        fits = isinstance(positions, torch.Tensor) and positions.shape in shapes
        given = positions.cpu().expand(mask.shape) if fits else None
        if given is None or not torch.equal(given[mask], wanted[mask]):
            raise HostOnly("position_ids do not count the tokens of each row from 0")
    return tuple(int(n) for n in mask.sum(-1))


def run_between(
    session: Session,
    request: Request,
    streamer: Any,
    *,
    processors: Any,
    criteria: Any,
    draws: bool,
) -> torch.Tensor:
    """All new tokens, int64 ``[B, new]``, with the host's processors and criteria between steps."""
    graph = session.graph("forward")
    session.fill(request)
    state, rows = session.state, request.batch
    ids = request.input_ids.to(state.tokens.device)
    running = torch.ones(rows, dtype=torch.bool, device=ids.device)
    padded = _stops_rows(criteria)
    while True:
        scores = processors(ids, session.step.logits[:rows].clone())
        chosen = torch.multinomial(scores.softmax(-1), 1)[:, 0] if draws else scores.argmax(-1)
        if padded:
            chosen = chosen.where(running, request.pad)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        running = running & ~criteria(ids, None)
        if streamer is not None:
            streamer.put(chosen.cpu())
        if not bool(running.any()):
            return ids[:, request.input_ids.shape[1] :]
        state.next_ids[:rows].copy_(chosen)
        state.lengths[:rows].add_(1)
        graph.replay()
