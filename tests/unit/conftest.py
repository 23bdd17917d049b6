"""A workspace of one tiny family, unlike that of any other test, so that each loads its own."""

import os
import shutil
from pathlib import Path

import pytest

from flash_rt.flashrt_hf.kernels import toolchain
from flash_rt.flashrt_hf.kernels.manifest import Family, Workspace

SCRATCH = Path(__file__).parent / "scratch"


def _make_workspace(root: Path) -> Workspace:
    shutil.copytree(SCRATCH, root, ignore=shutil.ignore_patterns("__pycache__"))
    module = root / "kernel_sources/scale/torch-ext/scale/__init__.py"
    module.write_text(module.read_text() + f"\nWORKSPACE = {str(root)!r}\n")
    return Workspace(root)


@pytest.fixture(scope="session")
def make_workspace():
    """``make_workspace(root)`` copies the scratch workspace to ``root``."""
    return _make_workspace


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.delenv("FLASH_RT_KERNEL_BUILDS", raising=False)
    monkeypatch.setenv("LOCAL_KERNELS", "")
    return _make_workspace(tmp_path / "workspace")


@pytest.fixture
def family(workspace: Workspace) -> Family:
    return workspace.family("scale")


@pytest.fixture(scope="session")
def nvcc() -> toolchain.Nvcc:
    """Skips, aloud, where there is no CUDA compiler."""
    try:
        return toolchain.find_nvcc()
    except toolchain.ToolchainError as error:
        pytest.skip(f"no nvcc: {str(error).splitlines()[0]}")


@pytest.fixture(scope="session")
def source_environment() -> dict[str, str]:
    """Environment in which a subprocess finds this checkout's packages."""
    source = Path(__file__).parents[2] / "src"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    }
