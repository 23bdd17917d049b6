"""A decoder layer: self-attention and a gated MLP on one residual stream.

Normed before each branch, after it, or on both sides. Up to eight rows it is five kernels; see
``layer_math``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..region import Region
from . import attention_probes
from .attention import Attention, Middle
from .attention_form import AttentionSpec, cropped_attention, cropped_linear, find_norm
from .attention_probes import AttentionProbe
from .base import (
    MAX_FUSED_ROWS,
    PROOF_WIDTH,
    Draw,
    Fast,
    Found,
    Groups,
    Probe,
    Refusal,
    Spec,
    Structure,
    Survey,
)
from .gated_mlp import GatedMlp, GatedMlpSpec
from .layer_math import BoundLayer, Families, Stream, layer_fused, layer_wide, settle
from .linear import LinearSpec
from .spec import Norm, NotThisForm, Rows, activation_value


@dataclass(frozen=True)
class LayerMlpSpec(Spec):
    """``down(activation(gate(x)) * up(x))``."""

    gate: Rows
    up: Rows
    down: Rows
    activation: str


@dataclass(frozen=True)
class LayerSpec(Spec):
    """One decoder layer on the residual stream ``x``; a norm that is None is the identity.

    ``x = x + residual_scale * attention_out_norm(attention(attention_norm(x)))``, then
    ``x = x + residual_scale * mlp_out_norm(mlp(mlp_norm(x)))``. All paths start at the layer.
    """

    attention_path: str
    attention: AttentionSpec
    mlp: LayerMlpSpec
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    residual_scale: float = 1.0


class DecoderLayer(Structure):
    """``(hidden_states [B, T, D], position_embeddings, attention_mask, cache) -> [B, T, D]``."""

    name = "decoder_layer"
    families = ("norm", "activation", "linear", "attention")
    multiplies = True
    reads = Attention.reads | GatedMlp.reads | {"residual_multiplier"}
    passive = Attention.passive | GatedMlp.passive | {"attention_type"}
    config_reads = Attention.config_reads

    def propose(self, region: Region, survey: Survey) -> tuple[LayerSpec, ...] | Refusal | None:
        names = inspect.signature(type(region.module).forward).parameters
        if "hidden_states" not in names or "position_embeddings" not in names:
            return None
        attention = [
            (child, found)
            for child in region.children()
            if isinstance(found := survey.find(child, "attention"), Found)
        ]
        if len(attention) != 1:
            return None
        try:
            return tuple(_propose(region, survey, attention[0][0], attention[0][1].spec))
        except NotThisForm as reason:
            return Refusal(str(reason))

    def width(self, spec: LayerSpec, module: nn.Module) -> int:
        return int(spec.attention.q.tensors(module)[0].shape[1])

    def crop(self, spec: LayerSpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
        width = min(PROOF_WIDTH, self.width(spec, module))
        shapes = cropped_attention(spec.attention, module, width)
        norms = (spec.attention_norm, spec.attention_out_norm, spec.mlp_norm, spec.mlp_out_norm)
        shapes |= {f"{norm.path}.weight": (width,) for norm in norms if norm is not None}
        gate, up, down = spec.mlp.gate, spec.mlp.up, spec.mlp.down
        inner = gate.count(module)
        if gate.start is None:
            inner = min(PROOF_WIDTH, inner)
        for part in (gate, up):
            rows = inner if part.start is None else Rows(part.path).count(module)
            shapes |= cropped_linear(part, module, rows, width)
        return shapes | cropped_linear(down, module, width, inner)

    def probes(self, spec: LayerSpec, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        return attention_probes.meaning(spec.attention, self.width(spec, module), draw)

    def number_probe(self, spec: LayerSpec, module: nn.Module, draw: Draw) -> Probe:
        return attention_probes.numbers(spec.attention, self.width(spec, module), draw)

    def call_host(self, spec: LayerSpec, module: nn.Module, probe: Probe) -> Any:
        return self._added(spec, module, probe, type(module).forward)

    def call_bound(self, spec: LayerSpec, module: nn.Module, fast: Fast, probe: Probe) -> Any:
        return self._added(spec, module, probe, fast)

    def _added(self, spec: LayerSpec, module: nn.Module, probe: Probe, forward: Fast) -> Any:
        """What the layer adds to its input: an identity must not pass."""

        def call(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            out = forward(module, hidden_states, **kwargs)
            return out - hidden_states if isinstance(out, torch.Tensor) else ()

        return attention_probes.run(spec.attention, module, probe, call)

    def call_reference(
        self, spec: LayerSpec, module: nn.Module, probe: Probe, dtype: torch.dtype
    ) -> Any:
        call: AttentionProbe = probe.args[0]
        history: list[torch.Tensor] = []
        return tuple(
            self.reference(spec, module, x, cos, sin, seen, history, dtype=dtype) - x
            for x, (cos, sin), seen in call.steps(dtype)
        )

    def reference(
        self, spec: LayerSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        x, *rest = args

        def norm(part: Norm | None, value: torch.Tensor) -> torch.Tensor:
            return value if part is None else part.wide(module, value)

        branch = Attention().reference(
            spec.attention, module, norm(spec.attention_norm, x), *rest, dtype=dtype
        )
        x = x + spec.residual_scale * norm(spec.attention_out_norm, branch)
        inner = norm(spec.mlp_norm, x)
        gate, up = spec.mlp.gate.wide(module, inner), spec.mlp.up.wide(module, inner)
        branch = spec.mlp.down.wide(module, activation_value(spec.mlp.activation, gate) * up)
        out: torch.Tensor = x + spec.residual_scale * norm(spec.mlp_out_norm, branch)
        return out

    def weights(self, spec: LayerSpec, module: nn.Module) -> Groups:
        a, m = spec.attention, spec.mlp
        groups = ((a.q, a.k, a.v), (a.o,), (m.gate, m.up), (m.down,))
        return tuple(tuple(rows.part for rows in group) for group in groups)

    def bind(self, spec: LayerSpec) -> Fast:
        families = Families.load()
        middle = Middle(spec.attention)

        def fast(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            attention = self._modules[spec.attention_path]
            if args or hidden_states.dim() != 3 or not middle.covers(attention, kwargs):
                return NotImplemented
            batch, tokens, width = hidden_states.shape

            def heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                q, k, v = (t.unflatten(0, (batch, tokens)) for t in (q, k, v))
                return middle(self, attention, q, k, v, kwargs)[0].flatten(0, 1)

            layer = BoundLayer.of(self, spec)
            stream = Stream(hidden_states.reshape(-1, width))
            if batch * tokens <= MAX_FUSED_ROWS:
                stream = layer_fused(families, layer, stream, heads)
            else:
                stream = layer_wide(families, layer, stream, heads)
            return settle(families, stream).view(hidden_states.shape)

        return fast


def _propose(
    region: Region, survey: Survey, attention: Region, spec: AttentionSpec
) -> Iterator[LayerSpec]:
    module: Any = region.module
    name = attention.path.rpartition(".")[2]
    rest = {
        n: c
        for n, c in module.named_children()
        if n != name and not isinstance(c, (nn.Dropout, nn.Identity))
    }
    mlps = {n: survey.find(region.child(n), "gated_mlp") for n in rest}
    found = [n for n, f in mlps.items() if isinstance(f, Found)]
    if len(found) != 1:
        kinds = {n: type(c).__name__ for n, c in rest.items()}
        raise NotThisForm(f"one gated MLP is wanted beside the attention, found {found} of {kinds}")
    mlp = _mlp(found[0], module, mlps[found[0]].spec)  # type: ignore[union-attr]
    norms = [n for n in rest if n not in found]
    scale = float(getattr(module, "residual_multiplier", 1.0))
    for places in _norm_places(norms):
        read = [None if place is None else find_norm(region, survey, place) for place in places]
        if len({norm.zero_centered for norm in read if norm is not None}) > 1:
            raise NotThisForm("plain and zero-centred norms in one layer")
        if scale != 1.0 and (read[1] or read[3]):
            continue  # no host is known that has both
        yield LayerSpec(name, spec.within(name), mlp, read[0], read[1], read[2], read[3], scale)


def _mlp(name: str, layer: nn.Module, spec: GatedMlpSpec) -> LayerMlpSpec:
    parts = (spec.gate, spec.up or spec.gate, spec.down)
    if any(part.transposed or part.activation != "identity" for part in parts):
        raise NotThisForm(f"{name}: matrices must be stored [N, K] without activation of their own")

    def rows(part: LinearSpec, start: int | None = None, stop: int | None = None) -> Rows:
        return Rows(f"{name}.{part.path}", start, stop)

    if spec.up is not None:
        gate, up = rows(spec.gate), rows(spec.up)
    else:
        total = Rows(f"{name}.{spec.gate.path}").count(layer)
        halves = rows(spec.gate, 0, total // 2), rows(spec.gate, total // 2, total)
        gate, up = halves if spec.gate_first else halves[::-1]
    return LayerMlpSpec(gate, up, rows(spec.down), spec.activation)


def _norm_places(
    norms: list[str],
) -> Iterator[tuple[str | None, str | None, str | None, str | None]]:
    """Where norms may stand: before attention, after it, before the MLP, after it."""
    if len(norms) == 2:
        first, second = norms
        before = (first, None, second, None)
        after = (None, first, None, second)
        # Names only order the two ways; the proof decides.
        yield from (after, before) if "post" in first else (before, after)
    elif len(norms) == 4:
        first, second, third, fourth = norms
        yield (first, second, third, fourth)
        yield (first, third, second, fourth)
    else:
        raise NotThisForm(f"two or four norms beside attention and MLP are wanted, found {norms}")
