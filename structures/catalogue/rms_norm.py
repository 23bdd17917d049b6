"""RMS norm: ``x * rsqrt(mean(x^2) + eps) * w``, plain or zero-centred (``1 + w``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .. import kernels
from ..region import Region
from .base import Fast, Refusal, Spec, Structure, Survey

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_eps")


@dataclass(frozen=True)
class RmsNormSpec(Spec):
    """``eps`` as the host holds it; ``weight`` is ``1 + w`` where ``zero_centered``."""

    eps: float
    zero_centered: bool = False
    weight: bool = True


class RmsNorm(Structure):
    """``[..., D] -> [..., D]``."""

    name = "rms_norm"
    families = ("norm",)
    reads = frozenset(EPS_NAMES)

    def propose(self, region: Region, survey: Survey) -> tuple[RmsNormSpec, ...] | Refusal | None:
        module = region.module
        if not self._has_form(module):
            return None
        found = [name for name in EPS_NAMES if hasattr(module, name)]
        if len(found) != 1:
            return Refusal(f"exactly one epsilon attribute is wanted, found {found}")
        eps = getattr(module, found[0])
        weight = module._parameters.get("weight")
        if eps is None and isinstance(module, nn.RMSNorm):  # torch: the input dtype's epsilon
            eps = torch.finfo(torch.float32 if weight is None else weight.dtype).eps
        if not isinstance(eps, float) or not 0.0 <= eps < 1.0:
            return Refusal(f"{found[0]} must be a float in [0, 1), got {eps!r}")
        if weight is None:
            return (RmsNormSpec(eps, weight=False),)
        return (RmsNormSpec(eps), RmsNormSpec(eps, zero_centered=True))

    def _has_form(self, module: nn.Module) -> bool:
        """One vector ``weight``, no child; which formula uses it is left to the proof."""
        if isinstance(module, nn.RMSNorm):
            return len(module.normalized_shape) == 1
        if isinstance(module, nn.LayerNorm) or any(True for _ in module.children()):
            return False
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return (
            set(tensors) == {"weight"}
            and tensors["weight"].dim() == 1
            and any(hasattr(module, name) for name in EPS_NAMES)
        )

    def width(self, spec: RmsNormSpec, module: nn.Module) -> int:
        weight = module._parameters.get("weight")
        size = module.normalized_shape[0] if weight is None else weight.shape[0]  # type: ignore
        return int(size)

    def reference(
        self, spec: RmsNormSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        x = args[0].to(dtype)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.eps)
        if not spec.weight:
            return y
        weight = cast(torch.Tensor, module.weight).to(dtype)
        return y * (1 + weight) if spec.zero_centered else y * weight

    def bind(self, spec: RmsNormSpec) -> Fast:
        rms_norm = kernels.family("norm").rms_norm
        eps, zero_centered = spec.eps, spec.zero_centered

        def fast(self: nn.Module, x: torch.Tensor) -> Any:
            return rms_norm(x, self._parameters["weight"], eps=eps, zero_centered=zero_centered)

        return fast
