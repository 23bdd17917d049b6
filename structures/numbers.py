"""The second proof: each bound instance, on its real weights, is as exact as the host.

With the region's own weights, dtype and device, the bound forward's root mean square error against
the reference in the next wider type is at most twice the host's own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from .catalogue.base import Draw
from .cost import measure
from .decision import Cost, Measured
from .discover import Candidate
from .lending import lent
from .progress import watched
from .prove import PROBE_ERRORS, SEED, Disproof, tensors_of
from .region import Region

Verdict = Measured | Disproof
# Relative error that no rounding explains: in fp32, and in 16 bits, where a small branch may drown
# in the rounding of the residual it is added to.
IMPLAUSIBLE = (1e-3, 0.5)


def place(model: nn.Module) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of the first floating-point tensor: those of regions without any."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return torch.float32, torch.device("cpu")


def region_dtype(region: Region, default: torch.dtype) -> torch.dtype:
    """The one floating-point dtype of a region's tensors."""
    return next((t.dtype for _, t in region.tensors() if t.is_floating_point()), default)


def numbers(
    candidates: list[Candidate], dtype: torch.dtype, device: torch.device
) -> dict[str, Verdict]:
    """Verdicts by path, on ``device``; one synchronisation for the whole plan."""
    verdicts: dict[str, Verdict] = {}
    rows: dict[str, torch.Tensor] = {}
    for candidate in watched(candidates, "Proving regions"):
        path = candidate.region.path
        try:
            with lent(candidate.region.module, device):
                rows[path] = _errors(candidate, region_dtype(candidate.region, dtype), device)
        except PROBE_ERRORS as error:
            verdicts[path] = Disproof(f"numbers: {type(error).__name__}: {error}".splitlines()[0])
    if rows:
        for path, measured in zip(rows, torch.stack(list(rows.values())).tolist(), strict=True):
            verdicts[path] = judge(*measured)
    return verdicts


def _errors(candidate: Candidate, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[4]`` fp64: root mean square errors of bound and host, that of the reference, epsilon."""
    structure, spec, module = candidate.structure, candidate.spec, candidate.region.module
    probe = structure.number_probe(spec, module, _draw(dtype, device))
    wider = torch.float64 if dtype == torch.float32 else torch.float32
    with torch.no_grad():
        truth = _flat(structure.call_reference(spec, module, probe, wider))
        ours = _flat(structure.call_bound(spec, module, candidate.fast, probe))
        host = _flat(structure.call_host(spec, module, probe))
    if not ours.numel() == host.numel() == truth.numel():
        raise ValueError(f"{ours.numel()} values, the host gives {host.numel()}")
    rms = [t.square().mean().sqrt() for t in (ours - truth, host - truth, truth)]
    return torch.stack([*rms, rms[0].new_tensor(torch.finfo(dtype).eps)])


def _draw(dtype: torch.dtype, device: torch.device) -> Draw:
    return Draw(device, dtype, torch.Generator().manual_seed(SEED + 2))


def _flat(value: Any) -> torch.Tensor:
    return torch.cat([t.double().reshape(-1) for t in tensors_of(value)])


def judge(bound: float, host: float, size: float, epsilon: float) -> Verdict:
    """Compare root mean square errors of bound and host with each other.

    A host that is far from what its kind means, here and only here, is refused too. The floor of a
    quarter epsilon is one correct rounding: a host that happens to be exact on a probe must not
    refuse a result that is as good as its dtype allows.
    """
    relative = Measured(bound / max(size, 1e-30), host / max(size, 1e-30))
    if not host <= IMPLAUSIBLE[epsilon > 1e-6] * size:
        return Disproof(f"numbers: here the host differs from its kind by {relative.host:.1e}")
    if bound <= 2.0 * host + 0.25 * epsilon * size:
        return relative
    return Disproof(
        f"numbers: error {relative.bound:.1e} against the host's {relative.host:.1e}, limit 2x"
    )


def costs(
    candidates: list[Candidate], dtype: torch.dtype, device: torch.device
) -> dict[Any, tuple[Cost, Cost]]:
    """Cost of one call on the numbers probe, bound and host, for each kind (by its ``fast``)."""
    kinds: dict[Any, tuple[Cost, Cost]] = {}
    for c in candidates:
        if c.fast in kinds:
            continue
        module = c.region.module
        with torch.no_grad(), lent(module, device):
            draw = _draw(region_dtype(c.region, dtype), device)
            probe = c.structure.number_probe(c.spec, module, draw)
            kinds[c.fast] = (
                measure(partial(c.structure.call_bound, c.spec, module, c.fast, probe)),
                measure(partial(c.structure.call_host, c.spec, module, probe)),
            )
    return kinds
