import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _common.family import cuda, device, load_family  # noqa: E402, F401  fixtures


@pytest.fixture(scope="session")
def quant():
    return load_family("quant", HERE.parent)


@pytest.fixture(autouse=True)
def no_grad():
    import torch

    with torch.no_grad():
        yield
