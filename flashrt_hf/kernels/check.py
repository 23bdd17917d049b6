"""Prove that a build complies with the Hub's rules for kernels.

Rules: huggingface.co/docs/kernels, "Kernel requirements" (stable Python ABI of 3.9, manylinux_2_28
symbols, no libraries beyond torch's own), and torch's stable ABI: only its C shim.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from flash_rt.flashrt_hf.kernels import elf, glibc, toolchain, variant
from flash_rt.flashrt_hf.kernels.elf import SharedObject, Symbol
from flash_rt.flashrt_hf.kernels.manifest import Family

# A binding creates its module and uses no other Python interface.
_PYTHON_SYMBOLS = {"PyModule_Create2", "PyModuleDef_Init"}
_TORCH_SHIM = re.compile(r"(aoti_)?torch_\w+")
_LIBRARIES = re.compile(
    r"(libtorch|libtorch_cpu|libtorch_cuda|libc10|libc10_cuda)\.so"
    r"|(libc|libm|libstdc\+\+)\.so\.6|(librt|libgcc_s)\.so\.1|libdl\.so\.2|libpthread\.so\.0"
    r"|ld-linux-[\w-]+\.so\.\d"
)

_LOAD = """
import ctypes, sys
import torch
if len(sys.argv) > 3 and torch.version.cuda is None:
    ctypes.CDLL(sys.argv[3], mode=ctypes.RTLD_GLOBAL)
from kernels import get_kernel
module = get_kernel(sys.argv[1], version=int(sys.argv[2]), check_arch=False)
print(module.__name__)
"""
_STREAM_STAND_IN = """
extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }
"""


@dataclass
class Report:
    """What a check of one variant found; compliant when ``problems`` is empty."""

    path: Path
    problems: list[str] = field(default_factory=list)
    archs: tuple[str, ...] = ()


def check_variant(family: Family, path: Path) -> Report:
    """Check one variant folder of the family."""
    from kernels.variants import parse_variant

    report = Report(path)
    try:
        parse_variant(path.name)
    except ValueError as error:
        report.problems.append(f"name: {error}")
    metadata = variant.read_metadata(path)
    if metadata is None:
        report.problems.append("metadata.json: missing, malformed, or its digest does not match")
        return report
    backend = str(metadata.backend.backend_type)
    report.archs = tuple(metadata.backend.archs or ())
    expected = variant.variant_id(family, backend, variant.source_hash(family))
    for name, value, wanted in (
        ("name", str(metadata.name), family.name),
        ("version", metadata.version, family.version),
        ("license", metadata.license, family.config["general"]["license"]),
        ("id", metadata.id, expected),
    ):
        if value != wanted:
            report.problems.append(
                f"metadata.json: {name} is {value!r}, the sources say {wanted!r}; "
                f"flash-rt kernels build {family.name} renews it"
            )
    libraries = sorted(p.name for p in path.rglob("*.so*"))
    wanted_libraries = [f"{metadata.id}.abi3.so"] if backend == "cuda" else []
    if libraries != wanted_libraries:
        report.problems.append(f"libraries: {libraries}, expected {wanted_libraries}")
    for library in libraries:
        report.problems += library_problems(path / library, metadata.id, report.archs)
    if not report.problems:
        report.problems += _load_problems(family, path, metadata.id)
    return report


def library_problems(path: Path, identifier: str, archs: tuple[str, ...]) -> list[str]:
    """What a shared object does that the Hub's rules forbid."""
    try:
        shared = elf.read(path)
    except ValueError as error:
        return [str(error)]
    found = [
        f"{path.name}: needs {library}, which is neither torch's nor libc's"
        for library in shared.needed
        if not _LIBRARIES.fullmatch(library)
    ]
    found += [f"{path.name}: {text}" for text in _symbol_problems(shared, identifier)]
    built = _declared(shared)
    if built != set(archs):
        found.append(
            f"{path.name}: holds code for {', '.join(sorted(built)) or 'no GPU'};"
            f" metadata.json says {', '.join(archs) or 'nothing'}"
        )
    return found


def _declared(shared: SharedObject) -> set[str]:
    # PTX comes with machine code of its own architecture and is declared as one entry.
    with_ptx = {arch.removesuffix("+PTX") for arch in shared.archs if arch.endswith("+PTX")}
    return {f"{arch}+PTX" if arch in with_ptx else arch for arch in shared.archs} - {""}


def _symbol_problems(shared: SharedObject, identifier: str) -> list[str]:
    found = []
    exported = {s.name for s in shared.symbols if s.defined and s.is_exported}
    if exported != {f"PyInit_{identifier}"}:
        found.append(f"exports {sorted(exported)}, expected only PyInit_{identifier}")
    needed = [s for s in shared.symbols if not s.defined]
    too_new = [f"{s.name}@{s.version}" for s in needed if glibc.is_too_new(s.version)]
    if too_new:
        found.append(f"needs symbols newer than manylinux_2_28: {', '.join(sorted(too_new))}")
    foreign = [s.name for s in needed if not (s.version or s.weak or _is_allowed(s))]
    if foreign:
        found.append(f"needs symbols outside the stable ABIs: {', '.join(sorted(foreign))}")
    return found


def _is_allowed(symbol: Symbol) -> bool:
    return symbol.name in _PYTHON_SYMBOLS or bool(_TORCH_SHIM.fullmatch(symbol.name))


def _load_problems(family: Family, path: Path, identifier: str) -> list[str]:
    """Load the variant through ``get_kernel`` in a process of its own.

    A CPU-only torch lacks one function that a CUDA extension needs; a stand-in that only fails
    takes its place, so that everything else about loading is still proven.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", _LOAD, family.repo_id, str(family.version)]
        if any(path.glob("*.so")):
            source = Path(folder, "stream.cpp")
            source.write_text(_STREAM_STAND_IN)
            library = source.with_suffix(".so")
            compiler = toolchain.find_program("c++")
            subprocess.run(
                [compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True
            )
            arguments.append(str(library))
        environment = os.environ | {"LOCAL_KERNELS": f"{family.repo_id}={path}"}
        result = subprocess.run(
            arguments, env=environment, capture_output=True, text=True, check=False
        )
    if result.returncode == 0 and result.stdout.strip() == identifier:
        return []
    return [f"does not load through get_kernel: {(result.stderr or result.stdout).strip()[-2000:]}"]
