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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..binding import PLAN, Binder, host_class
from ..catalogue.layer_math import Families
from ..catalogue.spec import NotThisForm
from ..kernels import KernelUnavailable
from ..plan import Plan
from .decoder import DecoderSpec, read_decoder
from .depth import Yields
from .host_call import CACHES, OF_ASSISTANTS, HostOnly, own_cache, read_call
from .sessions import LoopRefused, Sessions, plain_tensors, token_table

LENGTH_STEP = 1024  # a coarse step, so that a longer request seldom needs a new session


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
        token = own_cache.set(given)
        try:
            return host.generate(self, *args, **kwargs)
        finally:
            own_cache.reset(token)

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
    call = read_call(
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
