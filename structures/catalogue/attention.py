"""Self-attention with rotary positions, called with ``position_embeddings`` and a cache.

Separate or fused q/k/v, grouped heads, q/k norm, partial rotary, sliding window, soft cap. Attached,
norm and rotary are one kernel and the projections another; the cache and the scores stay the
host's own, so any cache and any attention implementation keeps its meaning.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..region import Region
from . import attention_probes
from .attention_probes import AttentionProbe
from .base import Draw, Fast, Found, Probe, Refusal, Spec, Structure, Survey
from .rms_norm import RmsNorm
from .spec import Norm, NotThisForm, Rows, child_named, is_linear

QUERY = ("q_proj", "query", "q", "wq", "to_q", "q_lin")
KEY = ("k_proj", "key", "k", "wk", "to_k", "k_lin")
VALUE = ("v_proj", "value", "v", "wv", "to_v", "v_lin")
FUSED = ("qkv_proj", "qkv", "query_key_value", "c_attn", "W_pack", "wqkv")
OUTPUT = ("o_proj", "out_proj", "dense", "wo", "c_proj", "proj", "out_lin")
QUERY_NORM = ("q_norm", "q_layernorm", "query_norm")
KEY_NORM = ("k_norm", "k_layernorm", "key_norm")
MAX_FUSED_ROWS = 8
CACHES = ("past_key_values", "cache", "past_key_value")


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


class Attention(Structure):
    """``(hidden_states [B, T, D], position_embeddings, attention_mask, cache) -> ([B, T, D], weights)``."""

    name = "attention"
    families = ("attention", "linear")
    multiplies = True
    reads = RmsNorm.reads | frozenset(
        "head_dim scaling sliding_window use_rope is_causal attn_logit_softcapping".split()
    )
    passive = frozenset(
        "num_heads num_attention_heads num_key_value_heads num_key_value_groups is_sliding "
        "attention_dropout _kernel_funcs".split()
    )

    def propose(
        self, region: Region, survey: Survey
    ) -> tuple[AttentionSpec, ...] | Refusal | None:
        module = region.module
        names = inspect.signature(type(module).forward).parameters
        cache = next((name for name in CACHES if name in names), None)
        if "position_embeddings" not in names or "hidden_states" not in names or cache is None:
            return None
        linears = {n: c for n, c in module.named_children() if is_linear(c)}
        if not any(name in OUTPUT for name in linears):
            return None
        try:
            return tuple(_propose(region, survey, linears, cache))
        except NotThisForm as reason:
            return Refusal(str(reason))

    def width(self, spec: AttentionSpec, module: nn.Module) -> int:
        return int(spec.q.tensors(module)[0].shape[1])

    def probes(self, spec: AttentionSpec, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        return attention_probes.meaning(spec, self.width(spec, module), draw)

    def number_probe(self, spec: AttentionSpec, module: nn.Module, draw: Draw) -> Probe:
        return attention_probes.numbers(spec, self.width(spec, module), draw)

    def call_host(self, spec: AttentionSpec, module: nn.Module, probe: Probe) -> Any:
        host = type(module).forward
        return attention_probes.run(spec, module, probe, lambda **k: host(module, **k)[0])

    def call_bound(
        self, spec: AttentionSpec, module: nn.Module, fast: Fast, probe: Probe
    ) -> Any:
        return attention_probes.run(spec, module, probe, lambda **k: fast(module, **k)[0])

    def call_reference(
        self, spec: AttentionSpec, module: nn.Module, probe: Probe, dtype: torch.dtype
    ) -> Any:
        call: AttentionProbe = probe.args[0]
        history: list[torch.Tensor] = []
        return tuple(
            self.reference(spec, module, x, cos, sin, seen, history, dtype=dtype)
            for (x, (cos, sin)), seen in zip(call.steps(dtype), call.visible(), strict=True)
        )

    def reference(
        self, spec: AttentionSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        """Attention of ``x [B, T, D]`` to what ``seen [T, N]`` shows of itself and of ``history``.

        ``history`` holds keys and values of earlier calls; this call's are added to it.
        """
        x, cos, sin, seen, history = args
        q, k, v = (p.wide(module, x) for p in (spec.q, spec.k, spec.v))
        if spec.q_norm is not None and spec.k_norm is not None and spec.norm_scope == "all":
            q, k = spec.q_norm.wide(module, q), spec.k_norm.wide(module, k)
        q, k, v = (t.unflatten(-1, (-1, spec.head_dim)).transpose(1, 2) for t in (q, k, v))
        if spec.q_norm is not None and spec.k_norm is not None and spec.norm_scope == "head":
            q, k = spec.q_norm.wide(module, q), spec.k_norm.wide(module, k)
        if spec.rotary is not None:
            q, k = (rotate(t, cos[:, None], sin[:, None], spec.rotary) for t in (q, k))
        if history:
            k, v = torch.cat([history[0], k], 2), torch.cat([history[1], v], 2)
        history[:] = [k, v]
        groups = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(groups, 1).transpose(-1, -2) * spec.scaling
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        heads = scores.softmax(-1) @ v.repeat_interleave(groups, 1)
        return spec.o.wide(module, heads.transpose(1, 2).flatten(2))

    def bind(self, spec: AttentionSpec) -> Fast:
        linear = kernels.family("linear")
        middle = Middle(spec)
        wide = nn.functional.linear

        def fast(
            self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            if args or hidden_states.dim() != 3 or not middle.covers(self, kwargs):
                return NotImplemented
            few = hidden_states.shape[0] * hidden_states.shape[1] <= MAX_FUSED_ROWS
            if few:
                parts = [part.tensors(self) for part in (spec.q, spec.k, spec.v)]
                weights, biases = zip(*parts, strict=True)
                q, k, v = linear.linear_split(hidden_states, weights, biases)
            else:
                q, k, v = project_wide(self, spec, hidden_states)
            heads, scores = middle(self, self, q, k, v, kwargs)
            weight, bias = spec.o.tensors(self)
            out = linear.linear(heads, weight, bias) if few else wide(heads, weight, bias)
            return out, scores

        return fast


def project_wide(
    region: nn.Module, spec: AttentionSpec, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q, k and v of many rows through torch: one product where the host stores them as one."""
    if not spec.fused:
        parts = (part.tensors(region) for part in (spec.q, spec.k, spec.v))
        return tuple(nn.functional.linear(x, weight, bias) for weight, bias in parts)
    packed = nn.functional.linear(x, *Rows(spec.q.path).tensors(region))
    cut = spec.q.stop or 0
    width = (packed.shape[-1] - cut) // 2
    return packed.split([cut, width, width], dim=-1)


