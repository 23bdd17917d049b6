"""What a model is calibrated and compared on: the caller's data, or text that it samples itself."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ..binding import host_class
from ..prove import PROBE_ERRORS

WINDOW_TOKENS = 256  # longer rows of ids are cut: bounds logits and activations of one pass
MOST_POSITIONS = 16384  # of calibration data; the rest is left
FIDELITY_POSITIONS = 1024  # fewer say nothing about the worst
SAMPLED_ROWS, SAMPLED_TOKENS, SEED = 18, 128, 20


class NoText(Exception):
    """The model cannot be run on data of its own; the text says why."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call of the model."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def run(self, model: nn.Module, device: torch.device) -> Any:
        """What the model's class returns for it: hooks on the model itself do not run."""
        args, kwargs = tree_map(
            lambda x: x.to(device) if isinstance(x, torch.Tensor) else x,
            (self.args, dict(self.kwargs)),
        )
        forward = type(model).forward  # the bound one, where the model itself is a region
        names = inspect.signature(forward).parameters
        if "use_cache" in names:
            kwargs.setdefault("use_cache", False)
        return forward(model, *args, **kwargs)

    @property
    def ids(self) -> torch.Tensor | None:
        """Token ids ``[B, T]`` where they are the only argument."""
        found = self.kwargs.get("input_ids")
        alone = not self.args and set(self.kwargs) == {"input_ids"}
        return found if alone and isinstance(found, torch.Tensor) and found.dim() == 2 else None

    @property
    def positions(self) -> int:
        """Rows of the output, as far as the input tells."""
        tensors = [x for x in tree_leaves((self.args, dict(self.kwargs))) if _is_tensor(x)]
        if not tensors:
            return 1
        ids = self.kwargs.get("input_ids")
        first = ids if isinstance(ids, torch.Tensor) else tensors[0]
        return first.numel() if not first.is_floating_point() else first.shape[0]

    @property
    def kept(self) -> torch.Tensor | None:
        """Which of the ``B * T`` positions are no padding; None: all."""
        mask = self.kwargs.get("attention_mask")
        return mask.flatten().bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _cloned(x: Any) -> Any:
    return x.detach().clone() if _is_tensor(x) else x


def read_calls(calibration: Any, model: nn.Module) -> list[Call]:
    """The caller's data as calls of the model, rows of ids in windows of ``WINDOW_TOKENS``.

    Raises:
        TypeError: an item that is no call.
        ValueError: there is none, or one with token ids that the model does not have.
    """
    if isinstance(calibration, (torch.Tensor, Mapping)):
        calibration = [calibration]
    if isinstance(calibration, nn.Module):
        raise TypeError("attach: calibration must be data or a function, got a module")
    calls: list[Call] = []
    positions = 0
    found = _recorded(calibration, model) if callable(calibration) else map(_call, calibration)
    vocabulary = _vocabulary(model)
    for call in found:
        if not call.args and call.kwargs.keys() <= {"input_ids", "attention_mask"}:
            _check_ids(call.kwargs.get("input_ids"), vocabulary)
        for window in _windows(call):
            calls.append(window)
            positions += window.positions
        if positions >= MOST_POSITIONS:
            break
    if not calls:
        raise ValueError("attach: calibration must have at least one item, got none")
    return calls


def _vocabulary(model: nn.Module) -> int | None:
    """Rows of the model's embedding of tokens; None where it has none that is known."""
    try:
        table = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers, of models without one
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _check_ids(ids: Any, vocabulary: int | None) -> None:
    """Refuse token ids that the embedding would fail on, which on a GPU ends the process.

    Raises:
        ValueError: none at all, or one outside the vocabulary.
    """
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_meta:
        return
    if not ids.numel():
        raise ValueError(
            f"attach: calibration must have token ids, got a tensor of shape {tuple(ids.shape)}"
        )
    low, high = (int(x) for x in ids.aminmax())
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        raise ValueError(
            f"attach: calibration must have token ids from 0 to {vocabulary - 1}, got "
            f"{low if low < 0 else high}"
        )


