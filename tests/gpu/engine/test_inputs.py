"""Resident batches by one kernel on a GPU: compiled, captured, replayed; one launch, no copy, no wait."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.engine.captured import gather as gather_module
from halfstep.engine.captured.gather import gather_samples
from halfstep.engine.captured.inputs import ALLOCATION_BYTES, Resident
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from tests.support.captured_runs import Hasty, by_hand, data, rows, step, sunk
from tests.support.no_sync import no_sync
from tests.unit.engine.captured.test_inputs import (
    CASES,
    RESTS,
    SIZE,
    equal_to_indexing,
    noise,
    tables,
)
from tests.unit.engine.captured.test_step_bursts import BATCH, STEPS, Case, equal_to_eager, noted
from tests.unit.engine.captured.test_step_bursts import CASES as BURSTS

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("case", CASES)
def test_equal_to_indexing(case: str) -> None:
    equal_to_indexing(case)


@pytest.mark.parametrize("check", RESTS)
def test_the_rest(check: Callable[[], None]) -> None:
    check()


def made() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    columns = {"x": noise((40, 1, 28, 28), torch.uint8, 1), "y": noise((40,), torch.int64, 2)}
    return columns, *tables()


def test_captured_and_replayed() -> None:
    """A replay finds the row at which the counter stands then, in a column as it is then."""
    columns, numbers, passes, at = made()
    assert gather_samples(columns, numbers, at, SIZE, (passes,)) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_samples(columns, numbers, at, SIZE, (passes,))
    assert found is not None
    for place in (0, 4, 2):
        at.fill_(place)
        columns["y"].add_(1)
        graph.replay()
        for name, column in columns.items():
            assert torch.equal(found[0][name], column[numbers[place]])
        assert torch.equal(found[1][0], passes[place])


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    columns, numbers, _, at = made()
    monkeypatch.setattr(gather_module, "_kernel_works", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather_samples(columns, numbers, at, SIZE) is None
        assert (
            columns["y"].index_select(0, numbers[3]) is not None
        )  # a graph of nothing is an error of its own
    assert not gather_module._kernel_works
    assert gather_samples(columns, numbers, at, SIZE) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather_samples(columns, numbers, at, 5) is not None  # any n, once compiled
    assert list(gather_module._kernel_works.values()) == [True]


def test_one_launch_and_no_wait() -> None:
    columns, numbers, passes, at = made()
    gather_samples(columns, numbers, at, SIZE, (numbers, passes))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        with no_sync():
            gather_samples(columns, numbers, at, SIZE, (numbers, passes))
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["_gather"]


def test_columns_beyond_int32() -> None:
    """2.7 · 10^9 words of one byte: the last row begins beyond 2^31."""
    numbers, _, at = tables()
    column = torch.zeros(40, 2**26 + 1, dtype=torch.uint8, device=CUDA)
    column[39] = 1
    column[39, -1] = 2
    found = gather_samples({"x": column}, numbers, at, 2)  # samples 0 and 39
    assert found is not None
    assert torch.equal(found[0]["x"], column[[0, 39]])


def test_a_polished_run_gathers_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of many steps, a short batch included: the same state and records, and the kernel ran."""
    monkeypatch.setattr(gather_module, "_kernel_works", {})
    one, two = (step(CUDA, "fp32", deterministic=True) for _ in range(2))
    torch.manual_seed(7)
    expected = by_hand(one, data(CUDA, samples=420), 3)
    torch.manual_seed(7)
    got, _ = sunk(two, data(CUDA, samples=420), 3, every=50, direct=False, polished=True)
    assert got["loss"] == expected["loss"]
    assert list(gather_module._kernel_works.values()) == [True]


@pytest.mark.parametrize("case", BURSTS)
def test_a_burst_is_equal_to_eager(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of a graph of many steps by one call, where they can be: the bits of steps by hand."""
    asked = noted(monkeypatch, gather_samples)
    equal_to_eager(BURSTS[case], CUDA, hs.sink, deterministic=True)
    assert max(asked) == BURSTS[case].batch * (16 if BURSTS[case].ahead else 1)


def test_a_compiled_burst_is_equal_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that was compiled for a batch by itself takes one among others, and is not compiled again."""
    asked = noted(monkeypatch, gather_samples)
    equal_to_eager(BURSTS["drawn, a tail"], CUDA, hs.sink, deterministic=True, compile=True)
    assert max(asked) == 16 * BATCH


def kernels(burst: Case) -> list[str]:
    """What one pass of 20 steps launches, once everything is captured: 16 are one graph, 4 are single."""
    sink = hs.sink(burst.step(CUDA), burst.data(CUDA), every=100)
    assert isinstance(sink.runner.program, StepProgram)
    sink.runner.program.polish()
    sink.runner.throttle = Hasty(CUDA)
    rows(sink, 3)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        rows(sink, 1)
        torch.cuda.synchronize()
    return [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("case", ["bytes", "drawn", "odd"])
def test_one_launch_in_a_burst(case: str) -> None:
    """So many kernels gather, and one to a step where they must."""
    burst = BURSTS[case]
    assert kernels(burst).count("_gather") == (5 if burst.ahead else STEPS)


def test_the_deciding_kernel_writes_the_record() -> None:
    """Of a cycle of one batch; in a longer one every step has its own."""
    names = kernels(BURSTS["bytes"])
    assert (names.count("decide"), names.count("record")) == (STEPS, 0)
    names = kernels(BURSTS["cycles"])
    assert (names.count("decide"), names.count("record")) == (STEPS // 4, STEPS)


def test_batches_of_a_burst_begin_where_their_own_memory_would() -> None:
    data = Case(maps=BURSTS["drawn"].maps).data(CUDA)
    expected, ring, feed = list(data.fresh()), RecordBuffer(64, CUDA), Feed(data)
    assert isinstance(feed.data, hs.data.Dataset)
    found = Resident(feed, ring, feed.data)
    ring.use_kernels = True
    found.start()
    found.next()
    kept = found._gather_by_kernel(4)
    assert kept is not None
    tensors = [t for columns, *told in kept for t in (*columns.values(), *told)]
    assert len(tensors) == 16
    assert [t.data_ptr() % ALLOCATION_BYTES for t in tensors] == [0] * 16
    for batch, other in zip(found.batches(4), expected, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def test_bursts_captured_and_replayed() -> None:
    """The rows from the counter's place on, as it stands at a replay."""
    columns, numbers, passes, at = made()
    gather_samples(columns, numbers, at, SIZE, (passes,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather_samples(columns, numbers, at, 2 * SIZE, (passes,))
        assert found is not None
        parts = [gather_module.split_storage(t, 2) for t in (*found[0].values(), *found[1])]
    del found  # memory lives as long as one of its parts
    for place in (0, 3, 1):
        at.fill_(place)
        graph.replay()
        for i in range(2):
            assert torch.equal(parts[0][i], columns["x"][numbers[place + i]])
            assert torch.equal(parts[1][i], columns["y"][numbers[place + i]])
            assert torch.equal(parts[2][i], passes[place + i])
