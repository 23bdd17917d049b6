"""Schemas and fakes of the `sampling` family; the CPU implementations are in reference.py."""

from __future__ import annotations

import torch

from . import reference
from ._ops import add_op_namespace_prefix

_LIB = torch.library.Library(add_op_namespace_prefix("").rstrip(":"), "DEF")

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


def _nothing(*arguments):
    return None


def _define(schema, implementation):
    name = schema.partition("(")[0]
    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(name, implementation, "CPU")
    torch.library.register_fake(add_op_namespace_prefix(name), _nothing, lib=_LIB)


_define("argmax(Tensor logits, Tensor(a!) workspace, Tensor(b!) out) -> ()", reference.argmax)
_define(
    f"greedy_step(Tensor logits, {_STATE.format(*'abcde')}, Tensor eos, Tensor max_new, "
    "int pad_id, Tensor(f!) workspace) -> ()",
    reference.greedy_step,
)
_define(
    f"sample_step(Tensor logits, {_STATE.format(*'abcde')}, Tensor eos, Tensor max_new, "
    f"{_SETTINGS}) -> ()",
    reference.sample_step,
)
_define(
    f"accept_drafts(Tensor logits, Tensor drafts, {_STATE.format(*'abcde')}, "
    f"Tensor(f!) accepted, Tensor eos, Tensor max_new, Tensor? draft_probs, {_SETTINGS}) -> ()",
    reference.accept_drafts,
)
_define(
    "logprobs(Tensor logits, Tensor ids, Tensor(a!) workspace, Tensor(b!) chosen, "
    "Tensor(c!) top_ids, Tensor(d!) top) -> ()",
    reference.logprobs,
)
