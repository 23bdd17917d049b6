"""Part ``fidelity``: logit errors of FlashRT and of the host's own precision against fp32.

The real model reads real text, and then the whole greedy fidelity rule holds; a random model reads
random tokens, and the share of equal top tokens means nothing. Two paths are compared, each with
the same path of the host: one token a step over a cache, and whole windows at once.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..host import REAL_MODEL
from . import rule, text
from .flashrt import FlashRTRunner
from .peers import HostRunner, Runner
from .session import Session, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = 16


def run(session: Session) -> dict[str, Any]:
    """Compare both paths on ``--windows`` windows of ``--window-tokens`` tokens."""
    from flash_rt import structures

    options = session.options
    real = session.name == REAL_MODEL
    ids, source = _windows(session)
    reference = copy.deepcopy(session.host).float()
    prompt, forced = ids[:, :PROMPT_TOKENS], ids[:, PROMPT_TOKENS:]
    cache = ids.shape[1]
    plan = structures.attach(session.model, session.model.forward)
    try:
        ours = FlashRTRunner(session.model, cache_tokens=cache, rows=ids.shape[0])
        paths = {
            "decode": compare_steps(
                HostRunner("fp32", reference, cache_tokens=cache),
                {"flashrt": ours, "host": HostRunner("host", session.host, cache_tokens=cache)},
                prompt,
                forced,
            ),
            "forward": compare_forwards(
                reference, {"flashrt": session.model, "host": session.host}, ids
            ),
        }
    finally:
        plan.detach()
    result: dict[str, Any] = dict(text=source, windows=options.windows, window_tokens=cache)
    for path, errors in paths.items():
        verdict = rule.judge(errors["flashrt"], errors["host"], with_top1=real)
        result[path] = dict(
            passed=verdict.passed,
            broken=list(verdict.broken),
            **{name: error.summary() for name, error in errors.items()},
        )
        say(f"fidelity {path}: " + ("; ".join(verdict.broken) or "passed"))
    return result


def _windows(session: Session) -> tuple[torch.Tensor, dict[str, Any]]:
    """``[rows, tokens]`` ids, and where they come from."""
    options = session.options
    tokens = options.window_tokens
    if tokens <= PROMPT_TOKENS:
        raise ValueError(f"bench: window tokens must be above {PROMPT_TOKENS}, got {tokens}")
    if session.name != REAL_MODEL:
        return session.prompt(tokens, rows=options.windows, seed=3), dict(kind="random tokens")
    from ..real_model import tokenizer

    if options.text:
        body, kind = Path(options.text).read_text(encoding="utf-8"), Path(options.text).name
    else:
        body, kind = text.reference_text(), "pydoc_data.topics"
    ids = text.windows(tokenizer(), body, rows=options.windows, tokens=tokens)
    return ids.to(session.device), dict(kind=kind, sha256=text.digest(body))


def compare_steps(
    reference: Runner, others: dict[str, Runner], prompt: torch.Tensor, forced: torch.Tensor
) -> dict[str, rule.LogitError]:
    """Feed the same tokens to every runner, one a step, and sum up the errors of every step."""
    errors = {name: rule.LogitError() for name in others}
    steps = {name: runner.forced_steps(prompt, forced) for name, runner in others.items()}
    for expected in reference.forced_steps(prompt, forced):
        for name, step in steps.items():
            errors[name].add(next(step), expected)
    return errors


@torch.no_grad()
def compare_forwards(
    reference: PreTrainedModel, others: dict[str, PreTrainedModel], ids: torch.Tensor
) -> dict[str, rule.LogitError]:
    """Run every window through every model's forward at once, without a cache."""
    errors = {name: rule.LogitError() for name in others}
    for row in range(ids.shape[0]):
        window = ids[row : row + 1]
        expected = reference(input_ids=window, use_cache=False).logits[0]
        for name, model in others.items():
            errors[name].add(model(input_ids=window, use_cache=False).logits[0], expected)
    return errors
