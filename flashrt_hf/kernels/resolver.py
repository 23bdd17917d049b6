"""Find and load kernel families: LOCAL_KERNELS, local builds, the Hub, then the reference."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flash_rt.flashrt_hf import settings
from flash_rt.flashrt_hf.kernels import toolchain
from flash_rt.flashrt_hf.kernels.manifest import (
    Family,
    ManifestError,
    Workspace,
    find_workspace,
)
from flash_rt.kernel_loader import load_from_library, local_overrides


class KernelNotFoundError(RuntimeError):
    """No build of a family is usable here; lists what was found and why each was rejected."""


@dataclass(frozen=True)
class Candidate:
    """One variant folder; ``rejected`` is the reason it cannot run here, or None."""

    path: Path
    rejected: str | None


def environment_line(workspace: Workspace) -> str:
    """Value of LOCAL_KERNELS: what it holds already, then every family with a local build.

    Where no GPU is visible an entry names the reference variant itself: a CUDA torch would
    otherwise pass over it.
    """
    from flash_rt.flashrt_hf.kernels.variant import REFERENCE_VARIANT

    entries = local_overrides()
    has_gpu = bool(toolchain.gpu_capabilities())
    for family in workspace.families():
        folder = workspace.builds / family.name
        reference = folder / "build" / REFERENCE_VARIANT
        if (folder / "build").is_dir():
            path = folder if has_gpu or not reference.is_dir() else reference
            entries.setdefault(family.repo_id, path)
    return ":".join(f"{repo}={path}" for repo, path in entries.items())


def set_local_kernels(workspace: Workspace | None = None) -> None:
    """Make this process's ``kernels`` library see the local builds.

    In a checkout, brings the reference variants up to date first (they are only copied Python).
    Entries that LOCAL_KERNELS holds already win. Without a checkout this does nothing. Warns of
    CUDA builds that are older than their sources, where a GPU would run them, and of a malformed
    LOCAL_KERNELS, which stays as it is: loading a kernel raises then, importing does not.

    Args:
        workspace: default, the checkout that this package runs from.
    """
    workspace = workspace or find_workspace()
    if workspace is None:
        return
    _refresh_references(workspace)
    if toolchain.gpu_capabilities():
        _warn_of_old_builds(workspace)
    try:
        line = environment_line(workspace)
    except ValueError as error:
        warnings.warn(f"{error}; no kernel can be loaded until that is mended", stacklevel=2)
        return
    if line:
        os.environ["LOCAL_KERNELS"] = line


def _refresh_references(workspace: Workspace) -> None:
    from flash_rt.flashrt_hf.kernels.builder import build_reference

    for family in workspace.families():
        try:
            build_reference(workspace, family)
        except OSError as error:  # read-only, full, something in the way: keep what is there
            warnings.warn(
                f"reference of {family.name} not refreshed: {error};"
                f" {settings.KERNEL_BUILDS.name} names another folder for builds",
                stacklevel=2,
            )
        except ManifestError as error:  # one family being edited must not hide the others
            warnings.warn(f"reference of {family.name} not refreshed: {error}", stacklevel=2)


def _warn_of_old_builds(workspace: Workspace) -> None:
    from flash_rt.flashrt_hf.kernels.variant import source_hash, variant_id

    for family in workspace.families():
        expected = variant_id(family, "cuda", source_hash(family))
        for path in (workspace.builds / family.name / "build").glob("torch-stable-abi*-cu*"):
            if not (path / f"{expected}.abi3.so").is_file():
                warnings.warn(
                    f"{family.name}: {path.name} was built from other sources than the checkout's;"
                    f" renew it with: flash-rt kernels build {family.name}",
                    stacklevel=3,
                )


def candidates(folder: Path) -> list[Candidate]:
    """Every variant in a repository folder (or the one variant it is), best first.

    A variant is rejected by the ``kernels`` library's own rules, for GPU architectures it was
    not built for, or because its files do not match its digest.
    """
    from kernels.variants import VariantAccepted, get_variants_local, resolve_variants

    if (folder / "metadata.json").is_file():
        return [Candidate(folder, _unusable(folder))]
    build = folder / "build"
    _, trace = resolve_variants(get_variants_local(build), _backend())
    accepted, rejected = [], []
    for decision in trace:
        path = build / decision.variant.variant_str
        if isinstance(decision, VariantAccepted):
            accepted.append(Candidate(path, _unusable(path)))
        else:
            rejected.append(Candidate(path, decision.reason))
    return accepted + rejected


def _backend() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "cpu"


def _unusable(path: Path) -> str | None:
    import torch

    from flash_rt.flashrt_hf.kernels.builder import arch_covers
    from flash_rt.flashrt_hf.kernels.variant import read_metadata

    metadata = read_metadata(path)
    if metadata is None:
        return "incomplete or changed: its files do not match the digest in metadata.json"
    archs = metadata.backend.archs
    if not archs or not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_capability()
    if any(arch_covers(arch, gpu) for arch in archs):
        return None
    return f"built for {', '.join(archs)}; the GPU has compute capability {gpu[0]}.{gpu[1]}"


def load(name: str, *, version: int = 1, workspace: Workspace | None = None) -> ModuleType:
    """The kernel module of one family.

    Looks in the entry of LOCAL_KERNELS, or where there is none in the local builds, then on the
    Hub; without a GPU the reference variant of the checkout is always there. Warns where the Hub's
    build takes the place of an entry's. Without a checkout the ``kernels`` library decides.

    Args:
        workspace: default, the checkout that this package runs from.

    Raises:
        ValueError: an entry of LOCAL_KERNELS is not ``repo_id=path``.
        ManifestError: not a family of this project, or another version than the checkout's.
        KernelNotFoundError: nothing usable; says which variants exist, why each was rejected,
            and the command that builds one.
    """
    from kernels import get_local_kernel

    workspace = workspace or find_workspace()
    if workspace is None:
        return load_from_library(name, version=version)
    family = workspace.family(name)
    if version != family.version:
        raise ManifestError(f"{name}: no version {version}; the checkout has {family.version}")
    local_overrides()  # raises here, where set_local_kernels would only warn
    set_local_kernels(workspace)
    folder = local_overrides().get(family.repo_id)
    found = candidates(folder) if folder is not None else []
    usable = next((one for one in found if one.rejected is None), None)
    if usable is not None:
        module: ModuleType = get_local_kernel(usable.path, backend=_backend())
        return module
    module = _load_from_hub(family, folder, found)
    builds = workspace.builds / family.name
    if folder is not None and folder != builds and builds not in folder.parents:
        warnings.warn(
            "\n".join(
                [
                    f"{family.repo_id}: nothing at its LOCAL_KERNELS entry {folder} runs here;"
                    " the Hub's build is used",
                    *_reasons(folder, found),
                ]
            ),
            stacklevel=2,
        )
    return module


def _load_from_hub(family: Family, folder: Path | None, local: list[Candidate]) -> ModuleType:
    from huggingface_hub.errors import HfHubHTTPError
    from kernels import get_kernel

    try:
        with _without_override(family.repo_id):
            module: ModuleType = get_kernel(
                family.repo_id, version=family.version, backend=_backend()
            )
    except (OSError, ValueError, RuntimeError, HfHubHTTPError) as error:
        raise KernelNotFoundError(_not_found(family, folder, local, error)) from error
    return module


@contextmanager
def _without_override(repo_id: str) -> Iterator[None]:
    before = os.environ.pop("LOCAL_KERNELS", None)
    entries = [e for e in (before or "").split(":") if e and not e.startswith(f"{repo_id}=")]
    if entries:  # the kernels library refuses an empty variable
        os.environ["LOCAL_KERNELS"] = ":".join(entries)
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_KERNELS"] = before


def _reasons(folder: Path | None, local: list[Candidate]) -> list[str]:
    """One line for each local variant that was rejected, or that there is none."""
    if local:
        return [f"  {one.path.name}: {one.rejected}" for one in local]
    return [f"  no build in {folder}" if folder else "  no local build"]


def _not_found(family: Family, folder: Path | None, local: list[Candidate], hub: Exception) -> str:
    import torch

    where = f"torch {torch.__version__}"
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        where += f", {torch.cuda.get_device_name()} (compute capability {major}.{minor})"
    first_line = str(hub).strip().split("\n", 1)[0]
    return "\n".join(
        [
            f"{family.repo_id} version {family.version}: no build of it runs here ({where})",
            *_reasons(folder, local),
            f"  Hub: {type(hub).__name__}: {first_line}",
            f"build one with: flash-rt kernels build {family.name}",
        ]
    )
