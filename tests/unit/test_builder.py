"""Builds without a compiler: reference variants, recovery, locks, choice of architectures."""

import json
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from flash_rt.flashrt_hf.kernels import builder, install, resolver, toolchain, variant
from flash_rt.flashrt_hf.kernels.manifest import ManifestError


def test_reference_computes_and_second_build_does_nothing(workspace, family):
    first = builder.build_reference(workspace, family)
    assert first.action == "built"
    assert first.path == workspace.root / "build/kernels/scale/build/torch-cpu"
    before = {p: p.stat().st_mtime_ns for p in first.path.rglob("*")}

    module = resolver.load("scale", workspace=workspace)

    assert torch.equal(module.scale(torch.tensor([1.0, -3.0])), torch.tensor([2.0, -6.0]))
    assert module.__name__ == f"_scale_cpu_{variant.source_hash(family)[:7]}"
    assert builder.build_reference(workspace, family).action == "unchanged"
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_hash_covers_names_and_contents_but_not_tests(workspace, family):
    first = variant.source_hash(family)
    (family.path / "tests").mkdir()
    (family.path / "tests/test_scale.py").write_text("assert True")
    (family.package / "__pycache__").mkdir()
    (family.package / "__pycache__/ops.pyc").write_bytes(b"1")
    assert variant.source_hash(family) == first
    (family.path / "csrc/scale.h").rename(family.path / "csrc/other.h")
    second = variant.source_hash(family)
    assert second != first
    (family.path / "csrc/other.h").write_text("")
    assert variant.source_hash(family) not in (first, second)


def truncate(path: Path):
    (path / "ops.py").write_text("")


def forget_metadata(path: Path):
    (path / "metadata.json").unlink()


def break_metadata(path: Path):
    (path / "metadata.json").write_text("{")


def lose_a_file(path: Path):
    (path / "ops.py").unlink()


def empty(path: Path):
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, forget_metadata, break_metadata, lose_a_file, empty])
def test_damaged_build_is_refused_and_rebuilt(workspace, family, damage):
    path = builder.build_reference(workspace, family).path
    damage(path)
    (candidate,) = resolver.candidates(workspace.builds / "scale")
    assert candidate.rejected == (
        "incomplete or changed: its files do not match the digest in metadata.json"
    )

    assert builder.build_reference(workspace, family).action == "built"

    assert resolver.candidates(workspace.builds / "scale")[0].rejected is None
    assert variant.read_metadata(path).id == variant.variant_id(
        family, "cpu", variant.source_hash(family)
    )


def test_killed_build_leaves_nothing_behind(workspace, family, source_environment):
    code = f"""
        import sys, time
        from pathlib import Path
        from flash_rt.flashrt_hf.kernels import install
        folder = Path({str(workspace.builds / "scale")!r})
        with install.locked(folder), install.staging(folder) as stage:
            (stage / "half").write_text("written")
            print("ready", flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=source_environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((workspace.builds / "scale").glob(".staging-*/half"))

    assert builder.build_reference(workspace, family).action == "built"

    assert not list((workspace.builds / "scale").glob(".staging-*"))
    assert variant.read_metadata(workspace.builds / "scale/build/torch-cpu") is not None


def test_concurrent_builds_take_turns_and_readers_see_whole_builds(
    workspace, family, source_environment
):
    code = f"""
        from pathlib import Path
        from flash_rt.flashrt_hf.kernels import builder, variant
        from flash_rt.flashrt_hf.kernels.manifest import Workspace
        workspace = Workspace(Path({str(workspace.root)!r}))
        family = workspace.family("scale")
        built = 0
        for step in range(40):
            found = builder.build_reference(workspace, family)
            built += found.action == "built"
            metadata = variant.read_metadata(found.path)
            assert metadata is not None, step
            (family.package / "extra.py").write_text(f"STEP = {{step}}")
        print(built)
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=source_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum(int(out) for out, _ in outputs) > 1
    assert not list((workspace.builds / "scale").glob(".staging-*"))


def test_second_builder_says_that_it_waits(workspace, capsys):
    folder = workspace.builds / "scale"
    waiting = threading.Thread(target=lambda: install.locked(folder).__enter__())
    said = ""
    with install.locked(folder):
        waiting.start()
        while not said.endswith("\n") and waiting.is_alive():
            waiting.join(0.01)
            said += capsys.readouterr().err
        assert waiting.is_alive()
    assert said == "scale: another build is running, waiting for it\n"
    waiting.join(60)
    assert not waiting.is_alive()


def test_replace_folder_keeps_the_old_one_for_the_caller(tmp_path):
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    install.replace_folder(tmp_path / "new", tmp_path / "target")
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["new"]
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["target"]


