"""``flash-rt kernels`` from the outside: output, messages and exit codes."""

import subprocess
import sys

import pytest

from flash_rt.flashrt_hf import cli
from flash_rt.flashrt_hf.kernels import cli as kernels_cli


@pytest.fixture
def run(workspace, monkeypatch, capsys):
    """``run("build", "scale")`` -> (exit code, stdout, stderr), on the scratch workspace."""
    monkeypatch.setattr(kernels_cli, "require_workspace", lambda: workspace)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flash-rt", "kernels", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


def test_build_then_list_check_and_env(run, workspace):
    assert run("build", "scale", "--cpu-only")[:2] == (0, "scale: torch-cpu built\n")
    assert run("build", "--cpu-only")[:2] == (0, "scale: torch-cpu unchanged\n")
    assert run("list") == (0, "flashrt/scale version 1\n  torch-cpu: runs here\n", "")
    assert run("check")[:2] == (0, "scale: torch-cpu complies\n")
    reference = workspace.builds / "scale/build/torch-cpu"
    assert run("env")[1] == f"export LOCAL_KERNELS='flashrt/scale={reference}'\n"


def test_list_without_a_build_names_the_command(run):
    assert run("list")[1] == "flashrt/scale version 1\n  no build; flash-rt kernels build scale\n"


def test_check_fails_on_a_damaged_build(run, workspace):
    run("build", "--cpu-only")
    (workspace.builds / "scale/build/torch-cpu/ops.py").write_text("")
    code, out, _ = run("check")
    assert code == 1
    assert out == (
        "scale: torch-cpu: metadata.json: missing, malformed, or its digest does not match\n"
    )
    assert "scale: torch-cpu" in run("build", "--cpu-only")[1]
    assert run("check")[0] == 0


def test_check_without_a_build_fails(run):
    assert run("check")[:2] == (1, "scale: no build; flash-rt kernels build scale\n")


def test_unknown_family(run):
    assert run("build", "scales") == (
        1,
        "",
        "flash-rt: kernels: no family 'scales'; the families are scale\n",
    )


def test_missing_nvcc_fails_or_is_skipped_aloud(run, workspace, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    code, out, err = run("build", "--arch", "9.0a")
    assert (code, out) == (1, "scale: torch-cpu built\n")
    assert err.startswith("flash-rt: nvcc: version 13.0 or later is needed")
    code, out, err = run("build", "--arch", "9.0a", "--skip-without-nvcc")
    assert (code, out) == (0, "scale: torch-cpu unchanged\n")
    assert err.startswith("SKIPPED: CUDA variants are not compiled on this machine\nnvcc: ")
    assert [p.name for p in (workspace.builds / "scale/build").iterdir()] == ["torch-cpu"]


def test_a_setting_that_breaks_its_rule_is_one_message(run, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    code, _, err = run("build", "scale")
    assert code == 1
    assert err == (
        f"flash-rt: CUDA_HOME: must be an existing directory, got {str(tmp_path / 'nowhere')!r}\n"
    )


def test_a_build_folder_that_cannot_be_made_is_one_message(run, workspace):
    workspace.builds.parent.mkdir(exist_ok=True)
    workspace.builds.touch()
    code, out, err = run("build", "scale", "--cpu-only")
    assert (code, out) == (1, "")
    assert err.startswith("flash-rt: [Errno ")
    assert str(workspace.builds) in err
    workspace.builds.unlink()
    assert run("build", "scale", "--cpu-only")[0] == 0


def test_sync_check(run, family):
    assert run("sync", "--check") == (0, "", "")
    (family.path / "flake.nix").write_text("")
    code, out, err = run("sync", "--check")
    assert (code, err) == (1, "flash-rt: kernels: copies differ; run `flash-rt kernels sync`\n")
    assert out == ("kernel_sources/scale/flake.nix: differs from kernel_sources/common/flake.nix\n")
    assert run("sync")[0] == 0
    assert run("sync", "--check")[0] == 0


def test_every_registered_command_has_help(source_environment):
    for name in cli.COMMANDS:
        result = subprocess.run(
            [sys.executable, "-m", "flash_rt", name, "--help"],
            env=source_environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert f"flash-rt {name}" in result.stdout


@pytest.mark.parametrize("module", ["flash_rt", "flash_rt.flashrt_hf.cli"])
def test_modules_that_run_as_the_command(source_environment, module):
    def call(*arguments):
        command = [sys.executable, "-W", "error", "-m", module, *arguments]
        return subprocess.run(
            command, env=source_environment, capture_output=True, text=True, check=False
        )

    listed = call("kernels", "sync", "--check")
    assert (listed.returncode, listed.stdout, listed.stderr) == (0, "", "")
    wrong = call("kernels", "build", "nope")
    assert wrong.returncode == 1
    assert wrong.stderr.startswith("flash-rt: kernels: no family 'nope'; the families are ")


def test_a_malformed_local_kernels_is_one_message(source_environment):
    command = [sys.executable, "-m", "flash_rt", "kernels", "env"]
    environment = source_environment | {"LOCAL_KERNELS": "nonsense"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (1, "")
    assert last == "flash-rt: LOCAL_KERNELS: an entry must be repo_id=path, got 'nonsense'"


def test_one_broken_family_does_not_stop_the_others(run, workspace):
    import shutil

    second = workspace.sources / "tint"
    shutil.copytree(workspace.sources / "scale", second)
    manifest = workspace.root / "build.toml"
    manifest.write_text(manifest.read_text().replace('["scale"]', '["tint", "scale"]'))
    code, out, err = run("build", "--cpu-only")
    assert (code, out) == (1, "scale: torch-cpu built\n")
    assert "flash-rt: tint/build.toml: has no torch-ext/tint/__init__.py\n" in err
