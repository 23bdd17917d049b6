"""A decoder layer in kernel calls, from a spec and tensors; shared by the decode step, prefill and attached layers.

Up to eight rows a layer is five fused kernels. Above, it is norm kernels around torch's own matmuls. What differs
between the users is the middle, from projected q, k, v to attended heads, which the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import linear as matmul

from .attention import AttentionSpec
from .decoder_layer import LayerSpec
from .spec import Norm, Rows

Tensor = torch.Tensor
FUSED_ROWS = (
    8  # more rows than this and a matmul of torch beats streaming the weights once a row group
)
QkvToHeads = Callable[[Tensor, Tensor, Tensor], Tensor]


class Families(Protocol):
    """The kernel families a layer is made of."""

    norm: ModuleType
    activation: ModuleType
    linear: ModuleType
    attention: ModuleType
    sampling: ModuleType


@dataclass(frozen=True)
class BoundNorm:
    weight: Tensor
    eps: float
    zero_centered: bool


@dataclass(frozen=True)
class BoundLinear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class BoundLayer:
    """The tensors of one layer, views of the host's own parameters, beside its spec."""

    spec: LayerSpec
    qkv: tuple[BoundLinear, BoundLinear, BoundLinear]
    qkv_whole: BoundLinear | None
    o: BoundLinear
    gate: BoundLinear
    up: BoundLinear
    gate_up_whole: BoundLinear | None
    down: BoundLinear
    attention_norm: BoundNorm | None
    attention_out_norm: BoundNorm | None
    mlp_norm: BoundNorm | None
    mlp_out_norm: BoundNorm | None
    q_norm: BoundNorm | None
    k_norm: BoundNorm | None


@dataclass(frozen=True)
class Stream:
    """The residual stream: ``x [M, D]`` plus ``norm(branch)``, an addition that the next kernel still has to make."""

    x: Tensor
    branch: Tensor | None = None
    branch_norm: BoundNorm | None = None


@dataclass(frozen=True)
class Buffers:
    """Static outputs of a step's kernels, for M rows; ``None`` in their place means allocate."""

    streams: tuple[Tensor, Tensor]
    qkv: Tensor
    branches: tuple[Tensor, Tensor]
    hidden: Tensor

    def other(self, stream: Tensor) -> Tensor:
        return self.streams[1] if stream is self.streams[0] else self.streams[0]


def bind_linear(region: nn.Module, rows: Rows) -> BoundLinear:
    return BoundLinear(*rows.tensors(region))


def bind_norm(region: nn.Module, norm: Norm | None) -> BoundNorm | None:
    if norm is None:
        return None
    return BoundNorm(region.get_submodule(norm.path).weight, norm.eps, norm.zero_centered)


def _whole(region: nn.Module, *parts: Rows) -> BoundLinear | None:
    if len({p.path for p in parts}) > 1:
        return None
    layer = region.get_submodule(parts[0].path)
    return BoundLinear(layer.weight, layer.bias)


def bind(region: nn.Module, spec: LayerSpec) -> BoundLayer:
    """The tensors of the layer ``region`` that ``spec`` names."""
    attention, mlp = region.get_submodule(spec.attention_path), region.get_submodule(spec.mlp_path)
    a, m = spec.attention, spec.mlp
    return BoundLayer(
        spec=spec,
        qkv=(bind_linear(attention, a.q), bind_linear(attention, a.k), bind_linear(attention, a.v)),
        qkv_whole=_whole(attention, a.q, a.k, a.v),
        o=bind_linear(attention, a.o),
        gate=bind_linear(mlp, m.gate),
        up=bind_linear(mlp, m.up),
        gate_up_whole=_whole(mlp, m.gate, m.up),
        down=bind_linear(mlp, m.down),
        attention_norm=bind_norm(region, spec.attention_norm),
        attention_out_norm=bind_norm(region, spec.attention_out_norm),
        mlp_norm=bind_norm(region, spec.mlp_norm),
        mlp_out_norm=bind_norm(region, spec.mlp_out_norm),
        q_norm=bind_norm(attention, a.q_norm),
        k_norm=bind_norm(attention, a.k_norm),
    )


def norm_arguments(layer: BoundLayer) -> dict[str, Any]:
    """The q/k norm arguments that every op of the attention family takes."""
    if layer.q_norm is None or layer.k_norm is None:
        return {}
    return {
        "q_norm_weight": layer.q_norm.weight,
        "k_norm_weight": layer.k_norm.weight,
        "norm_eps": layer.q_norm.eps,
        "norm_zero_centered": layer.q_norm.zero_centered,
        "norm_scope": layer.spec.attention.norm_scope,
    }


def prologue(stream: Stream, norm: BoundNorm | None, residual_out: Tensor | None) -> dict[str, Any]:
    """Prologue arguments of the linear family: add the pending branch, then norm."""
    arguments: dict[str, Any] = {}
    if stream.branch is not None and stream.branch_norm is not None:
        arguments.update(
            branch=stream.branch,
            branch_norm_weight=stream.branch_norm.weight,
            branch_norm_eps=stream.branch_norm.eps,
            norm_zero_centered=stream.branch_norm.zero_centered,
            residual_out=residual_out,
        )
    if norm is not None:
        arguments.update(norm_weight=norm.weight, norm_eps=norm.eps, norm_zero_centered=norm.zero_centered)
    return arguments


