"""What transformers asks of ``_sample``, read as a request of the loop and run on a session."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from .cache import EOS_SLOTS
from .controls import way_of
from .decode import MAX_BATCH
from .depth import Yields
from .processors import ignores_padding, read_processors
from .request import Request, draw_seed, padded_on_the_left
from .run import run_steps
from .sampling import Sampling
from .session import Session
from .speculate import FromLookup, run_speculative

CACHES = ("past_key_values", "cache")
READ = (
    *("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position"),
    "tokenizer",  # of stop strings, which are a criterion by now
)
OF_ASSISTANTS = ("assistant_model", "assistant_tokenizer", "inputs_tensor")

# Whether the caller of generate passed a cache, which _sample cannot tell from its own.
own_cache: ContextVar[bool] = ContextVar("flashrt_own_cache", default=False)


class HostOnly(Exception):
    """A request that the host must answer; the text says why."""


@dataclass(frozen=True)
class HostCall:
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


def read_call(
    input_ids: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    model_kwargs: dict[str, Any],
    *,
    vocabulary: int,
    lookup: bool,
) -> HostCall:
    """The request of one call of ``_sample``.

    Raises:
        HostOnly: the loop cannot answer it as the host does.
    """
    if config.return_dict_in_generate:
        raise HostOnly("return_dict_in_generate=True: the loop returns ids only")
    if getattr(config, "is_assistant", False):
        raise HostOnly("the model is another one's assistant")
    if own_cache.get():
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
    return HostCall(
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
