"""Linear layer: ``x @ W.T + b``, optionally followed by an activation inside the same module.

Found by form: one matrix and at most one vector of its rows, whatever the class is called. A matrix
stored ``[K, N]`` (``x @ W + b``, as GPT-2's ``Conv1D``) has the same meaning, but torch's own
product reads that layout best, so alone it is kept; inside an MLP it is one of its parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .. import kernels
from ..products import project
from ..region import Region
from ..weights import BoundLinear, bound_linear
from .base import MAX_FUSED_ROWS, Fast, Groups, Part, Refusal, Spec, Structure, Survey
from .forms import activations, few_owners, takes_one_tensor, with_activation
from .spec import activation_value, module_at

# Bounds what a proof adds to the peak of memory: 64 MB as fp32.
CAST_ELEMENTS = 16 << 20
# Rows of a weight are alike: this many of them prove what all of them mean.
PROOF_ROWS = 512


@dataclass(frozen=True)
class LinearSpec(Spec):
    """``activation(x @ W.T + b)`` with the matrix at ``path`` inside the region.

    ``transposed``: the host stores ``[K, N]``.
    """

    path: str = ""
    bias: bool = True
    transposed: bool = False
    activation: str = "identity"

    def tensors(self, module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight as ``[N, K]`` (a view) and bias, found through the region's module."""
        parameters: Any = module_at(module, self.path)._parameters
        weight = parameters["weight"]
        return weight.t() if self.transposed else weight, parameters.get("bias")

    @property
    def part(self) -> Part:
        """The weight, for its packed copy."""
        return Part(self.path, self.transposed)

    def bound(self, module: nn.Module) -> BoundLinear:
        """What a bound forward reads: the host's tensors, or a packed copy ``[N, K]``."""
        parameters: Any = module_at(module, self.path)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        return bound_linear(weight, bias, transposed=self.transposed)

    def halves(self, module: nn.Module) -> tuple[BoundLinear, BoundLinear]:
        """The first and the second half of the rows, as ``bound``."""
        parameters: Any = module_at(module, self.path)._parameters
        weight, bias = parameters["weight"], parameters.get("bias")
        rows = self.tensors(module)[0].shape[0]
        runs = ((0, rows // 2), (rows // 2, rows))
        first, second = (
            bound_linear(weight, bias, start=i, stop=j, transposed=self.transposed) for i, j in runs
        )
        return first, second

    def shapes(self, module: nn.Module, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Parameter shapes of the same layer with other sizes, for a proof of meaning."""
        prefix = f"{self.path}." if self.path else ""
        matrix = (columns, rows) if self.transposed else (rows, columns)
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}weight": matrix}
        if self.tensors(module)[1] is not None:
            shapes[f"{prefix}bias"] = (rows,)
        return shapes

    def wide(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype of ``x``: what references use. Some rows at a time are cast."""
        weight, bias = self.tensors(module)
        rows = max(1, CAST_ELEMENTS // max(1, weight.shape[1]))
        parts = torch.split(weight, rows)
        y = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], dim=-1)
        return y if bias is None else y + bias.to(x.dtype)


class Linear(Structure):
    """``[..., K] -> [..., N]``."""

    name = "linear"
    families = ("linear",)
    multiplies = True
    unary = True
    reads = frozenset({"approximate"})

    def propose(self, region: Region, survey: Survey) -> tuple[LinearSpec, ...] | Refusal | None:
        module = region.module
        owners = few_owners(module, 1)
        if not owners or not takes_one_tensor(module):
            return None
        path = owners[0]
        leaf = module.get_submodule(path)
        specs = leaf_specs(leaf, path)
        if not specs or leaf is module:
            return specs or None
        names = activations(region)
        if isinstance(names, Refusal):
            return names
        return with_activation(
            names, lambda name: [LinearSpec(path, s.bias, s.transposed, name) for s in specs]
        )

    def width(self, spec: LinearSpec, module: nn.Module) -> int:
        return int(spec.tensors(module)[0].shape[1])

    def reference(
        self, spec: LinearSpec, module: nn.Module, *args: Any, dtype: torch.dtype, **kwargs: Any
    ) -> torch.Tensor:
        return activation_value(spec.activation, spec.wide(module, args[0].to(dtype)))

    def crop(self, spec: LinearSpec, module: nn.Module) -> dict[str, tuple[int, ...]]:
        rows, columns = spec.tensors(module)[0].shape
        return spec.shapes(module, min(PROOF_ROWS, rows), columns)

    def keep(self, spec: LinearSpec) -> str | None:
        if spec.transposed and spec.activation == "identity":
            return "the matrix is stored [K, N], which torch's own product reads best"
        return None

    def weights(self, spec: LinearSpec, module: nn.Module) -> Groups:
        return ((spec.part,),)

    def bind(self, spec: LinearSpec) -> Fast:
        linear = kernels.family("linear").linear
        activate = None
        if spec.activation != "identity":
            activate = kernels.family("activation").activate
        name = spec.activation

        def fast(self: nn.Module, x: torch.Tensor) -> Any:
            bound = spec.bound(self)
            if x.numel() <= MAX_FUSED_ROWS * x.shape[-1]:
                return linear(x, bound.weight, bound.bias, activation=name)
            y = project(x, bound)
            return y if activate is None else activate(y, activation=name)

        return fast


def leaf_specs(leaf: nn.Module, path: str) -> tuple[LinearSpec, ...]:
    """Both ways in which a leaf may be linear: its matrix stored ``[N, K]`` or ``[K, N]``."""
    if isinstance(leaf, nn.Embedding) or any(True for _ in leaf.children()):
        return ()
    tensors = dict(leaf.named_parameters(recurse=False)) | dict(leaf.named_buffers(recurse=False))
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if set(tensors) - {"weight", "bias"} or weight is None or weight.dim() != 2:
        return ()
    if bias is not None and bias.dim() != 1:
        return ()
    ways = [way for way in (False, True) if bias is None or bias.shape[0] == weight.shape[way]]
    if type(leaf).forward is nn.Linear.forward:
        ways = [False]
    return tuple(LinearSpec(path, bias is not None, transposed) for transposed in ways)
