"""CUDA builds of the scratch family. They need nvcc, not a GPU."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from flash_rt.flashrt_hf.kernels import builder, check, elf, variant
from flash_rt.flashrt_hf.kernels.compile import BuildError, gencode
from flash_rt.flashrt_hf.kernels.manifest import Workspace

ARCHS = ("8.0+PTX", "9.0a", "12.0f")


@pytest.fixture(scope="module")
def built(nvcc, make_workspace, tmp_path_factory):
    """A workspace whose family is compiled for ARCHS; tests must not change it."""
    workspace = make_workspace(tmp_path_factory.mktemp("built") / "workspace")
    result = builder.build_cuda(workspace, workspace.family("scale"), ARCHS)
    assert result.action == "built"
    return workspace, result.path


@pytest.fixture
def copy(built, tmp_path):
    """A copy of that workspace to change."""
    workspace, path = built
    shutil.copytree(workspace.root, tmp_path / "copy")
    copied = Workspace(tmp_path / "copy")
    return copied, copied.root / path.relative_to(workspace.root)


def library(path: Path) -> Path:
    (found,) = path.glob("*.so")
    return found


def test_variant_complies(built):
    workspace, path = built
    assert path.name.startswith("torch-stable-abi211-cu13")
    report = check.check_variant(workspace.family("scale"), path)
    assert (report.problems, report.archs) == ([], ARCHS)
    assert elf.read(library(path)).archs == {"8.0", "8.0+PTX", "9.0a", "12.0f"}


def test_unchanged_build_does_nothing(built):
    workspace, path = built
    before = library(path).stat().st_mtime_ns
    for archs in (ARCHS, ("9.0a",)):
        assert builder.build_cuda(workspace, workspace.family("scale"), archs).action == "unchanged"
    assert library(path).stat().st_mtime_ns == before


def test_changed_source_is_compiled_again(copy):
    workspace, path = copy
    old = library(path).name
    source = workspace.sources / "scale/csrc/scale.cu"
    source.write_text(source.read_text().replace("2.0f", "3.0f"))
    assert builder.build_cuda(workspace, workspace.family("scale"), ["9.0a"]).action == "built"
    assert library(path).name != old
    (work,) = (workspace.builds / "scale/.work").iterdir()
    assert [p.name for p in work.glob("*.abi3.so")] == [library(path).name]
    assert check.check_variant(workspace.family("scale"), path).problems == []


def test_failed_build_keeps_the_old_one(copy):
    workspace, path = copy
    before = library(path).read_bytes()
    source = workspace.sources / "scale/csrc/scale.cu"
    source.write_text(source.read_text() + "\nint broken(;\n")
    with pytest.raises(BuildError, match="scale: build failed\n(?s:.*)scale.cu"):
        builder.build_cuda(workspace, workspace.family("scale"), ["9.0a"])
    assert library(path).read_bytes() == before
    assert variant.read_metadata(path) is not None
    assert not list((workspace.builds / "scale").glob(".staging-*"))


def test_two_builds_at_once(nvcc, workspace, source_environment):
    code = (
        "from pathlib import Path; from flash_rt.flashrt_hf.kernels import builder\n"
        "from flash_rt.flashrt_hf.kernels.manifest import Workspace\n"
        f"workspace = Workspace(Path({str(workspace.root)!r}))\n"
        "print(builder.build_cuda(workspace, workspace.family('scale'), ['9.0a']).action)"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=source_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert sorted(out.strip() for out, _ in outputs) == ["built", "unchanged"], outputs
    assert "scale: another build is running, waiting for it" in "".join(e for _, e in outputs)
    (path,) = (workspace.builds / "scale/build").iterdir()
    assert check.check_variant(workspace.family("scale"), path).problems == []


def test_compilers_that_outlive_a_killed_build_keep_its_lock(
    nvcc, workspace, tmp_path, source_environment
):
    ninja, started = tmp_path / "ninja", tmp_path / "started"
    ninja.write_text(
        f"#!/bin/sh\necho $$ > {started}.new\nmv {started}.new {started}\nexec sleep 60\n"
    )
    ninja.chmod(0o755)
    code = f"""
        from pathlib import Path
        from flash_rt.flashrt_hf.kernels import builder, toolchain
        from flash_rt.flashrt_hf.kernels.manifest import Workspace
        found = toolchain.find_program
        toolchain.find_program = lambda name: {str(ninja)!r} if name == "ninja" else found(name)
        workspace = Workspace(Path({str(workspace.root)!r}))
        builder.build_cuda(workspace, workspace.family("scale"))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=source_environment,
        stdout=subprocess.DEVNULL,
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with (workspace.builds / "scale/.lock").open("a") as lock:
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.kill(int(started.read_text()), signal.SIGKILL)
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert not list((workspace.builds / "scale").glob("build/*-cu*"))


