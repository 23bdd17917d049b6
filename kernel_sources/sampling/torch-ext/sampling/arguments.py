"""Argument checks of the family, and its workspaces."""

from __future__ import annotations

import torch

from ._common import checks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SAMPLED_VOCAB = 2**22

# As in csrc/sampling.h. A counter and at most 128 keys, 8 bytes each, for an argmax.
WORKSPACE_BYTES_PER_ROW = (1 + 128) * 8
# As in csrc/sample.h, for a draw besides: a state, a histogram of 2048 counts and masses, and two
# words for each logit.
DRAW_BYTES_PER_ROW = 128 + 2048 * (4 + 8)
DRAW_BYTES_PER_LOGIT = 4 + 4


def argmax_bytes(rows: int, size: int) -> int:
    return rows * WORKSPACE_BYTES_PER_ROW


def sample_bytes(rows: int, size: int) -> int:
    padded = (size + 31) // 32 * 32
    start = (argmax_bytes(rows, size) + 15) // 16 * 16
    return start + rows * (DRAW_BYTES_PER_ROW + DRAW_BYTES_PER_LOGIT * padded)


def check_logits(op, logits, dtypes=DTYPES, largest=2**30, power="2**30"):
    checks.inference_only(op, logits)
    checks.dims_at_least(op, "logits", logits, 1)
    checks.dtype_in(op, "logits", logits, dtypes)
    checks.unit_stride(op, "logits", logits)
    if not 1 <= logits.shape[-1] <= largest:
        checks.fail(
            op, "logits", f"have 1 to {power} elements in its last dim", tuple(logits.shape)
        )


def check_vector(op, name, tensor, shape, dtype, device):
    checks.shape_is(op, name, tensor, shape)
    checks.dtype_in(op, name, tensor, (dtype,))
    checks.same_device(op, name, tensor, device)
    checks.contiguous(op, name, tensor)


def check_state(op, rows, device, tokens, counts, lengths, finished, next_ids, eos, max_new):
    if tokens.dim() != 2:
        checks.fail(op, "tokens", "have shape [B, L]", tuple(tokens.shape))
    checks.output(op, "tokens", tokens, (rows[0], tokens.shape[1]), torch.int64, device)
    if eos.dim() != 1 and (eos.dim() != 2 or eos.shape[0] != rows[0]):
        checks.fail(op, "eos", f"have shape [E] or [{rows[0]}, E]", tuple(eos.shape))
    check_vector(op, "counts", counts, rows, torch.int32, device)
    check_vector(op, "lengths", lengths, rows, torch.int32, device)
    check_vector(op, "finished", finished, rows, torch.bool, device)
    check_vector(op, "next_ids", next_ids, rows, torch.int64, device)
    check_vector(op, "eos", eos, eos.shape, torch.int64, device)
    check_vector(op, "max_new", max_new, rows, torch.int32, device)


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SETTINGS = (
    ("temperature", torch.float32),
    ("seed", torch.int64),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
    ("min_new", torch.int32),
    *((name, torch.float32) for name in PENALTIES),
)


def check_settings(op, rows, size, words, device, **settings):
    """Every per-sequence setting of ``rows`` sequences and ``size`` logits; ``words`` is the shape
    of ``allowed``."""
    for name, dtype in _SETTINGS:
        if settings[name] is not None:
            check_vector(op, name, settings[name], rows, dtype, device)
    occurrences = settings["occurrences"]
    if occurrences is None:
        for name in PENALTIES:
            if settings[name] is not None:
                checks.fail(op, "occurrences", f"be given with {name}", None)
    if occurrences is not None:
        checks.output(op, "occurrences", occurrences, (*rows, size), torch.int32, device)
    bias_ids, bias_values = settings["bias_ids"], settings["bias_values"]
    if (bias_ids is None) != (bias_values is None):
        missing = "bias_ids" if bias_ids is None else "bias_values"
        other = "bias_values" if bias_ids is None else "bias_ids"
        checks.fail(op, missing, f"be given with {other}", None)
    if bias_ids is not None:
        if bias_ids.dim() != 2:
            checks.fail(op, "bias_ids", "have shape [B, C]", tuple(bias_ids.shape))
        shape = (*rows, bias_ids.shape[1])
        check_vector(op, "bias_ids", bias_ids, shape, torch.int64, device)
        check_vector(op, "bias_values", bias_values, shape, torch.float32, device)
    if settings["allowed"] is not None:
        check_vector(op, "allowed", settings["allowed"], words, torch.int32, device)


def workspace_for(op, logits, given, bytes_of, maker):
    """``given``, checked, or a new one of ``bytes_of(rows, V)`` zeros."""
    size = logits.shape[-1]
    rows = logits.numel() // size
    needed = bytes_of(rows, size)
    if given is None:
        return torch.zeros(needed, dtype=torch.uint8, device=logits.device)
    checks.dtype_in(op, "workspace", given, (torch.uint8,))
    checks.same_device(op, "workspace", given, logits.device)
    checks.contiguous(op, "workspace", given)
    if given.numel() < needed:
        rule = f"have at least {needed} bytes, as {maker}({rows}, {size}, device) makes"
        checks.fail(op, "workspace", rule, given.numel())
    return given


def new_workspace(op, B, V, device, bytes_of):
    if B < 0:
        checks.fail(op, "B", "not be negative", B)
    if V < 1:
        checks.fail(op, "V", "be at least 1", V)
    return torch.zeros(bytes_of(B, V), dtype=torch.uint8, device=device)
