"""From a name to files: a local folder, a GGUF file, or a Hub id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from ..host import REAL_MODEL
from .files import WHERE, Weights, check_config, choose, listing_of
from .hub import Hub

# Where the well-known open models live, by how their names begin.
ORGANISATIONS = {
    "bert": "google-bert",
    "deepseek": "deepseek-ai",
    "dinov": "facebook",
    "falcon": "tiiuae",
    "gemma": "google",
    "gpt-oss": "openai",
    "gpt2": "openai-community",
    "granite": "ibm-granite",
    "llama": "meta-llama",
    "meta-llama": "meta-llama",
    "mistral": "mistralai",
    "mixtral": "mistralai",
    "olmo": "allenai",
    "opt": "facebook",
    "paligemma": "google",
    "phi": "microsoft",
    "qwen": "Qwen",
    "roberta": "FacebookAI",
    "siglip": "google",
    "smollm": "HuggingFaceTB",
    "t5": "google-t5",
    "vit": "google",
}


@dataclass(frozen=True)
class Source:
    """The files of one model.

    Attributes:
        name: what the user called it.
        folder: where they are.
        weights: those of them that hold weights.
    """

    name: str
    folder: Path
    weights: Weights

    @property
    def gguf(self) -> str | None:
        """The GGUF file's name, None where the weights are safetensors."""
        return next(iter(self.weights.sizes)) if self.weights.gguf else None


def find(
    name: str | Path,
    *,
    gguf_file: str | None,
    hub: Hub,
    remote_code: bool,
    approve: Callable[[Path, Weights], None],
) -> Source:
    """The files that ``name`` stands for, downloaded first where they are only on the Hub.

    Raises:
        FileNotFoundError: no such folder, no such model, or not in the cache while offline.
        ValueError: a bare name, a file that is not GGUF, weights of another format, or a revision
            of a local folder.
    """
    text = str(name)
    path = Path(text).expanduser()
    if path.exists() and hub.revision is not None:
        raise ValueError(f"{WHERE}: revision must be left out for files, got {hub.revision!r}")
    if path.is_file():
        return _of_file(path, gguf_file)
    folder = path
    if not path.is_dir() or not text:
        if isinstance(name, Path) or _looks_local(text):
            raise FileNotFoundError(
                f"{WHERE}: model must be a folder or GGUF file that exists, got {text!r}"
            )
        if "/" not in text:
            raise ValueError(
                f"{WHERE}: model must be a folder or GGUF file that exists, or a Hub id "
                f"organisation/name, got {text!r}{_suggestion(text, hub)}"
            )
        folder = hub.fetch(text, gguf_file=gguf_file, remote_code=remote_code, approve=approve)
    listing = listing_of(folder)
    if gguf_file is None and not any(n.lower().endswith(".gguf") for n in listing):
        check_config(folder)
    weights = choose(listing, gguf_file=gguf_file, where=str(folder))
    return Source(str(name), folder, weights)


def _of_file(path: Path, gguf_file: str | None) -> Source:
    if path.suffix.lower() != ".gguf":
        raise ValueError(
            f"{WHERE}: a file must be GGUF, got {str(path)!r}; name safetensors by their folder"
        )
    if gguf_file not in (None, path.name):
        raise ValueError(f"{WHERE}: gguf_file must be left out beside a file, got {gguf_file!r}")
    return Source(str(path), path.parent, Weights({path.name: path.stat().st_size}, gguf=True))


def _looks_local(name: str) -> bool:
    """Whether a text that names no folder was meant as one: Hub ids have exactly one slash."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or "\\" in name


def _suggestion(name: str, hub: Hub) -> str:
    """What a bare name may have meant: ids of the cache, then of the well-known organisations."""
    if name == REAL_MODEL:
        return (
            ", which is a name of the command line alone; its folder is "
            "flash_rt.flashrt_hf.real_model.folder()"
        )
    cached = {i.rpartition("/")[2].lower(): i for i in _cached_ids(hub)}
    ids = [cached[n] for n in get_close_matches(name.lower(), cached, n=2, cutoff=0.8)]
    for prefix in sorted(ORGANISATIONS, key=len, reverse=True):
        if name.lower().startswith(prefix):
            guess = f"{ORGANISATIONS[prefix]}/{name}"
            ids += [guess] if guess.lower() not in {i.lower() for i in ids} else []
            break
    return f"; did you mean {' or '.join(ids)}?" if ids else ""


def _cached_ids(hub: Hub) -> list[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    names = (p.name.split("--") for p in Path(hub.cache_dir or HF_HUB_CACHE).glob("models--*--*"))
    return sorted("/".join(parts[1:]) for parts in names if len(parts) == 3)