def test_build_without_a_standard_input(workspace, nvcc, source_environment):
    code = (
        "from pathlib import Path; from flash_rt.flashrt_hf.kernels import builder\n"
        "from flash_rt.flashrt_hf.kernels.manifest import Workspace\n"
        f"workspace = Workspace(Path({str(workspace.root)!r}))\n"
        "print(builder.build_cuda(workspace, workspace.family('scale'), ['9.0a']).action)"
    )
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code],
        env=source_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "built\n", result.stderr


def test_check_finds_a_truncated_library(copy):
    workspace, path = copy
    with library(path).open("r+b") as file:
        file.truncate(1000)
    report = check.check_variant(workspace.family("scale"), path)
    assert report.problems == ["metadata.json: missing, malformed, or its digest does not match"]


def test_check_finds_other_sources(copy):
    workspace, path = copy
    header = workspace.sources / "scale/csrc/scale.h"
    header.write_text(header.read_text() + "// changed\n")
    (problem,) = check.check_variant(workspace.family("scale"), path).problems
    assert problem.startswith("metadata.json: id is '_scale_cuda_")


def test_check_finds_undeclared_archs(built):
    _, path = built
    so = library(path)
    identifier = so.name.removesuffix(".abi3.so")
    assert check.library_problems(so, identifier, ARCHS) == []
    assert check.library_problems(so, identifier, ("9.0a",)) == [
        f"{so.name}: holds code for 12.0f, 8.0+PTX, 9.0a; metadata.json says 9.0a"
    ]


FORBIDDEN = """
#include <pthread.h>
extern "C" void* PyList_GetItem(void*, long);
extern "C" void* PyInit_bad() { return PyList_GetItem(nullptr, 0); }
extern "C" void extra() { pthread_t t; pthread_create(&t, nullptr, nullptr, nullptr); }
"""


def test_check_finds_forbidden_symbols(tmp_path):
    source, target = tmp_path / "bad.cpp", tmp_path / "bad.abi3.so"
    source.write_text(FORBIDDEN)
    options = ["-shared", "-fPIC", "-Wl,--no-as-needed", "-lresolv"]
    subprocess.run(["c++", source, "-o", target, *options], check=True)
    problems = "\n".join(check.library_problems(target, "bad", ()))
    assert "needs libresolv.so.2, which is neither torch's nor libc's" in problems
    assert "exports ['PyInit_bad', 'extra'], expected only PyInit_bad" in problems
    assert "needs symbols outside the stable ABIs: PyList_GetItem" in problems
    too_new = [s for s in elf.read(target).symbols if s.name == "pthread_create"]
    if too_new[0].version == "GLIBC_2.34":  # otherwise this system is as old as manylinux_2_28
        assert "needs symbols newer than manylinux_2_28: pthread_create@GLIBC_2.34" in problems


def test_check_of_no_shared_object(tmp_path):
    path = tmp_path / "x.abi3.so"
    path.write_bytes(b"nothing")
    (problem,) = check.library_problems(path, "x", ())
    assert problem.startswith(f"{path}: not a shared object")


@pytest.mark.parametrize(
    ("arch", "flag"),
    [
        ("9.0a", "-gencode=arch=compute_90a,code=sm_90a"),
        ("12.0f", "-gencode=arch=compute_120f,code=sm_120f"),
        ("8.0+PTX", "-gencode=arch=compute_80,code=[sm_80,compute_80]"),
    ],
)
def test_gencode(arch, flag):
    assert gencode(arch) == [flag]