class Middle:
    """From projected q, k, v to attended heads, through the host's cache and implementation."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        # Hosts that say "cache" still take the older name; the others pass "cache" on.
        self._cache_names = CACHES if spec.cache == "cache" else (spec.cache,)
        self._norm_rope = kernels.family("attention").norm_rope
        self._options = {
            "scaling": spec.scaling,
            "dropout": 0.0,
            "sliding_window": spec.window,
        }
        if spec.soft_cap is not None:
            self._options["softcap"] = spec.soft_cap

    def covers(self, attention: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call of the host's with these keywords can be made."""
        rotation = kwargs.get("position_embeddings")
        if self._spec.rotary is not None and (rotation is None or rotation[0].dim() != 3):
            return False
        return not kwargs.get("output_attentions") and attention_function(attention) is not None

    def __call__(
        self,
        region: nn.Module,
        attention: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attended heads ``[B, T, H*D]`` and the scores that the host's implementation returned.

        Args:
            region: where the paths of the spec start; ``attention``: the host's own module.
            q, k, v: ``[B, T, -1]``.
            kwargs: those of the host's call.
        """
        spec = self._spec
        kwargs = dict(kwargs)
        mask = kwargs.pop("attention_mask", None)
        rotation = kwargs.pop("position_embeddings", None)
        caches = [kwargs.pop(name, None) for name in self._cache_names]
        cache = next((c for c in caches if c is not None), None)
        q, k, v = (t.unflatten(-1, (-1, spec.head_dim)) for t in (q, k, v))
        arguments = spec.norms(region)
        if spec.rotary is not None:
            cos, sin = rotation
            if cos.shape[0] != q.shape[0]:
                cos, sin = (t.expand(q.shape[0], -1, -1) for t in (cos, sin))
            arguments |= {"cos": cos, "sin": sin, "rotary": spec.rotary}
        if arguments:
            q, k = self._norm_rope(q, k, **arguments)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None and spec.cache == "cache":
            k, v = cache.update(k, v, attention.layer_idx, kwargs=kwargs)
        elif cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        function: Any = attention_function(attention)
        heads, scores = function(attention, q, k, v, mask, **self._options, **kwargs)
        return heads.flatten(2), scores


def attention_function(attention: Any) -> Callable[..., Any] | None:
    """The function that the host would call for this module's attention implementation."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    module = sys.modules[type(attention).__module__]
    eager = getattr(module, "eager_attention_forward", None)
    if eager is None:
        return None
    implementation = attention.config._attn_implementation
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    return found


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: str) -> torch.Tensor:
    """Rotary positions on the first R values of each head; cos and sin are full width R."""
    size = cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    if rotary == "half":
        other = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
    else:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    return torch.cat([turned * cos + other * sin, kept], -1)


def _propose(
    region: Region, survey: Survey, linears: dict[str, nn.Module], cache: str
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
    module: nn.Module, linears: dict[str, nn.Module], output: str, head_dim: int
) -> tuple[Rows, Rows, Rows]:
    paths = [child_named(linears, names) for names in (QUERY, KEY, VALUE)]
    heads_width = int(linears[output].weight.shape[1])  # type: ignore[arg-type]
    if all(paths):
        rows = tuple(Rows(str(path)) for path in paths)
    else:
        fused = child_named(linears, FUSED)
        if fused is None:
            raise NotThisForm(f"no q, k, v and no fused projection among {sorted(linears)}")
        total = int(linears[fused].weight.shape[0])  # type: ignore[arg-type]
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
