"""Self-attention with rotary positions, called with ``position_embeddings`` and a cache.

Separate or fused q/k/v, grouped heads, q/k norm, partial rotary, sliding window, soft cap.
Attached, norm and rotary are one kernel and the projections another; the cache and the scores stay
the host's own, so any cache and any attention implementation keeps its meaning.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .. import kernels
from ..products import project, project_all
from ..region import Region
from . import attention_probes
from .attention_form import OUTPUT, AttentionSpec, cropped_attention, propose_attention
from .attention_probes import AttentionProbe
from .base import (
    MAX_FUSED_ROWS,
    PROOF_WIDTH,
    Draw,
    Fast,
    Groups,
    Probe,
    Refusal,
    Structure,
    Survey,
)
from .rms_norm import RmsNorm
from .spec import NotThisForm, is_linear, whole

CACHES = ("past_key_values", "cache", "past_key_value")


class Attention(Structure):
    """``(hidden_states [B, T, D], position_embeddings, mask, cache) -> ([B, T, D], scores)``."""

    name = "attention"
    families = ("attention", "linear")
    multiplies = True
    reads = RmsNorm.reads | {
        *("head_dim", "scaling", "sliding_window", "attn_logit_softcapping"),
        *("use_rope", "is_causal"),
    }
    passive = frozenset(
        {
            *("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups"),
            *("is_sliding", "attention_dropout", "_kernel_funcs"),
        }
    )
    # The counts of heads are in the shapes; the window is in the spec.
    config_reads = frozenset({"sliding_window", "num_attention_heads", "num_key_value_heads"})

    def propose(self, region: Region, survey: Survey) -> tuple[AttentionSpec, ...] | Refusal | None:
        module = region.module
        names = inspect.signature(type(module).forward).parameters
        cache = next((name for name in CACHES if name in names), None)
        if "position_embeddings" not in names or "hidden_states" not in names or cache is None:
            return None
        linears = {n: c for n, c in module.named_children() if is_linear(c)}
        if not any(name in OUTPUT for name in linears):
            return None
        try:
            return tuple(propose_attention(region, survey, linears, cache))
        except NotThisForm as reason:
            return Refusal(str(reason))

    def width(self, spec: AttentionSpec, module: nn.Module) -> int:
        return int(spec.q.tensors(module)[0].shape[1])

    def crop(self, spec: AttentionSpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
        return cropped_attention(spec, module, min(PROOF_WIDTH, self.width(spec, module)))

    def probes(self, spec: AttentionSpec, module: nn.Module, draw: Draw) -> Iterator[Probe]:
        return attention_probes.meaning(spec, self.width(spec, module), draw)

    def number_probe(self, spec: AttentionSpec, module: nn.Module, draw: Draw) -> Probe:
        return attention_probes.numbers(spec, self.width(spec, module), draw)

    def call_host(self, spec: AttentionSpec, module: nn.Module, probe: Probe) -> Any:
        host = type(module).forward
        return attention_probes.run(spec, module, probe, lambda **k: host(module, **k)[0])

    def call_bound(self, spec: AttentionSpec, module: nn.Module, fast: Fast, probe: Probe) -> Any:
        return attention_probes.run(spec, module, probe, lambda **k: fast(module, **k)[0])

    def call_reference(
        self, spec: AttentionSpec, module: nn.Module, probe: Probe, dtype: torch.dtype
    ) -> Any:
        call: AttentionProbe = probe.args[0]
        history: list[torch.Tensor] = []
        return tuple(
            self.reference(spec, module, x, cos, sin, seen, history, dtype=dtype)
            for x, (cos, sin), seen in call.steps(dtype)
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

    def weights(self, spec: AttentionSpec, module: nn.Module) -> Groups:
        return ((spec.q.part, spec.k.part, spec.v.part), (spec.o.part,))

    def bind(self, spec: AttentionSpec) -> Fast:
        linear = kernels.family("linear")
        middle = Middle(spec)

        def fast(self: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if args or hidden_states.dim() != 3 or not middle.covers(self, kwargs):
                return NotImplemented
            few = hidden_states.shape[0] * hidden_states.shape[1] <= MAX_FUSED_ROWS
            if few:
                parts = [part.bound(self) for part in (spec.q, spec.k, spec.v)]
                q, k, v = linear.linear_split(
                    hidden_states, [p.weight for p in parts], [p.bias for p in parts]
                )
            else:
                q, k, v = project_wide(self, spec, hidden_states)
            heads, scores = middle(self, self, q, k, v, kwargs)
            o = spec.o.bound(self)
            out = linear.linear(heads, o.weight, o.bias) if few else project(heads, o)
            return out, scores

        return fast


def project_wide(
    region: nn.Module, spec: AttentionSpec, x: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """q, k and v of many rows through torch: one product where the host stores them as one."""
    parts = (spec.q, spec.k, spec.v)
    packed = whole(region, *parts)
    if packed is None:
        return project_all(x, [part.bound(region) for part in parts])
    return torch.split(project(x, packed), [part.count(region) for part in parts], dim=-1)


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
