"""The flakes evaluate to the right outputs, against a stand-in for kernel-builder."""

import json
import shutil
import subprocess

import pytest

from flash_rt.flashrt_hf.kernels.manifest import require_workspace

# Reads the family that it is given, as the real function does, so a wrong path cannot pass.
STAND_IN = """
{
  outputs = { self }: {
    lib.genKernelFlakeOutputs = { self, path }:
      let
        name = (builtins.fromTOML (builtins.readFile (path + "/build.toml"))).general.name;
        bundle = system: {
          bundle = derivation { name = "${name}-bundle"; inherit system; builder = "/bin/sh"; };
        };
      in {
        packages.x86_64-linux = bundle "x86_64-linux";
        packages.aarch64-linux = bundle "aarch64-linux";
      };
  };
}
"""
NAMES = "p: builtins.mapAttrs (_: packages: builtins.mapAttrs (_: d: d.name) packages) p"


@pytest.fixture
def evaluate(tmp_path):
    if shutil.which("nix") is None:
        pytest.skip("no nix (Debian: apt-get install nix-bin)")
    (tmp_path / "builder").mkdir()
    (tmp_path / "builder/flake.nix").write_text(STAND_IN)

    def run(flake, apply):
        command = ["nix", "--extra-experimental-features", "nix-command flakes", "eval", "--json"]
        command += ["--offline", "--no-write-lock-file", "--store", str(tmp_path / "store")]
        command += ["--override-input", "kernel-builder", f"path:{tmp_path / 'builder'}"]
        command += [f"path:{flake}#packages", "--apply", apply]
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin:/usr/local/bin"}
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        assert not (flake / "flake.lock").exists()
        return json.loads(result.stdout)

    return run


def test_root_flake_has_one_package_per_member(evaluate, tmp_path):
    workspace = require_workspace()
    copy = tmp_path / "workspace"
    for family in workspace.families():
        target = copy / "kernel_sources" / family.name
        target.mkdir(parents=True)
        shutil.copy(family.path / "build.toml", target)
    for name in ("build.toml", "flake.nix"):
        shutil.copy(workspace.root / name, copy)
    packages = {name: f"{name}-bundle" for name in workspace.members}
    assert evaluate(copy, NAMES) == {"x86_64-linux": packages, "aarch64-linux": packages}


def test_family_flake_hands_over_its_own_folder(evaluate, tmp_path):
    family = require_workspace().family("norm")
    copy = tmp_path / "norm"
    copy.mkdir()
    for name in ("build.toml", "flake.nix"):
        shutil.copy(family.path / name, copy)
    bundle = {"bundle": "norm-bundle"}
    assert evaluate(copy, NAMES) == {"x86_64-linux": bundle, "aarch64-linux": bundle}
