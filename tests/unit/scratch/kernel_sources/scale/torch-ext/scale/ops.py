import torch

from ._ops import add_op_namespace_prefix, ops

_LIB = torch.library.Library(add_op_namespace_prefix("").removesuffix("::"), "DEF")
_LIB.define("scale(Tensor x, Tensor(a!) y) -> ()")


@torch.library.impl(_LIB, "scale", "CPU")
def _scale(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(2 * x)


def scale(x: torch.Tensor) -> torch.Tensor:
    """``2 * x``"""
    y = torch.empty_like(x)
    ops.scale(x, y)
    return y
