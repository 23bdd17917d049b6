"""Schemas, fakes and public functions of the `attention` family; see reference.py for the CPU."""

from __future__ import annotations

import torch

from . import arguments, reference
from ._common import checks
from ._common.operators import define
from ._ops import ops

HEAD_DIMS = (64, 80, 96, 128, 192, 256)  # of the fused kernel; others take a slower path
MAX_ROWS = 8  # B * T of attend
MAX_HEADS = 512  # H of attend: its workspace has kCounters = MAX_ROWS * MAX_HEADS counters
COUNTER_BYTES = 4 * MAX_ROWS * MAX_HEADS
SLOTS_PER_SPLIT = 128  # kSplit of csrc/attend.cuh
MAX_NORM_ROPE_DIM = 512  # kMaxRowDim of csrc/norm_rope.h

_NORM = "float norm_eps, bool norm_zero_centered, bool norm_over_all, bool interleaved"
_SCALES = "Tensor? k_scale, Tensor? v_scale"
_TABLES = "Tensor? cos, Tensor? sin, Tensor? q_norm_weight, Tensor? k_norm_weight"
_SCHEMAS = (
    "attend(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
    f"{_SCALES}, {_TABLES}, Tensor(c!) workspace, Tensor(d!) out, {_NORM}, float scaling, "
    "int window, float soft_cap, bool history_static) -> ()",
    f"norm_rope(Tensor q, Tensor k, {_TABLES}, {_NORM}, Tensor(a!) q_out, Tensor(b!) k_out) -> ()",
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, "
    f"{_SCALES}) -> ()",
)


