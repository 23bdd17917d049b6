"""The choice of the next token, with the bookkeeping of a decode loop."""

from ._common.exports import unknown_name
from .accept import accept_drafts
from .logprobs import logprobs
from .lookup import lookup_drafts
from .ops import argmax, greedy_step, workspace
from .sample import record_prompt, sample_step, sample_workspace

__all__ = [
    "accept_drafts",
    "argmax",
    "greedy_step",
    "logprobs",
    "lookup_drafts",
    "record_prompt",
    "sample_step",
    "sample_workspace",
    "workspace",
]

__getattr__ = unknown_name("sampling", __all__)
