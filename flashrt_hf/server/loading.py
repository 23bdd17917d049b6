"""From a model in memory to what the endpoints serve."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flash_rt import structures
from flash_rt.structures.binding import PLAN
from flash_rt.structures.explain import COLUMNS

from .decoder_engine import DecoderEngine
from .embeddings import Encoder
from .engine import Engine
from .errors import bad
from .host_engine import HostEngine
from .sampling import Defaults
from .served import Served
from .template import ChatTemplate
from .text import Codec

log = logging.getLogger("flash_rt.server")

POOLING_FILE = "1_Pooling/config.json"
DEFAULT_LEN = 8192  # the cache of eight sequences is static


def text_model(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    processor: Any = None,
    max_len: int | None = None,
    **options: Any,
) -> Served:
    """Serve a model that generates text, attached to FlashRT or not yet.

    Args:
        model: of transformers, in evaluation mode.
        tokenizer: a fast one.
        name: what requests call it.
        processor: of a vision-language model.
        max_len: most tokens of prompt and answer; None takes the model's limit, at most 8192.
        options: further ones of ``structures.decode_engine``: ``slots`` and others.

    Raises:
        ValueError: the tokenizer is a slow one, or an option is out of range.
        LoopRefused: the device has no memory for the cache.
    """
    text = model.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or DEFAULT_LEN
    length = min(limit, DEFAULT_LEN) if max_len is None else max_len
    generation = getattr(model, "generation_config", None)
    codec = Codec(
        tokenizer,
        stop_ids=_stop_ids(generation, tokenizer),
        vocabulary=model.get_input_embeddings().weight.shape[0],
    )
    return Served(
        name=name,
        plan=plan_reader(model),
        max_len=length,
        codec=codec,
        engine=_engine(model, processor, length, options),
        template=ChatTemplate(tokenizer if processor is None else processor),
        defaults=Defaults.of(generation),
        vision=None if processor is None else ProcessorVision(processor),
        device=next(model.parameters()).device,
    )


def encoder_model(model: Any, tokenizer: Any, *, name: str, pooling: str) -> Served:
    """Serve the vectors of an encoder.

    Raises:
        ValueError: an unknown pooling.
    """
    encoder = Encoder(model, tokenizer, pooling=pooling)
    return Served(
        name=name,
        plan=plan_reader(model),
        max_len=encoder.max_len,
        embedder=encoder,
        counters=lambda: _forward_counters(model),
        device=next(model.parameters()).device,
    )


def _forward_counters(model: Any) -> dict[str, float]:
    """Graphs of the captured forward, and calls that ran without one."""
    plan = vars(model).get(PLAN)
    if plan is None or plan.captured is None:
        return {"graph_captures": 0, "fallbacks": 0}
    stats = plan.captured.stats
    return {"graph_captures": stats.captures, "fallbacks": stats.fallbacks.total()}


def _engine(model: Any, processor: Any, max_len: int, options: dict[str, Any]) -> Engine:
    if processor is not None:
        reason = "images run through the model's own generate"
    else:
        try:
            engine = structures.decode_engine(model, max_len=max_len, **options)
        except ValueError as error:
            if not hasattr(model, "generate") or "cannot run on the loop" not in str(error):
                raise
            reason = str(error)
        else:
            if next(model.parameters()).is_cuda:
                log.info("recording the steps of every number of answers")
                engine.warm_up()
            return DecoderEngine(engine)
    given = [name for name, value in options.items() if name != "slots" and value is not None]
    if given:
        raise ValueError(f"serve: {', '.join(given)} needs the decode loop, but {reason}")
    log.warning("requests run one at a time on the host's generate: %s", reason)
    return HostEngine(model, max_len=max_len, reason=reason)


def _stop_ids(generation: Any, tokenizer: Any) -> list[int]:
    ends = getattr(generation, "eos_token_id", None)
    found = [] if ends is None else list(ends) if isinstance(ends, Sequence) else [ends]
    if tokenizer.eos_token_id is not None:
        found.append(tokenizer.eos_token_id)
    return [int(token) for token in found]


def plan_reader(model: Any) -> Callable[[], dict[str, Any]]:
    """Reads the table of ``structures.explain`` as JSON: its cells for people, its rows as data."""

    def read() -> dict[str, Any]:
        found = vars(model).get(PLAN)
        if found is None:
            note = "nothing is attached; the host runs as it is"
            return {"columns": [], "cells": [], "rows": [], "notes": [note]}
        table = structures.explain(found)
        rows = [dict(decision=type(row).__name__, **dataclasses.asdict(row)) for row in table]
        shown = {"columns": COLUMNS, "cells": table.cells()}
        made: dict[str, Any] = json.loads(
            json.dumps({**shown, "rows": rows, "notes": list(table.notes)}, default=str)
        )
        return made

    return read


def pooling_of(path: Path) -> str:
    """The pooling that a checkpoint of sentence-transformers names; ``mean`` without the file.

    Raises:
        ValueError: it names one that is not served.
    """
    if not path.is_file():
        return "mean"
    modes = json.loads(path.read_text("utf-8"))
    names = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
    chosen = [k for k, v in modes.items() if k.startswith("pooling_mode_") and v is True]
    for pooling, mode in names.items():
        if chosen == [f"pooling_mode_{mode}"]:
            return pooling
    raise ValueError(f"serve: pooling must be one of {list(names)}, the checkpoint says {chosen}")


class ProcessorVision:
    """A processor of transformers."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def inputs(self, prompt: str, images: Sequence[Any]) -> tuple[list[int], Mapping[str, Any]]:
        """Ids and pixel values.

        Raises:
            ApiError: 400, the processor does not take these images.
        """
        try:
            found = self._processor(
                text=[prompt], images=list(images), return_tensors="pt", add_special_tokens=False
            )
        except (ValueError, TypeError, IndexError) as error:
            raise bad(f"The model does not take these images: {error}", "messages") from None
        ids: list[int] = found.pop("input_ids")[0].tolist()
        return ids, dict(found)
