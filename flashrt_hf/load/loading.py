"""``load_model``: one line from a name to an attached model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flash_rt import structures
from flash_rt.structures import kv_format
from flash_rt.structures.kv_format import KVCache
from flash_rt.structures.precision.choice import Precision
from flash_rt.structures.precision.choice import checked as checked_precision
from flash_rt.structures.precision.host_weights import KeepHost
from flash_rt.structures.precision.quantising import MIN_COSINE, read_quantising

from ..host import default_device, default_dtype
from . import memory
from .architecture import model_class, read_config
from .files import WHERE, Weights, check_safetensors
from .handle import Handle
from .hub import Hub
from .loop_shelf import DEFAULT_LEN
from .module_handle import ModuleHandle
from .options import (
    checked_device,
    checked_dtype,
    refuse_beside_module,
    refuse_unattached,
    shown,
)
from .preprocessing import load_processor, load_tokenizer
from .progress import progress_bars
from .prompts import token_ids
from .source import Source, find
from .text_handle import TextHandle
from .vision_handle import VisionLanguageHandle
from .weights import load_weights

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def load_model(
    model: str | Path | nn.Module,
    *,
    precision: Precision = "auto",
    calibration: Any = None,
    observer: str = "max",
    min_cosine: float | None = MIN_COSINE,
    keep_host: KeepHost = "cpu",
    kv_cache: KVCache = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    max_len: int | None = None,
    draft: Any = None,
    attach: bool = True,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    local_files_only: bool = False,
    cache_dir: Path | str | None = None,
    token: str | bool | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    progress: bool = True,
) -> Any:
    """Load a model, attach FlashRT to it, and return a handle.

    Args:
        model: a folder with ``config.json`` and safetensors, a GGUF file (dequantised), a Hub id
            ``organisation/name``, or an ``nn.Module`` in evaluation mode, which stays yours.
        precision: ``"auto"`` (weights as they are), ``"bf16"``, ``"fp8"``, ``"int8"``,
            ``"nvfp4"``, or a dict of patterns. What is quantised is read on the CPU and goes to the
            device packed, weight by weight.
        calibration, observer, min_cosine, keep_host: of the precision, see ``structures.attach``;
            ``calibration`` may also be a text or a list of texts.
        kv_cache: ``"fp8"`` keeps keys and values in half the bytes, see ``structures.decode_loop``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:N"``; None takes the first GPU, else the CPU, and
            leaves a module where it is.
        dtype: what the weights are cast to; None takes the checkpoint's own (of a GGUF file BF16
            on a GPU and fp32 on a CPU).
        max_len: most positions of prompt and answer together; None takes the model's limit, and
            lets the cache grow with the requests.
        draft: ``"lookup"`` or a smaller model that drafts tokens, see ``structures.decode_loop``.
        attach: False leaves the host as it is, so that ``structures.attach(handle)`` can come
            later, or never.
        gguf_file: the file to read in a folder or repository that has several.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run the Python files of the checkpoint, with your rights.
        local_files_only: never ask the Hub; ``HF_HUB_OFFLINE=1`` says the same for a process.
        cache_dir, token: of the Hub, as in ``from_pretrained``.
        tokenizer, processor: used in the place of the checkpoint's own.
        progress: whether downloads and loading draw a bar on standard error.

    Returns:
        ``TextHandle`` for a model that generates text, ``VisionLanguageHandle`` for one that also
        takes images, ``ModuleHandle`` for everything else.

    Raises:
        FileNotFoundError: no such folder, file, model or revision, or no weights in it.
        ValueError: a name without an organisation, weights in another format than safetensors, a
            corrupt file, an architecture that is not known, code that was not asked for, an
            argument out of its range, or ``kv_cache`` or ``draft`` for a model that the decode
            loop cannot run.
        MemoryError: weights, cache and workspace are more than the device has free; nothing has
            been loaded then.
        KernelUnavailable: no kernel family can be loaded on this device.
    """
    quantising: dict[str, Any] = dict(
        calibration=calibration, observer=observer, min_cosine=min_cosine, keep_host=keep_host
    )
    packs = read_quantising(checked_precision(precision), **quantising) is not None
    kv_format.checked(WHERE, kv_cache)
    if isinstance(draft, str) and draft != "lookup":
        raise ValueError(f'{WHERE}: draft must be "lookup" or a model, got {draft!r}')
    if not attach:
        refuse_unattached(precision=precision if packs else None, kv_cache=kv_cache, draft=draft)
    if max_len is not None and max_len < 2:
        raise ValueError(f"{WHERE}: max_len must be at least 2, got {max_len}")
    place, kind = checked_device(device), checked_dtype(dtype)
    name = str(model)
    hub = Hub(revision, cache_dir, token, local_files_only)
    if isinstance(model, nn.Module):
        refuse_beside_module(hub, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
        name = type(model).__name__
        if model.training:
            raise ValueError(
                f"{WHERE}: model must be in evaluation mode, got {name} in training mode; call "
                "model.eval() first"
            )
        host: nn.Module = model.to(device=None if packs else place, dtype=kind)
    else:
        place = default_device() if place is None else place
        request = _Request(
            precision=precision if packs else "auto",
            kv_cache=kv_cache,
            device=place,
            dtype=kind,
            max_len=max_len,
            remote_code=trust_remote_code,
        )
        with progress_bars(progress):
            source = find(
                model,
                gguf_file=gguf_file,
                hub=hub,
                remote_code=trust_remote_code,
                approve=request.approve_download,
            )
            host = request.load(source)
            if tokenizer is None:
                tokenizer = load_tokenizer(source, remote_code=trust_remote_code)
            if processor is None:
                processor = load_processor(source, remote_code=trust_remote_code)
    handle = _handle(
        host,
        name=name,
        tokenizer=tokenizer,
        processor=processor,
        max_len=max_len,
        draft=draft,
        kv_cache=kv_cache,
    )
    if attach:
        quantising["calibration"] = token_ids(calibration, tokenizer)
        was_attached = handle.plan is not None
        with progress_bars(progress):
            structures.attach(
                handle, precision=precision, kv_cache=kv_cache, device=place, **quantising
            )
        if draft is not None:
            _check_draft(handle, draft, keep=was_attached)
    return handle


class _Request:
    """What loading one checkpoint was asked for."""

    def __init__(
        self,
        *,
        precision: Precision,
        kv_cache: KVCache,
        device: torch.device,
        dtype: torch.dtype | None,
        max_len: int | None,
        remote_code: bool,
    ) -> None:
        self.precision, self.kv_cache = precision, kv_cache
        self.device, self.dtype = device, dtype
        self.max_len, self.remote_code = max_len, remote_code

    def approve_download(self, folder: Path, weights: Weights) -> None:
        """Refuse before a download what would be refused after it."""
        source = Source(folder.name, folder, weights)
        if not weights.gguf:  # whose size says little, and whose configuration is in the file
            config = read_config(source, remote_code=self.remote_code)
            self._check_memory(source, config, weights.size_bytes)

    def load(self, source: Source) -> nn.Module:
        """Check everything that can be checked first, then load.

        What is to be quantised stays on the CPU, until ``attach`` brings it to the device packed.
        """
        away = self.precision != "auto" and self.device.type != "cpu"
        dtype = self.dtype
        if source.gguf:
            dtype = dtype or default_dtype(self.device)
            config = read_config(source, remote_code=False)
            size = memory.gguf_elements(source.folder / source.gguf) * dtype.itemsize
        else:
            config = read_config(source, remote_code=self.remote_code)
            tensors = check_safetensors(source.folder, source.weights)
            size = memory.weight_bytes(tensors, dtype=dtype, precision=self.precision)
            if away:
                whole = memory.Estimate(memory.weight_bytes(tensors, dtype=dtype), 0, 0)
                memory.check(whole, torch.device("cpu"), source.name)
        kind = model_class(source, config, remote_code=self.remote_code)
        self._check_memory(source, config, size)
        loaded: nn.Module = load_weights(
            source,
            config,
            kind,
            device=torch.device("cpu") if away else self.device,
            dtype=dtype,
            remote_code=self.remote_code,
        )
        return loaded

    def _check_memory(self, source: Source, config: PretrainedConfig, size: int) -> None:
        element = 1 if self.kv_cache == "fp8" else 2 if self.device.type == "cuda" else 4
        text = config.get_text_config()
        limit = getattr(text, "max_position_embeddings", None) or DEFAULT_LEN
        if self.max_len is not None and self.max_len > limit:
            raise ValueError(
                f"{WHERE}: max_len must be at most the {limit} positions of {source.name}, got "
                f"{self.max_len}"
            )
        length = self.max_len or min(limit, DEFAULT_LEN)
        estimate = memory.Estimate(
            size,
            memory.cache_bytes(config, max_len=length, batch=1, element=element),
            memory.workspace_bytes(config, self.device, batch=1),
        )
        memory.check(estimate, self.device, source.name)


def _check_draft(handle: Handle, draft: Any, *, keep: bool) -> None:
    """Drafts are verified by the decode loop alone.

    Raises:
        ValueError: the loop cannot run the model, which is then detached unless ``keep``.
    """
    refusal = handle.loop_refusal if isinstance(handle, TextHandle) else None
    if refusal is None:
        return
    kind = type(handle.model).__name__
    if not keep:
        handle.detach()
    raise ValueError(
        f"{WHERE}: draft must be left out where the decode loop cannot run the model, got "
        f"{shown(draft)}; {kind}: {refusal}"
    )


def _handle(
    host: nn.Module,
    *,
    name: str,
    tokenizer: Any,
    processor: Any,
    max_len: int | None,
    draft: Any,
    kv_cache: KVCache,
) -> Handle:
    """The kind of handle that a model can be used through."""
    generates = getattr(host, "can_generate", None)
    if not (callable(generates) and generates()):
        for option, value in (("max_len", max_len), ("draft", draft), ("kv_cache", kv_cache)):
            if value is not None:
                raise ValueError(
                    f"{WHERE}: {option} is for models that generate text, got {shown(value)}"
                )
        return ModuleHandle(host, name=name, tokenizer=tokenizer, processor=processor)
    kind = VisionLanguageHandle if takes_images(host) else TextHandle
    if tokenizer is None:
        tokenizer = getattr(processor, "tokenizer", None)
    return kind(
        host, name=name, tokenizer=tokenizer, processor=processor, max_len=max_len, draft=draft
    )


def takes_images(host: nn.Module) -> bool:
    """Whether a model that generates text has a vision part."""
    config = getattr(host, "config", None)
    return getattr(config, "vision_config", None) is not None
