"""Fixtures of the family's tests."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from _common.family import cuda, device, load_family  # noqa: F401


@pytest.fixture(scope="session")
def family() -> ModuleType:
    """The family as ``kernels.get_kernel`` loads it."""
    return load_family("linear", Path(__file__).parents[1])
