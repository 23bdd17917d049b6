"""Files of a Hub id, through huggingface_hub's cache and its offline rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import WHERE, Weights, choose

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
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
        folder = Path(self._snapshot(name, self.revision, (*SMALL_FILES, *code)))
        listing = self._listing(name, folder.name)
        if listing is None:
            return folder
        weights = choose(listing, gguf_file=gguf_file, where=name)
        approve(folder, weights)
        return Path(self._snapshot(name, folder.name, tuple(weights.sizes)))

    def _snapshot(self, name: str, revision: str | None, patterns: tuple[str, ...]) -> str:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            return snapshot_download(
                name,
                revision=revision,
                cache_dir=self.cache_dir,
                token=self.token,
                local_files_only=self.local_files_only,
                allow_patterns=[*patterns],
                ignore_patterns=[*OTHER_EXPORTS],
            )
        except HFValidationError as error:
            raise ValueError(f"{WHERE}: a Hub id must be valid, got {name!r}: {error}") from None
        except (HfHubHTTPError, FileNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(self._not_found(name, error)) from error

    def _listing(self, name: str, commit: str) -> dict[str, int] | None:
        """Bytes of every file of the repository; None where only the cache can answer."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import DryRunError, HfHubHTTPError

        if self.local_files_only:
            return None
        try:
            files: Any = snapshot_download(
                name, revision=commit, cache_dir=self.cache_dir, token=self.token, dry_run=True
            )
        except (DryRunError, HfHubHTTPError, ConnectionError):
            return None
        return {file.filename: file.file_size for file in files}

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
