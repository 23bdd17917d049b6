"""FlashRT as a quantizer of diffusers: quantise on load, save, reload.

``registration`` puts it into diffusers' table. Source of the interface: diffusers,
``quantizers/base.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from flash_rt.structures.precision.formats import packer

from . import stored
from .config import FlashRTConfig
from .tensor import PackedTensor


class FlashRTDiffusersQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """See :class:`FlashRTConfig`."""

    quantization_config: FlashRTConfig

    def __init__(self, quantization_config: FlashRTConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._dtype = torch.float32
        self._precisions: dict[str, str] = {}

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype of all that is not quantised, and of what packed weights stand for."""
        self._dtype = torch_dtype or torch.float32
        return torch_dtype

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            config = self.quantization_config
            config.check_patterns(name for name, _ in model.named_modules() if name)
        self._precisions = dict(self._wanted(model, kwargs.get("keep_in_fp32_modules") or ()))
        if self.pre_quantized:
            for path, precision in self._precisions.items():
                _expect_stored(model.get_submodule(path), precision)

    def _wanted(self, model: nn.Module, kept: Any) -> Iterator[tuple[str, str]]:
        """Path and precision of every linear layer that is quantised."""
        config = self.quantization_config
        skipped = [*(config.modules_to_not_convert or ()), *kept]
        for path, module in model.named_modules():
            precision = config.precision_of(path)
            if type(module).forward is not nn.Linear.forward or precision is None:
                continue
            if not any(part in path.split(".") or part == path for part in skipped):
                yield path, precision

    def check_if_quantized_param(
        self, model: Any, param_value: torch.Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        """Whether :meth:`create_quantized_param` takes a tensor of the checkpoint."""
        path, _, name = param_name.rpartition(".")
        names = (stored.DATA, stored.SCALE) if self.pre_quantized else ("weight",)
        return path in self._precisions and name in names

    def check_quantized_param_shape(self, param_name: str, expected: Any, value: Any) -> bool:
        """Shapes are known beforehand.

        Raises:
            ValueError: another shape.
        """
        expected, got = tuple(expected.shape), tuple(value.shape)
        if expected != got:
            raise ValueError(f"flashrt: {param_name} must have shape {expected}, got {got}")
        return True

    def create_quantized_param(
        self,
        model: Any,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, Any] | None = None,
        unexpected_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put one tensor of the checkpoint into the model."""
        path, _, name = param_name.rpartition(".")
        module = model.get_submodule(path)
        if self.pre_quantized:
            # The one before it was cast to the model's dtype.
            kept = param_value if state_dict is None else state_dict[param_name]
            value: torch.Tensor = kept.to(target_device)
        else:
            weight = param_value.to(device=target_device, dtype=self._dtype)
            value = PackedTensor(packer(self._precisions[path])(weight), self._dtype)
        module._parameters[name] = nn.Parameter(value, requires_grad=False)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.pre_quantized:
            for path in self._precisions:
                module = model.get_submodule(path)
                tensors = {n: module._parameters.pop(n) for n in (stored.DATA, stored.SCALE)}
                shape = (module.out_features, module.in_features)
                made = stored.rebuild(
                    {n: t.detach() for n, t in tensors.items()}, shape, self._dtype, path
                )
                module.weight = nn.Parameter(made, requires_grad=False)
        model.requires_grad_(False)  # the kernels have no backward
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What ``save_pretrained`` writes."""
        return stored.flatten(state_dict), {}

    @property
    def is_serializable(self) -> bool:
        """Packed weights are stored as plain tensors."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No backward."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Products are torch ops."""
        return True


def _expect_stored(module: Any, precision: str) -> None:
    """Give a linear layer the parameters that its packed weight is stored as, without memory."""
    rows, columns = module.out_features, module.in_features
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "nvfp4": torch.uint8}[precision]
    shape = stored.data_shape(dtype, rows, columns)
    del module._parameters["weight"]
    for name, size, kind in (
        (stored.DATA, shape, dtype),
        (stored.SCALE, (rows,), torch.float32),
    ):
        empty = torch.empty(size, dtype=kind, device="meta")
        module._parameters[name] = nn.Parameter(empty, requires_grad=False)
