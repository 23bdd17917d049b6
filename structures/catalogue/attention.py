"""Self-attention with rotary positions: separate or fused q/k/v, grouped heads, q/k norm, window, soft cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

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

QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin")
KEY = ("k_proj", "key", "k", "wk", "to_k", "k_lin")
VALUE = ("v_proj", "value", "v", "wv", "to_v", "v_lin")
FUSED = ("qkv_proj", "qkv", "query_key_value", "c_attn", "W_pack", "wqkv")
OUTPUT = ("o_proj", "out_proj", "dense", "wo", "c_proj", "proj", "out_lin")
QUERY_NORM = ("q_norm", "q_layernorm", "query_norm")
KEY_NORM = ("k_norm", "k_layernorm", "key_norm")

# Read below, or repeat a shape that the projections already give, or matter in training only.
_READ = ("head_dim", "scaling", "sliding_window", "use_rope", "is_causal", "attn_logit_softcapping")
_SHAPES = (
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_key_value_groups",
    "hidden_size",
)
_INERT = ("layer_idx", "layer_type", "is_sliding", "attention_dropout")


@dataclass(frozen=True)
class AttentionSpec:
    """``o(softmax(mask(cap(scaling * rope(norm(q)) @ rope(norm(k)).T))) @ v)`` with causal mask and window.

    ``rotary`` is None for a layer without positions. ``window`` w: a position sees the w newest, itself among them.
    ``norm_scope`` says whether q/k norm runs over each head or over all heads of a token.
    """

    q: Rows
    k: Rows
    v: Rows
    o: Rows
    heads: int
    kv_heads: int
    head_dim: int
    scaling: float
    rotary: str | None
    window: int | None = None
    soft_cap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_scope: str = "head"

    @property
    def fused(self) -> bool:
        """Whether q, k and v are consecutive rows of one linear layer."""
        return self.q.path == self.k.path == self.v.path


def propose_attention(attention: nn.Module, config: object) -> Iterator[AttentionSpec]:
    """Yield what this module may compute, likeliest first; the proof takes the first that holds.

    Raises:
        NotThisForm: children, shapes or scalars rule a rotary self-attention out.
    """
    children = dict(attention.named_children())
    linears = {name: child for name, child in children.items() if is_linear(child)}
    output = child_named(linears, OUTPUT)
    if output is None:
        raise NotThisForm(
            f"attention: no output projection among linear children {sorted(linears)}"
        )
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int):
        raise NotThisForm(f"attention: head_dim must be an integer attribute, got {head_dim!r}")
    q, k, v = _projections(attention, linears, output, head_dim)
    _check_remaining(children, {output, q.path, k.path, v.path})
    audit_scalars(attention, _READ + _SHAPES + _INERT, "attention")
    if getattr(attention, "is_causal", True) is not True:
        raise NotThisForm("attention: is_causal must be True, got False (bidirectional)")
    spec = AttentionSpec(
        q=q,
        k=k,
        v=v,
        o=linear_rows(attention, output),
        heads=(q.stop - q.start) // head_dim,
        kv_heads=(k.stop - k.start) // head_dim,
        head_dim=head_dim,
        scaling=_scaling(attention, head_dim),
        rotary="half",
        window=_window(attention, config),
    )
    spec = _with_norms(attention, children, spec)
    rotaries = (None,) if not getattr(attention, "use_rope", True) else ("half", "interleaved")
    cap = getattr(attention, "attn_logit_softcapping", None)
    caps = (None,) if cap is None else (float(cap), None)
    for soft_cap, rotary in product(caps, rotaries):
        yield replace(spec, rotary=rotary, soft_cap=soft_cap)


def _projections(
    attention: nn.Module, linears: dict[str, nn.Module], output: str, head_dim: int
) -> tuple[Rows, Rows, Rows]:
    parts = [child_named(linears, names) for names in (QUERY, KEY, VALUE)]
    heads_width = int(linears[output].weight.shape[1])
    if all(parts):
        rows = tuple(linear_rows(attention, str(path)) for path in parts)
    else:
        fused = child_named(linears, FUSED)
        if fused is None:
            raise NotThisForm(
                f"attention: no q, k, v and no fused projection among {sorted(linears)}"
            )
        total = int(linears[fused].weight.shape[0])
        kv_width = (total - heads_width) // 2
        cuts = (0, heads_width, heads_width + kv_width, total)
        rows = tuple(
            linear_rows(attention, fused, a, b) for a, b in zip(cuts, cuts[1:], strict=False)
        )
    q, k, v = rows
    widths = [r.stop - r.start for r in rows]
    if widths[0] != heads_width or widths[1] != widths[2] or min(widths) <= 0:
        raise NotThisForm(
            f"attention: q, k, v widths {widths} do not fit an output projection of {heads_width} inputs"
        )
    if any(w % head_dim for w in widths) or widths[0] % widths[1]:
        raise NotThisForm(
            f"attention: q, k, v widths {widths} are not whole groups of heads of {head_dim}"
        )
    return q, k, v


def _check_remaining(children: dict[str, nn.Module], used: set[str]) -> None:
    for name, child in children.items():
        if name in used or name in QUERY_NORM + KEY_NORM or isinstance(child, nn.Dropout):
            continue
        raise NotThisForm(f"attention: no structure reads child {name} ({type(child).__name__})")


def _scaling(attention: nn.Module, head_dim: int) -> float:
    scaling = getattr(attention, "scaling", head_dim**-0.5)
    if not isinstance(scaling, (int, float)):
        raise NotThisForm(f"attention: scaling must be a number, got {type(scaling).__name__}")
    return float(scaling)


def _window(attention: nn.Module, config: object) -> int | None:
    own = vars(attention)
    window = (
        own["sliding_window"]
        if "sliding_window" in own
        else getattr(config, "sliding_window", None)
    )
    if window is not None and not isinstance(window, int):
        raise NotThisForm(f"attention: sliding_window must be an integer, got {window!r}")
    return window


def _with_norms(
    attention: nn.Module, children: dict[str, nn.Module], spec: AttentionSpec
) -> AttentionSpec:
    q_norm, k_norm = child_named(children, QUERY_NORM), child_named(children, KEY_NORM)
    if q_norm is None and k_norm is None:
        return spec
    if q_norm is None or k_norm is None:
        raise NotThisForm("attention: only one of q and k is normed")
    q, k = read_norm(attention, q_norm), read_norm(attention, k_norm)
    if (q.eps, q.zero_centered) != (k.eps, k.zero_centered):
        raise NotThisForm(f"attention: q and k norm differ: {q} and {k}")
    sizes = (q.size, k.size)
    if sizes == (spec.head_dim, spec.head_dim):
        return replace(spec, q_norm=q, k_norm=k, norm_scope="head")
    if sizes == (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim):
        return replace(spec, q_norm=q, k_norm=k, norm_scope="all")
    raise NotThisForm(
        f"attention: q/k norm sizes {sizes} are neither one head of {spec.head_dim} nor all heads"
    )
