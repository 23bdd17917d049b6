"""A decoder layer in kernel calls; shared by the decode step, prefill and attached layers.

Up to eight rows a layer is five fused kernels. Above, it is norm kernels around torch's own
products. What differs between the users is the middle, from projected q, k, v to attended heads,
which the caller passes in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .. import kernels
from ..products import Rows8, in_fp8, project, project_added, project_all
from ..weights import BoundLinear
from .spec import Norm, whole

if TYPE_CHECKING:
    from .decoder_layer import LayerSpec

Tensor = torch.Tensor
QkvToHeads = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Families:
    """The kernel families that a decoder layer is made of."""

    norm: ModuleType
    activation: ModuleType
    linear: ModuleType
    attention: ModuleType

    @classmethod
    def load(cls) -> Families:
        """Load them; raises ``KernelUnavailable`` when one of them cannot be."""
        return cls(*(kernels.family(n) for n in ("norm", "activation", "linear", "attention")))


@dataclass(frozen=True)
class BoundNorm:
    """A norm's weight with its scalars."""

    weight: Tensor
    eps: float
    zero_centered: bool

    @classmethod
    def of(cls, region: nn.Module, norm: Norm | None) -> BoundNorm | None:
        """The tensors of ``norm`` in ``region``; None for the identity."""
        if norm is None:
            return None
        return cls(norm.weight(region), norm.eps, norm.zero_centered)


@dataclass(frozen=True)
class BoundLayer:
    """What one layer reads, beside its spec: the host's own parameters, or packed copies."""

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
    qk_norms: dict[str, Any]

    @classmethod
    def of(cls, region: nn.Module, spec: LayerSpec) -> BoundLayer:
        """The tensors of ``spec`` in the layer ``region``."""
        a, m = spec.attention, spec.mlp
        return cls(
            spec=spec,
            qkv=(a.q.bound(region), a.k.bound(region), a.v.bound(region)),
            qkv_whole=whole(region, a.q, a.k, a.v),
            o=a.o.bound(region),
            gate=m.gate.bound(region),
            up=m.up.bound(region),
            gate_up_whole=whole(region, m.gate, m.up),
            down=m.down.bound(region),
            attention_norm=BoundNorm.of(region, spec.attention_norm),
            attention_out_norm=BoundNorm.of(region, spec.attention_out_norm),
            mlp_norm=BoundNorm.of(region, spec.mlp_norm),
            mlp_out_norm=BoundNorm.of(region, spec.mlp_out_norm),
            qk_norms=a.norms(region),
        )

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.qkv[1].weight.shape[0] // self.spec.attention.head_dim

    @property
    def heads(self) -> int:
        """H."""
        return self.qkv[0].weight.shape[0] // self.spec.attention.head_dim


@dataclass(frozen=True)
class Stream:
    """The residual stream: ``x [M, D]``, and a branch whose normed sum with it is still due."""

    x: Tensor
    branch: Tensor | None = None
    branch_norm: BoundNorm | None = None


@dataclass(frozen=True)
class Buffers:
    """Static outputs of a layer's kernels for M rows."""

    streams: tuple[Tensor, Tensor]
    qkv: Tensor
    branches: tuple[Tensor, Tensor]
    hidden: Tensor

    def other(self, stream: Tensor) -> Tensor:
        """The stream buffer that is free while ``stream`` is read."""
        return self.streams[1] if stream is self.streams[0] else self.streams[0]


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
        arguments.update(
            norm_weight=norm.weight, norm_eps=norm.eps, norm_zero_centered=norm.zero_centered
        )
    return arguments


def layer_fused(
    families: Families,
    layer: BoundLayer,
    stream: Stream,
    heads: QkvToHeads,
    *,
    buffers: Buffers | None = None,
    weights_static: bool = False,
) -> Stream:
    """One layer for at most eight rows in five kernels; the stream after it.

    Args:
        stream: ``x [M, D]`` and perhaps a branch that is still to be added.
        heads: ``(q [M, H*D], k [M, G*D], v [M, G*D]) -> [M, H*D]``.
        buffers: where results go; None allocates.
        weights_static: nothing on this stream writes weights, so kernels may load them early.
    """
    linear = families.linear
    moved = _moved(stream, buffers)
    q, k, v = linear.linear_split(
        stream.x,
        [part.weight for part in layer.qkv],
        [part.bias for part in layer.qkv],
        **prologue(stream, layer.attention_norm, moved),
        weights_static=weights_static,
        out=None if buffers is None else buffers.qkv,
    )
    x = stream.x if moved is None else moved
    out_norm = layer.attention_out_norm
    close = _Close(linear, layer.spec.residual_scale, buffers, weights_static)
    stream = close(layer.o, heads(q, k, v), x, out_norm, 0)
    moved = _moved(stream, buffers)
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
    return close(layer.down, hidden, x, layer.mlp_out_norm, 1)


def _moved(stream: Stream, buffers: Buffers | None) -> Tensor | None:
    """Where the stream goes when a pending branch is added to it; None when there is none."""
    if stream.branch is None:
        return None
    return torch.empty_like(stream.x) if buffers is None else buffers.other(stream.x)


