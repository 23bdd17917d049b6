"""Quantised weights in graphs and behind whoever writes them: what only a GPU shows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import linear_cases as cases
import packing
import pytest
import torch
from _common.tolerance import assert_bitwise
from test_streams import BF16, Read, check_waits

TILES = (7, 2, 2304)  # what the bytes of ``made`` have room for: N = 112, K = 512


def _tiles(f: ModuleType, made: torch.Tensor) -> Any:
    count = TILES[0] * TILES[1] * TILES[2]
    data = made.view(torch.uint8).flatten()[:count].view(TILES)
    return f.PackedWeight(data, _ones(112), (112, 512))


def _bytes(f: ModuleType, made: torch.Tensor) -> Any:
    return f.PackedWeight(made.view(torch.int8), _ones(8), (8, 2 * made.shape[1]))


def _scaled(f: ModuleType, form: str, scale: torch.Tensor) -> Any:
    """A weight [48, 256] of ready data whose scales are bytes of ``scale``."""
    data, _, shape = WEIGHTS[form]
    count = 2 if form == "fp8_blocks" else 48
    scale = scale.flatten()[: 2 * count].view(torch.float32)
    return f.PackedWeight(data, scale.view(1, 2) if count == 2 else scale, shape)


def _ones(n: int) -> torch.Tensor:
    return WEIGHTS["ones"][:n]


# Ready before a producer starts: nothing runs between producer and reader.
WEIGHTS: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _ready(family: ModuleType) -> None:
    if torch.cuda.is_available() and not WEIGHTS:
        WEIGHTS["ones"] = torch.ones(128, device="cuda")
        for form in packing.FORMATS:
            WEIGHTS[form] = packing.make_packed(family, form, 48, 256, "cuda").weight
        torch.cuda.synchronize()


READERS: dict[str, Read] = {
    "int8_data": lambda f, o, made, s: f.linear(o.x.view(4, -1), _bytes(f, made), weights_static=s),
    "nvfp4_data": lambda f, o, made, s: f.linear(o.x[:, :512], _tiles(f, made), weights_static=s),
    "nvfp4_gated": lambda f, o, made, s: f.gated_linear(
        o.x[:, :512], _tiles(f, made), _tiles(f, made), weights_static=s
    ),
    "int8_table": lambda f, o, made, s: f.embedding(o.ids, _bytes(f, made), weights_static=s),
    "nvfp4_table": lambda f, o, made, s: f.embedding(o.ids, _tiles(f, made), weights_static=s),
    "table_scale": lambda f, o, made, s: f.embedding(
        o.ids, _scaled(f, "int8", made), weights_static=s
    ),
}
for _form in packing.FORMATS:
    READERS[f"{_form}_scale"] = lambda f, o, made, s, form=_form: f.linear(
        o.x[:, :256], _scaled(f, form, made), weights_static=s
    )
    READERS[f"{_form}_split"] = lambda f, o, made, s, form=_form: torch.cat(
        f.linear_split(o.x[:, :256], [_scaled(f, form, made)] * 3, weights_static=s), dim=-1
    )
INPUTS: dict[str, Read] = {
    form: lambda f, o, made, s, form=form: f.linear(made[:, :256], WEIGHTS[form], weights_static=s)
    for form in packing.FORMATS
}


@pytest.mark.parametrize("kind", ["family", "torch"])
@pytest.mark.parametrize("reader", READERS)
def test_weights_wait_for_their_producer(
    family: ModuleType, cuda: str, reader: str, kind: str
) -> None:
    """With ``weights_static=False`` neither data nor scales are read before they are made."""
    check_waits(family, READERS[reader], kind, weights_static=False)


@pytest.mark.parametrize("weights_static", [False, True])
@pytest.mark.parametrize("form", packing.FORMATS)
def test_inputs_wait_for_their_producer(
    family: ModuleType, cuda: str, form: str, weights_static: bool
) -> None:
    """Activations are never read early, whatever is promised of the weights."""
    check_waits(family, INPUTS[form], "family", weights_static=weights_static)


def make_step(
    family: ModuleType, form: str, rows: int, weights_static: bool
) -> tuple[torch.Tensor, Any]:
    """Static buffers and a function over them with the calls of a decoder layer."""
    d, n = 1024, 2816

    def make(rows: int, columns: int, seed: int) -> Any:
        return packing.make_packed(family, form, rows, columns, "cuda", seed=seed).weight

    q, k, v = (make(m, d, seed) for seed, m in enumerate((d, 256, 256)))
    gate, up, down, table = make(n, d, 4), make(n, d, 5), make(d, n, 6), make(512, d, 7)
    norm = cases.normal((d,), BF16, "cuda", seed=9)
    ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
    static = {"weights_static": weights_static}
    normed = {"norm_weight": norm, "norm_eps": 1e-6, **static}

    def step() -> tuple[torch.Tensor, ...]:
        x = family.embedding(ids, table, scale=2.0, **static)
        stream = torch.empty_like(x)
        for _ in range(3):
            parts = family.linear_split(x, [q, k, v], **normed)
            branch = family.linear(parts[0], q, **static)
            added = {"branch": branch, "residual_out": stream}
            hidden = family.gated_linear(x, gate, up, **added, **normed)
            x = family.linear(hidden, down, residual=stream, **static)
            stream = torch.empty_like(x)
        logits = family.linear(x, table, out_dtype=torch.float32, soft_cap=30.0, **normed)
        return x, logits, *parts

    return ids, step


@pytest.mark.parametrize("rows", [1, 4, 8, 12])
@pytest.mark.parametrize("weights_static", [False, True])
@pytest.mark.parametrize("form", packing.FORMATS)
def test_graph_replay_equals_eager(
    family: ModuleType, cuda: str, form: str, rows: int, weights_static: bool
) -> None:
    """Replays of a captured step give the bits of eager, for other inputs too.

    More than 8 rows run on torch's products, which may choose another way in a graph.
    """
    ids, step = make_step(family, form, rows, weights_static)
    for result, wanted in cases.replays_of(step, ids, count=10):
        if rows <= 8:
            assert_bitwise(result, wanted)
        else:
            assert (result - wanted).norm() <= 2**-5 * wanted.norm()


@pytest.mark.parametrize("form", packing.FORMATS)
def test_no_synchronisation_and_no_workspace(family: ModuleType, cuda: str, form: str) -> None:
    """A call with outputs given neither waits for the GPU nor allocates on it."""
    x = cases.normal((4, 512), BF16, cuda, seed=0)
    weight = packing.make_packed(family, form, 512, 512, cuda).weight
    out, stream = torch.empty_like(x), torch.empty_like(x)
    ids = torch.arange(4, device=cuda)
    arguments = cases.make_prologue("add_normed_norm", (4, 512), BF16, cuda)

    def call() -> None:
        family.linear(x, weight, residual=x, residual_out=stream, out=out, **arguments)
        family.embedding(ids, weight, out=out)

    cases.assert_neither_waits_nor_allocates(call)


@pytest.mark.parametrize("rows", [4, 12])
@pytest.mark.parametrize("form", packing.FORMATS)
def test_compile_with_inductor(family: ModuleType, cuda: str, form: str, rows: int) -> None:
    """Inductor's own code around the operators computes the same function."""
    x = cases.normal((rows, 256), BF16, cuda, seed=0)
    weight, dense = packing.make_packed(family, form, 256, 256, cuda)
    norm = cases.normal((256,), BF16, cuda, seed=4)
    before = {"norm_weight": norm, "norm_eps": 1e-6}

    def block(x: torch.Tensor) -> torch.Tensor:
        y = family.linear(x * 2, weight, **before)
        return family.linear(y, weight, residual=x) + 1

    torch._dynamo.reset()
    result, eager = torch.compile(block, fullgraph=True)(x), block(x)
    wide = dense.double()
    exact = cases.linear(x.double() * 2, wide, norm_weight=norm.double(), norm_eps=1e-6)
    exact = cases.linear(exact, wide, residual=x.double()) + 1
    error = (result.double() - exact).abs().max()
    assert error <= 2 * (eager.double() - exact).abs().max() + 2.0**-8 * exact.abs().max()
