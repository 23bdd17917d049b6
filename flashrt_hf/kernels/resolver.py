"""Find and load kernel families: LOCAL_KERNELS, local builds, the Hub, then the reference."""

from __future__ import annotations

import os
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from flash_rt.flashrt_hf.kernels.manifest import (
    ManifestError,
    Workspace,
    find_workspace,
    require_workspace,
)

if TYPE_CHECKING:
    from pathlib import Path


def local_overrides() -> dict[str, Path]:
    """The entries of LOCAL_KERNELS, as the ``kernels`` library reads them.

    Raises:
        ValueError: an entry is not ``repo_id=path``.
    """
    from pathlib import Path

    overrides = {}
    for entry in filter(None, os.environ.get("LOCAL_KERNELS", "").split(":")):
        repo_id, separator, path = entry.partition("=")
        if not separator:
            raise ValueError(f"LOCAL_KERNELS: an entry must be repo_id=path, got {entry!r}")
        overrides[repo_id] = Path(path)
    return overrides


def environment_line(workspace: Workspace) -> str:
    """Value of LOCAL_KERNELS: what it holds already, then every family with a local build."""
    entries = {repo: str(path) for repo, path in local_overrides().items()}
    for family in workspace.families():
        folder = workspace.builds / family.name
        if (folder / "build").is_dir():
            entries.setdefault(family.repo_id, str(folder))
    return ":".join(f"{repo}={path}" for repo, path in entries.items())


def set_local_kernels() -> None:
    """Make this process's ``kernels`` library see the local builds.

    In a checkout, brings the reference variants up to date first (they are only copied Python).
    Entries that LOCAL_KERNELS holds already win. Without a checkout this does nothing.
    """
    workspace = find_workspace()
    if workspace is None:
        return
    _refresh_references(workspace)
    line = environment_line(workspace)
    if line:
        os.environ["LOCAL_KERNELS"] = line


def _refresh_references(workspace: Workspace) -> None:
    from flash_rt.flashrt_hf.kernels.builder import build_reference

    for family in workspace.families():
        try:
            build_reference(workspace, family)
        except PermissionError:  # a read-only checkout keeps the builds it has
            continue
        except ManifestError as error:  # one family being edited must not hide the others
            warnings.warn(f"reference of {family.name} not refreshed: {error}", stacklevel=2)


def load(name: str, *, version: int = 1) -> ModuleType:
    """The kernel module of one family."""
    import torch
    from kernels import get_kernel

    family = require_workspace().family(name)
    set_local_kernels()
    backend = None if torch.cuda.is_available() else "cpu"
    module: ModuleType = get_kernel(family.repo_id, version=version, backend=backend)
    return module
