"""A loaded model with its plan: what ``load_model`` returns."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from flash_rt.structures.binding import PLAN
from flash_rt.structures.plan import Plan


class Handle:
    """A model, attached; accepted wherever ``structures`` takes a model.

    ``with load_model(...) as model:`` closes it at the end.

    Attributes:
        name: what the user called it.
        tokenizer, processor: of the checkpoint; None where it has none.
    """

    def __init__(
        self, model: nn.Module, *, name: str, tokenizer: Any = None, processor: Any = None
    ) -> None:
        self._model: nn.Module | None = model
        self.name = name
        self.tokenizer, self.processor = tokenizer, processor

    def __repr__(self) -> str:
        if self._model is None:
            return f"{type(self).__name__}({self.name!r}, closed)"
        kind = type(self._model).__name__
        return f"{type(self).__name__}({self.name!r}, {kind} on {self.device}, {self.plan})"

    @property
    def model(self) -> Any:
        """The host model, an ``nn.Module``.

        Raises:
            RuntimeError: the handle is closed.
        """
        if self._model is None:
            raise RuntimeError(f"handle: {self.name!r} is closed; load it again")
        return self._model

    @property
    def forward(self) -> Callable[..., Any]:
        """The model's own ``forward``, captured while attached."""
        forward: Callable[..., Any] = self.model.forward
        return forward

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None while nothing is attached."""
        found: Plan | None = vars(self.model).get(PLAN)
        return found

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        model, plan = self.model, self.plan
        if plan is not None and plan.packing is not None:  # full-precision weights may be elsewhere
            return plan.packing.device
        first = next(model.parameters(), None)
        first = next(model.buffers(), None) if first is None else first
        return torch.device("cpu") if first is None else first.device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """What the model is for; see the kind of handle."""
        raise NotImplementedError

    def detach(self) -> None:
        """Give the host back, bit for bit; ``predict`` then runs the host's own code."""
        self._forget()
        if self.plan is not None:
            self.plan.detach()

    def _forget(self) -> None:
        """Let go of everything that refers to the model."""

    def close(self) -> None:
        """Detach and let go of the model; its memory is free when nobody else holds it."""
        if self._model is None:
            return
        device, plan = self.device, self.plan
        if plan is not None and plan.packing is not None and plan.packing.hosts.released:
            self._forget()
            self._model = plan = None
            gc.collect()  # model and plan refer to each other
        else:
            self.detach()
        self._model = None
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Without grad, on the model's device whatever the thread's own is."""
        on_gpu = self.device.type == "cuda"
        place = torch.cuda.device(self.device) if on_gpu else contextlib.nullcontext()
        with place, torch.no_grad():
            yield
