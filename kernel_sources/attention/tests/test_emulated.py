"""The CUDA source of attend, run thread by thread on the CPU and checked against fp64."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent / "csrc"
STATICS = "emulate::current->block->statics.data()"
# Shared variables of a block live in the emulated block; the numbers are their offsets there.
SHARED = (
    (r"extern __shared__ .*shared\[\];",
     "unsigned char* shared = emulate::current->block->shared.data();"),
    (r"__shared__ ByteBarrier gathered;",
     f"ByteBarrier& gathered = *(ByteBarrier*)({STATICS} + 128);"),
    (r"__shared__ bool last;", f"bool& last = *(bool*)({STATICS} + 64);"),
)  # fmt: skip


def cuda_headers():
    nvcc = shutil.which("nvcc")
    folders = [Path(nvcc).resolve().parent.parent / "include"] if nvcc else []
    folders.append(Path("/usr/local/cuda/include"))
    return next((folder for folder in folders if (folder / "cuda_bf16.h").is_file()), None)


def test_attend_emulated(tmp_path):
    headers, compiler = cuda_headers(), shutil.which("g++")
    if headers is None or compiler is None or platform.machine() != "x86_64":
        pytest.skip("needs g++, the CUDA headers and an x86-64 processor")
    source = tmp_path / "csrc"
    shutil.copytree(CSRC, source)
    shutil.copy(HERE / "emulation" / "ptx.cuh", source)
    replaced = 0
    for path in source.glob("*.cuh"):
        text = path.read_text()
        for pattern, replacement in SHARED:
            text, count = re.subn(pattern, replacement, text)
            replaced += count
        assert "__shared__ " not in text, f"{path.name}: a shared variable that SHARED lacks"
        path.write_text(text)
    assert replaced == len(SHARED)

    program = tmp_path / "attend_check"
    sources = [str(HERE / "emulation" / name) for name in ("attend_check.cpp", "emulate.cpp")]
    include = ["-include", str(HERE / "emulation" / "emulate.h")]
    folders = [f"-I{HERE / 'emulation'}", f"-I{source}", f"-I{headers}"]
    command = [
        compiler,
        "-std=c++17",
        "-O2",
        "-w",
        *include,
        *folders,
        "-o",
        str(program),
        *sources,
    ]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
