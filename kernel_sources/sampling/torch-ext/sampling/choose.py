"""How a token is chosen from a row of logits, in plain torch: `reference.py` is built on it.

``R`` rows. Every function works on all of them at once, and no row sees another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import noise

# Below this a temperature means greedy, as in vLLM (``_SAMPLING_EPS``): a logit divided by less
# could overflow.
SMALLEST_TEMPERATURE = 1e-5


@dataclass
class Controls:
    """The settings of R rows; what is None is off. Shapes and meanings as in `sample_step`."""

    temperature: torch.Tensor
    seed: torch.Tensor
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None
    min_new: torch.Tensor | None = None
    repetition_penalty: torch.Tensor | None = None
    presence_penalty: torch.Tensor | None = None
    frequency_penalty: torch.Tensor | None = None
    occurrences: torch.Tensor | None = None
    bias_ids: torch.Tensor | None = None
    bias_values: torch.Tensor | None = None
    allowed: torch.Tensor | None = None


def adjusted(
    logits: torch.Tensor, controls: Controls, counts: torch.Tensor, eos: torch.Tensor
) -> torch.Tensor:
    """Logits ``[R, V]`` after bias, penalties, and bans, in this order."""
    scores = logits.float()
    size = scores.shape[-1]
    if controls.bias_ids is not None and bool((controls.bias_ids >= 0).any()):
        scores = scores + _scattered(controls.bias_ids, controls.bias_values, size)
    if controls.occurrences is not None and _is_penalised(controls):
        scores = _penalised(scores, controls)
    if controls.allowed is not None and not bool((controls.allowed == -1).all()):
        index = torch.arange(size, device=scores.device)
        word = controls.allowed[:, index // 32]
        scores = torch.where((word >> (index % 32)) & 1 == 1, scores, -torch.inf)
    if controls.min_new is not None and bool((counts < controls.min_new).any()):
        too_early = (counts < controls.min_new)[:, None]
        eos = eos.expand(scores.shape[0], eos.shape[-1])
        inside = (eos >= 0) & (eos < size)
        is_eos = torch.zeros(scores.shape[0], size + 1, dtype=torch.bool, device=scores.device)
        is_eos.scatter_(1, torch.where(inside, eos, size), True)
        scores = torch.where(too_early & is_eos[:, :size], -torch.inf, scores)
    return scores


def _scattered(ids: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
    """The bias lists as ``[R, size]``; equal ids add up in the order of the list."""
    bias = values.new_zeros(ids.shape[0], size + 1)
    inside = (ids >= 0) & (ids < size)
    target = torch.where(inside, ids, size)
    for column in inside.any(0).nonzero().flatten().tolist():
        place = target[:, column : column + 1]
        bias.scatter_(1, place, bias.gather(1, place) + values[:, column : column + 1])
    return bias[:, :size]


def _is_penalised(controls: Controls) -> bool:
    neutral = (
        (controls.repetition_penalty, 1),
        (controls.presence_penalty, 0),
        (controls.frequency_penalty, 0),
    )
    return any(values is not None and bool((values != value).any()) for values, value in neutral)


def _penalised(scores: torch.Tensor, controls: Controls) -> torch.Tensor:
    occurrences = controls.occurrences
    generated = (occurrences >> 1).float()
    penalty = controls.repetition_penalty
    if penalty is not None:
        penalty = penalty[:, None]
        repeated = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(occurrences != 0, repeated, scores)
    if controls.frequency_penalty is not None:
        scores = scores - controls.frequency_penalty[:, None] * generated
    if controls.presence_penalty is not None:
        scores = torch.where(generated > 0, scores - controls.presence_penalty[:, None], scores)
    return scores


def is_greedy(controls: Controls) -> torch.Tensor:
    return ~(controls.temperature >= SMALLEST_TEMPERATURE)


def tempered(scores: torch.Tensor, controls: Controls) -> torch.Tensor:
    """Scores over temperature; those of a greedy row as they are."""
    return scores / torch.where(is_greedy(controls), 1.0, controls.temperature)[:, None]


def kept(scores: torch.Tensor, controls: Controls) -> torch.Tensor:
    """bool ``[R, V]``: what top-k, then top-p, then min-p leave of tempered scores.

    Each is a threshold on the score, so equal scores share their fate: a token stays while fewer
    than ``top_k`` tokens have a higher score; while the tokens with a higher score have less than
    ``top_p`` of the mass that top-k left; while its probability is at least ``min_p`` of the
    largest. Masses are integers (`noise.mass`), so their sums have no order.
    """
    stays = torch.ones_like(scores, dtype=torch.bool)
    highest = scores.amax(-1, keepdim=True)
    if controls.top_k is not None:
        top_k = controls.top_k.long()
        active = (top_k > 0) & (top_k < scores.shape[-1])
        if bool(active.any()):
            last = torch.where(active, top_k, 1)[:, None] - 1
            ordered = scores.topk(int(last.max()) + 1).values
            stays &= (scores >= ordered.gather(-1, last)) | ~active[:, None]
    if controls.top_p is not None:
        active = controls.top_p < 1
        if bool(active.any()):
            stays &= _nucleus(torch.where(stays, scores, -torch.inf), controls.top_p, active)
    if controls.min_p is not None:
        lowest = controls.min_p.clamp(min=torch.finfo(torch.float32).tiny)
        enough = scores - highest >= noise.log(lowest)[:, None].clamp(max=0)
        stays &= enough | ~(controls.min_p > 0)[:, None]
    return stays


def masses_of(scores: torch.Tensor) -> torch.Tensor:
    """int64 ``[R, V]``: probabilities over that of the highest score; 0 where none is finite."""
    highest = scores.amax(-1, keepdim=True)
    return noise.mass(torch.where(highest.isfinite(), scores - highest, -torch.inf))


def _nucleus(scores: torch.Tensor, top_p: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Tokens for which the mass of all higher scores is less than ``top_p`` of all mass; the
    highest stay in any case. All True in rows that are not active."""
    most = int((scores > -torch.inf).sum(-1).max().clamp(min=1))
    ordered = scores.topk(most).values
    masses = masses_of(ordered)
    sums = masses.cumsum(-1)
    target = top_p.double() * sums[:, -1].double()
    before = (sums - masses).double()
    last = ((before < target[:, None]).sum(-1, keepdim=True) - 1).clamp(min=0)
    return (scores >= ordered.gather(-1, last)) | ~active[:, None]


