"""What a warm-up on a GPU refuses before a capture would break, shown with stand-in devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flash_rt.structures.capture import CaptureError
from flash_rt.structures.capture.syncs import HostReads, Preflight

X = torch.arange(6.0).reshape(2, 3)
IDS = torch.tensor([0, 1])

REFUSED: dict[str, Callable[[], Any]] = {
    "item": lambda: X.sum().item(),
    "branch": lambda: bool(X.sum() > 0),
    "equal": lambda: torch.equal(X, X),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 1],
    "write of many through a mask": lambda: X.clone().index_put_((X > 3,), torch.ones(2)),
    "repeats": lambda: IDS.repeat_interleave(IDS),
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "cpu": lambda: X.cpu(),
    "upload": lambda: torch.tensor([1.0, 2.0], device="cpu"),
    "upload of one": lambda: torch.tensor(1.0, device="cpu"),
    "list": lambda: torch.tensor([1.0, 2.0]),
}
ALLOWED: dict[str, Callable[[], Any]] = {
    "arithmetic": lambda: (X @ X.t()).softmax(-1) + 1,
    "index": lambda: X[:, IDS],
    "index write": lambda: X.clone().index_put_((IDS,), torch.zeros(3)),
    "one value through a mask": lambda: X.clone().masked_fill_(X > 1, 0.0),
    "number through a mask": lambda: X.clone().__setitem__(X > 1, 0.0),
    "repeats of known size": lambda: IDS.repeat_interleave(IDS + 1, output_size=3),
    "constant": lambda: X * torch.tensor(2.0),
    "number into a row": lambda: X.clone().__setitem__(0, 1.5),
    "random": lambda: torch.rand(3),
    "attention": lambda: F.scaled_dot_product_attention(*[torch.rand(1, 2, 4, 8)] * 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with (
        pytest.raises(CaptureError, match="record: the step must not"),
        HostReads("cpu"),
        Preflight("cpu"),
    ):
        REFUSED[name]()


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    with HostReads("cpu"), Preflight("cpu"):
        ALLOWED[name]()


@pytest.mark.parametrize("name", [*REFUSED, *ALLOWED])
def test_what_stays_on_the_host_is_free(name: str) -> None:
    with HostReads("cuda"), Preflight("cuda"):
        (REFUSED | ALLOWED)[name]()


def test_copies_between_devices_are_refused_unless_they_do_not_wait() -> None:
    far = torch.zeros(2, 3, device="meta")
    with Preflight("meta"):
        with pytest.raises(CaptureError, match="copy between host and device, got aten._to_copy"):
            X.to("meta")
        with pytest.raises(CaptureError, match="copy between host and device, got aten.copy_"):
            far.copy_(X)
        with pytest.raises(CaptureError, match="must not upload host data, got aten.index"):
            far[IDS]
        assert X.to("meta", non_blocking=True).shape == (2, 3)
        assert far.to(torch.float16).dtype is torch.float16
        assert X.to(torch.float16).dtype is torch.float16
        far.copy_(far)
        far[0] = 1.5
