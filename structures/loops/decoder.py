"""What a whole decoder computes, read from a host model: embedding, layers, rotary tables, head."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..catalogue.decoder_layer import LayerSpec, propose_layer
from ..catalogue.head import FINAL_NORM, EmbeddingSpec, HeadSpec, propose_head, read_embedding
from ..catalogue.spec import NotThisForm, audit_scalars, child_named

_BASE_SCALARS = (
    "name_or_path padding_idx vocab_size gradient_checkpointing embedding_multiplier has_sliding_layers".split()
)
_MODEL_SCALARS = "loss_type name_or_path vocab_size embedding_multiplier".split()


@dataclass(frozen=True)
class DecoderForm:
    """Where the parts of a decoder are, as paths from the model, before anything is known of its layers."""

    base: str
    embedding: str
    layers: str
    norm: str
    rotary: str | None
    layer_types: tuple[str | None, ...]

    def layer_path(self, index: int) -> str:
        return f"{self.base}.{self.layers}.{index}"


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder that the loop can run: ``layers[i]`` describes the region at ``form.layer_path(i)``."""

    form: DecoderForm
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec


def read_form(model: nn.Module) -> DecoderForm:
    """Find the parts of a decoder by their form.

    Raises:
        NotThisForm: a part is missing, there are two of one, or something that no loop reads is present.
    """
    bases = {
        n: c
        for n, c in model.named_children()
        if any(isinstance(m, nn.ModuleList) for m in c.children())
    }
    if len(bases) != 1:
        raise NotThisForm(f"a decoder has one child that holds its layers, got {sorted(bases)}")
    base_path, base = next(iter(bases.items()))
    children = dict(base.named_children())
    layers = _one(children, nn.ModuleList, "list of layers")
    embedding = _one(children, nn.Embedding, "token embedding")
    norm = child_named(children, FINAL_NORM)
    if norm is None:
        raise NotThisForm(f"no final norm among {sorted(children)}")
    rest = {n: c for n, c in children.items() if n not in (layers, embedding, norm)}
    rest = {n: c for n, c in rest.items() if not isinstance(c, nn.Dropout)}
    rotary = [n for n, c in rest.items() if _is_rotary(c)]
    if len(rotary) > 1 or len(rest) > len(rotary):
        raise NotThisForm(f"no structure reads {sorted(set(rest) - set(rotary))} beside {rotary}")
    audit_scalars(base, _BASE_SCALARS, type(base).__name__)
    audit_scalars(model, _MODEL_SCALARS, type(model).__name__)
    count = len(children[layers])  # type: ignore[arg-type]
    types = _layer_types(base, children.get(rotary[0]) if rotary else None, count)
    return DecoderForm(base_path, embedding, layers, norm, rotary[0] if rotary else None, types)


def propose_decoder(model: nn.Module, layers: Mapping[str, LayerSpec] | None = None) -> DecoderSpec:
    """Read a whole decoder; ``layers`` holds specs that are proven already, by path.

    Raises:
        NotThisForm: as ``read_form``, or a layer of another form, named by its path.
    """
    form = read_form(model)
    base = model.get_submodule(form.base)
    config = getattr(model, "config", None)
    specs = []
    for index in range(len(form.layer_types)):
        path = form.layer_path(index)
        known = (layers or {}).get(path)
        try:
            specs.append(known or next(propose_layer(model.get_submodule(path), config)))
        except NotThisForm as reason:
            raise NotThisForm(f"{path}: {reason}") from None
    head = next(propose_head(model, form.base, form.norm, config))
    return DecoderSpec(form, read_embedding(base, form.embedding), tuple(specs), head)


def _one(children: dict[str, nn.Module], kind: type, what: str) -> str:
    found = [name for name, child in children.items() if isinstance(child, kind)]
    if len(found) != 1:
        raise NotThisForm(f"a decoder has one {what}, got {found}")
    return found[0]


def _is_rotary(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return "position_ids" in parameters and not list(module.parameters())


def _layer_types(base: nn.Module, rotary: nn.Module | None, count: int) -> tuple[str | None, ...]:
    """The argument that the host's rotary wants for each layer, None where it takes none."""
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return (None,) * count
    types = tuple(getattr(getattr(base, "config", None), "layer_types", ()))
    if len(types) < count:
        raise NotThisForm(
            f"the rotary takes a layer type, and the configuration names {len(types)} for {count} layers"
        )
    return types[:count]