def layer_fused(
    families: Families,
    layer: BoundLayer,
    stream: Stream,
    heads: QkvToHeads,
    *,
    buffers: Buffers | None,
    weights_static: bool,
) -> Stream:
    """One layer for at most eight rows in five kernels; the stream after it.

    Args:
        stream: ``x [M, D]`` and perhaps a branch that is still to be added.
        heads: ``(q [M, H*D], k [M, G*D], v [M, G*D]) -> [M, H*D]``.
        buffers: where results go; None allocates.
        weights_static: nothing on this stream writes weights, so kernels may load them before they wait.
    """
    linear = families.linear
    scale = layer.spec.residual_scale
    x = stream.x
    moved = None if buffers is None or stream.branch is None else buffers.other(x)
    if stream.branch is not None and moved is None:
        moved = torch.empty_like(x)
    q, k, v = linear.linear_split(
        x,
        [part.weight for part in layer.qkv],
        [part.bias for part in layer.qkv],
        **prologue(stream, layer.attention_norm, moved),
        weights_static=weights_static,
        out=None if buffers is None else buffers.qkv,
    )
    x = x if moved is None else moved
    attended = heads(q, k, v)
    stream = _close(
        linear, layer.o, attended, x, layer.attention_out_norm, scale, buffers, 0, weights_static
    )
    moved = None
    if stream.branch is not None:
        moved = torch.empty_like(x) if buffers is None else buffers.other(stream.x)
    hidden = linear.gated_linear(
        stream.x,
        layer.gate.weight,
        layer.up.weight,
        layer.gate.bias,
        layer.up.bias,
        activation=layer.spec.mlp.activation,
        **prologue(stream, layer.mlp_norm, moved),
        weights_static=weights_static,
        out=None if buffers is None else buffers.hidden,
    )
    x = stream.x if moved is None else moved
    return _close(
        linear, layer.down, hidden, x, layer.mlp_out_norm, scale, buffers, 1, weights_static
    )


def _close(
    linear: ModuleType,
    weights: BoundLinear,
    inner: Tensor,
    x: Tensor,
    out_norm: BoundNorm | None,
    scale: float,
    buffers: Buffers | None,
    place: int,
    weights_static: bool,
) -> Stream:
    """The last matmul of a branch: added to the stream at once, or left beside it when the branch is normed first."""
    if out_norm is None:
        out = None if buffers is None else buffers.other(x)
        y = linear.linear(
            inner,
            weights.weight,
            weights.bias,
            residual=x,
            scale=scale,
            weights_static=weights_static,
            out=out,
        )
        return Stream(y)
    out = None if buffers is None else buffers.branches[place]
    branch = linear.linear(
        inner, weights.weight, weights.bias, weights_static=weights_static, out=out
    )
    return Stream(x, branch, out_norm)


def layer_wide(families: Families, layer: BoundLayer, stream: Stream, heads: QkvToHeads) -> Stream:
    """One layer for many rows: norm kernels around torch's own matmuls; same arguments as ``layer_fused``."""
    x, normed = _settle(families, stream, layer.attention_norm)
    attention = layer.spec.attention
    if layer.qkv_whole is not None:
        packed = matmul(normed, layer.qkv_whole.weight, layer.qkv_whole.bias)
        width = attention.kv_heads * attention.head_dim
        q, k, v = packed.split([attention.heads * attention.head_dim, width, width], dim=-1)
    else:
        q, k, v = (matmul(normed, part.weight, part.bias) for part in layer.qkv)
    stream = _close_wide(
        layer.o, heads(q, k, v), x, layer.attention_out_norm, layer.spec.residual_scale
    )
    x, normed = _settle(families, stream, layer.mlp_norm)
    activation = layer.spec.mlp.activation
    if layer.gate_up_whole is not None:
        packed = matmul(normed, layer.gate_up_whole.weight, layer.gate_up_whole.bias)
        hidden = families.activation.gated_packed(packed, activation=activation)
    else:
        gate = matmul(normed, layer.gate.weight, layer.gate.bias)
        up = matmul(normed, layer.up.weight, layer.up.bias)
        hidden = families.activation.gated(gate, up, activation=activation)
    return _close_wide(layer.down, hidden, x, layer.mlp_out_norm, layer.spec.residual_scale)


def _settle(families: Families, stream: Stream, norm: BoundNorm | None) -> tuple[Tensor, Tensor]:
    """Add the pending branch and norm the sum: the stream, and what the next matmul reads."""
    x = stream.x
    if stream.branch is not None and stream.branch_norm is not None:
        branch = apply_norm(families, stream.branch, stream.branch_norm)
        if norm is None:
            x = x + branch
        else:
            arguments = {"eps": norm.eps, "zero_centered": norm.zero_centered}
            normed, x = families.norm.add_rms_norm(branch, x, norm.weight, **arguments)
            return x, normed
    return x, x if norm is None else apply_norm(families, x, norm)


def apply_norm(families: Families, x: Tensor, norm: BoundNorm) -> Tensor:
    y: Tensor = families.norm.rms_norm(
        x, norm.weight, eps=norm.eps, zero_centered=norm.zero_centered
    )
    return y


def _close_wide(
    weights: BoundLinear, inner: Tensor, x: Tensor, out_norm: BoundNorm | None, scale: float
) -> Stream:
    if out_norm is not None:
        return Stream(x, matmul(inner, weights.weight, weights.bias), out_norm)
    if weights.bias is None:
        return Stream(torch.addmm(x, inner, weights.weight.t(), alpha=scale))
    return Stream(torch.add(x, matmul(inner, weights.weight, weights.bias), alpha=scale))


def settle(families: Families, stream: Stream) -> Tensor:
    """The stream with its pending branch added."""
    return _settle(families, stream, None)[0]


def attention_shape(spec: AttentionSpec) -> tuple[int, int, int]:
    """Query heads H, key/value heads G, head size D."""
    return spec.heads, spec.kv_heads, spec.head_dim
