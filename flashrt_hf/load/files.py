"""Which files of a model hold its weights, and whether they are whole."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHERE = "load_model"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHERS = (".h5", ".msgpack", ".onnx", ".tflite")
POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Weights:
    """The files that hold a model's weights: bytes by name, relative to its folder.

    Attributes:
        gguf: whether it is one GGUF file; else they are safetensors.
    """

    sizes: Mapping[str, int]
    gguf: bool = False

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(self.sizes.values())


def choose(listing: Mapping[str, int], *, gguf_file: str | None, where: str) -> Weights:
    """The weight files among the files of one model, ``listing`` being bytes by name.

    Raises:
        FileNotFoundError: no weights at all, or not the GGUF file that was named.
        ValueError: only formats that are not read; several GGUF files and none named.
    """
    ggufs = sorted(n for n in listing if n.lower().endswith(".gguf"))
    if gguf_file is not None:
        if gguf_file not in ggufs:
            has = f"which has {', '.join(ggufs)}" if ggufs else "which has none"
            raise FileNotFoundError(
                f"{WHERE}: gguf_file must be a file of {where}, {has}, got {gguf_file!r}"
            )
        return Weights({gguf_file: listing[gguf_file]}, gguf=True)
    if WEIGHTS in listing:
        return Weights({WEIGHTS: listing[WEIGHTS]})
    if INDEX in listing:
        return Weights({n: b for n, b in listing.items() if SHARD.fullmatch(n)})
    if len(ggufs) == 1:
        return Weights({ggufs[0]: listing[ggufs[0]]}, gguf=True)
    if ggufs:
        raise ValueError(
            f"{WHERE}: gguf_file must name one of the files of {where}, {', '.join(ggufs)}, "
            "got None"
        )
    raise _no_weights(listing, where)


def _no_weights(listing: Iterable[str], where: str) -> Exception:
    names = sorted(listing)
    pickles = [n for n in names if n.endswith(PICKLES)]
    if pickles:
        return ValueError(
            f"{WHERE}: weights must be safetensors, got only {', '.join(pickles[:3])} in {where}; "
            "opening a pickle runs its code. Load it with transformers where you trust it, and "
            "save_pretrained writes safetensors"
        )
    others = [n for n in names if n.endswith((*OTHERS, ".safetensors"))]
    if others:
        return ValueError(
            f"{WHERE}: weights must be {WEIGHTS}, its shards or GGUF, got {', '.join(others[:3])} "
            f"in {where}"
        )
    return FileNotFoundError(f"{WHERE}: weights must be in {where}, found none")


def listing_of(folder: Path) -> dict[str, int]:
    """Bytes of every file directly in ``folder``, by name."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def check_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        FileNotFoundError: there is none; the text says what the folder is instead.
        ValueError: it is not JSON, or no object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{WHERE}: config.json must be in {folder}{_instead(folder)}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{WHERE}: {path} must be JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{WHERE}: {path} must be an object, got {type(found).__name__}")
    return found


def _instead(folder: Path) -> str:
    if (folder / "model_index.json").is_file():
        return (
            ", which is a diffusers pipeline: load that with diffusers and pass its modules "
            "to structures.attach"
        )
    if (folder / "adapter_config.json").is_file():
        return ", which is an adapter: merge it into its base model first"
    return ", found none"


def check_safetensors(folder: Path, weights: Weights) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor by name, out of the files' headers.

    Raises:
        FileNotFoundError: a shard that the index names is missing.
        ValueError: a file is cut short, no safetensors, or the pointer that git left for it.
    """
    from safetensors import SafetensorError, safe_open

    _check_index(folder, weights)
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in sorted(weights.sizes):
        path = folder / name
        try:
            with safe_open(path, framework="pt") as file:
                for key in list(file.keys()):
                    part = file.get_slice(key)
                    found[key] = part.get_dtype(), tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(_corrupt(path, error)) from None
    return found


def _check_index(folder: Path, weights: Weights) -> None:
    if set(weights.sizes) == {WEIGHTS}:
        return
    path = folder / INDEX
    try:
        files = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{WHERE}: {path} must have a weight_map, and has none") from None
    missing = sorted(files - set(weights.sizes))
    if missing:
        raise FileNotFoundError(
            f"{WHERE}: every shard that {INDEX} names must be in {folder}, missing "
            f"{', '.join(missing[:3])}"
        )


def _corrupt(path: Path, error: Exception) -> str:
    with path.open("rb") as file:
        pointer = file.read(len(POINTER)) == POINTER
    if pointer:
        return f"{WHERE}: {path} is the pointer of a large file; fetch the file with git lfs pull"
    return f"{WHERE}: {path} is corrupt or cut short ({error}); fetch it again"
