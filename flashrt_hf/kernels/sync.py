"""Copy what families share from kernel_sources/common into each of them."""

from __future__ import annotations

from pathlib import Path

from flash_rt.flashrt_hf.kernels.manifest import Family, Workspace


def copies(workspace: Workspace, family: Family) -> dict[Path, Path]:
    """Target file -> source file, for everything the family must hold a copy of."""
    common = workspace.sources / "common"
    places = {
        "csrc": family.path / "csrc" / "common",
        "python": family.package / "_common",
        "tests": family.path / "tests" / "_common",
    }
    return {
        place / source.relative_to(common / part): source
        for part, place in places.items()
        for source in sorted((common / part).rglob("*"))
        if source.is_file() and "__pycache__" not in source.parts
    }


def differences(workspace: Workspace, family: Family) -> list[str]:
    """What ``sync`` would change, one line a file; empty when the copies are identical."""
    wanted = copies(workspace, family)
    found = [
        f"{target.relative_to(workspace.root)}: "
        + ("differs from" if target.is_file() else "is missing, copy of")
        + f" {source.relative_to(workspace.root)}"
        for target, source in wanted.items()
        if not target.is_file() or target.read_bytes() != source.read_bytes()
    ]
    found += [
        f"{path.relative_to(workspace.root)}: has no original in kernel_sources/common"
        for path in _strays(wanted)
    ]
    return found


def sync(workspace: Workspace, family: Family) -> list[str]:
    """Make the copies identical; returns what was changed, as :func:`differences` says it."""
    found = differences(workspace, family)
    if found:
        wanted = copies(workspace, family)
        for path in _strays(wanted):
            path.unlink()
        for target, source in wanted.items():
            if not target.is_file() or target.read_bytes() != source.read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read_bytes())
    return found


def _strays(wanted: dict[Path, Path]) -> list[Path]:
    folders = {
        next(parent for parent in target.parents if parent.name in ("common", "_common"))
        for target in wanted
    }
    return sorted(
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path not in wanted
    )
