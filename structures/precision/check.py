"""Proof of a packed copy: its product is as exact as the host's with the same values.

The second half of the numbers proof, for weights that were packed: on this device, in this dtype,
the kernel's root mean square error against the dequantised values is at most twice that of torch's
own product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import kernels
from ..numbers import judge
from ..prove import SEED, Disproof
from ..weights import PackedWeight, sliced
from .formats import unpack

ROWS = 5  # of the input
_PART_ELEMENTS = 8 << 20  # of the weight in fp32 at a time: 32 MB
_GROUP = 128  # every format can be cut at multiples of this


def packed_disproof(packed: PackedWeight, dtype: torch.dtype) -> str | None:
    """Why the products of ``packed`` with inputs of ``dtype`` are not to be trusted, if so."""
    device, (rows, columns) = packed.data.device, packed.shape
    generator = torch.Generator().manual_seed(SEED + 3)
    x = torch.randn(ROWS, columns, generator=generator, device="cpu").to(device, dtype)
    ours = kernels.family("linear").linear(x, packed)
    step = max(_GROUP, _PART_ELEMENTS // columns // _GROUP * _GROUP)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        values = unpack(sliced(packed, start, stop), torch.float32)
        truth = F.linear(x.to(wider), values.to(wider)).double()
        host = F.linear(x, values.to(dtype)).double()
        parts = (ours[:, start:stop].double() - truth, host - truth, truth)
        sums += torch.stack([part.square().sum() for part in parts])
    bound, host_error, size = (sums / (ROWS * rows)).sqrt().tolist()
    verdict = judge(bound, host_error, size, torch.finfo(dtype).eps)
    return verdict.reason if isinstance(verdict, Disproof) else None
