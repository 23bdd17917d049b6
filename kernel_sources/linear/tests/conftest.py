"""Fixtures of the family's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from _common.family import cuda, device, load_family  # noqa: F401


@pytest.fixture(scope="session")
def family() -> ModuleType:
    """The family as ``kernels.get_kernel`` loads it."""
    return load_family("linear", Path(__file__).parents[1])


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:  # noqa: F811
    """Element types of linear: fp32 is for the CPU."""
    if device == "cuda" and request.param == torch.float32:
        pytest.skip("linear takes no fp32 on CUDA")
    return request.param


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield
