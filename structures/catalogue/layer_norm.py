"""Layer norm: ``(x - mean) * rsqrt(var + eps) * w + b``, each of ``w`` and ``b`` optional."""

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
from .rms_norm import EPS_NAMES, eps_probe, read_eps


@dataclass(frozen=True)
class LayerNormSpec(Spec):
    """``eps`` and width as the host holds them; weight and bias are there or not."""

    eps: float
    size: int
    weight: bool = True
    bias: bool = True


class LayerNorm(Structure):
    """``[..., D] -> [..., D]``."""

    name = "layer_norm"
    families = ("norm",)
    reads = frozenset(EPS_NAMES)
    unary = True

    def propose(self, region: Region, survey: Survey) -> LayerNormSpec | Refusal | None:
        module = region.module
        vectors = own_vectors(module)
        if vectors is None or set(vectors) - {"weight", "bias"} or len(set(vectors.values())) > 1:
            return None
        if isinstance(module, nn.LayerNorm):
            if len(module.normalized_shape) != 1:
                return Refusal(f"one normalised dimension is wanted, got {module.normalized_shape}")
            size = module.normalized_shape[0]
        elif set(vectors) == {"weight", "bias"} and takes_one_tensor(module):
            size = vectors["weight"]
        else:
            return None
        eps = read_eps(module)
        if eps is None or isinstance(eps, Refusal):
            return eps
        return LayerNormSpec(eps, size, "weight" in vectors, "bias" in vectors)

    def width(self, spec: LayerNormSpec, module: nn.Module) -> int:
        return spec.size

    def probes(self, spec: Any, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        yield from super().probes(spec, module, draw)
        yield eps_probe(spec.eps, spec.size, draw)

    def reference(
        self, spec: LayerNormSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        x: torch.Tensor = args[0].to(dtype)
        centred = x - x.mean(-1, keepdim=True)
        y: torch.Tensor = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + spec.eps)
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        y = y if weight is None else y * weight.to(dtype)
        return y if bias is None else y + bias.to(dtype)

    def bind(self, spec: LayerNormSpec) -> Fast:
        layer_norm = kernels.family("norm").layer_norm
        eps = spec.eps

        def fast(self: nn.Module, x: torch.Tensor) -> Any:
            parameters = self._parameters
            return layer_norm(x, parameters.get("weight"), parameters.get("bias"), eps=eps)

        return fast
