"""Copy what families share from kernel_sources/common into each of them."""

from __future__ import annotations

from pathlib import Path

from flash_rt.flashrt_hf.kernels.manifest import Family, Workspace


def places(family: Family) -> dict[str, Path]:
    """Folder of kernel_sources/common -> the family's copy of it, which holds nothing else."""
    return {
        "csrc": family.path / "csrc" / "common",
        "python": family.package / "_common",
        "tests": family.path / "tests" / "_common",
        "benchmarks": family.path / "benchmarks" / "_common",
    }


def copies(workspace: Workspace, family: Family) -> dict[Path, Path]:
    """Target file -> source file, for everything the family must hold a copy of."""
    common = workspace.sources / "common"
    wanted = {
        place / source.relative_to(common / part): source
        for part, place in places(family).items()
        for source in _files(common / part)
    }
    wanted[family.path / "flake.nix"] = common / "flake.nix"
    return wanted


def differences(workspace: Workspace, family: Family) -> list[str]:
    """What ``sync`` would change, one line a file; empty when the copies are identical."""
    wanted = copies(workspace, family)
    root = workspace.root
    found = []
    for target, source in wanted.items():
        if not _same(target, source):
            state = "differs from" if target.is_file() else "is missing, copy of"
            found.append(f"{target.relative_to(root)}: {state} {source.relative_to(root)}")
    for path in _strays(family, wanted):
        found.append(f"{path.relative_to(root)}: has no original in kernel_sources/common")
    return found


def sync(workspace: Workspace, family: Family) -> list[str]:
    """Make the copies identical; returns what was changed, as :func:`differences` says it."""
    found = differences(workspace, family)
    wanted = copies(workspace, family)
    for path in _strays(family, wanted):
        path.unlink()
    for target, source in wanted.items():
        if not _same(target, source):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )


def _same(target: Path, source: Path) -> bool:
    return target.is_file() and target.read_bytes() == source.read_bytes()


def _strays(family: Family, wanted: dict[Path, Path]) -> list[Path]:
    return [
        path for place in places(family).values() for path in _files(place) if path not in wanted
    ]
