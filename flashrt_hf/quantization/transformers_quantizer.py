"""FlashRT as a quantizer of transformers: quantise on load, save, reload, adopt.

``registration`` puts it into transformers' table. Source of the interface: transformers,
``quantizers/base.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from flash_rt.structures.precision.formats import packed_size, packer

from . import stored
from .config import FlashRTConfig
from .tensor import PackedTensor


class FlashRTQuantizer(HfQuantizer):  # type: ignore[misc]
    """See :class:`FlashRTConfig`."""

    requires_calibration = False
    quantization_config: FlashRTConfig

    def __init__(self, quantization_config: FlashRTConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._skipped: list[str] = []
        self._vocabulary: set[str] = set()

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse what packed weights cannot do.

        Raises:
            ValueError: a device map that leaves weights on the disk.
        """
        places = kwargs.get("device_map")
        if isinstance(places, dict) and "disk" in places.values():
            raise ValueError("flashrt: device_map must keep all weights in memory, got 'disk'")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        config = self.quantization_config
        if not self.pre_quantized:
            config.check_patterns(name for name, _ in model.named_modules() if name)
        self._skipped = [
            *(config.modules_to_not_convert or ()),
            *(model._keep_in_fp32_modules or ()),
        ]
        head = model.get_output_embeddings()
        self._vocabulary = {name for name, module in model.named_modules() if module is head}
        text = model.config.get_text_config()
        if head is not None and getattr(text, "tie_word_embeddings", False):
            self._skipped += sorted(self._vocabulary)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Weights of linear layers that have a precision."""
        return not self.pre_quantized and self.precision_of(model, param_name) is not None

    def precision_of(self, model: Any, param_name: str) -> str | None:
        """Precision of a parameter; None leaves it alone."""
        module, name = get_module_from_name(model, param_name)
        path = param_name.removesuffix(".weight")
        if name != "weight" or type(module).forward is not nn.Linear.forward:
            return None
        if self._skipped and not should_convert_module(path, self._skipped):
            return None
        vocabulary = path in self._vocabulary
        return self.quantization_config.precision_of(path, vocabulary=vocabulary)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element on its device, by which transformers reserves memory."""
        precision = self.precision_of(model, param_name)
        if precision is None:
            return param.element_size()
        rows, columns = param.shape
        return packed_size(precision, rows, columns, param.element_size()) / param.numel()

    def get_quantize_ops(self) -> ConversionOps:
        """What quantises a weight that was just read."""
        return Quantise(self)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """How stored tensors become packed weights."""
        if not self.pre_quantized:
            return []
        foreign = self.quantization_config.foreign
        names = stored.NAMES if foreign is None else foreign.names
        # Patterns, and older transformers look for them anywhere in a name.
        return [WeightConverter([f"{name}$" for name in names], "weight", [Rebuild(self)])]

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What ``save_pretrained`` writes."""
        return stored.flatten(model.state_dict()), {}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        foreign, self.quantization_config.foreign = self.quantization_config.foreign, None
        if foreign is not None:
            foreign.check(model)
        # What save_pretrained would undo: only the model's own changes of names and shapes.
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or ()
            if not any(isinstance(op, Rebuild) for op in getattr(conversion, "operations", ()))
        ]
        model.requires_grad_(False)  # the kernels have no backward
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
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


class Quantise(ConversionOps):  # type: ignore[misc]
    """A weight as it was read to a packed weight."""

    def __init__(self, hf_quantizer: FlashRTQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """One weight."""
        (value,) = input_dict.values()
        weight = value[0] if isinstance(value, list) else value
        precision = self.hf_quantizer.precision_of(model, full_layer_name)
        assert precision is not None
        with torch.no_grad():
            packed = packer(precision)(weight)
        return {full_layer_name: PackedTensor(packed, weight.dtype)}


class Rebuild(ConversionOps):  # type: ignore[misc]
    """The stored tensors of one layer to its weight; what is not quantised passes through."""

    def __init__(self, hf_quantizer: FlashRTQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self, input_dict: dict[str, Any], *, model: Any, full_layer_name: str, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """One layer."""
        tensors = {
            name.removesuffix("$"): value[0] if isinstance(value, list) else value
            for name, value in input_dict.items()
        }
        meta = model.get_parameter_or_buffer(full_layer_name)
        shape, dtype = tuple(meta.shape), meta.dtype
        foreign = self.hf_quantizer.quantization_config.foreign
        with torch.no_grad():
            if foreign is None:
                made: torch.Tensor = stored.rebuild(tensors, shape, dtype, full_layer_name)
            else:
                made = foreign.read(tensors, shape, dtype, full_layer_name)
        return {full_layer_name: made}
