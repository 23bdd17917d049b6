"""Weights out of a checkpoint, straight onto their device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flash_rt.structures.lending import indexed

from .files import WHERE
from .source import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def load_weights(
    source: Source,
    config: PretrainedConfig,
    kind: Any,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    remote_code: bool,
) -> PreTrainedModel:
    """The model in evaluation mode, without grad, each tensor read straight to ``device``.

    Args:
        source: safetensors, or a GGUF file, which is dequantised.
        config: what ``read_config`` returned.
        kind: the class that ``model_class`` returned.
        device: one device.
        dtype: what floats are cast to; None takes the checkpoint's own.
        remote_code: whether the checkpoint's own Python runs.

    Raises:
        ValueError: the checkpoint lacks tensors of its architecture, or has them in other shapes.
    """
    options: dict[str, Any] = dict(
        dtype=dtype if dtype is not None else "auto",
        trust_remote_code=remote_code,
        output_loading_info=True,
    )
    if device.type != "cpu":
        options["device_map"] = {"": indexed(device)}
    if source.gguf:
        from transformers import GgufConfig

        options |= dict(gguf_file=source.gguf, quantization_config=GgufConfig(dequantize=True))
    else:
        options |= dict(config=config, use_safetensors=True)
    try:
        model, report = kind.from_pretrained(source.folder, **options)
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise
        raise ValueError(
            f"{WHERE}: weights of {source.name} must have the shapes of its config.json: {error}"
        ) from error
    _check_report(report, source, type(model).__name__)
    if source.gguf:
        _check_shapes(model, source)
    model.requires_grad_(False)
    loaded: PreTrainedModel = model.eval()
    return loaded


def _check_report(report: dict[str, Any], source: Source, kind: str) -> None:
    """What is missing would be random numbers."""
    missing = sorted(report["missing_keys"])
    wrong = sorted(str(key) for key in report["mismatched_keys"])
    for what, names in (("missing", missing), ("of another shape", wrong)):
        if names:
            raise ValueError(
                f"{WHERE}: weights of {source.name} must have every tensor of {kind}, {what} "
                f"{len(names)}: {', '.join(names[:3])}"
            )


def _check_shapes(model: PreTrainedModel, source: Source) -> None:
    """A GGUF file may say sizes in words that transformers does not read, and take defaults for."""
    with torch.device("meta"):
        wanted = type(model)(model.config).state_dict()
    for name, tensor in model.state_dict().items():
        if name in wanted and wanted[name].shape != tensor.shape:
            raise ValueError(
                f"{WHERE}: weights of {source.name} must have the shapes that transformers reads "
                f"from the file, {tuple(wanted[name].shape)} for {name}, got {tuple(tensor.shape)}"
            )
