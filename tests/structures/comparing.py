"""What tests compare: results of a model, and everything about a host that detach must restore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Sums run in another order than the host's; a few layers of fp32 stay well inside this.
FP32_TOLERANCE = 2e-5


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a model's output, caches excluded."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "sample"):
        yield value.sample


def deviation(got: Any, wanted: Any) -> float:
    """Largest difference relative to the largest wanted value, over all tensors of an output.

    ``inf`` where a value is not finite: ``max`` would pass over a NaN.
    """
    ours, hosts = list(tensors(got)), list(tensors(wanted))
    assert [t.shape for t in ours] == [t.shape for t in hosts]
    assert [t.dtype for t in ours] == [t.dtype for t in hosts]
    worst = 0.0
    for mine, host in zip(ours, hosts, strict=True):
        if host.is_floating_point():
            error = (mine.double() - host.double()).abs().max() / host.double().abs().max()
            worst = max(worst, float(error.nan_to_num(nan=float("inf"))))
        else:
            assert torch.equal(mine, host)
    return worst


def same_bits(got: Any, wanted: Any) -> bool:
    """Whether two outputs are equal bit for bit."""
    ours, hosts = list(tensors(got)), list(tensors(wanted))
    return len(ours) == len(hosts) and all(map(torch.equal, ours, hosts))


def portrait(model: nn.Module) -> dict[str, Any]:
    """Everything about a host that attaching and detaching must leave as it was."""
    state = model.state_dict()
    return {
        "classes": {n: type(m) for n, m in model.named_modules()},
        "forwards": {n: type(m).forward for n, m in model.named_modules()},
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "hooks": {
            n: {k: list(v) for k, v in vars(m).items() if k.endswith("_hooks") and v}
            for n, m in model.named_modules()
        },
        "storages": {n: (t.data_ptr(), t.dtype, t.stride()) for n, t in state.items()},
        "versions": {n: p._version for n, p in model.named_parameters()},
        "config": config_text(model),
        "attention": attention_name(model),
    }


def config_text(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    to_json = getattr(config, "to_json_string", None)
    return to_json() if to_json else str(config)


def attention_name(model: nn.Module) -> str | None:
    return getattr(getattr(model, "config", None), "_attn_implementation", None)
