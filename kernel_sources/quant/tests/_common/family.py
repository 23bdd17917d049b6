"""Load the family under test as its users do, and name the devices to test on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def load_family(name: str, source: Path) -> ModuleType:
    """``kernels.get_kernel("flashrt/<name>", version=1)``.

    ``LOCAL_KERNELS`` decides when it names the family; otherwise the ``flash_rt`` resolver; where
    neither is there, ``source`` (the family's folder) is laid out as its CPU variant.
    """
    from kernels import get_kernel

    repo = f"flashrt/{name}"
    if f"{repo}=" not in os.environ.get("LOCAL_KERNELS", ""):
        try:
            from flash_rt.flashrt_hf.kernels.resolver import load
        except ImportError:
            known = os.environ.get("LOCAL_KERNELS")
            entry = f"{repo}={_cpu_variant(name, source)}"
            os.environ["LOCAL_KERNELS"] = f"{known}:{entry}" if known else entry
        else:
            return load(name)
    return get_kernel(repo, version=1)


def _cpu_variant(name: str, source: Path) -> Path:
    root = Path(tempfile.mkdtemp(prefix=f"flashrt-{name}-"))
    variant = root / "build" / "torch-cpu"
    shutil.copytree(source / "torch-ext" / name, variant)
    namespace = f"_{name}_cpu_0000000"
    (variant / "_ops.py").write_text(
        "import torch\n\n"
        f"ops = torch.ops.{namespace}\n\n\n"
        "def add_op_namespace_prefix(op_name: str) -> str:\n"
        f'    return f"{namespace}::{{op_name}}"\n'
    )
    metadata = {
        "name": name,
        "id": namespace,
        "version": 1,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata))
    return root


def require_cuda() -> str:
    """``"cuda"``, or a skip that says so (a failure under ``FLASH_RT_REQUIRE_GPU=1``)."""
    if not torch.cuda.is_available():
        if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
            pytest.fail("FLASH_RT_REQUIRE_GPU=1, and torch sees no GPU")
        pytest.skip("needs a GPU")
    return "cuda"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    """Every test that takes ``device`` runs on the CPU and, where there is one, on the GPU."""
    return require_cuda() if request.param == "cuda" else "cpu"


@pytest.fixture
def cuda() -> str:
    """For tests that only mean something on a GPU: graphs, launch order."""
    return require_cuda()


def write_late(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values`` to ``target`` (CUDA) after about a millisecond of queued waiting.

    What is launched next must not read ``target`` early, however soon it may start.
    """
    torch.cuda._sleep(2_000_000)
    target.copy_(values)


def replayed(function: Callable[[], None]) -> None:
    """Run ``function`` once as a CUDA graph: warmed up, captured, then replayed once."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    torch.cuda.synchronize()
