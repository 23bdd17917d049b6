import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, environment: dict[str, str], path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": str(path)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("folder", ["flashrt_hf", "structures"])
def test_folders_refuse_another_name(source_environment, folder):
    result = run(f"import {folder}", source_environment, ROOT)
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("ImportError: ")
    assert f"imported as flash_rt.{folder}, not as {folder}" in result.stderr


def test_import_is_light_and_names_are_lazy(source_environment):
    code = (
        "import sys, flash_rt; heavy = [m for m in ('torch', 'transformers') if m in sys.modules]\n"
        "print(heavy, sorted(flash_rt.__all__), 'flash_rt.structures' in sys.modules)\n"
        "print(flash_rt.structures.__name__)"
    )
    result = run(code, source_environment, ROOT / "src")
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()
    names = ["FlashRTConfig", "__version__", "flashrt_hf", "load_model", "structures"]
    assert first == f"[] {names} False"
    assert second == "flash_rt.structures"


WITHOUT_BUILD_TOOLS = """
import os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("elftools", "ninja"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

def no_build_tool(event, arguments):
    if event == "subprocess.Popen" and os.path.basename(arguments[0]) in ("nvcc", "ninja"):
        raise AssertionError(f"started {arguments[0]}")

sys.meta_path.insert(0, Blocker())
sys.addaudithook(no_build_tool)

import flash_rt
import torch
from kernels import get_kernel

norm = get_kernel("flashrt/norm", version=1, backend="cpu")
print(norm.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0).tolist())
import flash_rt.flashrt_hf.cli, flash_rt.structures
"""


def test_kernels_run_without_what_builds_need(source_environment):
    result = run(WITHOUT_BUILD_TOOLS, source_environment, ROOT / "src")
    assert result.returncode == 0, result.stderr
    ((first, second),) = json.loads(result.stdout)
    assert first == pytest.approx(3 / 12.5**0.5, rel=1e-6)
    assert second == pytest.approx(4 / 12.5**0.5, rel=1e-6)


def test_unknown_name_is_an_attribute_error():
    import flash_rt

    with pytest.raises(AttributeError, match="module 'flash_rt' has no attribute 'nope'"):
        _ = flash_rt.nope


def test_import_makes_local_builds_known(source_environment):
    code = "import os, flash_rt; print(os.environ['LOCAL_KERNELS'])"
    result = run(code, source_environment | {"LOCAL_KERNELS": "a/b=/c"}, ROOT / "src")
    assert result.returncode == 0, result.stderr
    entries = dict(entry.split("=") for entry in result.stdout.strip().split(":"))
    assert entries["a/b"] == "/c"
    assert Path(entries["flashrt/norm"]).is_dir()


def test_a_malformed_local_kernels_is_a_warning_until_a_kernel_is_loaded(source_environment):
    code = (
        "import flash_rt\n"
        "try: flash_rt.kernel_loader.load('norm', version=1)\n"
        "except ValueError as error: print(error)"
    )
    result = run(code, source_environment | {"LOCAL_KERNELS": "nonsense"}, ROOT / "src")
    rule = "LOCAL_KERNELS: an entry must be repo_id=path, got 'nonsense'"
    assert (result.returncode, result.stdout) == (0, f"{rule}\n")
    assert f"UserWarning: {rule}; no kernel can be loaded" in result.stderr
