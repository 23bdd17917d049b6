"""Notices when a module is no longer what a graph has baked in.

A graph holds addresses, so it is stale once a parameter, buffer or submodule has been replaced or
moved. In-place writes are seen by the graph itself and need no new one.
"""

from __future__ import annotations

import sys
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _torch_module

_pointer = torch.Tensor.data_ptr
_training = itemgetter("training")
_COLLECTOR = "transformers.utils.output_capturing"


class Watch:
    """The addresses and parts of one module, and a counter of their changes.

    ``changed()`` walks everything, once per forward or generate. ``generation`` is what a decode
    step compares; ``bump()`` advances it from overrides of ``_apply`` and ``load_state_dict``.

    Args:
        module: the root; everything below it is watched.
        versions: also notice in-place writes to parameters and buffers. For precisions that keep a
            packed copy; the graphs themselves do not need it.
    """

    def __init__(self, module: nn.Module, *, versions: bool = False) -> None:
        self.generation = 0
        self._module = module
        self._versioned = versions
        self._look()

    @property
    def device(self) -> torch.device | None:
        """The one device of all parameters and buffers; None when there are none or several."""
        return self._device

    def bump(self) -> None:
        """Something has changed or may have: every graph recorded so far is stale."""
        self.generation += 1

    def changed(self) -> bool:
        """Compare everything with the last look; on a difference look again and bump."""
        now = [*chain.from_iterable(map(dict.values, self._tables))]
        same = (
            len(now) == len(self._held)
            and all(map(is_, now, self._held))
            and [*map(_pointer, self._tensors)] == self._pointers
            and [*map(type, self._modules)] == self._types
            and [d.get("forward") for d in self._vars] == self._forwards
            and (not self._versioned or self.versions() == self._versions)
        )
        if same:
            return False
        self._look()
        self.bump()
        return True

    def refusal(self) -> str | None:
        """Why the module must run eagerly now: a hook, or a submodule in training mode."""
        if any(self._hooks):
            hooked = self._hooked()
            if hooked is not None:
                return hooked
        if any(map(_training, self._vars)):
            return "a submodule is in training mode"
        return None

    def versions(self) -> list[int]:
        """Counts of in-place writes to every parameter and buffer; 0 for inference tensors."""
        return [0 if t.is_inference() else t._version for t in self._tensors]

    def storages(self) -> set[int]:
        """Identities of the memory that holds the parameters and buffers."""
        return {t.untyped_storage().data_ptr() for t in self._tensors}

    def _look(self) -> None:
        self._modules = [*self._module.modules()]
        self._vars = [vars(m) for m in self._modules]
        self._types = [*map(type, self._modules)]
        self._forwards = [d.get("forward") for d in self._vars]
        tables: list[dict[str, Any]] = []
        for module in self._modules:
            tables += [module._modules, module._parameters, module._buffers]
        self._tables = [t for t in tables if t]
        self._held = [*chain.from_iterable(map(dict.values, self._tables))]
        self._tensors = [x for x in self._held if isinstance(x, torch.Tensor)]
        self._pointers = [*map(_pointer, self._tensors)]
        self._versions = self.versions() if self._versioned else []
        devices = {t.device for t in self._tensors}
        self._device = devices.pop() if len(devices) == 1 else None
        self._hooks: list[Any] = [
            _torch_module._global_forward_hooks,
            _torch_module._global_forward_pre_hooks,
            *chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in self._modules),
        ]

    def _hooked(self) -> str | None:
        if any(self._hooks[:2]):
            return "a global forward hook is registered"
        for name, module in self._module.named_modules():
            hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
            if any(getattr(hook, "__module__", "") != _COLLECTOR for hook in hooks):
                return f"a forward hook is registered on {name or type(module).__name__}"
        # Left are the hooks that transformers installs once and for all to collect hidden states.
        # They do something only while a forward around ours is collecting.
        collector = getattr(sys.modules.get(_COLLECTOR), "_active_collector", None)
        if collector is not None and collector.get() is not None:
            return "a forward around this one collects its hidden states"
        return None
