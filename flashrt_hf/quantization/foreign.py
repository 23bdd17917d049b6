"""Checkpoints that another library quantised: their weights are read as they are, bit for bit.

``adopt`` looks at a configuration's ``quantization_config``; each format has a module that knows
which of its schemes a packed weight can hold, and where its tensors go. Others are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from . import compressed_tensors, fine_grained_fp8, modelopt
from .config import FlashRTConfig, Method
from .tensor import PackedTensor


class Format(Protocol):
    """One module per format."""

    @property
    def NAMES(self) -> tuple[str, ...]:  # noqa: N802  a constant of a module
        """Short names of all tensors that a layer may have, the weight's own ones included."""

    def precision(self, config: Mapping[str, Any]) -> str:
        """What the weights are stored in; a scheme without a packed form raises ValueError."""

    def read(
        self, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> PackedTensor | None:
        """The packed weight; None where the layer is not quantised."""


FORMATS: dict[str, Format] = {
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "fp8": fine_grained_fp8,
}


@dataclass(frozen=True)
class Foreign:
    """The format of one checkpoint.

    Attributes:
        config: its ``quantization_config``.
    """

    config: Mapping[str, Any]

    @property
    def format(self) -> Format:
        """The module that reads it.

        Raises:
            ValueError: there is none.
        """
        method = str(self.config.get("quant_method"))
        if method not in FORMATS:
            raise ValueError(
                f"flashrt: quantization_config must be of {', '.join(FORMATS)}, got {method!r}; "
                "FlashRT has no kernels for that format"
            )
        return FORMATS[method]

    @property
    def names(self) -> tuple[str, ...]:
        """Short names of the tensors of a layer."""
        return self.format.NAMES

    def read(
        self,
        tensors: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        name: str,
    ) -> torch.Tensor:
        """The parameter ``name``: a packed weight, or what is not quantised in the model's dtype.

        Raises:
            ValueError: its tensors do not fit each other or ``shape``.
        """
        try:
            made = None
            if len(shape) == 2:
                made = self.format.read(tensors, (shape[0], shape[1]), dtype)
        except ValueError as error:
            raise ValueError(f"flashrt: {name}: {error}") from error
        if made is not None:
            return made
        if set(tensors) != {"weight"} or not tensors["weight"].dtype.is_floating_point:
            found = {name: str(value.dtype) for name, value in tensors.items()}
            raise ValueError(f"flashrt: {name}: these tensors are no linear weight: {found}")
        return tensors["weight"].to(dtype)

    def check(self, model: torch.nn.Module) -> None:
        """Refuse a model that none of the quantised weights fit.

        Raises:
            ValueError: nothing was read.
        """
        if not any(isinstance(parameter, PackedTensor) for parameter in model.parameters()):
            raise ValueError(
                f"flashrt: {type(model).__name__} must have linear layers for the quantised "
                "weights of its checkpoint, got none"
            )


def quantization_of(config: Any, folder: Path | str | None = None) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model's configuration, None where it is not quantised.

    Args:
        config: of transformers.
        folder: of the checkpoint, where an older ModelOpt keeps it in a file of its own.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None and folder is not None:
        found = modelopt.from_file(Path(folder))
    if found is None or isinstance(found, dict):
        return found
    made: dict[str, Any] = found.to_dict()
    return made


def adopt(config: Any, folder: Path | str | None = None) -> Any:
    """Let ``from_pretrained(..., config=config)`` read a quantised checkpoint into packed weights.

    The weights keep the values that the format's own library gives them. A configuration without
    quantised weights, or with FlashRT's own, is returned as it is.

    Args:
        config: of transformers, as ``AutoConfig.from_pretrained`` returns it; changed in place.
        folder: of the checkpoint, see :func:`quantization_of`.

    Returns:
        ``config``.

    Raises:
        ValueError: a format, or a scheme of a format, that FlashRT has no kernels for.
    """
    found = quantization_of(config, folder)
    if found is None or found.get("quant_method") == Method.FLASHRT.value:
        return config
    found = json.loads(json.dumps(found, default=str))
    made = FlashRTConfig(
        Foreign(found).format.precision(found),
        adopted_from=str(found["quant_method"]),
        foreign=found,
    )
    text = config.get_text_config()
    if text is not config and getattr(text, "quantization_config", None) is not None:
        del text.quantization_config
    config.quantization_config = made.to_dict()
    return config
