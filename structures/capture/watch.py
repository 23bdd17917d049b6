"""Notices when a module is no longer what a graph has baked in.

A graph holds addresses, so it is stale once a parameter, buffer or submodule has been replaced or
moved, or once a plain attribute (an eps, a scale) or a field of a config that chose the host's way
has changed. In-place writes are seen by the graph itself and need no new one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _torch_module

_pointer = torch.Tensor.data_ptr
# One call in CUDA builds of torch, against 60 ns for each parameter.
_pointers_equal = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_COLLECTOR = "transformers.utils.output_capturing"
_PLAIN = (bool, int, float, str, type(None))
# Sizes that shapes tell, places, and what does nothing in eval mode: many, and without effect.
_WITHOUT_EFFECT = frozenset(
    {
        *("training", "gradient_checkpointing", "in_features", "out_features", "layer_idx"),
        *("hidden_size", "intermediate_size", "vocab_size", "num_embeddings", "embedding_dim"),
    }
)


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Numbers, texts and switches that a module keeps as public attributes."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
        and name not in _WITHOUT_EFFECT
        and not (name.startswith("_") or "dropout" in name)
    }


class Watch:
    """The addresses and parts of one module, and a counter of their changes.

    ``check()`` walks everything, once per forward or generate; on 400 parameters that is tens of
    microseconds. ``generation`` advances with every change found, or told through ``bump()``.

    Args:
        module: the root; everything below it is watched.
        versions: also notice in-place writes to parameters and buffers. For precisions that keep a
            packed copy; the graphs themselves do not need it.
    """

    def __init__(self, module: nn.Module, *, versions: bool = False) -> None:
        self.generation = 0
        self._module = module
        self._versioned = versions
        self._moving: set[tuple[int, str]] = set()
        self._look()

    @property
    def device(self) -> torch.device | None:
        """The one device of all parameters and buffers; None when there are none or several."""
        return self._device

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Parameters and buffers at the last look."""
        return tuple(self._tensors)

    def bump(self) -> None:
        """Something has changed or may have: every graph recorded so far is stale."""
        self.generation += 1

    def check(self) -> str | None:
        """Compare everything with the last look; bump where it differs.

        Returns:
            Why the module must run eagerly now (a hook, a submodule in training mode), or None.
        """
        # One pass for two questions: few modules have either, and this is most of the cost.
        odd = [d for d in self._vars if d["training"] or "forward" in d]
        forwards = {id(d): d["forward"] for d in odd if "forward" in d} if odd else {}
        if forwards != self._forwards or not self._same():
            self._look()
            self.bump()
            odd = [d for d in self._vars if d["training"]]
        if any(self._hooks):
            hooked = self._hooked()
            if hooked is not None:
                return hooked
        if odd and any(d["training"] for d in odd):
            return "a submodule is in training mode"
        return None

    def versions(self) -> list[int]:
        """Counts of in-place writes to every parameter and buffer; 0 for inference tensors."""
        return [0 if t.is_inference() else t._version for t in self._tensors]

    def apart_from_own_writes(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``call(...)``; attributes that it writes itself (a counter) are not watched from then on.

        A replay leaves them as they are.
        """
        before = self._read_attributes()
        result = call(*args, **kwargs)
        if self._read_attributes() != before:
            pairs = zip(self._attributes, before, strict=True)
            self._moving |= {(id(d), name) for (d, name), old in pairs if d.get(name) != old}
            self._look_at_attributes()
        return result

    def _read_attributes(self) -> list[Any]:
        return [table.get(name) for table, name in self._attributes]

    def _look_at_attributes(self) -> None:
        self._attributes = [
            (vars(module), name)
            for module in self._module.modules()
            for name in plain_attributes(module)
            if (id(vars(module)), name) not in self._moving
        ]
        self._values = self._read_attributes()

    def storages(self) -> set[int]:
        """Addresses of the memory that holds the parameters and buffers."""
        return {t.untyped_storage().data_ptr() for t in self._tensors}

    def _same(self) -> bool:
        # Comparing dicts looks at identity first, so equal tables never compare tensors. Unequal
        # ones do, and then either the answer or the error says so; only tensors of one element
        # can be equal without being the same.
        try:
            same = self._tables == self._copies and self._configs == self._config_copies
        except (RuntimeError, TypeError, ValueError):
            return False
        return (
            same
            and self._read_attributes() == self._values
            and all(table.get(name) is tensor for table, name, tensor in self._single)
            and self._same_pointers()
            and (not self._versioned or self.versions() == self._versions)
        )

    def _same_pointers(self) -> bool:
        if _pointers_equal is not None:
            return bool(_pointers_equal(self._tensors, self._pointers, self._indices))
        return [*map(_pointer, self._tensors)] == self._pointers

    def _look(self) -> None:
        modules = [*self._module.modules()]
        self._vars = [vars(m) for m in modules if "training" in vars(m)]
        self._forwards = {id(d): d["forward"] for d in self._vars if "forward" in d}
        self._look_at_attributes()
        tables: list[dict[str, Any]] = []
        for module in modules:
            tables += [module._modules, module._parameters, module._buffers]
        self._tables = [t for t in tables if t]
        self._copies = [dict(t) for t in self._tables]
        configs = [vars(m).get("config") for m in modules]
        fields = {id(c): vars(c) for c in configs if hasattr(c, "__dict__")}
        self._configs: list[dict[str, Any]] = [*fields.values()]
        self._config_copies = [dict(f) for f in self._configs]
        self._tensors: list[torch.Tensor] = []
        self._single: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for table in self._tables:
            for name, value in table.items():
                if isinstance(value, torch.Tensor):
                    self._tensors.append(value)
                    if value.numel() <= 1:
                        self._single.append((table, name, value))
        self._pointers = [*map(_pointer, self._tensors)]
        self._indices = [*range(len(self._tensors))]
        self._versions = self.versions() if self._versioned else []
        devices = {t.device for t in self._tensors}
        self._device = devices.pop() if len(devices) == 1 else None
        self._hooks: list[Any] = [
            _torch_module._global_forward_hooks,
            _torch_module._global_forward_pre_hooks,
            *chain.from_iterable((m._forward_hooks, m._forward_pre_hooks) for m in modules),
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
