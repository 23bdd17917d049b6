"""Where kernels are found, and what is said when none is."""

import errno
import os
import sys
from pathlib import Path

import pytest
import torch

from flash_rt.flashrt_hf.kernels import builder, resolver, toolchain, variant
from flash_rt.flashrt_hf.kernels.manifest import ManifestError


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def gpu(monkeypatch):
    """torch and the driver report one H200; nothing may be launched on it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(toolchain, "gpu_capabilities", lambda: [(9, 0)])


def put_cuda_variant(workspace, family, archs, *, name=None) -> Path:
    """A complete CUDA variant folder whose library is empty and never imported."""
    target = workspace.builds / "scale/build" / (name or variant.cuda_variant(family, (13, 0)))
    identifier = variant.variant_id(family, "cuda", variant.source_hash(family))
    target.mkdir(parents=True)
    variant.write_python_files(family, identifier, target, backend="cpu")
    (target / f"{identifier}.abi3.so").touch()
    variant.write_metadata(family, identifier, target, backend="cuda", archs=archs)
    return target


def test_fresh_checkout_without_gpu_loads_the_reference(workspace):
    module = resolver.load("scale", workspace=workspace)
    assert torch.equal(module.scale(torch.ones(2)), torch.full((2,), 2.0))
    reference = workspace.builds / "scale/build/torch-cpu"
    assert os.environ["LOCAL_KERNELS"] == f"flashrt/scale={reference}"
    assert resolver.load("scale", workspace=workspace) is module


def test_get_kernel_finds_the_same_module(workspace):
    from kernels import get_kernel

    module = resolver.load("scale", workspace=workspace)
    assert get_kernel("flashrt/scale", version=1) is module


def test_reference_is_found_by_a_cuda_torch_without_gpu(workspace, monkeypatch):
    from kernels import get_kernel

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "gpu_capabilities", lambda: [])
    resolver.set_local_kernels(workspace)
    assert get_kernel("flashrt/scale", version=1).__name__.startswith("_scale_cpu_")


def test_changed_sources_refresh_the_reference(workspace, family):
    before = builder.build_reference(workspace, family).path
    first = variant.read_metadata(before).id
    (family.package / "more.py").write_text("")
    resolver.set_local_kernels(workspace)
    assert variant.read_metadata(before).id != first


def test_local_kernels_wins_over_local_builds(workspace, family, tmp_path, monkeypatch):
    builder.build_reference(workspace, family)
    own = tmp_path / "own/build"
    own.mkdir(parents=True)
    (workspace.builds / "scale/build/torch-cpu").rename(own / "torch-cpu")
    monkeypatch.setenv("LOCAL_KERNELS", f"a/b=/c:flashrt/scale={own.parent}")
    module = resolver.load("scale", workspace=workspace)
    assert Path(module.__file__) == own / "torch-cpu/__init__.py"
    assert os.environ["LOCAL_KERNELS"] == f"a/b=/c:flashrt/scale={own.parent}"


def test_with_a_gpu_the_entry_is_the_repository(workspace, family, gpu):
    builder.build_reference(workspace, family)
    assert resolver.environment_line(workspace) == f"flashrt/scale={workspace.builds / 'scale'}"


def test_gpu_build_is_preferred(workspace, family, gpu):
    path = put_cuda_variant(workspace, family, ("9.0a",))
    assert resolver.load("scale", workspace=workspace).__file__ == str(path / "__init__.py")


def test_gpu_without_a_build_lists_variants_reasons_and_command(workspace, family, gpu):
    put_cuda_variant(workspace, family, ("8.0", "12.0f"))
    other = variant.cuda_variant(family, (13, 0)).replace("cu130", "cu128")
    put_cuda_variant(workspace, family, ("9.0a",), name=other)
    modules = set(sys.modules)

    with pytest.raises(resolver.KernelNotFoundError) as caught:
        resolver.load("scale", workspace=workspace)

    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"flashrt/scale version 1: no build of it runs here (torch {torch.__version__},"
        " NVIDIA H200 (compute capability 9.0))"
    )
    built = variant.cuda_variant(family, (13, 0))
    assert f"  {built}: built for 8.0, 12.0f; the GPU has compute capability 9.0" in lines
    assert any(line.startswith(f"  {other}: ") and "12.8" in line for line in lines), lines
    assert any(line.startswith("  torch-cpu: ") and "cuda" in line.lower() for line in lines), lines
    assert lines[-2].startswith("  Hub: ")
    assert lines[-1] == "build one with: flash-rt kernels build scale"
    assert not [name for name in set(sys.modules) - modules if name.startswith("_scale_")]
    assert os.environ["LOCAL_KERNELS"] == f"flashrt/scale={workspace.builds / 'scale'}"


def test_half_written_gpu_build_is_a_reason(workspace, family, gpu):
    path = put_cuda_variant(workspace, family, ("9.0a",))
    (path / "ops.py").write_text("")
    with pytest.raises(resolver.KernelNotFoundError, match=f"{path.name}: incomplete or changed"):
        resolver.load("scale", workspace=workspace)


def test_unknown_family_and_version(workspace):
    with pytest.raises(ManifestError) as caught:
        resolver.load("scales", workspace=workspace)
    assert str(caught.value) == "kernels: no family 'scales'; the families are scale"
    with pytest.raises(ManifestError) as caught:
        resolver.load("scale", version=2, workspace=workspace)
    assert str(caught.value) == "scale: no version 2; the checkout has 1"


def test_malformed_local_kernels(workspace, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "flashrt/scale")
    with pytest.raises(ValueError) as caught:
        resolver.load("scale", workspace=workspace)
    assert str(caught.value) == (
        "LOCAL_KERNELS: an entry must be repo_id=path, got 'flashrt/scale'"
    )


def test_malformed_local_kernels_does_not_break_the_import(workspace, monkeypatch):
    monkeypatch.setenv("LOCAL_KERNELS", "flashrt/scale")
    with pytest.warns(UserWarning) as caught:
        resolver.set_local_kernels(workspace)
    assert [str(one.message) for one in caught] == [
        "LOCAL_KERNELS: an entry must be repo_id=path, got 'flashrt/scale';"
        " no kernel can be loaded until that is mended"
    ]
    assert os.environ["LOCAL_KERNELS"] == "flashrt/scale"


def test_the_hub_in_place_of_an_entry_is_said(workspace, family, gpu, tmp_path, monkeypatch):
    import kernels

    monkeypatch.setattr(kernels, "get_kernel", lambda *_, **__: sys)
    old = put_cuda_variant(workspace, family, ("8.0",))
    assert resolver.load("scale", workspace=workspace) is sys  # its own builds: nothing to say
    own = tmp_path / "own"
    (own / "build").mkdir(parents=True)
    monkeypatch.setenv("LOCAL_KERNELS", f"flashrt/scale={own}")
    with pytest.warns(UserWarning) as caught:
        assert resolver.load("scale", workspace=workspace) is sys
    first = f"flashrt/scale: nothing at its LOCAL_KERNELS entry {own} runs here; the Hub's"
    assert [str(one.message) for one in caught] == [f"{first} build is used\n  no build in {own}"]
    old.rename(own / "build" / old.name)
    with pytest.warns(UserWarning) as caught:
        assert resolver.load("scale", workspace=workspace) is sys
    assert str(caught[0].message) == (
        f"{first} build is used\n  {old.name}: built for 8.0; the GPU has compute capability 9.0"
    )


@pytest.mark.parametrize("place", ["nowhere", "empty", "file"])
def test_an_entry_without_builds_is_named(workspace, tmp_path, monkeypatch, place):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCAL_KERNELS", f"flashrt/scale={tmp_path / place}")
    with pytest.raises(resolver.KernelNotFoundError) as error:
        resolver.load("scale", workspace=workspace)
    assert f"\n  no build in {tmp_path / place}\n" in str(error.value)
    assert os.environ["LOCAL_KERNELS"] == f"flashrt/scale={tmp_path / place}"


def test_a_read_only_checkout_keeps_its_builds_and_says_so(workspace, family, monkeypatch):
    target = builder.build_reference(workspace, family).path
    (family.package / "more.py").write_text("")

    def read_only(*arguments):
        raise OSError(errno.EROFS, "Read-only file system", str(workspace.builds))

    monkeypatch.setattr(builder, "locked", read_only)
    with pytest.warns(UserWarning, match="scale not refreshed: .*Read-only.*FLASH_RT_KERNEL_BUILD"):
        module = resolver.load("scale", workspace=workspace)
    assert Path(module.__file__).parent == target
    assert torch.equal(module.scale(torch.ones(2)), torch.full((2,), 2.0))


def test_something_in_the_way_of_a_build_does_not_break_the_import(workspace, family):
    workspace.builds.mkdir(parents=True)
    blocking = workspace.builds / "scale"
    blocking.touch()
    with pytest.warns(UserWarning, match="reference of scale not refreshed: .*File exists"):
        resolver.set_local_kernels(workspace)
    blocking.unlink()
    resolver.set_local_kernels(workspace)
    assert os.environ["LOCAL_KERNELS"].startswith("flashrt/scale=")


def test_a_broken_family_hides_no_other(workspace, family):
    (family.package / "__init__.py").unlink()
    with pytest.warns(UserWarning, match="reference of scale not refreshed: scale/build.toml"):
        resolver.set_local_kernels(workspace)
    assert os.environ["LOCAL_KERNELS"] == ""


def test_hidden_gpus_are_no_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert toolchain.gpu_capabilities() == []


def test_without_a_checkout_the_library_decides(workspace, family, monkeypatch):
    path = builder.build_reference(workspace, family).path
    monkeypatch.setattr(resolver, "find_workspace", lambda: None)
    monkeypatch.setenv("LOCAL_KERNELS", f"flashrt/scale={path}")
    assert resolver.load("scale").__file__ == str(path / "__init__.py")
    resolver.set_local_kernels()
    assert os.environ["LOCAL_KERNELS"] == f"flashrt/scale={path}"


def test_structures_load_through_the_resolver():
    from flash_rt import kernel_loader

    assert kernel_loader.load is resolver.load


def test_old_gpu_build_is_used_with_a_warning(workspace, family, gpu):
    path = put_cuda_variant(workspace, family, ("9.0a",))
    (family.package / "more.py").write_text("")
    with pytest.warns(UserWarning) as caught:
        module = resolver.load("scale", workspace=workspace)
    assert module.__file__ == str(path / "__init__.py")
    assert str(caught[0].message) == (
        f"scale: {path.name} was built from other sources than the checkout's;"
        " renew it with: flash-rt kernels build scale"
    )
