"""Checks of the `attention` ops' arguments."""

from __future__ import annotations

import torch

from ._common import checks

VECTOR_BYTES = 16
FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROTARY = ("half", "interleaved")
SCOPES = ("head", "all")


def check_heads(op: str, name: str, x: torch.Tensor, dims: str) -> None:
    """``x [B, T, heads, D]`` of a known dtype, D even and contiguous."""
    _four_dims(op, name, x, dims)
    checks.dtype_in(op, name, x, DTYPES)
    checks.unit_stride(op, name, x)
    if x.shape[3] < 2 or x.shape[3] % 2:
        checks.fail(op, name, "have an even head dim D", f"shape {tuple(x.shape)}")


def check_keys(op: str, name: str, tensor: torch.Tensor, q: torch.Tensor) -> None:
    """``[B, T, G, D]`` of keys or values for ``q [B, T, H, D]``, G dividing H."""
    _four_dims(op, name, tensor, "[B, T, G, D]")
    checks.dtype_in(op, name, tensor, (q.dtype,))
    checks.same_device(op, name, tensor, q.device)
    checks.unit_stride(op, name, tensor)
    batch, tokens, heads, dim = q.shape
    kv_heads = tensor.shape[2]
    checks.shape_is(op, name, tensor, (batch, tokens, kv_heads, dim))
    if kv_heads < 1 or heads % kv_heads:
        checks.fail(op, name, f"have a number of heads G that divides H = {heads}", kv_heads)


def check_caches(
    op: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Caches ``[B, G, S, D]`` for keys and values ``[B, T, G, D]``, FP8 ones with their scales."""
    checks.shape_is(op, "v", v, k.shape)
    batch, _, kv_heads, dim = k.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _four_dims(op, name, cache, "[B, G, S, D]")
        shape = (batch, kv_heads, k_cache.shape[2], dim)
        stored = FP8 if k_cache.dtype == FP8 else k.dtype
        checks.output(op, name, cache, shape, stored, k.device)
    if k_cache.shape[2] < 1:
        checks.fail(op, "k_cache", "have at least 1 slot", f"shape {tuple(k_cache.shape)}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_scale(op, name, scale, k_cache, kv_heads)


def _check_scale(
    op: str, name: str, scale: torch.Tensor | None, cache: torch.Tensor, kv_heads: int
) -> None:
    if cache.dtype != FP8:
        if scale is not None:
            rule = "be None, for only a float8_e4m3fn cache has scales"
            checks.fail(op, name, rule, f"a tensor and a {checks.short_dtype(cache.dtype)} cache")
        return
    if scale is None:
        checks.fail(op, name, f"be [{kv_heads}] or [1] float32 for a float8_e4m3fn cache", None)
    if scale.shape not in ((kv_heads,), (1,)):
        checks.fail(op, name, f"have shape ({kv_heads},) or (1,)", tuple(scale.shape))
    checks.dtype_in(op, name, scale, (torch.float32,))
    checks.same_device(op, name, scale, cache.device)
    checks.contiguous(op, name, scale)


def check_lengths(op: str, lengths: torch.Tensor, batch: int, device: torch.device) -> None:
    checks.shape_is(op, "lengths", lengths, (batch,))
    checks.dtype_in(op, "lengths", lengths, (torch.int32,))
    checks.same_device(op, "lengths", lengths, device)
    checks.contiguous(op, "lengths", lengths)


def check_norm(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    scope: str,
) -> None:
    """Norm weights of one head, or of all heads of a token."""
    checks.one_of(op, "norm_scope", scope, SCOPES)
    checks.not_negative(op, "norm_eps", eps)
    for name, weight, x in (("q_norm_weight", q_weight, q), ("k_norm_weight", k_weight, k)):
        if weight is not None:
            heads = x.shape[2] if scope == "all" else 1
            checks.shape_is(op, name, weight, (heads * x.shape[3],))
            checks.dtype_in(op, name, weight, (x.dtype,))
            checks.same_device(op, name, weight, x.device)
            checks.contiguous(op, name, weight)


def check_rotary(
    op: str,
    q: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    rotary: str,
    slots: int | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``cos`` and ``sin``, both or neither, made equal in strides.

    They are ``[B, T, R]`` (or ``[1, T, R]``), or where ``slots`` is given also ``[P, R]`` with
    ``P >= slots``.
    """
    checks.one_of(op, "rotary", rotary, ROTARY)
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        missing = "cos" if cos is None else "sin"
        checks.fail(op, missing, "be given together with the other of cos and sin", None)
    by_slot = slots is not None and cos.dim() == 2
    if cos.dim() != 3 and not by_slot:
        forms = "[B, T, R]" if slots is None else "[P, R] or [B, T, R]"
        checks.fail(op, "cos", f"have shape {forms}", tuple(cos.shape))
    batch, tokens, _, dim = q.shape
    width = cos.shape[-1]
    if width < 2 or width % 2 or width > dim:
        checks.fail(op, "cos", f"have an even rotary dim R of at most D = {dim}", width)
    if by_slot and cos.shape[0] < slots:
        checks.fail(op, "cos", f"have at least S = {slots} rows", cos.shape[0])
    if not by_slot and (cos.shape[0] not in (1, batch) or cos.shape[1] != tokens):
        checks.fail(op, "cos", f"have shape {(batch, tokens, width)}", tuple(cos.shape))
    checks.shape_is(op, "sin", sin, cos.shape)
    checks.dtype_in(op, "cos", cos, tuple({q.dtype: 0, torch.float32: 0}))
    checks.dtype_in(op, "sin", sin, (cos.dtype,))
    for name, table in (("cos", cos), ("sin", sin)):
        checks.same_device(op, name, table, q.device)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        return cos.contiguous(), sin.contiguous()
    return cos, sin


def check_vector_rows(op: str, name: str, tensor: torch.Tensor) -> None:
    """Rows start a multiple of 16 bytes apart; CUDA checks where the first one starts."""
    per_vector = VECTOR_BYTES // tensor.element_size()
    strides = tensor.stride()
    if any(step % per_vector for step in strides[:-1]):
        checks.fail(op, name, "have rows on 16-byte boundaries", f"strides {strides}")


def _four_dims(op: str, name: str, tensor: torch.Tensor, dims: str) -> None:
    if tensor.dim() != 4:
        checks.fail(op, name, f"have dims {dims}", f"shape {tuple(tensor.shape)}")
