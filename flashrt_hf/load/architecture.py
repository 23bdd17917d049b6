"""The class of a checkpoint's model, out of its configuration."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from ..quantization.foreign import adopt
from .files import WHERE, check_config
from .source import Source

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of these auto classes the first that knows a configuration without "architectures" takes it; of
# remote code the first that the checkpoint maps.
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModel",
)


def read_config(source: Source, *, remote_code: bool) -> PretrainedConfig:
    """The configuration of a checkpoint; quantised weights will be read as they are.

    Raises:
        ValueError: it needs code of its own, is of a kind that transformers does not know, has a
            value that its class refuses, or is quantised in a format without kernels.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    if source.gguf:
        _require_gguf()
        try:
            return AutoConfig.from_pretrained(source.folder, gguf_file=source.gguf)
        except (ValueError, LookupError, NotImplementedError, struct.error) as error:
            raise ValueError(
                f"{WHERE}: {source.folder / source.gguf} must be a GGUF model that transformers "
                f"reads: {error}"
            ) from error
    raw = check_config(source.folder)
    if needs_remote_code(raw) and not remote_code:
        raise ValueError(
            f"{WHERE}: {source.name} needs Python code of its own, which runs with your rights; "
            "trust_remote_code must be True to allow that, got False"
        )
    if "model_type" not in raw:
        kind = raw.get("_class_name")
        what = f"it is diffusers' {kind}: load that with diffusers" if kind else "it has none"
        raise ValueError(f"{WHERE}: config.json of {source.name} must have a model_type; {what}")
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=remote_code)
    except (ValueError, LookupError, TypeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{WHERE}: config.json of {source.name} must be one that transformers {_version()} "
            f"reads, got model_type {raw['model_type']!r}: {reason}"
        ) from error
    return adopt(config, source.folder)


def needs_remote_code(raw: dict[str, Any]) -> bool:
    """Whether a configuration names code beside it that transformers does not have itself."""
    from transformers import CONFIG_MAPPING

    return bool(raw.get("auto_map")) and raw.get("model_type") not in CONFIG_MAPPING


def model_class(source: Source, config: PretrainedConfig, *, remote_code: bool) -> Any:
    """The class whose ``from_pretrained`` makes the model: what the checkpoint was saved from.

    A GGUF file, which names no class, is a causal language model.

    Raises:
        ValueError: transformers has no such class.
    """
    import transformers

    if source.gguf:
        return transformers.AutoModelForCausalLM
    mapped = getattr(config, "auto_map", None) or {}
    if remote_code and config.model_type not in transformers.CONFIG_MAPPING:
        for name in AUTO_CLASSES:
            if name in mapped:
                return getattr(transformers, name)
    named = getattr(config, "architectures", None) or []
    for name in named[:1]:
        found = getattr(transformers, name, None)
        if isinstance(found, type) and hasattr(found, "from_pretrained"):
            return found
        raise ValueError(
            f"{WHERE}: architectures of config.json must name a model of transformers "
            f"{_version()}, got {name!r}"
        )
    for name in AUTO_CLASSES:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(
        f"{WHERE}: config.json must be of a model, got model_type {config.model_type!r}"
    )


def _require_gguf() -> None:
    import importlib.util

    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"{WHERE}: a GGUF file needs the package gguf; run: pip install gguf")


def _version() -> str:
    import transformers

    return str(transformers.__version__)
