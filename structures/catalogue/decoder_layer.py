"""A decoder layer: self-attention and a gated MLP on one residual stream, normed before, after or around."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from .attention import OUTPUT, AttentionSpec, propose_attention
from .spec import (
    Norm,
    NotThisForm,
    Rows,
    audit_scalars,
    child_named,
    is_linear,
    linear_rows,
    read_activation,
    read_norm,
)

GATE = ("gate_proj", "w1", "gate", "wi_0")
UP = ("up_proj", "w3", "up", "wi_1")
DOWN = ("down_proj", "w2", "down", "wo", "c_proj")
FUSED = ("gate_up_proj", "gate_up")
ACTIVATION = ("act_fn", "activation_fn", "act", "hidden_act")

_MLP_SCALARS = ("hidden_size", "intermediate_size")
_LAYER_SCALARS = (
    "hidden_size",
    "layer_idx",
    "layer_type",
    "attention_type",
    "residual_multiplier",
    "is_sliding",
)


@dataclass(frozen=True)
class MlpSpec:
    """``down(activation(gate(x)) * up(x))``."""

    gate: Rows
    up: Rows
    down: Rows
    activation: str


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer on the residual stream ``x``; a norm that is None is the identity.

    ``x = x + residual_scale * attention_out_norm(attention(attention_norm(x)))``, then
    ``x = x + residual_scale * mlp_out_norm(mlp(mlp_norm(x)))``.
    """

    attention_path: str
    mlp_path: str
    attention: AttentionSpec
    mlp: MlpSpec
    attention_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    mlp_out_norm: Norm | None
    residual_scale: float = 1.0


def propose_layer(layer: nn.Module, config: object) -> Iterator[LayerSpec]:
    """Yield what this module may compute, likeliest first; the proof takes the first that holds.

    Raises:
        NotThisForm: children, shapes or scalars rule a decoder layer out.
    """
    children = {
        n: c for n, c in layer.named_children() if not isinstance(c, (nn.Dropout, nn.Identity))
    }
    attention = _only(children, _has_attention_form, "attention")
    mlp = _only(children, _has_mlp_form, "gated MLP")
    norms = [n for n in children if n not in (attention, mlp)]
    audit_scalars(layer, _LAYER_SCALARS, "decoder layer")
    scale = float(getattr(layer, "residual_multiplier", 1.0))
    mlp_spec = read_mlp(children[mlp])
    for places in _norm_places(norms):
        attention_norm, attention_out_norm, mlp_norm, mlp_out_norm = (
            None if name is None else read_norm(layer, name) for name in places
        )
        if scale != 1.0 and (attention_out_norm or mlp_out_norm):
            raise NotThisForm(
                f"decoder layer: a residual multiplier ({scale}) beside a norm of the branch"
            )
        for attention_spec in propose_attention(children[attention], config):
            yield LayerSpec(
                attention_path=attention,
                mlp_path=mlp,
                attention=attention_spec,
                mlp=mlp_spec,
                attention_norm=attention_norm,
                attention_out_norm=attention_out_norm,
                mlp_norm=mlp_norm,
                mlp_out_norm=mlp_out_norm,
                residual_scale=scale,
            )


def read_mlp(mlp: nn.Module) -> MlpSpec:
    """Read a gated MLP with separate or fused gate and up projections.

    Raises:
        NotThisForm: children, shapes, scalars or activation of another form.
    """
    children = dict(mlp.named_children())
    linears = {name: child for name, child in children.items() if is_linear(child)}
    gate, up, down, fused = (child_named(linears, names) for names in (GATE, UP, DOWN, FUSED))
    if down is None or not (fused or (gate and up)):
        raise NotThisForm(
            f"mlp: no gate, up and down projections among linear children {sorted(linears)}"
        )
    if fused:
        total = int(linears[fused].weight.shape[0])
        gate_rows, up_rows = (
            linear_rows(mlp, fused, 0, total // 2),
            linear_rows(mlp, fused, total // 2, total),
        )
    else:
        gate_rows, up_rows = linear_rows(mlp, str(gate)), linear_rows(mlp, str(up))
    width = int(linears[down].weight.shape[1])
    if gate_rows.stop - gate_rows.start != width or up_rows.stop - up_rows.start != width:
        raise NotThisForm(f"mlp: gate and up rows do not fit a down projection of {width} inputs")
    activation_name = next((n for n in ACTIVATION if hasattr(mlp, n)), None)
    activation = read_activation(getattr(mlp, activation_name or "", None), "mlp")
    used = {gate, up, down, fused, activation_name}
    for name, child in children.items():
        if name not in used and not isinstance(child, nn.Dropout):
            raise NotThisForm(f"mlp: no structure reads child {name} ({type(child).__name__})")
    audit_scalars(mlp, _MLP_SCALARS, "mlp")
    return MlpSpec(gate_rows, up_rows, linear_rows(mlp, down), activation)


def _has_attention_form(module: nn.Module) -> bool:
    linears = {n: c for n, c in module.named_children() if is_linear(c)}
    return hasattr(module, "head_dim") and any(n in OUTPUT for n in linears)


def _has_mlp_form(module: nn.Module) -> bool:
    linears = {n: c for n, c in module.named_children() if is_linear(c)}
    gated = {n for n in linears if n in GATE + FUSED}
    return bool(gated) and any(n in DOWN for n in linears)


def _only(children: dict[str, nn.Module], has_form: object, what: str) -> str:
    found = [name for name, child in children.items() if has_form(child)]  # type: ignore[operator]
    if len(found) != 1:
        kinds = {name: type(child).__name__ for name, child in children.items()}
        raise NotThisForm(
            f"decoder layer: one child of the form {what} is needed, got {found} of {kinds}"
        )
    return found[0]


def _norm_places(
    norms: list[str],
) -> Iterator[tuple[str | None, str | None, str | None, str | None]]:
    """Where the norms may stand: before attention, after it, before the MLP, after it; in order of definition."""
    if len(norms) == 2:
        first, second = norms
        before = (first, None, second, None)
        after = (None, first, None, second)
        # Two norms both called "post" come after their branches; either order is tried, the proof decides.
        yield from (after, before) if "post" in first else (before, after)
    elif len(norms) == 4:
        first, second, third, fourth = norms
        yield (first, second, third, fourth)
        yield (first, third, second, fourth)
    else:
        raise NotThisForm(
            f"decoder layer: two or four norms beside attention and MLP are needed, got {norms}"
        )


def prefixed(spec: LayerSpec) -> LayerSpec:
    """The spec with the paths of its attention and MLP made relative to the layer."""

    def under(prefix: str, part: Rows | Norm | None) -> Rows | Norm | None:
        return None if part is None else replace(part, path=f"{prefix}.{part.path}")

    attention = {
        n: under(spec.attention_path, getattr(spec.attention, n)) for n in ("q", "k", "v", "o")
    }
    norms = {
        n: under(spec.attention_path, getattr(spec.attention, n)) for n in ("q_norm", "k_norm")
    }
    mlp = {n: under(spec.mlp_path, getattr(spec.mlp, n)) for n in ("gate", "up", "down")}
    return replace(
        spec,
        attention=replace(spec.attention, **attention, **norms),  # type: ignore[arg-type]
        mlp=replace(spec.mlp, **mlp),  # type: ignore[arg-type]
    )
