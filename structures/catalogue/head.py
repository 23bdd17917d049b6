"""The two ends of a decoder: token embedding in front, final norm and vocabulary projection behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from .spec import (
    Norm,
    NotThisForm,
    Rows,
    audit_scalars,
    child_named,
    is_linear,
    linear_rows,
    read_norm,
)

HEAD = ("lm_head", "embed_out", "output", "head")
FINAL_NORM = ("norm", "final_layernorm", "ln_f", "final_layer_norm")

_EMBEDDING_SCALARS = (
    "num_embeddings embedding_dim padding_idx max_norm norm_type scale_grad_by_freq sparse".split()
)


@dataclass(frozen=True)
class EmbeddingSpec:
    """``table[ids] * scale``; ``rounded`` says that the host rounds the scale to the table's dtype first."""

    path: str
    scale: float = 1.0
    rounded: bool = False

    def scale_for(self, dtype: torch.dtype) -> float:
        return float(torch.tensor(self.scale).to(dtype)) if self.rounded else self.scale


@dataclass(frozen=True)
class HeadSpec:
    """``cap(scale * (norm(x) @ weight.T + bias))``, logits in fp32."""

    norm: Norm
    projection: Rows
    scale: float = 1.0
    soft_cap: float | None = None


def read_embedding(base: nn.Module, path: str) -> EmbeddingSpec:
    """Read the token embedding at ``path`` of ``base`` and the factor that the host puts on it.

    Raises:
        NotThisForm: options that change values (``max_norm``), or two factors.
    """
    table = base.get_submodule(path)
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        raise NotThisForm(f"{path}: a plain nn.Embedding is needed, got {type(table).__name__}")
    found: list[EmbeddingSpec] = []
    for name, value in [*table.named_buffers(recurse=False), *_scalars(table), *_scalars(base)]:
        if "embed" in name and ("scale" in name or "multiplier" in name):
            rounded = isinstance(value, torch.Tensor)
            found.append(EmbeddingSpec(path, float(value), rounded))
    factors = {spec.scale for spec in found}
    if len(factors) > 1:
        raise NotThisForm(f"{path}: two factors on the embedding, {sorted(factors)}")
    scalar_names = [name for name, _ in _scalars(table) if "scale" in name]
    audit_scalars(table, [*_EMBEDDING_SCALARS, *scalar_names], path)
    return next((s for s in found if s.rounded), found[0] if found else EmbeddingSpec(path))


def propose_head(
    model: nn.Module, base_path: str, norm_path: str, config: object
) -> Iterator[HeadSpec]:
    """Yield what may follow the last layer, likeliest first; the proof takes the first that holds."""
    linears = {n: c for n, c in model.named_children() if is_linear(c)}
    name = child_named(linears, HEAD)
    if name is None:
        raise NotThisForm(f"no vocabulary projection among linear children {sorted(linears)}")
    norm = read_norm(model.get_submodule(base_path), norm_path)
    spec = HeadSpec(replace(norm, path=f"{base_path}.{norm.path}"), linear_rows(model, name))
    cap = getattr(config, "final_logit_softcapping", None)
    caps = (None,) if cap is None else (float(cap), None)
    for scale in _logit_scales(config):
        for soft_cap in caps:
            yield replace(spec, scale=scale, soft_cap=soft_cap)


def _logit_scales(config: object) -> list[float]:
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        return [1.0 / float(divisor), float(divisor)]
    if (factor := getattr(config, "logit_scale", None)) is not None:
        return [float(factor), 1.0 / float(factor)]
    return [1.0]


def _scalars(module: nn.Module) -> list[tuple[str, float]]:
    own = vars(module).items()
    return [
        (k, float(v)) for k, v in own if isinstance(v, (int, float)) and not isinstance(v, bool)
    ]
