"""What a whole decoder computes: embedding, proven layers, rotary tables, head."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..catalogue.decoder_layer import LayerSpec
from ..catalogue.head import EmbeddingSpec, HeadSpec, propose_head, read_embedding
from ..catalogue.rms_norm import RmsNormSpec
from ..catalogue.spec import Norm, NotThisForm, child_named
from ..decision import Bound
from ..plan import Plan

FINAL_NORM = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


@dataclass(frozen=True)
class DecoderForm:
    """Where the parts of a decoder are: ``base`` from the model, the others from ``base``.

    ``layer_types`` holds the argument that the rotary wants for each layer, None where it takes
    none.
    """

    base: str
    embedding: str
    layers: str
    norm: str
    rotary: str | None
    layer_types: tuple[str | None, ...]

    def layer_path(self, index: int) -> str:
        """Path of a layer from the model."""
        return f"{self.base}.{self.layers}.{index}"


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder that the loop can run; ``layers[i]`` describes ``form.layer_path(i)``."""

    form: DecoderForm
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    head: HeadSpec


def read_form(model: nn.Module) -> DecoderForm:
    """Find the parts of a decoder by their form.

    Raises:
        NotThisForm: a part is missing, is there twice, or is one that no loop reads.
    """
    bases = {
        name: child
        for name, child in model.named_children()
        if any(isinstance(inner, nn.ModuleList) for inner in child.children())
    }
    if len(bases) != 1:
        raise NotThisForm(f"one child with a list of layers is wanted, found {sorted(bases)}")
    path, base = next(iter(bases.items()))
    children = dict(base.named_children())
    layers = _one(children, nn.ModuleList, "list of layers")
    embedding = _one(children, nn.Embedding, "token embedding")
    norm = child_named(children, FINAL_NORM)
    if norm is None:
        raise NotThisForm(f"no final norm among {sorted(children)}")
    rest = {
        name: child
        for name, child in children.items()
        if name not in (layers, embedding, norm) and not isinstance(child, nn.Dropout)
    }
    rotary = [name for name, child in rest.items() if _is_rotary(child)]
    if len(rotary) > 1 or len(rest) > len(rotary):
        raise NotThisForm(f"no loop reads {sorted(rest)} beside layers, embedding and norm")
    module = children[rotary[0]] if rotary else None
    count = len(children[layers]._modules)  # children() leaves out what is there twice
    types = _layer_types(base, module, count)
    return DecoderForm(path, embedding, layers, norm, rotary[0] if rotary else None, types)


def read_decoder(model: nn.Module, plan: Plan) -> DecoderSpec:
    """The proven description of ``model`` as a decoder.

    Raises:
        NotThisForm: it is none that a loop can run, with the regions and reasons that decided.
    """
    from .wiring import prove_wiring

    form = read_form(model)
    _check_own_code(model, form)
    layers, norm = layer_specs(plan, form), final_norm(plan, form)
    for module in (model, model.get_submodule(form.base)):
        _check_scalars(module)
    embedding = read_embedding(model.get_submodule(form.base), form.embedding)
    heads = propose_head(model, norm, getattr(model, "config", None))
    candidates = (DecoderSpec(form, embedding, layers, head) for head in heads)
    return prove_wiring(model, form, candidates)


def layer_specs(plan: Plan, form: DecoderForm) -> tuple[LayerSpec, ...]:
    """The proven spec of every layer.

    Raises:
        NotThisForm: layers that are not bound, each with what explain says of it.
    """
    specs: list[LayerSpec] = []
    missing: list[str] = []
    for index in range(len(form.layer_types)):
        path = form.layer_path(index)
        found = plan.candidates.get(path)
        if found is not None and found.structure.name == "decoder_layer":
            specs.append(found.spec)
            if not found.spec.attention.causal:
                missing.append(f"  {path}: its attention is bidirectional")
        else:
            missing.append(f"  {path}: {_why(plan, path)}")
    if missing:
        lines = "\n".join(missing)
        raise NotThisForm(
            f"{len(missing)} of {len(form.layer_types)} decoder layers are not bound:\n{lines}"
        )
    return tuple(specs)


def final_norm(plan: Plan, form: DecoderForm) -> Norm:
    """The proven RMS norm behind the last layer; its path from the model.

    Raises:
        NotThisForm: it is none, or is not bound.
    """
    path = f"{form.base}.{form.norm}"
    found = plan.candidates.get(path)
    if found is None or not isinstance(found.spec, RmsNormSpec) or not found.spec.weight:
        raise NotThisForm(f"{path}: {_why(plan, path)}")
    return Norm(path, found.spec.eps, found.spec.zero_centered)


def _why(plan: Plan, path: str) -> str:
    """What a plan says of ``path``, or else of the first region inside that is not bound."""
    rows = [d for d in plan.decisions if d.path == path and not isinstance(d, Bound)]
    rows += [
        d for d in plan.decisions if d.path.startswith(path + ".") and not isinstance(d, Bound)
    ]
    if not rows:
        return "it has not the form of a decoder layer"
    row = rows[0]
    where = "" if row.path == path else f"{row.path.removeprefix(path + '.')}: "
    return f"{where}{row.reason}"


def _one(children: dict[str, nn.Module], kind: type, what: str) -> str:
    found = [name for name, child in children.items() if isinstance(child, kind)]
    if len(found) != 1:
        raise NotThisForm(f"one {what} is wanted, found {found}")
    return found[0]


def _is_rotary(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    return "position_ids" in names and not any(True for _ in module.parameters())


def _check_own_code(model: nn.Module, form: DecoderForm) -> None:
    """Refuse what the loop would pass over: forwards of instances, one layer at two places."""
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise NotThisForm(f"{name or type(module).__name__} carries its own instance forward")
    places: dict[int, str] = {}
    for index in range(len(form.layer_types)):
        path = form.layer_path(index)
        first = places.setdefault(id(model.get_submodule(path)), path)
        if first != path:
            raise NotThisForm(f"{path} is the same module as {first}, and so are their caches")


def _check_scalars(module: nn.Module) -> None:
    """Refuse a number on the model itself that no loop reads."""
    sizes = {s for p in module.parameters() for s in p.shape}
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, float) or (isinstance(value, int) and value not in sizes):
            if name in ("padding_idx", "vocab_size") or ("embed" in name and "multiplier" in name):
                continue
            raise NotThisForm(f"{type(module).__name__}: no loop reads {name} = {value!r}")


def _layer_types(base: Any, rotary: nn.Module | None, count: int) -> tuple[str | None, ...]:
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return (None,) * count
    types = tuple(getattr(getattr(base, "config", None), "layer_types", None) or ())
    if len(types) < count:
        raise NotThisForm(
            f"the rotary wants a type for each of {count} layers, the config has {len(types)}"
        )
    return types[:count]