def test_replace_folder_without_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_exchange", lambda first, second: False)
    test_replace_folder_keeps_the_old_one_for_the_caller(tmp_path)


def test_invalid_family_builds_nothing(workspace, family):
    (family.package / "__init__.py").unlink()
    with pytest.raises(ManifestError, match="scale/build.toml: has no torch-ext/scale/__init__.py"):
        builder.build_reference(workspace, family)
    assert not (workspace.builds / "scale/build").exists()


def test_metadata_passes_kernels_parser_and_has_a_digest(workspace, family):
    path = builder.build_reference(workspace, family).path
    content = json.loads((path / "metadata.json").read_text())
    assert content["backend"] == {"type": "cpu"}
    assert set(content["digest"]["files"]) == {"__init__.py", "_ops.py", "ops.py"}
    metadata = variant.read_metadata(path)
    assert (str(metadata.name), metadata.version, metadata.license) == ("scale", 1, "apache-2.0")


@pytest.mark.parametrize(
    ("requested", "gpus", "selected"),
    [
        ((), [], ("9.0a",)),
        ((), [(9, 0)], ("9.0a",)),
        ((), [(12, 1), (8, 9)], ("8.9", "12.0f")),
        ((), [(10, 3)], ("10.0f",)),
        (("native",), [(8, 0), (8, 0)], ("8.0",)),
        (("9.0a", "8.0+PTX"), [], ("8.0+PTX", "9.0a")),
        (("all",), [], ("8.0", "8.6", "8.7", "8.9", "9.0a", "10.0f", "11.0f", "12.0f")),
    ],
)
def test_choice_of_architectures(family, monkeypatch, requested, gpus, selected):
    monkeypatch.setattr(toolchain, "gpu_capabilities", lambda: gpus)
    assert builder.select_archs(family, requested) == selected


@pytest.mark.parametrize(
    ("requested", "gpus", "message"),
    [
        (("9.0",), [], "scale: arch must be one of 8.0, 8.6, 8.7, 8.9, 9.0a, 10.0f"),
        (("sm_90",), [], "arch: must be like 8.0, 9.0a, 12.0f or 8.0+PTX"),
        (("native",), [], "scale: arch native, but no GPU is visible"),
        ((), [(7, 5)], "scale: GPU of compute capability 7.5 is not covered by 8.0, 8.6"),
    ],
)
def test_refused_architectures(family, monkeypatch, requested, gpus, message):
    monkeypatch.setattr(toolchain, "gpu_capabilities", lambda: gpus)
    with pytest.raises(ManifestError) as caught:
        builder.select_archs(family, requested)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arch", "runs_on"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)]),
        ("8.6", [(8, 6), (8, 9)]),
        ("9.0a", [(9, 0)]),
        ("10.0f", [(10, 0), (10, 3)]),
        ("8.0+PTX", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]),
    ],
)
def test_where_code_runs(arch, runs_on):
    gpus = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
    assert [gpu for gpu in gpus if builder.arch_covers(arch, gpu)] == runs_on


def fake_nvcc(home: Path, release: str):
    nvcc = home / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_missing_nvcc_says_where_it_looked(workspace, family, tmp_path, monkeypatch):
    reference = builder.build_reference(workspace, family).path
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(toolchain.ToolchainError) as caught:
        builder.build_cuda(workspace, family, ["9.0a"])
    lines = str(caught.value).splitlines()
    assert lines[0] == ("nvcc: version 13.0 or later is needed to build CUDA kernels, none found:")
    assert lines[1] == f"  {tmp_path}/bin/nvcc: not there"
    assert lines[2].startswith("Install a CUDA toolkit, or NVIDIA's wheels")
    assert [p.name for p in (workspace.builds / "scale/build").iterdir()] == ["torch-cpu"]
    assert variant.read_metadata(reference) is not None


def test_old_nvcc_is_refused_with_its_version(workspace, family, tmp_path, monkeypatch):
    fake_nvcc(tmp_path, "12.4")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(toolchain.ToolchainError, match=r"bin/nvcc: version 12\.4"):
        toolchain.find_nvcc()


def test_nvcc_of_the_system_comes_before_the_wheels(tmp_path, monkeypatch):
    wheel = fake_nvcc(tmp_path / "site/nvidia/cu13", "13.1")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain, "_wheel_folders", lambda: [tmp_path / "site/nvidia"])
    monkeypatch.setattr(toolchain, "SYSTEM_NVCC", tmp_path / "nowhere/nvcc")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert toolchain.find_nvcc().path == wheel
    assert toolchain.find_nvcc().version == (13, 1)
    system = fake_nvcc(tmp_path / "system", "13.0")
    monkeypatch.setenv("PATH", f"{system.parent}:/usr/bin:/bin")
    assert toolchain.find_nvcc().path == system
