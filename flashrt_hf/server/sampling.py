"""Sampling parameters of a request, checked against the model."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_rt.structures.loops.cache import EOS_SLOTS
from flash_rt.structures.loops.generation import GenerationRequest, TokenMask
from flash_rt.structures.loops.sampling import SEEDS, Sampling

from .config import ServerConfig
from .errors import ApiError, bad
from .schema.base import SamplingRequest
from .text import Codec


@dataclass(frozen=True)
class Defaults:
    """Where a request says nothing: the checkpoint's own way to sample, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, generation_config: Any) -> Defaults:
        """From a checkpoint's ``generation_config``; one that does not sample says nothing.

        Raises:
            ValueError: it samples in a way that there is none of.
        """
        if not getattr(generation_config, "do_sample", False):
            return cls()
        found = {
            name: getattr(generation_config, name)
            for name in cls.__dataclass_fields__
            if getattr(generation_config, name, None) is not None
        }
        try:
            Sampling(**found)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"serve: generation_config of the checkpoint must have values to sample by: {error}"
            ) from None
        return cls(**found)


def generation_request(
    body: SamplingRequest,
    prompt_ids: Sequence[int],
    *,
    codec: Codec,
    defaults: Defaults,
    max_len: int,
    config: ServerConfig,
    max_new: int | None,
    logprobs: int | None,
    mask: Callable[[], TokenMask] | None,
    limit_param: str,
) -> GenerationRequest:
    """What the engine is asked for.

    Args:
        max_new: new tokens at most; None fills the cache.
        logprobs: alternatives to report with each token; None for no logprobs.
        limit_param: name of the parameter that ``max_new`` came from.

    Raises:
        ApiError: 400, the prompt does not fit, or a parameter does not suit this model.
    """
    prompt = list(prompt_ids)
    _check_ids(prompt, codec.vocabulary, "prompt")
    room = max_len - len(prompt)
    if not prompt:
        raise bad("The prompt must have at least one token, got none", "prompt")
    if room < (max_new or 1):
        wanted = f"{len(prompt)} in the prompt and {max_new or 1} in the answer"
        raise ApiError(
            400,
            f"This model's maximum context length is {max_len} tokens, got {wanted}",
            param=limit_param,
            code="context_length_exceeded",
        )
    n = body.n or 1
    if n > config.max_choices:
        raise bad(f"Invalid value for 'n': must be 1 to {config.max_choices}, got {n}", "n")
    stops = () if body.ignore_eos else codec.stop_ids
    extra = tuple(body.stop_token_ids or ())
    _check_ids(extra, codec.vocabulary, "stop_token_ids")
    if (body.min_tokens or 0) > (max_new or room):
        raise bad(
            f"Invalid value for 'min_tokens': must be at most the {max_new or room} tokens that "
            f"the answer may have, got {body.min_tokens}",
            "min_tokens",
        )
    if body.min_tokens and len(stops) + len(extra) > EOS_SLOTS:
        raise bad(
            f"Invalid value for 'stop_token_ids': with 'min_tokens' and the model's {len(stops)} "
            f"own at most {EOS_SLOTS - len(stops)} ids are allowed, got {len(extra)}",
            "stop_token_ids",
        )
    return GenerationRequest(
        prompt_ids=prompt,
        max_new_tokens=max_new or room,
        stop_token_ids=(*stops, *extra),
        sampling=_sampling(body, codec, defaults, logprobs),
        n=n,
        mask=mask,
        reuse_prefix=config.prefix_reuse,
    )


def _sampling(
    body: SamplingRequest, codec: Codec, defaults: Defaults, logprobs: int | None
) -> Sampling:
    def given(name: str) -> Any:
        value = getattr(body, name)
        return getattr(defaults, name) if value is None else value

    return Sampling(
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        repetition_penalty=given("repetition_penalty"),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body, codec),
        seed=secrets.randbelow(SEEDS) if body.seed is None else body.seed % SEEDS,
        min_new_tokens=body.min_tokens or 0,
        logprobs=logprobs is not None,
        top_logprobs=logprobs or 0,
    )


def _bias(body: SamplingRequest, codec: Codec) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise bad(
                f"Invalid value for 'logit_bias': keys must be token ids, got {key[:40]!r}",
                "logit_bias",
            )
        bias[int(key)] = value
    _check_ids(tuple(bias), codec.vocabulary, "logit_bias")
    return bias


def _check_ids(ids: Sequence[int], vocabulary: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise bad(
                f"Invalid value for {param!r}: token ids must be 0 to {vocabulary - 1}, "
                f"got {token}",
                param,
            )