def drawn(
    scores: torch.Tensor,
    stays: torch.Tensor,
    controls: Controls,
    positions: torch.Tensor,
    purpose: int,
) -> torch.Tensor:
    """Gumbel-max: index ``[R]`` of the largest of score plus noise among those that stay.

    It is a draw from softmax(scores) over them (Gumbel 1954; Maddison, Tarlow and Minka 2014,
    arXiv:1411.0030), and needs no sum. A NaN or an infinite score decides as in `argmax`.
    """
    decided = ~scores.amax(-1, keepdim=True).isfinite()
    if 4 * int(stays.sum()) < stays.numel():  # few: the words of these alone
        row, index = stays.nonzero(as_tuple=True)
        bits = noise.words_at(controls.seed[row], positions[row], index, purpose)
        noisy = torch.full_like(scores, -torch.inf)
        noisy[row, index] = scores[row, index] + noise.gumbel(bits)
    else:
        bits = noise.random_bits(controls.seed, positions, scores.shape[-1], purpose)
        noisy = torch.where(stays, scores + noise.gumbel(bits), -torch.inf)
    return largest(torch.where(decided, scores, noisy))


def largest(values: torch.Tensor) -> torch.Tensor:
    """Lowest index of the largest value; torch.argmax leaves the index among equals open."""
    # A NaN is the largest of all; torch.amax returns NaN for a row that has one.
    highest = values.amax(-1, keepdim=True)
    is_highest = torch.where(highest.isnan(), values.isnan(), values == highest)
    # argmax over 0 and 1 would be ambiguous again: count down from V at the candidates instead.
    size = values.shape[-1]
    countdown = torch.arange(size, 0, -1, device=values.device)
    return size - torch.where(is_highest, countdown, 0).amax(-1)


def chosen(
    logits: torch.Tensor,
    controls: Controls,
    counts: torch.Tensor,
    positions: torch.Tensor,
    eos: torch.Tensor,
) -> torch.Tensor:
    """Id ``[R]`` for rows with ``counts`` tokens generated and ``positions`` behind them."""
    scores = adjusted(logits, controls, counts, eos)
    greedy = is_greedy(controls)
    if bool(greedy.all()):
        return largest(scores)
    hot = tempered(scores, controls)
    sampled = drawn(hot, kept(hot, controls), controls, positions.long(), noise.DRAW)
    return torch.where(greedy, largest(scores), sampled) if bool(greedy.any()) else sampled


def by_rejection(
    scores: torch.Tensor,
    controls: Controls,
    draft: torch.Tensor,
    draft_probs: torch.Tensor,
    positions: torch.Tensor,
    otherwise: torch.Tensor,
) -> torch.Tensor:
    """``draft`` with probability min(1, p/q), else a draw from max(p - q, 0).

    p is softmax(scores) over what stays, q is ``draft_probs [R, V]``. Where nothing is left of
    p - q, which only rounding can bring about, the id is ``otherwise``.
    """
    masses = torch.where(kept(scores, controls), masses_of(scores), 0)
    p = masses.float() / masses.sum(-1, keepdim=True).float()
    place = draft.clamp(0, scores.shape[-1] - 1)[:, None]
    bits = noise.random_bits(controls.seed, positions, 1, noise.ACCEPT)
    accepted = noise.uniform(bits) * draft_probs.gather(-1, place) < p.gather(-1, place)
    left = p - draft_probs
    remains = left > 0
    logs = noise.log(left.clamp(min=torch.finfo(torch.float32).tiny))
    redrawn = drawn(logs, remains, controls, positions, noise.RESIDUAL)
    redrawn = torch.where(remains.any(-1), redrawn, otherwise)
    return torch.where(accepted[:, 0], draft, redrawn)
