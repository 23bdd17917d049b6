"""Values are rebuilt in the host's own type, and keys tell apart what a graph must tell apart."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flash_rt.structures.capture.signature import NotCapturableError, Signature, read
from flash_rt.structures.capture.trees import NotATreeError, flatten, items

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Plain:
    value: torch.Tensor
    note: str = "x"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    count: int


@dataclass
class Slotted:
    __slots__ = ("value",)
    value: torch.Tensor


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """Items and attributes at once, as the outputs of transformers and diffusers."""

    logits: torch.Tensor
    states: Any = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                OrderedDict.__setitem__(self, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("rebuilding must not run the host's methods")


class Color(enum.Enum):
    RED = 1


def t(value: float) -> torch.Tensor:
    return torch.full((2,), value)


VALUES = {
    "tensor": t(1),
    "list": [t(1), None, [t(2)]],
    "tuple": (t(1), 3, ("a", t(2))),
    "namedtuple": Pair(t(1), (t(2),)),
    "torch result": torch.max(torch.rand(2, 3), dim=1),
    "dict": {"b": t(1), "a": {"c": t(2)}, 3: 0.5},
    "ordered": OrderedDict(b=t(1), a=t(2)),
    "dataclass": Plain(t(1), "y"),
    "frozen": Frozen(t(1), 4),
    "slotted": Slotted(t(1)),
    "output": Output(t(1), (t(2), t(3))),
    "output without states": Output(t(1)),
    "constants": (None, True, 2, 1.5, "s", torch.float16, torch.Size([2]), Color.RED),
}


def shown(value: Any) -> Any:
    """Types and contents, all the way down."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Output):
        parts = [*vars(value).items()], [*OrderedDict.items(value)]
        return type(value), [[(k, shown(v)) for k, v in p] for p in parts]
    try:
        return type(value), [(k, shown(v)) for k, v in items(value)]
    except NotATreeError:
        return type(value), value


@pytest.mark.parametrize("name", VALUES)
def test_rebuilding_gives_the_same_type_and_content_from_other_tensors(name: str) -> None:
    value = VALUES[name]
    leaves, build = flatten(value)
    clones = [leaf.clone() for leaf in leaves]
    rebuilt = build(clones)
    assert shown(rebuilt) == shown(value)
    rebuilt_leaves, _ = flatten(rebuilt)
    assert all(a is b for a, b in zip(rebuilt_leaves, clones, strict=True))


def test_items_and_attributes_of_an_output_stay_the_same_object() -> None:
    leaves, build = flatten(Output(t(1), (t(2), t(3))))
    made = build([leaf * 10 for leaf in leaves])
    assert len(leaves) == 3
    assert made["states"] is made.states
    assert made["logits"] is made.logits
    assert [*made] == ["logits", "states"]
    assert made.states[1].tolist() == [30.0, 30.0]
    assert build(leaves) is not build(leaves)
    assert Output(t(1)).states is None
    assert flatten(Output(t(1)))[1]([t(5)]).states is None


def test_lists_are_new_at_every_build() -> None:
    leaves, build = flatten([t(1)])
    first = build(leaves)
    first.append(None)
    assert len(build(leaves)) == 1


@pytest.mark.parametrize("value", [object(), [{1, 2}], {"a": torch.nn.Linear(1, 1)}, lambda: 0])
def test_unknown_types_are_refused_by_name(value: Any) -> None:
    with pytest.raises(NotATreeError, match="is no container of tensors"):
        flatten(value)


@pytest.mark.parametrize("name", VALUES)
def test_keys_list_the_tensors_in_the_order_of_flatten(name: str) -> None:
    _, tensors = read([("x", VALUES[name])], CPU, grad=False)
    leaves, _ = flatten([VALUES[name]])
    assert [*map(id, tensors)] == [*map(id, leaves)]


def key(*args: Any, **kwargs: Any) -> Any:
    def function(a: Any, b: Any = 1.0, *rest: Any, c: Any = None) -> None: ...

    return read(Signature(function).named(args, kwargs), CPU, grad=True)[0]


def test_spelling_of_a_call_makes_no_difference() -> None:
    x = t(1)
    expected = key(x, 2, c="s")
    assert key(x, c="s", b=2) == expected
    assert key(c="s", b=2, a=x) == expected
    assert key(x, c=None) == key(x)
    assert hash(expected) == hash(key(t(7), 2, c="s"))


DIFFERENT = {
    "bool and int": (True, 1),
    "int and float": (1, 1.0),
    "signed zeros": (0.0, -0.0),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.float16)),
    "strides": (torch.zeros(4, 4), torch.zeros(4, 4).t()),
    "list and tuple": ([1], (1,)),
    "nesting": ([1, [2]], [[1], 2]),
    "labels": ({"a": 1}, {"b": 1}),
    "order of labels": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "tensor and none": (torch.zeros(2), None),
    "containers": (Plain(torch.zeros(2)), Frozen(torch.zeros(2), 1)),
    "enum": (Color.RED, 1),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_keys_differ(name: str) -> None:
    one, other = DIFFERENT[name]
    assert key(one) != key(other)


def test_keys_agree_where_only_content_or_irrelevant_strides_differ() -> None:
    assert key(t(1)) == key(t(2))
    wide = torch.zeros(1, 9)
    assert key(wide[:, 2:5]) == key(torch.zeros(1, 3))
    assert key(float("nan")) == key(float("nan"))


def test_a_tensor_passed_twice_is_another_key() -> None:
    x, y = t(1), t(1)
    assert key(x, x) != key(x, y)
    assert key(x, x) == key(y, y)


class Cache:
    pass


class TheirCache(Cache):
    pass


class LengthOnly:
    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (TheirCache(), r"argument a carries state \(TheirCache\)"),
        ([LengthOnly()], r"argument a carries state \(LengthOnly\)"),
        (object(), r"argument a is neither a tensor nor an immutable constant \(object\)"),
        (torch.Generator(), r"neither a tensor nor an immutable constant \(Generator\)"),
        (lambda: 0, r"neither a tensor nor an immutable constant \(function\)"),
        ({1, 2}, r"neither a tensor nor an immutable constant \(set\)"),
        (torch.zeros(2, device="meta"), "argument a is torch.strided on meta"),
        (torch.zeros(2).to_sparse(), "argument a is torch.sparse_coo on cpu"),
        (torch.zeros(2, requires_grad=True), "argument a requires grad"),
    ],
)
def test_what_keeps_a_call_from_being_captured(value: Any, reason: str) -> None:
    with pytest.raises(NotCapturableError, match=reason):
        key(value)


def test_requires_grad_is_no_reason_without_grad() -> None:
    x = torch.zeros(2, requires_grad=True)
    assert read([("x", x)], CPU, grad=False)[1][0] is x


def test_transformers_outputs_are_rebuilt() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = outputs.CausalLMOutputWithPast(logits=t(1), hidden_states=(t(2), t(3)))
    leaves, build = flatten(made)
    again = build([leaf + 1 for leaf in leaves])
    assert type(again) is type(made)
    assert [*again.keys()] == ["logits", "hidden_states"]
    assert again.logits is again["logits"] is again[0]
    assert again.loss is None
    assert again.to_tuple()[1][1].tolist() == [4.0, 4.0]
    again.loss = t(9)
    assert "loss" in again.keys()  # noqa: SIM118 - their own __contains__ is not what is tested
