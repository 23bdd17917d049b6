"""What the workspace's and the families' build.toml files say."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from flash_rt.flashrt_hf import settings


class ManifestError(ValueError):
    """A build.toml or the sources it names are not as the workspace demands."""


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ManifestError: missing or malformed; names the file.
    """
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file") from None
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(f"{path}: {error}") from None
    return content


@dataclass(frozen=True)
class CudaKernel:
    """One ``[kernel.<name>]`` section with ``backend = "cuda"``; paths relative to the family."""

    name: str
    sources: tuple[str, ...]
    include: tuple[str, ...]
    capabilities: tuple[str, ...]
    cuda_flags: tuple[str, ...]
    cxx_flags: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One kernel family: a folder in kernel-builder's layout."""

    path: Path
    organisation: str

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_toml(self.path / "build.toml")

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def repo_id(self) -> str:
        return f"{self.organisation}/{self.name}"

    @property
    def version(self) -> int:
        return int(self.config["general"]["version"])

    @property
    def package(self) -> Path:
        """The Python package that every variant carries."""
        return self.path / "torch-ext" / self.python_name

    @property
    def stable_abi(self) -> str:
        abi = self.config["torch"]["stable-abi"]
        return str(abi["cuda"] if isinstance(abi, dict) else abi)

    @property
    def binding_sources(self) -> tuple[str, ...]:
        return tuple(self.config["torch"].get("src", ()))

    @property
    def binding_include(self) -> tuple[str, ...]:
        return tuple(self.config["torch"].get("include", ()))

    @cached_property
    def cuda_kernels(self) -> tuple[CudaKernel, ...]:
        return tuple(
            CudaKernel(
                name=name,
                sources=tuple(section["src"]),
                include=tuple(section.get("include", ())),
                capabilities=tuple(section.get("cuda-capabilities", ())),
                cuda_flags=tuple(section.get("cuda-flags", ())),
                cxx_flags=tuple(section.get("cxx-flags", ())),
            )
            for name, section in self.config.get("kernel", {}).items()
            if section["backend"] == "cuda"
        )

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Union of the kernels' CUDA capabilities, in the order given."""
        return tuple(dict.fromkeys(c for k in self.cuda_kernels for c in k.capabilities))


@dataclass(frozen=True)
class Workspace:
    """A checkout: root build.toml, kernel_sources/ and the folder of local builds."""

    root: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        config = read_toml(self.root / "build.toml").get("workspace")
        if config is None:
            raise ManifestError(f"{self.root / 'build.toml'}: has no [workspace] section")
        return dict(config)

    @property
    def sources(self) -> Path:
        return self.root / "kernel_sources"

    @property
    def builds(self) -> Path:
        return settings.KERNEL_BUILDS.get() or self.root / "build" / "kernels"

    @property
    def organisation(self) -> str:
        return str(self.config["organisation"])

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self.config["members"])

    @property
    def capabilities(self) -> tuple[str, ...]:
        return tuple(self.config["cuda-capabilities"])

    def family(self, name: str) -> Family:
        """The member family of that name.

        Raises:
            ManifestError: not a member (lists the members), or its folder has no build.toml.
        """
        if name not in self.members:
            raise ManifestError(
                f"kernels: no family {name!r}; the families are {', '.join(self.members)}"
            )
        path = self.sources / name
        if not (path / "build.toml").is_file():
            raise ManifestError(f"kernels: family {name!r} has no {path / 'build.toml'}")
        return Family(path, self.organisation)

    def families(self) -> list[Family]:
        """The member families that have sources."""
        present = [m for m in self.members if (self.sources / m / "build.toml").is_file()]
        return [self.family(name) for name in present]


def find_workspace() -> Workspace | None:
    """The checkout this package runs from, or None where it was installed without one."""
    root = Path(__file__).resolve().parents[2]
    return Workspace(root) if (root / "kernel_sources").is_dir() else None


def require_workspace() -> Workspace:
    """The checkout this package runs from.

    Raises:
        ManifestError: there is none.
    """
    workspace = find_workspace()
    if workspace is None:
        raise ManifestError(
            "kernels: this installation has no kernel_sources; build from a checkout of the project"
        )
    return workspace


def capability_number(capability: str) -> tuple[int, int]:
    """``"10.0f"`` -> ``(10, 0)``.

    Raises:
        ManifestError: not ``MAJOR.MINOR`` with an optional ``a`` or ``f`` and ``+PTX``.
    """
    match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", capability)
    if match is None:
        raise ManifestError(
            f"arch: must be like 8.0, 9.0a, 12.0f or 8.0+PTX, 'all' or 'native', got {capability!r}"
        )
    return int(match[1]), int(match[2])
