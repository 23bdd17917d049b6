"""Inputs and fp64 truths that the norm tests share."""

import torch

# One element, less than a chunk, odd, a head, a warp's limit and past it, a hidden size, one that
# needs several chunks a thread, the longest that fits registers, and one that is read twice.
SIZES = (1, 3, 64, 127, 256, 257, 576, 4096, 5003, 16384, 65536, 65600)


def rows(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Normal values whose rows differ in scale and have a mean, as hidden states do."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    scales = torch.rand((*shape[:-1], 1), generator=generator) * 4 + 0.1
    return ((values + 0.3) * scales).to(dtype).to(device)


def parameter(size: int, *, dtype: torch.dtype, device: str, seed: int = 1) -> torch.Tensor:
    return rows(size, dtype=dtype, device=device, seed=seed)


def rms_norm(x, weight=None, *, eps=1e-6, zero_centered=False, scale=None, shift=None, to=None):
    """In dtype ``to``: fp64 is the truth, the dtype of ``x`` the eager baseline."""
    to = to or torch.float64
    values = x.to(to)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        values = values * ((1 if zero_centered else 0) + weight.to(to))
    return modulate(values, scale, shift, to)


def layer_norm(x, weight=None, bias=None, *, eps=1e-5, scale=None, shift=None, to=None):
    to = to or torch.float64
    values = x.to(to)
    values = values - values.mean(-1, keepdim=True)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    values = values if weight is None else values * weight.to(to)
    values = values if bias is None else values + bias.to(to)
    return modulate(values, scale, shift, to)


def modulate(values, scale, shift, to):
    values = values if scale is None else values * (1 + scale.to(to))
    return values if shift is None else values + shift.to(to)
