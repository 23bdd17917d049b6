"""The ops in plain torch: what runs on the CPU, and the ground truth of the CUDA kernels.

Arithmetic is fp32; q and k are rounded to their dtype after the norm and after the rotary, and the
cache rounds keys and values, exactly where the kernels round.
"""

from __future__ import annotations

import torch

FP8_LARGEST = 448.0


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    workspace: torch.Tensor,
    out: torch.Tensor,
    norm_eps: float,
    norm_zero_centered: bool,
    norm_over_all: bool,
    interleaved: bool,
    scaling: float,
    window: int,
    soft_cap: float,
    history_static: bool,
) -> None:
    """The fused op, step by step. Lengths are read on the host here, and therefore checked.

    Every row is a product of its own over its own slots: torch's products round by their shape.
    """
    tokens, slots = q.shape[1], k_cache.shape[2]
    if q.numel() == 0:
        return
    check_room("attend", lengths, tokens, slots)
    if cos is not None and cos.dim() == 2:
        positions = lengths.long()[:, None] + torch.arange(tokens)
        cos, sin = cos[positions], sin[positions]
    q, k = rotated(
        q, k, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_zero_centered, norm_over_all,
        interleaved,
    )  # fmt: skip
    append(k, v, k_cache, v_cache, lengths, k_scale, v_scale)
    scores = (scaling, window, soft_cap)
    for b, length in enumerate(lengths.tolist()):
        for t in range(tokens):
            one, live = (slice(b, b + 1), slice(t, t + 1)), length + t + 1
            caches = (cache[b : b + 1, :, :live] for cache in (k_cache, v_cache))
            position = lengths[b : b + 1] + t
            out[one] = masked_attention(q[one], *caches, position, k_scale, v_scale, *scores)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_zero_centered: bool,
    norm_over_all: bool,
    interleaved: bool,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
) -> None:
    q, k = rotated(
        q, k, cos, sin, q_norm_weight, k_norm_weight, norm_eps, norm_zero_centered, norm_over_all,
        interleaved,
    )  # fmt: skip
    q_out.copy_(q)
    k_out.copy_(k)


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    tokens, slots = k.shape[1], k_cache.shape[2]
    if k.numel() == 0:
        return
    check_room("append", lengths, tokens, slots)
    k, v = as_stored(k, k_scale), as_stored(v, v_scale)
    for b, start in enumerate(lengths.tolist()):
        k_cache[b, :, start : start + tokens] = k[b].transpose(0, 1)
        v_cache[b, :, start : start + tokens] = v[b].transpose(0, 1)


def as_stored(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """``x [B, T, G, D]`` as a cache holds it: itself, or with a scale ``[G]`` or ``[1]`` FP8."""
    if scale is None:
        return x
    scaled = x.float() / scale[:, None]
    return scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


def check_room(op: str, lengths: torch.Tensor, tokens: int, slots: int) -> None:
    """Every new token has a slot."""
    smallest, largest = int(lengths.min()), int(lengths.max())
    if smallest < 0 or largest + tokens > slots:
        raise ValueError(
            f"{op}: lengths must be at least 0 and at most S - T = {slots - tokens}, "
            f"got {smallest} to {largest}; allocate a longer cache"
        )


def rotated(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    norm_eps: float,
    norm_zero_centered: bool,
    norm_over_all: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, round, rotate, round; ``cos`` and ``sin`` are ``[B, T, R]``."""
    rows = []
    for x, weight in ((q, q_norm_weight), (k, k_norm_weight)):
        if weight is not None:
            x = _norm(x, weight, norm_eps, norm_zero_centered, norm_over_all)
        rows.append(x if cos is None else _rotate(x, cos, sin, interleaved))
    return rows[0], rows[1]


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool, over_all: bool
) -> torch.Tensor:
    dims = (-2, -1) if over_all else -1
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(dims, keepdim=True) + eps)
    factor = weight.float() + 1 if zero_centered else weight.float()
    return (x32 * scale * factor.view(-1, x.shape[-1])).to(x.dtype)


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    width = cos.shape[-1]
    turned = x[..., :width].float()
    if interleaved:
        pairs = turned.unflatten(-1, (width // 2, 2))
        partner = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        partner = torch.cat((-turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    turned = turned * cos.float().unsqueeze(2) + partner * sin.float().unsqueeze(2)
    return torch.cat((turned.to(x.dtype), x[..., width:]), dim=-1)


def masked_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    scaling: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    """Softmax attention of ``q [B, T, H, D]`` at slots ``lengths[b] + t`` over a cache.

    Nothing here waits for the device. Rows that no query sees do not take part, whatever they
    hold; a query that sees no row gives 0.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads, slots = k_cache.shape[1:3]
    slot = torch.arange(slots, device=q.device)
    position = lengths.long()[:, None, None] + torch.arange(tokens, device=q.device)[:, None]
    sees = slot <= position  # [B, T, S]
    if window > 0:
        sees &= slot > position - window
    seen = sees.any(1)[:, None, :, None]
    keys, values = (
        cache.to(torch.float32, memory_format=torch.contiguous_format).masked_fill(~seen, 0.0)
        for cache in (k_cache, v_cache)
    )
    if k_scale is not None and v_scale is not None:
        keys, values = keys * k_scale[:, None, None], values * v_scale[:, None, None]

    grouped = q.float().view(batch, tokens, kv_heads, heads // kv_heads, dim).transpose(1, 2)
    scores = grouped.flatten(2, 3) @ keys.transpose(-1, -2) * scaling  # [B, G, T * H/G, S]
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    sees_rows = sees[:, None, :, None].expand(-1, -1, -1, heads // kv_heads, -1).flatten(2, 3)
    scores = scores.masked_fill(~sees_rows, float("-inf"))
    weights = torch.softmax(scores, dim=-1).masked_fill(~sees_rows, 0.0)
    out = (weights @ values).view(batch, kv_heads, tokens, heads // kv_heads, dim)
    return out.transpose(1, 2).reshape(batch, tokens, heads, dim).to(q.dtype)
