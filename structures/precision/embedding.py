"""Embeddings whose table is a packed weight: the same rows, gathered from the packed copy."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .. import kernels
from ..binding import Binder, guarded, host_class
from ..catalogue.head import read_embedding
from ..catalogue.spec import NotThisForm
from ..weights import table_of
from .host_weights import refuse_absent

IDS = (torch.int64, torch.int32)


def embedding_factor(model: nn.Module, path: str) -> float:
    """What the embedding at ``path`` multiplies rows of its table with, found by trying.

    Raises:
        NotThisForm: it does something else; the text says what was tried.
    """
    module: Any = model.get_submodule(path)
    parent, _, name = path.rpartition(".")
    spec = read_embedding(model.get_submodule(parent), name)
    table = module._parameters["weight"]
    rows = table.shape[0]
    ids = torch.tensor(sorted({0, 1 % rows, rows // 2, rows - 1}), device=table.device)
    with torch.no_grad():
        wanted = host_class(module).forward(module, ids)
        for factor in dict.fromkeys((1.0, spec.scale_for(table.dtype))):
            ours = kernels.family("linear").embedding(ids, table.detach(), scale=factor)
            if ours.shape == wanted.shape and torch.equal(ours, wanted):
                return factor
    raise NotThisForm(f"{path} does not return rows of its table times {spec.scale:g}")


def bind_embedding(model: nn.Module, path: str, binder: Binder, factor: float) -> None:
    """Give the embedding at ``path`` a forward that reads what ``table_of`` its weight says.

    Calls that are the host's own are refused while its table is elsewhere.
    """
    module: Any = model.get_submodule(path)
    weight = module._parameters["weight"]
    dtype, device = weight.dtype, weight.device
    embed = kernels.family("linear").embedding

    def fast(self: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        table: Any = table_of(self._parameters["weight"])  # type: ignore[arg-type]
        out = torch.empty((*ids.shape, table.shape[1]), dtype=dtype, device=ids.device)
        result: torch.Tensor = embed(ids.long(), table, scale=factor, out=out)
        return result

    forward = guarded(
        host_class(module),
        fast,
        unary=True,
        example=module,
        dtypes=IDS,
        device=device.type,
        before_host=refuse_absent,
    )
    binder.override(module, ("packed embedding", factor, dtype), forward=forward)
