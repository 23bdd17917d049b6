"""Files of a Hub id, through huggingface_hub's cache and its offline rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import WEIGHTS, WHERE, Weights, choose

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
SHARDS = "model-*-of-*.safetensors"
SECONDS = 10.0  # that the Hub may take to answer before the cache does
OTHER_EXPORTS = ("original/*", "onnx/*", "openvino/*", "coreml/*", "metal/*")


@dataclass(frozen=True)
class Hub:
    """How the Hub is asked; the fields are the arguments of the same name of ``load_model``."""

    revision: str | None = None
    cache_dir: Path | str | None = None
    token: str | bool | None = None
    local_files_only: bool = False

    def fetch(
        self,
        name: str,
        *,
        gguf_file: str | None,
        remote_code: bool,
        approve: Callable[[Path, Weights], None],
    ) -> Path:
        """The snapshot folder of ``name``, downloaded where it is not in the cache.

        Args:
            name: ``organisation/name``.
            gguf_file: the one weight file to fetch; None means the safetensors files.
            remote_code: whether Python files are fetched too.
            approve: called with the folder of small files and the weight files before these are
                downloaded; what it raises stops the download. Not called where the cache answers.

        Raises:
            FileNotFoundError: no such model or revision, no access, or offline and not cached.
            ValueError: the name is no id, or its weights are in no format that is read.
        """
        code = ("*.py",) if remote_code else ()
        wanted = (*SMALL_FILES, *code)
        try:
            listing = self._listing(name)
        except _transport_errors() as error:
            cached = (*wanted, *((gguf_file,) if gguf_file else (WEIGHTS, SHARDS)))
            return self._snapshot(name, self.revision, cached, why=error)
        folder = self._snapshot(name, self.revision, wanted)
        weights = choose(listing, gguf_file=gguf_file, where=name)
        approve(folder, weights)
        return self._snapshot(name, folder.name, tuple(weights.sizes))

    def _listing(self, name: str) -> dict[str, int]:
        """Bytes of every file of the repository, by one question to the Hub."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import OfflineModeIsEnabled

        if self.local_files_only:
            raise OfflineModeIsEnabled("local_files_only=True")
        try:
            info = HfApi(token=self.token).model_info(
                name, revision=self.revision, files_metadata=True, timeout=SECONDS
            )
        except ValueError as error:  # of the name's form
            raise ValueError(f"{WHERE}: a Hub id must be valid, got {name!r}: {error}") from None
        return {file.rfilename: file.size or 0 for file in info.siblings or ()}

    def _snapshot(
        self,
        name: str,
        revision: str | None,
        patterns: tuple[str, ...],
        *,
        why: Exception | None = None,
    ) -> Path:
        """A snapshot with these files; of the cache alone where ``why`` says that it has to be."""
        from huggingface_hub import snapshot_download

        errors: tuple[type[Exception], ...] = (FileNotFoundError, *_transport_errors())
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    cache_dir=self.cache_dir,
                    token=self.token,
                    local_files_only=why is not None,
                    allow_patterns=[*patterns],
                    ignore_patterns=[*OTHER_EXPORTS],
                )
            )
        except errors as error:
            raise FileNotFoundError(self._not_found(name, why or error)) from None

    def _not_found(self, name: str, error: Exception) -> str:
        from huggingface_hub.constants import HF_HUB_OFFLINE
        from huggingface_hub.errors import (
            GatedRepoError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        at = f"{name!r}" + (f" at revision {self.revision!r}" if self.revision else "")
        if isinstance(error, RevisionNotFoundError):
            return f"{WHERE}: revision must be one of {name!r}, got {self.revision!r}"
        if isinstance(error, GatedRepoError):
            return (
                f"{WHERE}: {name!r} asks for its terms to be accepted on its Hub page, and for a "
                "token of that account (hf auth login, or token=)"
            )
        if isinstance(error, RepositoryNotFoundError):
            return (
                f"{WHERE}: there is no folder {name!r} and no such model on the Hub, or it is "
                "private and the token does not reach it"
            )
        if self.local_files_only or HF_HUB_OFFLINE:
            rule = "local_files_only=True" if self.local_files_only else "HF_HUB_OFFLINE=1"
            return (
                f"{WHERE}: there is no folder {name!r}, and {at} is not whole in the cache, which "
                f"{rule} allows alone"
            )
        first = str(error).splitlines()[0]
        return (
            f"{WHERE}: there is no folder {name!r}, {at} is not whole in the cache, and the Hub "
            f"does not answer ({first})"
        )


def _transport_errors() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises where the Hub refuses or cannot be reached."""
    from huggingface_hub import errors

    http: Any = errors.HfHubHTTPError.__mro__
    (base,) = (kind for kind in http if kind.__name__ == "HTTPError")
    return base, ConnectionError