def _call(item: Any) -> Call:
    if isinstance(item, Mapping):
        return Call(kwargs={str(name): value for name, value in item.items()})
    if isinstance(item, torch.Tensor):
        if item.is_floating_point():
            return Call((item,))
        if item.dim() not in (1, 2) or item.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                "attach: calibration must have token ids int64 [B, T] or [T], got "
                f"{item.dtype} of shape {tuple(item.shape)}"
            )
        return Call(kwargs={"input_ids": item.long().view(-1, item.shape[-1])})
    if isinstance(item, (list, tuple)) and item:
        if all(isinstance(i, int) for i in item):
            return Call(kwargs={"input_ids": torch.tensor([item], device="cpu")})
        if all(map(_is_tensor, item)):
            return Call(tuple(item))
    raise TypeError(
        "attach: calibration must have token ids, dicts of the forward's arguments or tuples of "
        f"tensors, got {type(item).__name__}; text has to be tokenised first"
    )


def _recorded(call_model: Callable[[nn.Module], Any], model: nn.Module) -> list[Call]:
    """The calls that a function makes of the model."""
    calls: list[Call] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        args, kwargs = tree_map(_cloned, (args, kwargs))
        calls.append(Call(args, kwargs))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            call_model(model)
    finally:
        hook.remove()
    if any(_has_state(c) for c in calls):
        raise ValueError(
            "attach: calibration must call the model without a cache (use_cache=False), got calls "
            "that pass one"
        )
    return calls


def _has_state(call: Call) -> bool:
    names = ("past_key_values", "cache", "cache_params")
    return any(call.kwargs.get(name) is not None for name in names)


def _windows(call: Call) -> Iterator[Call]:
    ids = call.ids
    if ids is None:
        yield call
        return
    for row in ids.split(1):
        for window in row.split(WINDOW_TOKENS, dim=1):
            yield Call(kwargs={"input_ids": window})


def halves(calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """Calls to calibrate on and others to compare on: by turns, or halves of a single row."""
    ids = calls[0].ids if len(calls) == 1 else None
    if ids is not None and ids.shape[1] > 1:
        cut = ids.shape[1] // 2
        parts = ids[:, :cut], ids[:, cut:]
        calls = [Call(kwargs={"input_ids": part}) for part in parts]
    return calls[::2], calls[1::2]


def total(calls: Iterable[Call]) -> int:
    """Positions of all calls."""
    return sum(call.positions for call in calls)


def enough(calls: list[Call]) -> list[Call]:
    """The first calls that have ``FIDELITY_POSITIONS`` together, or all."""
    found: list[Call] = []
    for call in calls:
        if total(found) >= FIDELITY_POSITIONS:
            break
        found.append(call)
    return found


def joined(calls: Sequence[Call], positions: int) -> list[Call]:
    """Calls of ids of one length as batches of up to ``positions``, others as they are."""
    found: list[Call] = []
    for call in calls:
        ids, last = call.ids, found[-1].ids if found else None
        if (
            ids is not None
            and last is not None
            and ids.shape[1] == last.shape[1]
            and ids.numel() + last.numel() <= positions
        ):
            found[-1] = Call(kwargs={"input_ids": torch.cat([last, ids])})
        else:
            found.append(call)
    return found


def digest(calls: Iterable[Call]) -> str:
    """SHA-256 of every value of every call."""
    found = hashlib.sha256()
    for call in calls:
        for leaf in tree_leaves((call.args, sorted(call.kwargs.items()))):
            if isinstance(leaf, torch.Tensor):
                found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
                found.update(leaf.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(leaf).encode())
    return found.hexdigest()


@torch.no_grad()
def sample_text(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Ids ``[SAMPLED_ROWS, SAMPLED_TOKENS]`` that a language model draws, each row from another id.

    Raises:
        NoText: it is none.
    """
    generator = torch.Generator().manual_seed(SEED)
    forward = host_class(model).forward
    config: Any = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if "input_ids" not in inspect.signature(forward).parameters or not isinstance(vocabulary, int):
        raise NoText("it is no language model that could sample its own")
    ids = torch.randint(0, vocabulary, (SAMPLED_ROWS, 1), generator=generator, device="cpu")
    cache = None
    try:
        for _ in range(SAMPLED_TOKENS - 1):
            out = forward(
                model, input_ids=ids[:, -1:].to(device), past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            chances = out.logits[:, -1].float().softmax(-1).cpu()
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], dim=1)
    except PROBE_ERRORS as error:
        text = str(error).splitlines()[0] if str(error) else ""
        raise NoText(f"it could not sample its own: {type(error).__name__}: {text}") from error
    if cache is None:
        raise NoText("it could not sample its own: it keeps no cache")
    return ids