@dataclass(frozen=True)
class _Close:
    """The last product of a branch: added at once, or left beside when it is normed first."""

    linear: ModuleType
    scale: float
    buffers: Buffers | None
    weights_static: bool

    def __call__(
        self, weights: BoundLinear, inner: Tensor, x: Tensor, norm: BoundNorm | None, place: int
    ) -> Stream:
        arguments: dict[str, Any] = {"weights_static": self.weights_static}
        if norm is None:
            arguments |= {"residual": x, "scale": self.scale}
        if self.buffers is not None:
            other = self.buffers.other(x)
            arguments["out"] = other if norm is None else self.buffers.branches[place]
        y = self.linear.linear(inner, weights.weight, weights.bias, **arguments)
        return Stream(y) if norm is None else Stream(x, y, norm)


def layer_wide(families: Families, layer: BoundLayer, stream: Stream, heads: QkvToHeads) -> Stream:
    """One layer for many rows through torch's products; arguments as in ``layer_fused``.

    Where products run in E4M3, norms and activations write it themselves.
    """
    x, normed = _settle(families, stream, layer.attention_norm, layer.qkv)
    if layer.qkv_whole is not None:
        packed = project(normed, layer.qkv_whole)
        q, k, v = packed.split([part.weight.shape[0] for part in layer.qkv], dim=-1)
    else:
        q, k, v = project_all(normed, layer.qkv)
    scale = layer.spec.residual_scale
    stream = _close_wide(layer.o, heads(q, k, v), x, layer.attention_out_norm, scale)
    x, normed = _settle(families, stream, layer.mlp_norm, (layer.gate, layer.up))
    halves: tuple[Tensor, ...]
    if layer.gate_up_whole is not None:
        halves = (project(normed, layer.gate_up_whole),)
    else:
        halves = project_all(normed, (layer.gate, layer.up))
    hidden = _gated(families, halves, layer.spec.mlp.activation, layer.down)
    return _close_wide(layer.down, hidden, x, layer.mlp_out_norm, scale)


def _gated(
    families: Families, halves: tuple[Tensor, ...], activation: str, reader: BoundLinear
) -> Tensor | Rows8:
    """``activation(gate) * up`` of ``(gate, up)``, or of one tensor that holds both."""
    family = families.activation
    if in_fp8(halves[0], (reader,)):
        gate = family.gated_fp8 if len(halves) == 2 else family.gated_packed_fp8
        data, scale = gate(*halves, activation=activation, static_scale=reader.input_scale)
        return Rows8(data, scale, halves[0].dtype)
    gate = family.gated if len(halves) == 2 else family.gated_packed
    hidden: Tensor = gate(*halves, activation=activation)
    return hidden


def _close_wide(
    weights: BoundLinear,
    inner: Tensor | Rows8,
    x: Tensor,
    out_norm: BoundNorm | None,
    scale: float,
) -> Stream:
    if out_norm is not None:
        return Stream(x, project(inner, weights), out_norm)
    return Stream(project_added(inner, weights, x, scale))


def _settle(
    families: Families,
    stream: Stream,
    norm: BoundNorm | None,
    readers: tuple[BoundLinear, ...] = (),
) -> tuple[Tensor, Tensor | Rows8]:
    """Add the pending branch and norm the sum: the stream, and what ``readers`` multiply."""
    x = stream.x
    if stream.branch is not None and stream.branch_norm is not None:
        branch = apply_norm(families, stream.branch, stream.branch_norm)
        if norm is not None:
            return _add_and_norm(families, branch, x, norm, readers)
        x = x + branch
    if norm is None:
        return x, x
    if readers and in_fp8(x, readers):
        data, scale = families.norm.rms_norm_fp8(
            *(x, norm.weight),
            eps=norm.eps,
            zero_centered=norm.zero_centered,
            static_scale=readers[0].input_scale,
        )
        return x, Rows8(data, scale, x.dtype)
    return x, apply_norm(families, x, norm)


def _add_and_norm(
    families: Families,
    branch: Tensor,
    x: Tensor,
    norm: BoundNorm,
    readers: tuple[BoundLinear, ...],
) -> tuple[Tensor, Tensor | Rows8]:
    arguments: dict[str, Any] = {"eps": norm.eps, "zero_centered": norm.zero_centered}
    if readers and in_fp8(x, readers):
        data, scale, x = families.norm.add_rms_norm_fp8(
            branch, x, norm.weight, static_scale=readers[0].input_scale, **arguments
        )
        return x, Rows8(data, scale, x.dtype)
    normed, x = families.norm.add_rms_norm(branch, x, norm.weight, **arguments)
    return x, normed


def apply_norm(families: Families, x: Tensor, norm: BoundNorm) -> Tensor:
    """``norm`` of every row of ``x``."""
    y: Tensor = families.norm.rms_norm(
        x, norm.weight, eps=norm.eps, zero_centered=norm.zero_centered
    )
    return y


def settle(families: Families, stream: Stream) -> Tensor:
    """The stream with its pending branch added."""
    return _settle(families, stream, None)[0]