for _schema in _SCHEMAS:
    define(_schema, getattr(reference, _schema.partition("(")[0]))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scaling: float,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rotary: str = "half",
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    norm_scope: str = "head",
    window: int | None = None,
    soft_cap: float | None = None,
    history_static: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm and rotate q and k, append k and v to a static cache, and attend over it.

    Token t of sequence b sits at position ``p = lengths[b] + t``, which is also its slot::

        q', k' = rotary_p(norm(q)), rotary_p(norm(k))      each rounded to the dtype of q
        k_cache[b, :, p], v_cache[b, :, p] = k', v
        s = scaling * q' . k_cache[b, h // (H / G), j]     for slots j in (p - window, p]
        out = softmax(soft_cap * tanh(s / soft_cap)) @ v_cache[b, h // (H / G)]

    An FP8 cache holds ``fp8(k' / k_scale[g])`` and ``fp8(v / v_scale[g])``, rounded to nearest even
    and saturated at 448; what it stands for is that times the scale, this call's tokens included.

    Args:
        q: ``[B, T, H, D]`` bf16 or fp16 (fp32 too on a slower path), last dim contiguous,
            ``B * T <= 8``, D even. D of 64, 80, 96, 128, 192 or 256 is fused; others take a
            slower path.
        k, v: ``[B, T, G, D]``, G dividing H, dtype of ``q``, last dim contiguous.
        k_cache, v_cache: ``[B, G, S, D]``, dtype of ``q`` or both float8_e4m3fn, last dim
            contiguous, rows on 16-byte boundaries. Rows outside a sequence's live slots are never
            used.
        lengths: ``[B]`` int32, slots filled before this call; not advanced here. On CUDA it cannot
            be checked: a token at or past slot S is not stored and its output is meaningless.
        scaling: of the scores, usually ``D ** -0.5``.
        k_scale, v_scale: ``[G]`` or ``[1]`` fp32, more than 0 (not checked), of an FP8 cache;
            ``None`` for any other.
        cos, sin: ``[P, R]`` with ``P >= S``, indexed by slot, or ``[B, T, R]`` (B may be 1); R
            even, at most D: the first R elements of a head turn. fp32 or dtype of ``q``. Full
            width, as hosts make them: ``cat(freqs, freqs)`` or each frequency twice.
        rotary: "half" pairs elements i and i + R/2, "interleaved" 2i and 2i + 1.
        q_norm_weight, k_norm_weight: RMS norm weights, dtype of ``q``; ``[D]`` with
            ``norm_scope="head"``, ``[H * D]`` and ``[G * D]`` with "all"; ``None`` for no norm.
        norm_eps: added to the mean square; finite and not negative.
        norm_zero_centered: scale by ``1 + weight``.
        norm_scope: "head" takes the mean over a head, "all" over all heads of a token.
        window: newest slots a token sees, itself included, at least 1; ``None`` for all.
        soft_cap: finite and more than 0; ``None`` for none.
        history_static: cache rows below ``lengths``, ``lengths``, the scales, the norm weights and
            a ``[P, R]`` table are not written by work still queued, so the kernel may read them
            before the work in front of it on the stream has finished.
        workspace: from :func:`workspace` for these sizes or larger; not shared by calls that may
            overlap. ``None`` allocates one.
        out: ``[B, T, H, D]`` contiguous, dtype of ``q``; must not overlap an input.

    Returns:
        ``out``, or a new tensor. Sums are fp32. On the fused path the bits of a row depend on that
        row, its history and its settings alone: not on B, T, its place, S or other rows.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Vaswani et al. 2017, arXiv:1706.03762, eq. 1; Su et al. 2021, arXiv:2104.09864, eq. 34;
    splits and merging: Dao 2023, arXiv:2307.08691, section 3.1.
    """
    op = "attend"
    checks.inference_only(op, q, k, v, k_cache, v_cache, cos, sin, q_norm_weight, k_norm_weight)
    checks.inference_only(op, k_scale, v_scale)
    arguments.check_heads(op, "q", q, "[B, T, H, D]")
    arguments.check_keys(op, "k", k, q)
    arguments.check_keys(op, "v", v, q)
    arguments.check_caches(op, k, v, k_cache, v_cache, k_scale, v_scale)
    batch, tokens, heads, dim = q.shape
    slots = k_cache.shape[2]
    if batch * tokens > MAX_ROWS:
        rule = f"have B * T <= {MAX_ROWS} (more: norm_rope, append and torch's own attention)"
        checks.fail(op, "q", rule, f"shape {tuple(q.shape)}")
    if heads > MAX_HEADS:
        checks.fail(op, "q", f"have H <= {MAX_HEADS}", f"shape {tuple(q.shape)}")
    arguments.check_lengths(op, lengths, batch, q.device)
    arguments.check_norm(op, q, k, q_norm_weight, k_norm_weight, norm_eps, norm_scope)
    cos, sin = arguments.check_rotary(op, q, cos, sin, rotary, slots)
    if not 0.0 < abs(scaling) < float("inf"):
        checks.fail(op, "scaling", "be finite and not 0", scaling)
    if window is not None and window < 1:
        checks.fail(op, "window", "be at least 1 or None", window)
    if soft_cap is not None and not 0.0 < soft_cap < float("inf"):
        checks.fail(op, "soft_cap", "be finite and more than 0, or None", soft_cap)
    result = _output(op, "out", out, q)
    if q.numel() == 0:
        return result

    norm = (float(norm_eps), norm_zero_centered, norm_scope == "all", rotary == "interleaved")
    scores = (float(scaling), min(window or 0, 2**31 - 1), float(soft_cap or 0.0))
    tables = (cos, sin, q_norm_weight, k_norm_weight)
    scales = (k_scale, v_scale)
    if q.device.type == "cuda" and (q.dtype == torch.float32 or dim not in HEAD_DIMS):
        cache = (k_cache, v_cache, lengths, *scales)
        _attend_unfused(q, k, v, cache, tables, norm, scores, result)
        return result
    if dim in HEAD_DIMS:
        arguments.check_vector_rows(op, "k_cache", k_cache)
        arguments.check_vector_rows(op, "v_cache", v_cache)
    workspace = _workspace_of(op, workspace, (batch, tokens, heads, dim, slots), q.device)
    ops.attend(
        q, k, v, k_cache, v_cache, lengths, *scales, *tables, workspace, result, *norm, *scores,
        history_static,
    )  # fmt: skip
    return result


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    rotary: str = "half",
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_zero_centered: bool = False,
    norm_scope: str = "head",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate q and k as :func:`attend` does, for any B and T.

    ``q', k' = rotary(norm(q)), rotary(norm(k))``, each rounded to the dtype of q in between

    Args:
        q: ``[B, T, H, D]`` bf16, fp16 or fp32, last dim contiguous, D even and at most 512 (on
            CUDA, larger D takes a slower path).
        k: ``[B, T, G, D]``, G dividing H, dtype of ``q``, last dim contiguous.
        cos, sin: ``[B, T, R]`` (B may be 1), R even, at most D; fp32 or dtype of ``q``; ``None``
            for no rotary.
        rotary, q_norm_weight, k_norm_weight, norm_eps, norm_zero_centered, norm_scope: as in
            :func:`attend`.
        out: two contiguous tensors like ``q`` and ``k``; must not overlap an input.

    Returns:
        ``(q', k')``, contiguous, or ``out``.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34; Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    op = "norm_rope"
    checks.inference_only(op, q, k, cos, sin, q_norm_weight, k_norm_weight)
    arguments.check_heads(op, "q", q, "[B, T, H, D]")
    arguments.check_keys(op, "k", k, q)
    arguments.check_norm(op, q, k, q_norm_weight, k_norm_weight, norm_eps, norm_scope)
    cos, sin = arguments.check_rotary(op, q, cos, sin, rotary, None)
    if out is not None and len(out) != 2:
        checks.fail(op, "out", "hold two tensors", len(out))
    q_out = _output(op, "out[0]", None if out is None else out[0], q)
    k_out = _output(op, "out[1]", None if out is None else out[1], k)
    if q.numel() == 0:
        return q_out, k_out
    settings = (
        cos, sin, q_norm_weight, k_norm_weight, float(norm_eps), norm_zero_centered,
        norm_scope == "all", rotary == "interleaved",
    )  # fmt: skip
    if q.device.type == "cuda" and q.shape[-1] > MAX_NORM_ROPE_DIM:
        reference.norm_rope(q, k, *settings, q_out, k_out)
        return q_out, k_out
    ops.norm_rope(q, k, *settings, q_out, k_out)
    return q_out, k_out


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Store keys and values of new tokens in a static cache.

    ``k_cache[b, g, lengths[b] + t], v_cache[b, g, lengths[b] + t] = k[b, t, g], v[b, t, g]``,
    in an FP8 cache ``fp8(k / k_scale[g]), fp8(v / v_scale[g])`` as :func:`attend` stores them

    Args:
        k, v: ``[B, T, G, D]`` bf16, fp16 or fp32, last dim contiguous, any T and even D.
        k_cache, v_cache: ``[B, G, S, D]``, dtype of ``k`` or both float8_e4m3fn, last dim
            contiguous.
        lengths: ``[B]`` int32; not advanced. On CUDA a token at or past slot S is dropped, on the
            CPU it is an error.
        k_scale, v_scale: as in :func:`attend`.

    Raises:
        ValueError: a shape, stride, dtype, device or range outside the above.
        RuntimeError: an input requires grad while grad mode is on.
    """
    op = "append"
    checks.inference_only(op, k, v, k_cache, v_cache, k_scale, v_scale)
    arguments.check_heads(op, "k", k, "[B, T, G, D]")
    arguments.check_keys(op, "v", v, k)
    arguments.check_caches(op, k, v, k_cache, v_cache, k_scale, v_scale)
    arguments.check_lengths(op, lengths, k.shape[0], k.device)
    if k.numel() > 0:
        ops.append(k, v, k_cache, v_cache, lengths, k_scale, v_scale)


def workspace(
    batch: int, tokens: int, heads: int, dim: int, slots: int, device: torch.device | str
) -> torch.Tensor:
    """Scratch for :func:`attend` calls of up to these sizes, for any number of key heads.

    Args:
        batch, tokens, heads, dim, slots: B, T, H, D and S of the calls, each at least 1.
        device: of the calls.

    Returns:
        ``[bytes]`` uint8, zeroed; every call leaves it ready for the next.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {"batch": batch, "tokens": tokens, "heads": heads, "dim": dim, "slots": slots}
    for name, size in sizes.items():
        if size < 1:
            checks.fail("workspace", name, "be at least 1", size)
    size = _workspace_bytes(batch, tokens, heads, dim, slots)
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _workspace_bytes(batch: int, tokens: int, heads: int, dim: int, slots: int) -> int:
    """Bytes of the counters, then of the partial (e, l) and o of each split (csrc/attend.cuh)."""
    rows = batch * tokens * heads
    splits = -(-slots // SLOTS_PER_SPLIT)
    sums = -(-8 * splits * rows // 256) * 256
    return COUNTER_BYTES + sums + 4 * splits * rows * dim


def _workspace_of(
    op: str,
    workspace: torch.Tensor | None,
    sizes: tuple[int, int, int, int, int],
    device: torch.device,
) -> torch.Tensor:
    """The caller's workspace, checked, or a new one; the CPU needs none."""
    size = _workspace_bytes(*sizes)
    if workspace is None and device.type == "cpu":
        return torch.empty(0, dtype=torch.uint8)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        workspace[:COUNTER_BYTES].zero_()
        return workspace
    checks.dtype_in(op, "workspace", workspace, (torch.uint8,))
    checks.same_device(op, "workspace", workspace, device)
    checks.contiguous(op, "workspace", workspace)
    if workspace.numel() < size:
        rule = f"have at least {size} bytes (see workspace())"
        checks.fail(op, "workspace", rule, workspace.numel())
    return workspace


def _output(op: str, name: str, out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return like.new_empty(like.shape)
    checks.output(op, name, out, like.shape, like.dtype, like.device)
    checks.contiguous(op, name, out)
    return out


def _attend_unfused(q, k, v, cache, tables, norm, scores, out) -> None:
    """The same from parts, for sizes and dtypes without a fused kernel; waits for nothing."""
    k_cache, v_cache, lengths, *scales = cache
    cos, sin, q_norm_weight, k_norm_weight = tables
    eps, zero_centered, over_all, interleaved = norm
    if cos is not None and cos.dim() == 2:
        steps = torch.arange(q.shape[1], device=q.device)
        positions = (lengths.long()[:, None] + steps).clamp(0, cos.shape[0] - 1)
        cos, sin = cos[positions], sin[positions]
    q, k = norm_rope(
        q, k, cos=cos, sin=sin, rotary="interleaved" if interleaved else "half",
        q_norm_weight=q_norm_weight, k_norm_weight=k_norm_weight, norm_eps=eps,
        norm_zero_centered=zero_centered, norm_scope="all" if over_all else "head",
    )  # fmt: skip
    ops.append(k, v, k_cache, v_cache, lengths, *scales)
    out.copy_(reference.masked_attention(q, k_cache, v_cache, lengths, *scales, *scores))
