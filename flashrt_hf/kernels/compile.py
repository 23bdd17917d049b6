"""Compile one family's CUDA extension with nvcc, the host compiler and ninja."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from flash_rt.flashrt_hf import settings
from flash_rt.flashrt_hf.kernels import glibc, toolchain
from flash_rt.flashrt_hf.kernels.manifest import CudaKernel, Family
from flash_rt.flashrt_hf.kernels.toolchain import Nvcc

# Oldest Python whose stable ABI the extension may use, as PY_VERSION_HEX.
_PYTHON_LIMITED_API = "0x03090000"

_REGISTRATION = """\
// Generated. Lets a binding name its library by a macro and makes the shared object importable.
#pragma once

#include <Python.h>
#include <torch/csrc/stable/library.h>

#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) \\
  STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

#define FLASHRT_REGISTER(NAME)                                                        \\
  PyMODINIT_FUNC PyInit_##NAME(void) {                                                \\
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #NAME, nullptr, 0, nullptr, \\
                                     nullptr, nullptr, nullptr, nullptr};              \\
    return PyModule_Create(&definition);                                              \\
  }
#define REGISTER_EXTENSION(NAME) FLASHRT_REGISTER(NAME)
"""

_RULES = """\
rule nvcc
  command = $nvcc -MD -MF $out.d $nvcc_flags $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = nvcc $in
rule cxx
  command = $cxx -MD -MF $out.d $cxx_flags $flags -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = c++ $in
rule link
  command = $cxx -shared -o $out $in $link_flags
  description = link $out
"""


class BuildError(RuntimeError):
    """A family did not compile; the message ends with the compiler's own."""


@dataclass(frozen=True)
class Extension:
    """What to compile: ``identifier`` names the module, ``archs`` the CUDA capabilities."""

    family: Family
    identifier: str
    archs: tuple[str, ...]
    nvcc: Nvcc


def compile_extension(extension: Extension, work: Path, *, lock: int) -> Path:
    """Compile into ``work``, which may hold the objects of an earlier build.

    Args:
        lock: file descriptor of ``install.locked``; the compilers hold it too.

    Returns:
        The shared object.

    Raises:
        BuildError: a compiler failed.
        ToolchainError: a tool or header is missing.
    """
    work.mkdir(parents=True, exist_ok=True)
    generated = work / "generated"
    generated.mkdir(exist_ok=True)
    init = f"PyInit_{extension.identifier}"
    _write_if_changed(generated / "registration.h", _REGISTRATION)
    _write_if_changed(generated / "compatibility.cpp", glibc.COMPATIBILITY_SOURCE)
    _write_if_changed(generated / "exports.map", f"{{ global: {init}; local: *; }};\n")
    _write_if_changed(work / "build.ninja", _ninja_file(extension, work))
    jobs = settings.MAX_JOBS.get()
    ninja = [toolchain.find_program("ninja"), "-C", str(work)]
    result = subprocess.run(
        [*ninja, "-j", str(jobs)],
        stdin=subprocess.DEVNULL,  # compilers fail where standard input is closed
        capture_output=True,
        text=True,
        check=False,
        pass_fds=[lock],
    )
    if result.returncode != 0:
        output = (result.stdout + result.stderr)[-8000:]
        raise BuildError(f"{extension.family.name}: build failed\n{output}")
    # Libraries and objects of earlier sources: build.ninja no longer names them.
    subprocess.run([*ninja, "-t", "cleandead"], capture_output=True, check=True)
    return work / f"{extension.identifier}.abi3.so"


def _write_if_changed(path: Path, text: str) -> None:
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def gencode(arch: str) -> list[str]:
    """nvcc's option for one capability: ``"9.0a"`` -> ``arch=compute_90a,code=sm_90a``."""
    number = arch.removesuffix("+PTX").replace(".", "")
    code = f"[sm_{number},compute_{number}]" if arch.endswith("+PTX") else f"sm_{number}"
    return [f"-gencode=arch=compute_{number},code={code}"]


def _ninja_file(extension: Extension, work: Path) -> str:
    family, nvcc, generated = extension.family, extension.nvcc, work / "generated"
    cxx = toolchain.find_program("c++")
    torch = toolchain.torch_root()
    version = tuple(int(part) for part in family.stable_abi.split("."))
    target_version = f"0x{version[0]:02x}{version[1]:02x}" + "0" * 12
    includes = [f"-I{family.path / folder}" for folder in family.binding_include]
    cxx_flags = [
        "-std=c++17 -O3 -fPIC -fvisibility=hidden -fvisibility-inlines-hidden -Wall",
        f"-DTORCH_EXTENSION_NAME={extension.identifier}",
        f"-DTORCH_TARGET_VERSION={target_version}",
        f"-DPy_LIMITED_API={_PYTHON_LIMITED_API}",
        "-DUSE_CUDA -DCUDA_KERNEL",
        f"-I{generated}",
        *includes,
        f"-isystem {torch / 'include'} -isystem {toolchain.python_include()}",
        f"-isystem {nvcc.include}",
    ]
    nvcc_flags = [
        "-std=c++17 -O3 -DUSE_CUDA -DCUDA_KERNEL",
        "-Xcompiler -fPIC,-fvisibility=hidden,-fvisibility-inlines-hidden,-Wall",
    ]
    # libtorch has no symbol that the linker sees used, yet it brings libtorch_cuda at load time.
    link_flags = [
        f"-L{nvcc.libraries} -lcudart_static -Wl,--as-needed",
        *glibc.old_library_flags(cxx, work),
        f"-lstdc++ -L{torch / 'lib'} -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,--as-needed",
        f"-Wl,--version-script={generated / 'exports.map'} -Wl,-O1 -s",
    ]
    lines = [
        f"nvcc = {nvcc.path}",
        f"cxx = {cxx}",
        f"cxx_flags = {' '.join(cxx_flags)}",
        f"nvcc_flags = {' '.join(nvcc_flags)}",
        f"link_flags = {' '.join(link_flags)}",
        _RULES,
    ]
    lines.append(f"build compatibility.o: cxx {generated / 'compatibility.cpp'}")
    objects = ["compatibility.o"]
    for source in family.binding_sources:
        if source.endswith((".cpp", ".cc", ".cxx")):
            objects.append(_edge(lines, "cxx", family, source, []))
    for kernel in family.cuda_kernels:
        for source in kernel.sources:
            if source.endswith(".cu"):
                objects.append(
                    _edge(lines, "nvcc", family, source, _kernel_flags(extension, kernel))
                )
            elif source.endswith((".cpp", ".cc", ".cxx")):
                flags = [f"-I{family.path / folder}" for folder in kernel.include]
                objects.append(_edge(lines, "cxx", family, source, [*flags, *kernel.cxx_flags]))
    lines.append(f"build {extension.identifier}.abi3.so: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _kernel_flags(extension: Extension, kernel: CudaKernel) -> list[str]:
    codes = [flag for arch in extension.archs for flag in gencode(arch)]
    threads = [f"--threads {min(len(codes), settings.MAX_JOBS.get())}"] if len(codes) > 1 else []
    includes = [f"-I{extension.family.path / folder}" for folder in kernel.include]
    return [*codes, *threads, *includes, *kernel.cuda_flags]


def _edge(lines: list[str], rule: str, family: Family, source: str, flags: list[str]) -> str:
    target = source.replace("/", "_") + ".o"
    lines.append(f"build {target}: {rule} {family.path / source}\n  flags = {' '.join(flags)}")
    return target
