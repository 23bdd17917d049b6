"""Proof of what a host does around its layers: embedding, masks, rotations, final norm, logits.

The host's own forward runs on the CPU in fp32 over a small vocabulary with stand-ins for its
layers. Each notes what it gets and returns something unrelated, so that order and inputs of all
layers show. Masks are made with a window of ``WINDOW`` in place of the configured one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..catalogue.attention_probes import visible
from ..catalogue.head import EmbeddingSpec, HeadSpec
from ..catalogue.spec import NotThisForm
from ..prove import PROBE_ERRORS
from ..quiet import proof_state, tensors_made_on
from .decoder import DecoderForm, DecoderSpec

WINDOW = 5
TOKENS = 9
START = 1000
PADDING = 2
VOCABULARY = 61
TOLERANCE = 1e-4


@dataclass
class _Record:
    order: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)
    returned: list[torch.Tensor] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)
    logits: torch.Tensor | None = None


class _StandIn(nn.Module):
    """A layer that notes its arguments and returns random values."""

    def __init__(self, layer: nn.Module, index: int, record: _Record) -> None:
        super().__init__()
        self._index = index
        self._names = inspect.signature(type(layer).forward)
        self._record = record
        for name, value in vars(layer).items():  # hosts read layer_type and the like from outside
            if isinstance(value, (str, int)) and not hasattr(self, name):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = self._names.bind_partial(self, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        x = given["hidden_states"]
        generator = torch.Generator().manual_seed(len(self._record.hidden))
        out = torch.randn(x.shape, generator=generator)
        self._record.order.append(self._index)
        self._record.hidden.append(x)
        self._record.arguments.append(given)
        self._record.returned.append(out)
        return out


def prove_wiring(
    model: nn.Module, form: DecoderForm, candidates: Iterator[DecoderSpec]
) -> DecoderSpec:
    """The first of ``candidates`` that agrees with what the host does around its layers.

    Raises:
        NotThisForm: none does; the text is the first one's first difference.
    """
    cpu = torch.device("cpu")
    with proof_state(cpu), tensors_made_on(cpu):
        return _first_that_agrees(model, form, candidates)


def _first_that_agrees(
    model: nn.Module, form: DecoderForm, candidates: Iterator[DecoderSpec]
) -> DecoderSpec:
    twin = _twin(model, form)
    plain, padded = _run(twin, form, start=START), _run(twin, form, padding=PADDING)
    first: NotThisForm | None = None
    for spec in candidates:
        try:
            _compare(twin, spec, plain, start=START)
            _compare(twin, spec, padded, padding=PADDING)
            return spec
        except NotThisForm as reason:
            first = first or reason
    raise first or NotThisForm("no proposal")


def _twin(model: nn.Module, form: DecoderForm) -> nn.Module:
    """The host around its layers, small, in fp32, on the CPU; shares nothing that a run changes."""
    twin = _shallow(model)
    config = copy.deepcopy(getattr(model, "config", None))
    if config is not None:
        config._attn_implementation = "eager"
        if isinstance(getattr(config, "sliding_window", None), int):
            config.sliding_window = WINDOW
    base = twin._modules[form.base] = _shallow(model.get_submodule(form.base))
    generator = torch.Generator().manual_seed(7)
    for module in (twin, base):
        if "config" in vars(module):
            vars(module)["config"] = config
    for owner, name, child in [*_children(twin), *_children(base)]:
        if child is base:
            continue
        if isinstance(child, nn.ModuleList):
            continue
        owner._modules[name] = _small(child, generator)
    return twin.eval()


def _children(module: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [(module, name, child) for name, child in module.named_children()]


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for name, value in list(vars(twin).items()):
        if isinstance(value, dict):
            vars(twin)[name] = type(value)() if name.endswith("_hooks") else copy.copy(value)
    vars(twin).pop("forward", None)
    return twin


def _small(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy in fp32 on the CPU with redrawn parameters; matrices keep ``VOCABULARY`` rows."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 2:
            values = torch.randn(VOCABULARY, shape[1], generator=generator) * 20 / shape[1] ** 0.5
        else:
            values = 0.7 + 0.4 * torch.randn(shape, generator=generator)
        memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
    for buffer in module.buffers():
        kept = buffer.detach().to("cpu", copy=True)
        memo[id(buffer)] = kept.float() if kept.is_floating_point() else kept
    twin = copy.deepcopy(module, memo)
    for inner in twin.modules():
        for name, value in list(vars(inner).items()):
            if name.endswith("_hooks") and isinstance(value, dict):
                vars(inner)[name] = type(value)()
        vars(inner).pop("forward", None)
        if isinstance(inner, nn.Embedding):
            inner.padding_idx = None  # for training only, and beyond the small vocabulary
    return twin


def _ids() -> torch.Tensor:
    return (torch.arange(TOKENS) * 7 % VOCABULARY)[None]


def _run(twin: nn.Module, form: DecoderForm, *, start: int = 0, padding: int = 0) -> _Record:
    record = _Record()
    base = twin.get_submodule(form.base)
    layers = base.get_submodule(form.layers)
    stand_ins = nn.ModuleList(
        _StandIn(layer, index, record) for index, layer in enumerate(layers.children())
    )
    base._modules[form.layers] = stand_ins
    mask = torch.ones(1, TOKENS, dtype=torch.int64)
    mask[:, :padding] = 0
    positions = _positions(start, padding)
    try:
        out = twin(input_ids=_ids(), attention_mask=mask, position_ids=positions, use_cache=False)
    except PROBE_ERRORS as error:
        raise NotThisForm(f"the forward around the layers cannot be run alone: {error}") from error
    finally:
        base._modules[form.layers] = layers
    record.logits = getattr(out, "logits", None)
    return record


def _positions(start: int, padding: int) -> torch.Tensor:
    return (torch.arange(TOKENS) - padding).clamp_min(0)[None] + start


def _compare(
    twin: nn.Module, spec: DecoderSpec, record: _Record, *, start: int = 0, padding: int = 0
) -> None:
    base = twin.get_submodule(spec.form.base)
    if record.order != list(range(len(spec.layers))):
        raise NotThisForm(f"of {len(spec.layers)} layers the host calls, in order, {record.order}")
    _agree("embedding", _embed(base, spec.embedding), record.hidden[0])
    for index in range(1, len(spec.layers)):
        if record.hidden[index] is not record.returned[index - 1]:
            _agree(f"input of layer {index}", record.returned[index - 1], record.hidden[index])
    for index, given in enumerate(record.arguments):
        _compare_layer(base, spec, index, given, start, padding)
    if record.logits is None:
        raise NotThisForm("the host returns no logits")
    _agree("logits", _logits(twin, spec.head, record.returned[-1]), record.logits)


def _embed(base: nn.Module, spec: EmbeddingSpec) -> torch.Tensor:
    return spec.table(base)[_ids()] * spec.scale


def _logits(twin: nn.Module, spec: HeadSpec, x: torch.Tensor) -> torch.Tensor:
    logits = spec.scale * spec.projection.wide(twin, spec.norm.wide(twin, x))
    if spec.soft_cap is None:
        return logits
    return spec.soft_cap * torch.tanh(logits / spec.soft_cap)


def _compare_layer(
    base: nn.Module, spec: DecoderSpec, index: int, given: dict[str, Any], start: int, padding: int
) -> None:
    attention, where = spec.layers[index].attention, f"layer {index}"
    mask = given.get("attention_mask")
    if not isinstance(mask, torch.Tensor) or mask.dim() != 4:
        raise NotThisForm(f"{where}: eager attention gets no mask [B, 1, T, N]")
    window = None if attention.window is None else WINDOW
    wanted = visible(TOKENS, TOKENS, window, mask.device)
    got = (mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0)[padding:, padding:]
    if not torch.equal(got, wanted[padding:, padding:]):
        raise NotThisForm(
            f"{where}: the host's mask is not causal with window {attention.window}: it differs "
            f"for {int((got != wanted[padding:, padding:]).sum())} of {got.numel()} pairs"
        )
    if attention.rotary is None:
        return
    if spec.form.rotary is None or given.get("position_embeddings") is None:
        raise NotThisForm(f"{where}: no rotary module gives it its rotation")
    kind = spec.form.layer_types[index]
    arguments = {} if kind is None else {"layer_type": kind}
    rotary = copy.deepcopy(base.get_submodule(spec.form.rotary))
    x = torch.zeros(1, 1, 1)
    rows = [
        rotary(x, position_ids=p.view(1, 1), **arguments) for p in _positions(start, padding)[0]
    ]
    for part, name in enumerate(("cos", "sin")):
        table = torch.cat([row[part] for row in rows], dim=1)
        _agree(f"{where}: {name}", table, given["position_embeddings"][part])


def _agree(what: str, ours: torch.Tensor, host: torch.Tensor) -> None:
    if ours.shape != host.shape:
        raise NotThisForm(f"{what}: shape {tuple(ours.shape)} against {tuple(host.shape)}")
    error = float((ours - host).abs().max() / host.abs().max().clamp_min(1e-30))
    if not error <= TOLERANCE:
        raise NotThisForm(f"{what}: differs from the host by {error:.1e}, limit {TOLERANCE:g}")
