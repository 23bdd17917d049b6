"""RMS norm: ``x * rsqrt(mean(x^2) + eps) * w``, plain or zero-centred (``1 + w``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..region import Region
from .base import Draw, Fast, Probe, Refusal, Spec, Structure, Survey
from .forms import own_vectors, takes_one_tensor

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")


@dataclass(frozen=True)
class RmsNormSpec(Spec):
    """``eps`` as the host holds it; the factor is ``1 + w`` where ``zero_centered``."""

    eps: float
    size: int
    zero_centered: bool = False
    weight: bool = True


class RmsNorm(Structure):
    """``[..., D] -> [..., D]``."""

    name = "rms_norm"
    families = ("norm",)
    reads = frozenset(EPS_NAMES)
    unary = True

    def propose(self, region: Region, survey: Survey) -> tuple[RmsNormSpec, ...] | Refusal | None:
        module = region.module
        vectors = own_vectors(module)
        if vectors is None or isinstance(module, nn.LayerNorm) or not takes_one_tensor(module):
            return None
        if isinstance(module, nn.RMSNorm):
            if len(module.normalized_shape) != 1:
                return Refusal(f"one normalised dimension is wanted, got {module.normalized_shape}")
            size = int(module.normalized_shape[0])
        elif set(vectors) == {"weight"}:
            size = vectors["weight"]
        else:
            return None
        eps = read_eps(module)
        if eps is None or isinstance(eps, Refusal):
            return eps
        if not vectors:
            return (RmsNormSpec(eps, size, weight=False),)
        return (RmsNormSpec(eps, size), RmsNormSpec(eps, size, zero_centered=True))

    def width(self, spec: RmsNormSpec, module: nn.Module) -> int:
        return spec.size

    def probes(self, spec: Any, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        yield from super().probes(spec, module, draw)
        yield eps_probe(spec.eps, spec.size, draw)

    def reference(
        self, spec: RmsNormSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        x: torch.Tensor = args[0].to(dtype)
        y: torch.Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
        weight = module._parameters.get("weight")
        if weight is None:
            return y
        return y * (1 + weight.to(dtype) if spec.zero_centered else weight.to(dtype))

    def bind(self, spec: RmsNormSpec) -> Fast:
        rms_norm = kernels.family("norm").rms_norm
        eps, zero_centered = spec.eps, spec.zero_centered

        def fast(self: nn.Module, x: torch.Tensor) -> Any:
            weight = self._parameters.get("weight")
            return rms_norm(x, weight, eps=eps, zero_centered=zero_centered)

        return fast


def eps_probe(eps: float, size: int, draw: Draw) -> Probe:
    """Values of the size of ``sqrt(eps)``: any other eps shows."""
    scale = max(eps, 1e-30) ** 0.5
    return Probe(f"input scale {scale:.1e}", (draw(1, 5, size, scale=scale),))


def read_eps(module: nn.Module) -> float | Refusal | None:
    """The one epsilon attribute of a norm; ``None`` where there is none."""
    found = [name for name in EPS_NAMES if hasattr(module, name)]
    if not found:
        return None
    if len(found) > 1:
        return Refusal(f"one epsilon attribute is wanted, found {found}")
    eps = getattr(module, found[0])
    if eps is None and isinstance(module, nn.RMSNorm):  # torch: the input dtype's epsilon
        weight = module._parameters.get("weight")
        eps = torch.finfo(torch.float32 if weight is None else weight.dtype).eps
    if not isinstance(eps, float) or not 0.0 <= eps < 1.0:
        return Refusal(f"{found[0]} must be a float in [0, 1), got {eps!r}")
    return eps
