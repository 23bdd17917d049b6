"""Where the compiler, its headers, torch's headers and the GPUs of this machine are."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from flash_rt.flashrt_hf import settings

SYSTEM_NVCC = Path("/usr/local/cuda/bin/nvcc")


class ToolchainError(RuntimeError):
    """Something a build needs is not on this machine; the message says how to get it."""


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler with the toolkit it belongs to."""

    path: Path
    root: Path
    version: tuple[int, int]

    @property
    def include(self) -> Path:
        return self.root / "include"

    @property
    def libraries(self) -> Path:
        for name in ("lib64", "lib"):
            if (self.root / name / "libcudart_static.a").is_file():
                return self.root / name
        raise ToolchainError(
            f"nvcc: {self.root} has no libcudart_static.a; install the CUDA runtime development"
            " files of the same version"
        )


def nvcc_candidates() -> list[Path]:
    """Places an nvcc may be, first choice first; NVIDIA's wheels come after the system's."""
    home = settings.CUDA_HOME.get()
    if home is not None:
        return [home / "bin" / "nvcc"]
    candidates = []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(SYSTEM_NVCC)
    for folder in _wheel_folders():
        candidates += sorted(folder.glob("cu*/bin/nvcc"), reverse=True)
    return candidates


def _wheel_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def find_nvcc(*, minimum: tuple[int, int] = (13, 0)) -> Nvcc:
    """The first nvcc of at least version ``minimum``.

    Raises:
        ToolchainError: there is none; lists the places searched and what each lacked.
    """
    rejected = []
    for path in nvcc_candidates():
        if not path.is_file():
            rejected.append(f"  {path}: not there")
            continue
        nvcc = _probe_nvcc(path)
        if nvcc is None:
            rejected.append(f"  {path}: does not run")
        elif nvcc.version < minimum:
            rejected.append(f"  {path}: version {_dotted(nvcc.version)}")
        else:
            return nvcc
    raise ToolchainError(
        f"nvcc: version {_dotted(minimum)} or later is needed to build CUDA kernels, none found:\n"
        + "\n".join(rejected)
        + "\nInstall a CUDA toolkit, or NVIDIA's wheels (pip install 'nvidia-cuda-nvcc==13.0.*'"
        " 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*'"
        " 'nvidia-cuda-cccl==13.0.*'), or set CUDA_HOME."
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _probe_nvcc(path: Path) -> Nvcc | None:
    # The dry run prints the toolkit's root even where the nvcc found is a wrapper script.
    try:
        version = _run(path, "--version")
        dry = _run(path, "-dryrun", "-c", "probe.cu")
    except OSError:
        return None
    release = re.search(r"release (\d+)\.(\d+)", version.stdout)
    top = re.search(r"^#\$ TOP=(.+)$", dry.stderr, re.MULTILINE)
    if version.returncode != 0 or release is None:
        return None
    root = Path(top[1]) if top else path.resolve().parent.parent
    return Nvcc(path, root.resolve(), (int(release[1]), int(release[2])))


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    # Compilers fail where standard input is closed, as services may have it.
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def torch_root() -> Path:
    """The installed torch, found without importing it.

    Raises:
        ToolchainError: torch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError("torch: not installed in this Python; `pip install torch`")
    return Path(spec.origin).parent


def python_include() -> Path:
    """Folder of Python.h.

    Raises:
        ToolchainError: the development headers are not installed.
    """
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise ToolchainError(
            f"Python.h: not in {include}; install the headers of this Python (Debian: python3-dev)"
        )
    return include


def find_program(name: str) -> str:
    """Path of ``name``, looked for beside this Python first.

    Raises:
        ToolchainError: not found.
    """
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise ToolchainError(f"{name}: needed to build kernels, not found; install it")
    return found


def gpu_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs the driver shows.

    Asks NVML: neither torch is imported nor is CUDA initialised, which would break later forks.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if (
            nvml.nvmlDeviceGetCudaComputeCapability(
                device, ctypes.byref(major), ctypes.byref(minor)
            )
            == 0
        ):
            found.append((major.value, minor.value))
    return found
