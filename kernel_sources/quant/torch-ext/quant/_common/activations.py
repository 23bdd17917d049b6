"""The activations every family knows, their numbers on the C++ side, and their formulas.

The position of a name in ``ACTIVATIONS`` is the value of ``enum class Activation`` in
``csrc/common/activations.cuh``.

Sources: GELU is Hendrycks and Gimpel 2016, arXiv:1606.08415 (section 2; the tanh form and the
sigmoid form with 1.702 are its two approximations); SiLU is Elfwing et al. 2017,
arXiv:1702.03118; squared ReLU is So et al. 2021, arXiv:2109.08668.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .checks import one_of

ACTIVATIONS = (
    "identity",
    "silu",
    "gelu",
    "gelu_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "tanh",
)
_NUMBERS = {name: number for number, name in enumerate(ACTIVATIONS)}


def activation_number(op: str, name: str) -> int:
    """Number of the activation ``name``, or a ``ValueError`` that lists the names."""
    number = _NUMBERS.get(name)
    if number is None:
        one_of(op, "activation", name, ACTIVATIONS)
        raise AssertionError(name)
    return number


def apply_activation(values: torch.Tensor, number: int) -> torch.Tensor:
    """The activation of that number, in the dtype of ``values`` (fp32 in every caller)."""
    name = ACTIVATIONS[number]
    if name == "identity":
        return values
    if name == "silu":
        return F.silu(values)
    if name == "gelu":
        return F.gelu(values)
    if name == "gelu_tanh":
        return F.gelu(values, approximate="tanh")
    if name == "quick_gelu":
        return values * torch.sigmoid(1.702 * values)
    if name == "relu":
        return F.relu(values)
    if name == "relu2":
        return F.relu(values).square()
    if name == "sigmoid":
        return torch.sigmoid(values)
    return torch.tanh(values)
