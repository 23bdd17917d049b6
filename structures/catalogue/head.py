"""The two ends of a decoder: token embedding in front, final norm and vocabulary behind.

No single module of a host holds the final norm together with the vocabulary projection, so these
are read for the loops, which run them as one kernel, and bound apart in an attached model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import cast

import torch
from torch import nn

from .base import Spec
from .spec import Norm, NotThisForm, Rows, child_named, is_linear

HEAD = ("lm_head", "embed_out", "output", "head")


@dataclass(frozen=True)
class EmbeddingSpec(Spec):
    """``table[ids] * scale``; ``rounded`` says that the host rounds it to the table's dtype."""

    path: str
    scale: float = 1.0
    rounded: bool = False

    def scale_for(self, dtype: torch.dtype) -> float:
        """The factor in a model of ``dtype``."""
        return (
            torch.tensor(self.scale, device="cpu").to(dtype).item() if self.rounded else self.scale
        )

    def table(self, base: nn.Module) -> torch.Tensor:
        """``[V, D]``."""
        return cast(torch.Tensor, base.get_submodule(self.path)._parameters["weight"])


@dataclass(frozen=True)
class HeadSpec(Spec):
    """``cap(scale * (norm(x) @ weight.T + bias))``, logits in fp32; paths from the model."""

    norm: Norm
    projection: Rows
    scale: float = 1.0
    soft_cap: float | None = None


def read_embedding(base: nn.Module, path: str) -> EmbeddingSpec:
    """Read the token embedding at ``path`` of ``base`` and the factor that the host puts on it.

    The factor is a buffer of the embedding, or else a number of it or of ``base``, whose name
    speaks of embedding and of scale.

    Raises:
        NotThisForm: an option that changes values (``max_norm``).
    """
    table = base.get_submodule(path)
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        raise NotThisForm(f"{path}: an nn.Embedding without max_norm is wanted")
    if not isinstance(table._parameters.get("weight"), nn.Parameter):
        raise NotThisForm(f"{path}: its weight is computed and no parameter")
    buffers = [float(b) for name, b in table.named_buffers() if _is_factor(name)]
    if buffers:
        return EmbeddingSpec(path, prod(buffers), rounded=True)
    numbers = [*vars(table).items(), *vars(base).items()]
    factors = [v for name, v in numbers if _is_factor(name) and isinstance(v, (int, float))]
    return EmbeddingSpec(path, float(prod(factors)))


def _is_factor(name: str) -> bool:
    return "embed" in name and ("scale" in name or "multiplier" in name)


def propose_head(model: nn.Module, norm: Norm, config: object) -> Iterator[HeadSpec]:
    """Yield what may follow the last layer, likeliest first; the proof takes the first that holds.

    Raises:
        NotThisForm: there is no vocabulary projection.
    """
    linears = {n: c for n, c in model.named_children() if is_linear(c)}
    name = child_named(linears, HEAD)
    if name is None:
        raise NotThisForm(f"no vocabulary projection among linear children {sorted(linears)}")
    spec = HeadSpec(norm, Rows(name))
    cap = getattr(config, "final_logit_softcapping", None)
    caps = (None,) if cap is None else (float(cap), None)
    for scale in _logit_scales(config):
        for soft_cap in caps:
            yield replace(spec, scale=scale, soft_cap=soft_cap)


def _logit_scales(config: object) -> tuple[float, ...]:
    """A host may multiply or divide by a number of either name; both are proposed."""
    for name in ("logits_scaling", "logit_scale"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value != 0:
            return (1.0 / value, float(value))
    return (1.0,)
