"""Schemas and fakes of the `sampling` family; the CPU implementations are in reference.py."""

from __future__ import annotations

from . import reference
from ._common.operators import define

_STATE = (
    "Tensor({0}!) tokens, Tensor({1}!) counts, Tensor({2}!) lengths, Tensor({3}!) finished, "
    "Tensor({4}!) next_ids"
)
_SETTINGS = (
    "Tensor temperature, Tensor seed, Tensor? top_k, Tensor? top_p, Tensor? min_p, "
    "Tensor? min_new, Tensor? repetition_penalty, Tensor? presence_penalty, "
    "Tensor? frequency_penalty, Tensor(x!)? occurrences, Tensor? bias_ids, Tensor? bias_values, "
    "Tensor? allowed, int pad_id, Tensor(y!) workspace"
)


define("argmax(Tensor logits, Tensor(a!) workspace, Tensor(b!) out) -> ()", reference.argmax)
define(
    f"greedy_step(Tensor logits, {_STATE.format(*'abcde')}, Tensor eos, Tensor max_new, "
    "int pad_id, Tensor(f!) workspace) -> ()",
    reference.greedy_step,
)
define(
    f"sample_step(Tensor logits, {_STATE.format(*'abcde')}, Tensor eos, Tensor max_new, "
    f"{_SETTINGS}) -> ()",
    reference.sample_step,
)
define(
    f"accept_drafts(Tensor logits, Tensor drafts, {_STATE.format(*'abcde')}, "
    f"Tensor(f!) accepted, Tensor eos, Tensor max_new, Tensor? draft_probs, {_SETTINGS}) -> ()",
    reference.accept_drafts,
)
define(
    "logprobs(Tensor logits, Tensor ids, Tensor(a!) workspace, Tensor(b!) chosen, "
    "Tensor(c!) top_ids, Tensor(d!) top) -> ()",
    reference.logprobs,
)
define(
    "lookup_drafts(Tensor prompt, Tensor tokens, Tensor counts, Tensor lengths, Tensor(a!) drafts) "
    "-> ()",
    reference.lookup_drafts,
)
