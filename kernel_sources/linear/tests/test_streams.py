"""What only a GPU shows: graphs, streams, and waiting for whoever writes a weight."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import linear_cases as cases
import pytest
import torch
from _common.tolerance import assert_bitwise

BF16 = torch.bfloat16
K = 2048  # of the readers
PRODUCER_K = 16384  # 67 MB of weights: the producer runs for tens of microseconds in few blocks
DELAY_CYCLES = 2_000_000  # about a millisecond: everything behind it is queued before it ends


class Operands:
    """All that readers need besides ``made``, ready before: nothing runs between producer and
    reader, or the reader could not start early."""

    def __init__(self) -> None:
        self.x = cases.normal((8, K), BF16, "cuda", seed=0)
        self.other = cases.normal((8, K), BF16, "cuda", seed=1)
        self.wide = cases.make_weight(64, K, BF16, "cuda", seed=2)
        self.tall = cases.make_weight(K, 64, BF16, "cuda", seed=3)
        self.ids = torch.arange(8, device="cuda")
        self.stream = torch.empty_like(self.x)


Read = Callable[[ModuleType, Operands, torch.Tensor, bool], torch.Tensor]


def _branch(
    f: ModuleType, o: Operands, branch: torch.Tensor, norm_weight: torch.Tensor, static: bool
) -> torch.Tensor:
    return f.linear(
        o.x,
        o.wide,
        branch=branch,
        branch_norm_weight=norm_weight,
        branch_norm_eps=1e-6,
        residual_out=o.stream,
        weights_static=static,
    )


# Each computes from ``made [8, K]``, which something earlier on the stream writes.
WEIGHTS: dict[str, Read] = {
    "weight": lambda f, o, made, s: f.linear(o.x, made, weights_static=s),
    "transposed_weight": lambda f, o, made, s: f.linear(o.x[:, :8], made.t(), weights_static=s),
    "odd_weight": lambda f, o, made, s: f.linear(o.x[:, 1:], made[:, 1:], weights_static=s),
    "split_weight": lambda f, o, made, s: f.linear_split(
        o.x, [made[:4], made[4:6], made[6:]], weights_static=s
    )[2],
    "gate": lambda f, o, made, s: f.gated_linear(o.x, made[:4], made[4:], weights_static=s),
    "bias": lambda f, o, made, s: f.linear(o.x[:, :64], o.tall, made[0], weights_static=s),
    "norm_weight": lambda f, o, made, s: f.linear(
        o.x, o.wide, norm_weight=made[0], norm_eps=1e-6, weights_static=s
    ),
    "branch_norm_weight": lambda f, o, made, s: _branch(f, o, o.other, made[0], s),
    "table": lambda f, o, made, s: f.embedding(o.ids, made, weights_static=s),
}
INPUTS: dict[str, Read] = {
    "x": lambda f, o, made, s: f.linear(made, o.wide, weights_static=s),
    "residual": lambda f, o, made, s: f.linear(
        o.x[:, :64], o.tall, residual=made, weights_static=s
    ),
    "branch": lambda f, o, made, s: _branch(f, o, made, o.other[0], s),
}


class Producer:
    """Writes ``made [8, K]`` late: a delay, then a long product of this family, which lets its
    successor start early, or a copy by torch, which does not."""

    def __init__(self, family: ModuleType, kind: str) -> None:
        self._family, self._kind = family, kind
        self._x = cases.normal((8, PRODUCER_K), BF16, "cuda", seed=11)
        self._weight = cases.make_weight(K, PRODUCER_K, BF16, "cuda", seed=12)
        self._wanted = family.linear(self._x, self._weight)
        self.made = self._wanted.clone()
        torch.cuda.synchronize()

    def forget(self) -> None:
        """What was made is gone, as far as an early reader can see."""
        self.made.fill_(float("nan"))
        torch.cuda.synchronize()

    def make(self) -> None:
        torch.cuda._sleep(DELAY_CYCLES)
        if self._kind == "family":
            self._family.linear(self._x, self._weight, out=self.made)
        else:
            self.made.copy_(self._wanted)


@pytest.mark.parametrize("kind", ["family", "torch"])
@pytest.mark.parametrize("reader", WEIGHTS)
def test_weights_wait_for_their_producer(
    family: ModuleType, cuda: str, reader: str, kind: str
) -> None:
    """With ``weights_static=False`` (the default) nothing is read before the stream has made it."""
    check_waits(family, WEIGHTS[reader], kind, weights_static=False)


@pytest.mark.parametrize("weights_static", [False, True])
@pytest.mark.parametrize("reader", INPUTS)
def test_inputs_wait_for_their_producer(
    family: ModuleType, cuda: str, reader: str, weights_static: bool
) -> None:
    """Activations are never read early, whatever is promised of the weights."""
    check_waits(family, INPUTS[reader], "family", weights_static=weights_static)


def check_waits(family: ModuleType, read: Read, kind: str, *, weights_static: bool) -> None:
    operands = Operands()
    producer = Producer(family, kind)
    expected = read(family, operands, producer.made, weights_static).clone()
    for _ in range(10):
        producer.forget()
        producer.make()
        result = read(family, operands, producer.made, weights_static)
        torch.cuda.synchronize()
        assert_bitwise(result, expected)


def test_output_is_not_written_early(family: ModuleType, cuda: str) -> None:
    """A reader of the old output, earlier on the stream, still finds it."""
    operands = Operands()
    weight = cases.make_weight(PRODUCER_K, K, BF16, cuda)
    out = operands.other.clone()
    expected = family.linear(operands.other, weight)
    for _ in range(10):
        out.copy_(operands.other)
        torch.cuda.synchronize()
        torch.cuda._sleep(DELAY_CYCLES)
        result = family.linear(out, weight)
        family.linear(operands.x[:, :64], operands.tall, out=out, weights_static=True)
        torch.cuda.synchronize()
        assert_bitwise(result, expected)


def make_step(family: ModuleType, rows: int, weights_static: bool) -> tuple[Any, Any]:
    """Static buffers and a function over them with the calls of a decoder layer."""
    make = cases.make_weight
    d, n = 1024, 2816
    q, k, v = (make(m, d, BF16, "cuda", seed=i) for i, m in enumerate((d, 256, 256)))
    gate, up, down = make(n, d, BF16, "cuda"), make(n, d, BF16, "cuda"), make(d, n, BF16, "cuda")
    table = make(512, d, BF16, "cuda", seed=8)
    norm = cases.normal((d,), BF16, "cuda", seed=9)
    ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
    normed = {"norm_weight": norm, "norm_eps": 1e-6, "weights_static": weights_static}

    def step() -> tuple[torch.Tensor, ...]:
        x = family.embedding(ids, table, scale=2.0, weights_static=weights_static)
        stream = torch.empty_like(x)
        for _ in range(3):
            parts = family.linear_split(x, [q, k, v], **normed)
            branch = family.linear(parts[0], q, weights_static=weights_static)
            added = {
                "branch": branch,
                "branch_norm_weight": norm,
                "branch_norm_eps": 1e-6,
                "residual_out": stream,
            }
            hidden = family.gated_linear(x, gate, up, **added, **normed)
            x = family.linear(hidden, down, residual=stream, weights_static=weights_static)
            stream = torch.empty_like(x)
        logits = family.linear(x, table, out_dtype=torch.float32, soft_cap=30.0, **normed)
        return x, logits, *parts

    return ids, step


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("weights_static", [False, True])
def test_graph_replay_equals_eager(
    family: ModuleType, cuda: str, rows: int, weights_static: bool
) -> None:
    """Replays of a captured step give the bits of eager, for other inputs too."""
    ids, step = make_step(family, rows, weights_static)
    for result, wanted in cases.replays_of(step, ids, count=20):
        assert_bitwise(result, wanted)


def test_current_stream(family: ModuleType, cuda: str) -> None:
    """Work goes to the current stream: what was queued there before is seen."""
    x = cases.normal((4, K), BF16, cuda, seed=0)
    weight = cases.make_weight(64, K, BF16, cuda)
    expected = family.linear(x, weight)
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * DELAY_CYCLES)
        late.copy_(x)
        result = family.linear(late, weight)
    torch.cuda.synchronize()
    assert_bitwise(result, expected)


def test_no_synchronisation_and_no_workspace(family: ModuleType, cuda: str) -> None:
    """A call with outputs given neither waits for the GPU nor allocates on it."""
    x = cases.normal((4, 512), BF16, cuda, seed=0)
    weight = cases.make_weight(512, 512, BF16, cuda)
    out, stream = torch.empty_like(x), torch.empty_like(x)
    arguments = cases.make_prologue("add_normed_norm", (4, 512), BF16, cuda)

    def call() -> None:
        family.linear(x, weight, residual=x, residual_out=stream, out=out, **arguments)

    cases.assert_neither_waits_nor_allocates(call)
