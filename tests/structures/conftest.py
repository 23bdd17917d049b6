"""Makes the zoo importable from the tests beside it, and says which devices there are."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> str:
    """``"cpu"``, then ``"cuda"``: skipped aloud, or a failure under ``FLASH_RT_REQUIRE_GPU=1``."""
    if request.param == "cuda" and not torch.cuda.is_available():
        if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
            pytest.fail("FLASH_RT_REQUIRE_GPU=1, and torch sees no GPU")
        pytest.skip("torch sees no GPU")
    return str(request.param)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics of tests are nobody's but theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_RT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def statistics_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own cache of statistics."""
    monkeypatch.setenv("FLASH_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "calibration"


@pytest.fixture
def device(place: str) -> torch.device:
    """``place`` as the device that tensors there say they are on."""
    return torch.device(place, 0) if place == "cuda" else torch.device(place)
