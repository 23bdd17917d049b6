"""Build kernel families from this checkout into ``build/kernels/<family>/build/<variant>/``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flash_rt.flashrt_hf.kernels import toolchain, validate, variant
from flash_rt.flashrt_hf.kernels.compile import Extension, compile_extension
from flash_rt.flashrt_hf.kernels.install import locked, replace_folder, staging
from flash_rt.flashrt_hf.kernels.manifest import (
    Family,
    ManifestError,
    Workspace,
    capability_number,
)

# What a machine without a GPU builds for, unless told otherwise.
DEFAULT_ARCH = "9.0a"


@dataclass(frozen=True)
class Built:
    """One variant folder and what the builder did: ``"built"`` or ``"unchanged"``."""

    path: Path
    action: Literal["built", "unchanged"]


def build_reference(workspace: Workspace, family: Family) -> Built:
    """Write the ``torch-cpu`` variant: the family's Python, nothing compiled. Milliseconds.

    Raises:
        ManifestError: the family's build.toml or sources are wrong.
    """
    identifier = variant.variant_id(family, "cpu", variant.source_hash(family))
    folder = workspace.builds / family.name
    target = folder / "build" / variant.REFERENCE_VARIANT
    if _is_current(target, identifier, ()):
        return Built(target, "unchanged")
    validate.check_family(workspace, family, cuda=False)
    with locked(folder), staging(folder) as stage:
        if _is_current(target, identifier, ()):
            return Built(target, "unchanged")
        variant.write_python_files(family, identifier, stage, backend="cpu")
        variant.write_metadata(family, identifier, stage, backend="cpu")
        replace_folder(stage, target)
    return Built(target, "built")


def build_cuda(
    workspace: Workspace,
    family: Family,
    archs: Sequence[str] = (),
    *,
    say: Callable[[str], None] | None = None,
) -> Built:
    """Compile the family for ``archs`` (see :func:`select_archs`). Needs nvcc, not a GPU.

    Args:
        say: called with one line before a compilation, which can take minutes.

    Raises:
        ManifestError: the family's build.toml or sources are wrong, or an arch is not its own.
        ToolchainError: nvcc or another tool is missing.
        BuildError: the sources do not compile.
    """
    selected = select_archs(family, archs)
    nvcc = toolchain.find_nvcc(minimum=capability_number(workspace.config["cuda-minver"]))
    identifier = variant.variant_id(family, "cuda", variant.source_hash(family))
    name = variant.cuda_variant(family, nvcc.version)
    folder = workspace.builds / family.name
    target = folder / "build" / name
    if _is_current(target, identifier, selected):
        return Built(target, "unchanged")
    validate.check_family(workspace, family, cuda=True)
    with locked(folder) as lock, staging(folder) as stage:
        if _is_current(target, identifier, selected):
            return Built(target, "unchanged")
        if say:
            say(f"{family.name}: compiling for {', '.join(selected)} ...")
        extension = Extension(family, identifier, selected, nvcc)
        library = compile_extension(extension, folder / ".work" / name, lock=lock)
        variant.write_python_files(family, identifier, stage, backend="cuda")
        shutil.copy2(library, stage / library.name)
        variant.write_metadata(family, identifier, stage, backend="cuda", archs=selected)
        replace_folder(stage, target)
    return Built(target, "built")


def _is_current(target: Path, identifier: str, archs: tuple[str, ...]) -> bool:
    metadata = variant.read_metadata(target)
    if metadata is None or metadata.id != identifier:
        return False
    return set(archs) <= set(metadata.backend.archs or ())


def select_archs(family: Family, requested: Sequence[str] = ()) -> tuple[str, ...]:
    """The family's CUDA capabilities that a build is for, in build.toml's order.

    Args:
        requested: capabilities as build.toml spells them, optionally with ``+PTX``; ``"all"``;
            ``"native"`` for the GPUs present. Empty means native, or 9.0a where there is no GPU.

    Raises:
        ManifestError: a capability or a GPU that the family does not cover; lists what it covers.
    """
    known = family.capabilities
    chosen: list[str] = []
    for arch in requested or ["native"]:
        if arch == "all":
            chosen += known
        elif arch == "native":
            gpus = toolchain.gpu_capabilities()
            if not gpus and requested:
                raise ManifestError(f"{family.name}: arch native, but no GPU is visible")
            chosen += [_covering(family, gpu) for gpu in gpus] or [DEFAULT_ARCH]
        else:
            capability_number(arch)
            if arch.removesuffix("+PTX") not in known:
                raise ManifestError(
                    f"{family.name}: arch must be one of {', '.join(known)}, got {arch!r}"
                )
            chosen.append(arch)
    order = {arch: i for i, arch in enumerate(known)}
    return tuple(sorted(dict.fromkeys(chosen), key=lambda a: (order[a.removesuffix("+PTX")], a)))


def _covering(family: Family, gpu: tuple[int, int]) -> str:
    covering = [arch for arch in family.capabilities if arch_covers(arch, gpu)]
    if not covering:
        raise ManifestError(
            f"{family.name}: GPU of compute capability {gpu[0]}.{gpu[1]} is not covered by"
            f" {', '.join(family.capabilities)}"
        )
    return max(covering, key=capability_number)


def arch_covers(arch: str, gpu: tuple[int, int]) -> bool:
    """Whether code for ``arch`` runs on a GPU of that compute capability.

    ``9.0a`` runs on exactly 9.0; ``10.0f`` and ``8.6`` on the same major with that minor or a
    later one; ``+PTX`` on anything later. Source: CUDA C++ programming guide, compatibility.
    """
    number = capability_number(arch)
    if arch.endswith("+PTX"):
        return gpu >= number
    if arch.endswith("a"):
        return gpu == number
    return gpu[0] == number[0] and gpu[1] >= number[1]
