"""Log-probabilities beside the chosen token: `logprobs`."""

from __future__ import annotations

import torch

from . import arguments, schema  # noqa: F401  schema defines the ops
from ._common import checks
from ._ops import ops

MAX_TOP = 20


def logprobs(
    logits: torch.Tensor,
    ids: torch.Tensor,
    *,
    top_n: int = 0,
    workspace: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of chosen tokens, and the ``top_n`` most likely ones.

    ``logprob_i = logits_i - max(logits) - log(sum_j exp(logits_j - max(logits)))``

    Of the model's own logits, before bias, penalties, temperature and thresholds, as the OpenAI
    API and vLLM (``logprobs_mode="raw_logprobs"``) report them.

    Args:
        logits: fp32 ``[..., V]``, last dim contiguous, 1 <= V <= 2**22.
        ids: int64 ``[...]``, contiguous; the value of an id outside [0, V), such as the pad of a
            finished row, is -inf.
        top_n: from 0 to min(20, V).
        workspace: from :func:`sample_workspace` for at least as many rows and logits; allocated
            when absent, which a captured step should not do.
        out: the three results, contiguous.

    Returns:
        ``(chosen fp32 [...], top_ids int64 [..., top_n], top fp32 [..., top_n])``, the highest
        first, equal ones by rising id. Sums are fp32 in an order that only V decides. A row with a
        NaN has NaN values, and the NaN are the highest.

    Raises:
        ValueError: a shape, stride, dtype, device or ``top_n`` outside the above.
        RuntimeError: ``logits`` requires grad while grad mode is on.

    Source: the OpenAI API reference, ``logprobs`` and ``top_logprobs``.
    """
    op = "logprobs"
    arguments.check_logits(op, logits, (torch.float32,), arguments.MAX_SAMPLED_VOCAB, "2**22")
    shape, device = logits.shape[:-1], logits.device
    arguments.check_vector(op, "ids", ids, shape, torch.int64, device)
    most = min(MAX_TOP, logits.shape[-1])
    if not 0 <= top_n <= most:
        checks.fail(op, "top_n", f"be from 0 to {most}", top_n)
    if out is None:
        top = torch.empty(*shape, top_n, dtype=torch.float32, device=device)
        out = (
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(*shape, top_n, dtype=torch.int64, device=device),
            top,
        )
    else:
        arguments.check_vector(op, "out[0]", out[0], shape, torch.float32, device)
        arguments.check_vector(op, "out[1]", out[1], (*shape, top_n), torch.int64, device)
        arguments.check_vector(op, "out[2]", out[2], (*shape, top_n), torch.float32, device)
    scratch = arguments.workspace_for(
        op, logits, workspace, arguments.sample_bytes, "sample_workspace"
    )
    ops.logprobs(logits, ids, scratch, *out)
    return out
