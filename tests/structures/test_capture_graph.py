"""A recorded step keeps its device work and nothing else, on every backend."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

from flash_rt.structures.capture import (
    Backend,
    CaptureError,
    StaleAddressError,
    backend_for,
)


def require_gpu() -> None:
    if torch.cuda.is_available():
        return
    if os.environ.get("FLASH_RT_REQUIRE_GPU") == "1":
        pytest.fail("FLASH_RT_REQUIRE_GPU=1, but torch sees no CUDA GPU")
    pytest.skip("needs a CUDA GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "cuda":
        require_gpu()
    yield backend_for(request.param)


def test_replay_computes_from_the_current_content_of_the_static_input(backend: Backend) -> None:
    x = torch.arange(4.0, device=backend.device)
    y = torch.zeros(4, device=backend.device)
    graph = backend.record(lambda: y.copy_(x * 2 + 1))
    x.fill_(10)
    graph.replay()
    assert y.tolist() == [21.0] * 4
    x.copy_(torch.arange(4.0))
    graph.replay()
    assert y.tolist() == [1.0, 3.0, 5.0, 7.0]


def test_recording_leaves_state_as_it_was_and_replays_advance_it(backend: Backend) -> None:
    state = torch.zeros(3, device=backend.device)
    graph = backend.record(lambda: state.add_(1), warmups=0)
    assert state.tolist() == [0.0] * 3
    for _ in range(5):
        graph.replay()
    assert state.tolist() == [5.0] * 3


def test_warmups_run_for_real(backend: Backend) -> None:
    state = torch.zeros(3, device=backend.device)
    backend.record(lambda: state.add_(1), warmups=2)
    assert state.tolist() == [2.0] * 3


def test_python_numbers_are_baked_in(backend: Backend) -> None:
    y = torch.zeros(2, device=backend.device)
    factor = 3.0

    def step() -> None:
        y.fill_(1)
        y.mul_(factor)

    graph = backend.record(step)
    factor = 5.0
    graph.replay()
    assert y.tolist() == [3.0, 3.0]


def test_host_branches_are_baked_in(backend: Backend) -> None:
    y = torch.zeros(2, device=backend.device)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        y.fill_(float(len(calls)))

    graph = backend.record(step, warmups=1)
    graph.replay()
    graph.replay()
    assert y.tolist() == [2.0, 2.0]
    assert len(calls) == 2


def test_a_replaced_tensor_is_not_seen(backend: Backend) -> None:
    owner = {"w": torch.full((2,), 3.0, device=backend.device)}
    y = torch.zeros(2, device=backend.device)
    old = owner["w"]
    graph = backend.record(lambda: y.copy_(owner["w"]))
    owner["w"] = torch.full((2,), 7.0, device=backend.device)
    graph.replay()
    assert y.tolist() == [3.0, 3.0]
    old.fill_(4)
    graph.replay()
    assert y.tolist() == [4.0, 4.0]


def test_metadata_changes_inside_a_step_do_not_move_earlier_operations(backend: Backend) -> None:
    x = torch.arange(6.0, device=backend.device).reshape(2, 3)
    y = torch.zeros(3, 2, device=backend.device)

    def step() -> None:
        z = x + 0
        z[0].mul_(10)
        z.t_()
        z[0].add_(0.5)
        y.copy_(z)

    graph = backend.record(step)
    graph.replay()
    assert y.tolist() == [[0.5, 3.5], [10.0, 4.0], [20.0, 5.0]]


@pytest.mark.parametrize("warmups", [0, 1])
@pytest.mark.parametrize(
    "name", ["item", "bool", "tolist", "nonzero", "mask", "unique", "upload", "cpu"]
)
def test_steps_that_wait_or_upload_are_refused_and_leave_the_device_usable(
    backend: Backend, name: str, warmups: int
) -> None:
    x = torch.arange(4.0, device=backend.device)
    y = torch.zeros(4, device=backend.device)
    pool = backend.new_pool()
    steps = {
        "item": lambda: y.fill_(x[1].item()),
        "bool": lambda: y.fill_(1) if x.sum() > 0 else y.fill_(2),
        "tolist": lambda: y.fill_(x.tolist()[0]),
        "nonzero": lambda: x.nonzero(),
        "mask": lambda: x[x > 1],
        "unique": lambda: x.unique(),
        "upload": lambda: y.copy_(torch.tensor([1.0, 2, 3, 4], device=x.device)),
        "cpu": lambda: x.cpu(),
    }

    def step() -> None:
        y.add_(1)
        steps[name]()

    with pytest.raises(CaptureError, match="record: the step"):
        backend.record(step, warmups=warmups, pool=pool)
    if warmups == 0:
        assert y.tolist() == [0.0] * 4
    y.zero_()
    torch.cuda.empty_cache()
    torch.rand(3, device=backend.device)
    graph = backend.record(lambda: y.add_(1), warmups=0, pool=pool)
    graph.replay()
    assert y.tolist() == [1.0] * 4


@pytest.mark.gpu
def test_a_wait_that_no_check_foresees_aborts_and_leaves_the_device_usable() -> None:
    """The CUDA runtime aborts this capture; random numbers, pool and pinned memory go on."""
    require_gpu()
    backend = backend_for("cuda")
    y, drawn = torch.zeros(4, device="cuda"), torch.zeros(64, device="cuda")
    pool = backend.new_pool()
    before = backend.record(lambda: drawn.uniform_(), pool=pool)

    def step() -> None:
        y.add_(1)
        torch.cuda.current_stream().synchronize()

    torch.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    for _ in range(2):
        with pytest.raises(CaptureError, match="record: the step"):
            backend.record(step, warmups=0, pool=pool)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert y.tolist() == [0.0] * 4
    assert torch.zeros(4).pin_memory().to("cuda", non_blocking=True).tolist() == [0.0] * 4
    after = backend.record(lambda: y.add_(1), warmups=0, pool=pool)
    replayed = []
    for _ in range(2):
        torch.manual_seed(7)
        before.replay()
        replayed.append(drawn.clone())
        after.replay()
    assert torch.equal(*replayed)
    assert replayed[0].max() > 0
    assert y.tolist() == [2.0] * 4


def test_a_pool_outlives_its_graphs(backend: Backend) -> None:
    pool = backend.new_pool()
    y = torch.zeros(3, device=backend.device)
    for _ in range(3):
        graph = backend.record(lambda: y.add_(1), warmups=0, pool=pool)
        graph.replay()
        graph.release()
    with pytest.raises(CaptureError, match="record: the step failed"):
        backend.record(lambda: y + torch.zeros(2, device=y.device), warmups=0, pool=pool)
    backend.record(lambda: y.add_(1), warmups=0, pool=pool).replay()
    assert y.tolist() == [4.0] * 3


def test_an_error_of_the_step_keeps_its_cause(backend: Backend) -> None:
    x = torch.zeros(3, device=backend.device)

    def step() -> None:
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        backend.record(step, warmups=0)
    with pytest.raises(CaptureError, match="size of tensor") as failure:
        backend.record(lambda: x + torch.zeros(2, device=backend.device), warmups=0)
    assert isinstance(failure.value.__cause__, RuntimeError)
    backend.record(lambda: x.add_(1), warmups=0).replay()
    assert x.tolist() == [1.0] * 3


def test_graphs_of_one_pool_keep_their_inputs_and_share_their_memory(backend: Backend) -> None:
    pool = backend.new_pool()
    x = torch.arange(4.0, device=backend.device)
    y, z = torch.zeros_like(x), torch.zeros_like(x)
    first = backend.record(lambda: y.copy_((x + 1) * 2), pool=pool)
    second = backend.record(lambda: z.copy_((y + 1) * 3), pool=pool)
    for value in (1.0, 5.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.tolist() == [((value + 1) * 2 + 1) * 3] * 4


def test_random_numbers_differ_between_replays(backend: Backend) -> None:
    y = torch.zeros(64, device=backend.device)
    graph = backend.record(lambda: y.uniform_())
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
    assert y.min().item() >= 0
    assert y.max().item() < 1


def test_released_graphs_refuse_to_replay(backend: Backend) -> None:
    y = torch.zeros(2, device=backend.device)
    graph = backend.record(lambda: y.add_(1), warmups=0)
    graph.release()
    graph.release()
    with pytest.raises(RuntimeError, match="released graph"):
        graph.replay()


def test_bad_arguments(backend: Backend) -> None:
    with pytest.raises(ValueError, match="warmups must be at least 0, got -1"):
        backend.record(lambda: None, warmups=-1)
    with pytest.raises(TypeError, match="pool must come from this backend, got int"):
        backend.record(lambda: None, pool=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device must be cuda or cpu, got meta"):
        backend_for("meta")


def test_inference_mode_buffers_can_be_recorded(backend: Backend) -> None:
    with torch.inference_mode():
        x = torch.ones(3, device=backend.device)
        graph = backend.record(lambda: x.mul_(2), warmups=0)
    graph.replay()
    assert x.tolist() == [2.0] * 3


def test_a_parameter_that_requires_grad_is_written_without_a_version_change(
    backend: Backend,
) -> None:
    weight = torch.nn.Parameter(torch.ones(3, device=backend.device))
    graph = backend.record(lambda: weight.mul_(2), warmups=0)
    version = weight._version
    graph.replay()
    assert weight.tolist() == [2.0] * 3
    assert weight._version == version


# What only the tape shows.


def test_tape_poisons_what_a_step_left_unwritten() -> None:
    backend = backend_for("cpu")
    y = torch.zeros(4)

    def step() -> None:
        scratch = torch.empty(4)
        scratch[:2] = 1.0
        y.copy_(scratch)

    backend.record(step).replay()
    assert y[:2].tolist() == [1.0, 1.0]
    assert y[2:].isnan().all()


def test_tape_poisons_results_after_recording_and_when_the_pool_runs_again() -> None:
    backend = backend_for("cpu")
    pool = backend.new_pool()
    x = torch.ones(3)
    kept: list[torch.Tensor] = []
    first = backend.record(lambda: kept.append(x + 1), warmups=0, pool=pool)
    other = backend.record(lambda: x + 2, warmups=0, pool=pool)
    assert kept[0].isnan().all()
    first.replay()
    assert kept[0].tolist() == [2.0] * 3
    other.replay()
    assert kept[0].isnan().all()


def test_tape_keeps_a_result_that_the_next_graph_reads() -> None:
    backend = backend_for("cpu")
    pool = backend.new_pool()
    x = torch.ones(3)
    kept: list[torch.Tensor] = []
    first = backend.record(lambda: kept.append(x + 1), warmups=0, pool=pool)
    second = backend.record(lambda: kept.append(kept[0] * 10), warmups=0, pool=pool)
    first.replay()
    second.replay()
    assert kept[1].tolist() == [20.0] * 3


def test_tape_poisons_integers_with_what_indexes_nothing() -> None:
    backend = backend_for("cpu")
    table, y = torch.arange(8.0), torch.zeros(2)

    def step() -> None:
        ids = torch.empty(2, dtype=torch.int64)
        y.copy_(table.index_select(0, ids.clamp(max=1 << 62)))

    with pytest.raises((CaptureError, IndexError)):
        backend.record(step, warmups=0).replay()


def test_tape_refuses_to_read_freed_memory() -> None:
    backend = backend_for("cpu")
    owner = {"w": torch.ones(3)}
    y = torch.zeros(3)
    graph = backend.record(lambda: y.copy_(owner["w"]), warmups=0)
    other = backend.record(lambda: y.copy_(owner["w"]), warmups=0)
    graph.replay()
    owner["w"] = torch.zeros(3)
    gc.collect()
    with pytest.raises(StaleAddressError, match=r"tensor of shape \(3,\) and torch.float32"):
        graph.replay()
    with pytest.raises(StaleAddressError):
        other.replay()


def test_tape_refuses_host_data_that_never_dispatches() -> None:
    backend = backend_for("cpu")
    x = torch.arange(4.0)
    with pytest.raises(CaptureError, match="host data"):
        backend.record(lambda: x[[0, 2]], warmups=0)


def test_tape_reports_capturing_to_this_thread_only() -> None:
    backend = backend_for("cpu")
    seen: list[bool] = []
    original = torch.cuda.is_current_stream_capturing
    backend.record(lambda: seen.append(torch.cuda.is_current_stream_capturing()), warmups=1)
    assert seen == [True, True]
    assert torch.cuda.is_current_stream_capturing is original


def test_tape_keeps_the_random_state_of_the_host() -> None:
    backend = backend_for("cpu")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    backend.record(lambda: torch.rand(5), warmups=0)
    assert torch.equal(torch.rand(2), expected)
