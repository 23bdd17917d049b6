"""What a self-attention computes, read from its form: children, shapes, scalars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from ..region import Region
from .base import Found, Refusal, Spec, Survey
from .spec import Norm, NotThisForm, Rows, child_named

QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin")
KEY = ("k_proj", "key", "k", "wk", "to_k", "k_lin")
VALUE = ("v_proj", "value", "v", "wv", "to_v", "v_lin")
FUSED = ("qkv_proj", "qkv", "query_key_value", "c_attn", "W_pack", "wqkv")
OUTPUT = ("o_proj", "out_proj", "dense", "wo", "c_proj", "proj", "out_lin")
QUERY_NORM = ("q_norm", "q_layernorm", "query_norm")
KEY_NORM = ("k_norm", "k_layernorm", "key_norm")
PROOF_KV_HEADS = 2  # heads of keys that a proof of meaning needs


@dataclass(frozen=True)
class AttentionSpec(Spec):
    """``o(softmax(mask(cap(scaling * rope(norm(q)) @ rope(norm(k)).T))) @ v)``

    Attributes:
        rotary: ``"half"``, ``"interleaved"``, or None for a layer without positions.
        window: a position sees the ``window`` newest, itself among them; the host puts it into
            the mask that it passes.
        norm_scope: whether q/k norm runs over each head or over all heads of a token.
        cache: name of the host's cache argument; ``layer_idx`` comes from the module.
        causal: whether a call without a mask looks back only.
    """

    q: Rows
    k: Rows
    v: Rows
    o: Rows
    head_dim: int
    scaling: float
    rotary: str | None = "half"
    window: int | None = None
    soft_cap: float | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    norm_scope: str = "head"
    cache: str = "past_key_values"
    causal: bool = True

    @property
    def fused(self) -> bool:
        """Whether q, k and v are consecutive rows of one linear layer."""
        return self.q.path == self.k.path == self.v.path

    def norms(self, region: nn.Module) -> dict[str, Any]:
        """The q/k norm arguments that every op of the attention family takes."""
        if self.q_norm is None or self.k_norm is None:
            return {}
        return {
            "q_norm_weight": self.q_norm.weight(region),
            "k_norm_weight": self.k_norm.weight(region),
            "norm_eps": self.q_norm.eps,
            "norm_zero_centered": self.q_norm.zero_centered,
            "norm_scope": self.norm_scope,
        }

    def within(self, prefix: str) -> AttentionSpec:
        """The same attention seen from a module that has it as its child ``prefix``."""
        parts = ("q", "k", "v", "o", "q_norm", "k_norm")
        moved = {n: _under(prefix, getattr(self, n)) for n in parts}
        return replace(self, **moved)


def _under(prefix: str, part: Any) -> Any:
    return None if part is None else replace(part, path=f"{prefix}.{part.path}")


def propose_attention(
    region: Region, survey: Survey, linears: dict[str, nn.Linear], cache: str
) -> Iterator[AttentionSpec]:
    module: Any = region.module
    children = dict(module.named_children())
    output = child_named(linears, OUTPUT)
    assert output is not None
    head_dim = getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        raise NotThisForm(f"head_dim must be an integer attribute, got {head_dim!r}")
    q, k, v = _projections(module, linears, output, head_dim)
    _check_remaining(children, {output, q.path, k.path, v.path})
    scaling = getattr(module, "scaling", head_dim**-0.5)
    if not isinstance(scaling, (int, float)):
        raise NotThisForm(f"scaling must be a number, got {type(scaling).__name__}")
    spec = AttentionSpec(
        q=q,
        k=k,
        v=v,
        o=Rows(output),
        head_dim=head_dim,
        scaling=float(scaling),
        window=_window(module),
        cache=cache,
        causal=getattr(module, "is_causal", True) is True,
    )
    spec = _with_norms(region, survey, children, spec)
    rotaries = (None,) if not getattr(module, "use_rope", True) else ("half", "interleaved")
    cap = getattr(module, "attn_logit_softcapping", None)
    caps = (None,) if cap is None else (float(cap), None)
    for soft_cap, rotary in product(caps, rotaries):
        yield replace(spec, rotary=rotary, soft_cap=soft_cap)


def _projections(
    module: nn.Module, linears: dict[str, nn.Linear], output: str, head_dim: int
) -> tuple[Rows, Rows, Rows]:
    paths = [child_named(linears, names) for names in (QUERY, KEY, VALUE)]
    heads_width = linears[output].weight.shape[1]
    if all(paths):
        rows = tuple(Rows(str(path)) for path in paths)
    else:
        fused = child_named(linears, FUSED)
        if fused is None:
            raise NotThisForm(f"no q, k, v and no fused projection among {sorted(linears)}")
        total = Rows(fused).count(module)
        second = heads_width + (total - heads_width) // 2
        cuts = (0, heads_width, second, total)
        rows = tuple(Rows(fused, cuts[i], cuts[i + 1]) for i in range(3))
    q, k, v = rows
    widths = [r.count(module) for r in rows]
    if widths[0] != heads_width or widths[1] != widths[2] or min(widths) <= 0:
        raise NotThisForm(
            f"q, k, v widths {widths} do not fit an output projection of {heads_width} inputs"
        )
    if any(w % head_dim for w in widths) or widths[0] % widths[1]:
        raise NotThisForm(f"q, k, v widths {widths} are not groups of heads of {head_dim}")
    return q, k, v


def _check_remaining(children: dict[str, nn.Module], used: set[str]) -> None:
    for name, child in children.items():
        if name in used or name in QUERY_NORM + KEY_NORM or isinstance(child, nn.Dropout):
            continue
        raise NotThisForm(f"no structure reads child {name} ({type(child).__name__})")


def _window(module: Any) -> int | None:
    own = vars(module)
    config = getattr(module, "config", None)
    if "sliding_window" in own:
        window = own["sliding_window"]
    else:
        window = getattr(config, "sliding_window", None)
    if window is not None and not isinstance(window, int):
        raise NotThisForm(f"sliding_window must be an integer, got {window!r}")
    return window


def _with_norms(
    region: Region, survey: Survey, children: dict[str, nn.Module], spec: AttentionSpec
) -> AttentionSpec:
    names = child_named(children, QUERY_NORM), child_named(children, KEY_NORM)
    if names == (None, None):
        return spec
    if None in names:
        raise NotThisForm("only one of q and k is normed")
    q, k = (find_norm(region, survey, str(name)) for name in names)
    if (q.eps, q.zero_centered) != (k.eps, k.zero_centered):
        raise NotThisForm(f"q and k norm differ: {q} and {k}")
    sizes = tuple(norm.weight(region.module).shape[0] for norm in (q, k))
    if sizes == (spec.head_dim, spec.head_dim):
        return replace(spec, q_norm=q, k_norm=k, norm_scope="head")
    if sizes == (spec.q.count(region.module), spec.k.count(region.module)):
        return replace(spec, q_norm=q, k_norm=k, norm_scope="all")
    raise NotThisForm(f"q/k norm sizes {sizes} are neither a head of {spec.head_dim} nor all heads")


def find_norm(region: Region, survey: Survey, name: str) -> Norm:
    """The proven RMS norm that is the child ``name``.

    Raises:
        NotThisForm: it is another norm.
    """
    found = survey.find(region.child(name), "rms_norm")
    if not isinstance(found, Found) or not found.spec.weight:
        reason = found.reason if isinstance(found, Refusal) else "no RMS norm with a weight"
        raise NotThisForm(f"{name}: {reason}")
    return Norm(name, found.spec.eps, found.spec.zero_centered)


def cropped_attention(
    spec: AttentionSpec, region: nn.Module, width: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of an attention with two key heads on ``width`` columns; fused rows stay as many."""
    q_rows, k_rows = spec.q.count(region), spec.k.count(region)
    if not spec.fused:
        kv_heads = min(PROOF_KV_HEADS, k_rows // spec.head_dim)
        q_rows, k_rows = q_rows // k_rows * kv_heads * spec.head_dim, kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for part, rows in ((spec.q, q_rows), (spec.k, k_rows), (spec.v, k_rows)):
        whole = Rows(part.path).count(region) if spec.fused else rows
        shapes |= cropped_linear(part, region, whole, width)
    shapes |= cropped_linear(spec.o, region, width, q_rows)
    if spec.q_norm is not None and spec.k_norm is not None and spec.norm_scope == "all":
        shapes |= {f"{spec.q_norm.path}.weight": (q_rows,), f"{spec.k_norm.path}.weight": (k_rows,)}
    return shapes


def cropped_linear(
    part: Rows, region: nn.Module, rows: int, columns: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of the layer of ``part`` with other sizes."""
    shapes: dict[str, tuple[int, ...]] = {f"{part.path}.weight": (rows, columns)}
    if part.tensors(region)[1] is not None:
        shapes[f"{part.path}.bias"] = (rows,)
    return shapes
