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
from . import precisions, rule, text
from .flashrt import FlashRTRunner
from .peers import HostRunner, Runner
from .quality import Quality
from .session import Session, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROMPT_TOKENS = 16


def run(session: Session) -> dict[str, Any]:
    """Compare both paths on ``--windows`` windows of ``--window-tokens`` tokens.

    The first precision's values are the part's own; those of others stand in ``others``. The rule
    is for the model's own precision; others have cosine and perplexity.
    """
    options = session.options
    ids, source = _windows(session, options.windows + options.calibrate)
    ids, calibration = ids[: options.windows], ids[options.windows :]
    reference = copy.deepcopy(session.host).to(precisions.reference_dtype(session.host))
    shared = dict(
        text=source,
        windows=options.windows,
        window_tokens=ids.shape[1],
        calibration_windows=options.calibrate,
    )
    result: dict[str, Any] = {}
    for precision in options.precision:
        found = _run(session, precision, reference, ids, calibration)
        if not result:
            result = shared | found
        else:
            result.setdefault("others", {})[precisions.entry_name(precision)] = found
    return result


def _run(
    session: Session,
    precision: str,
    reference: PreTrainedModel,
    ids: torch.Tensor,
    calibration: torch.Tensor,
) -> dict[str, Any]:
    from flash_rt.structures import explain

    cache = ids.shape[1]
    model = precisions.entry_model(session, precision)
    plan = precisions.attach(
        model,
        precision,
        min_cosine=session.options.min_cosine,
        calibration=calibration if len(calibration) else None,
    )
    result: dict[str, Any] = dict(precision=precision, weights=precisions.summary(plan))
    try:
        ours = FlashRTRunner(model, cache_tokens=cache, rows=ids.shape[0])
        host = HostRunner("host", session.host, cache_tokens=cache)
        truth = HostRunner("fp32", reference, cache_tokens=cache)
        prompt, forced = ids[:, :PROMPT_TOKENS], ids[:, PROMPT_TOKENS:]
        quality: dict[str, Quality] = dict(decode=Quality(), forward=Quality())
        runners: dict[str, Runner] = {"flashrt": ours, "host": host}
        paths = {
            "decode": compare_steps(truth, runners, prompt, forced, quality["decode"]),
            "forward": compare_forwards(
                reference, {"flashrt": model, "host": session.host}, ids, quality["forward"]
            ),
        }
        result["explain"] = str(explain(plan)) if plan.packing is not None else ""
    finally:
        plan.detach()
    for path, errors in paths.items():
        result[path] = {name: error.summary() for name, error in errors.items()}
        result[path] |= quality[path].summary()
        if precision == precisions.PLAIN:
            real = session.name == REAL_MODEL
            verdict = rule.judge(errors["flashrt"], errors["host"], with_top1=real)
            result[path] |= dict(passed=verdict.passed, broken=list(verdict.broken))
        say(f"fidelity {precision} {path}: {quality[path]}")
    return result


def _windows(session: Session, rows: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """``[rows, tokens]`` ids, and where they come from."""
    options = session.options
    tokens = options.window_tokens
    if tokens <= PROMPT_TOKENS:
        raise ValueError(f"bench: window tokens must be above {PROMPT_TOKENS}, got {tokens}")
    if session.name != REAL_MODEL:
        return session.prompt(tokens, rows=rows, seed=3), dict(kind="random tokens")
    from ..real_model import tokenizer

    if options.text:
        body, kind = Path(options.text).read_text(encoding="utf-8"), Path(options.text).name
    else:
        body, kind = text.reference_text(), "pydoc_data.topics"
    ids = text.windows(tokenizer(), body, rows=rows, tokens=tokens)
    return ids.to(session.device), dict(kind=kind, sha256=text.digest(body))


def compare_steps(
    reference: Runner,
    others: dict[str, Runner],
    prompt: torch.Tensor,
    forced: torch.Tensor,
    quality: Quality | None = None,
) -> dict[str, rule.LogitError]:
    """Feed the same tokens to every runner, one a step, and sum up the errors of every step."""
    errors = {name: rule.LogitError() for name in others}
    steps = {name: runner.forced_steps(prompt, forced) for name, runner in others.items()}
    for index, expected in enumerate(reference.forced_steps(prompt, forced)):
        logits = {name: next(step) for name, step in steps.items()}
        for name, found in logits.items():
            errors[name].add(found, expected)
        if quality is not None and index < forced.shape[1]:
            quality.add({**logits, "fp32": expected}, forced[:, index])
    return errors


@torch.no_grad()
def compare_forwards(
    reference: PreTrainedModel,
    others: dict[str, PreTrainedModel],
    ids: torch.Tensor,
    quality: Quality | None = None,
) -> dict[str, rule.LogitError]:
    """Run every window through every model's forward at once, without a cache."""
    errors = {name: rule.LogitError() for name in others}
    for row in range(ids.shape[0]):
        window = ids[row : row + 1]
        expected = reference(input_ids=window, use_cache=False).logits[0]
        logits = {n: m(input_ids=window, use_cache=False).logits[0] for n, m in others.items()}
        for name, found in logits.items():
            errors[name].add(found, expected)
        if quality is not None:
            every = {**logits, "fp32": expected}
            quality.add({name: found[:-1] for name, found in every.items()}, window[0, 1:])
    return errors
