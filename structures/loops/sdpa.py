"""Causal attention over many positions through torch, by the fastest backend for the case."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..catalogue.attention_probes import visible

QUERY_BLOCK = 256  # rows of scores kept at once where torch has no fused kernel for the formula


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """``softmax(mask(cap(scaling * q @ k.T))) @ v``; the last query stands at the last key.

    Args:
        q: ``[B, H, T, D]``; k, v: ``[B, G, N, D]`` with H a multiple of G and N >= T.
        window: a query sees the ``window`` newest keys, its own among them.
        soft_cap: ``cap(s) = soft_cap * tanh(s / soft_cap)``, kept in fp32.

    Returns:
        ``[B, H, T, D]``.
    """
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and keys >= queries + window:
        oldest = keys - queries - window + 1
        k, v = k[:, :, oldest:], v[:, :, oldest:]
        keys = k.shape[2]
    if window is not None and window >= keys:
        window = None
    if soft_cap is not None:
        return _soft_capped(q, k, v, scaling, window, soft_cap)
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": q.shape[1] != k.shape[1]}
    if window is None and queries in (1, keys):
        return scaled_dot_product_attention(q, k, v, is_causal=queries > 1, **options)
    mask: Any
    if window is None and q.is_cuda:
        mask = causal_lower_right(queries, keys)
    else:
        mask = visible(queries, keys, window, q.device)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)


def _soft_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    window: int | None,
    soft_cap: float,
) -> torch.Tensor:
    batch, heads, queries, size = q.shape
    groups, keys = k.shape[1], k.shape[2]
    mask = visible(queries, keys, window, q.device)
    grouped = q.reshape(batch, groups, heads // groups, queries, size)
    k, v = k[:, :, None].transpose(-1, -2), v[:, :, None]
    out = torch.empty_like(grouped)
    for start in range(0, queries, QUERY_BLOCK):
        rows = slice(start, start + QUERY_BLOCK)
        scores = torch.matmul(grouped[:, :, :, rows], k).float() * scaling
        scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~mask[rows], float("-inf"))
        out[:, :, :, rows] = torch.matmul(scores.softmax(-1).to(v.dtype), v)
    return out.view(batch, heads, queries, size)
