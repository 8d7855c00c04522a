"""Resident batches by one kernel on a GPU: compiled, captured, replayed.

One launch, no copy, no wait.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.engine.captured import gather as gather_module
from halfstep.engine.captured.gather import gather_samples, split_storage
from halfstep.engine.captured.inputs import ALLOCATION_BYTES, ResidentInputs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from tests.support.captured_runs import (
    ShortSteps,
    collect_columns,
    make_data,
    make_step,
    run_by_hand,
    run_captured,
)
from tests.support.no_sync import no_sync
from tests.unit.engine.captured.test_inputs import (
    CASES,
    CHECKS,
    SIZE,
    equal_to_indexing,
    make_tables,
    random_bits,
)
from tests.unit.engine.captured.test_step_bursts import (
    BATCH,
    STEPS,
    Case,
    count_gathered,
    equal_to_eager,
)
from tests.unit.engine.captured.test_step_bursts import CASES as BURSTS

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("case", CASES)
def test_equal_to_indexing(case: str) -> None:
    equal_to_indexing(case)


@pytest.mark.parametrize("check", CHECKS)
def test_checks(check: Callable[[], None]) -> None:
    check()


def make_columns() -> dict[str, Tensor]:
    return {
        "x": random_bits((40, 1, 28, 28), torch.uint8, 1),
        "y": random_bits((40,), torch.int64, 2),
    }


def test_captured_and_replayed() -> None:
    """A replay finds the row at which the counter stands then, in a column as it is then."""
    columns = make_columns()
    numbers, passes, row = make_tables()
    assert gather_samples(columns, numbers, row, SIZE, (passes,)) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gather_samples(columns, numbers, row, SIZE, (passes,))
    assert result is not None
    batch, copies = result
    for row_number in (0, 4, 2):
        row.fill_(row_number)
        columns["y"].add_(1)
        graph.replay()
        for name, column in columns.items():
            assert torch.equal(batch[name], column[numbers[row_number]])
        assert torch.equal(copies[0], passes[row_number])


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = make_columns()
    numbers, _, row = make_tables()
    monkeypatch.setattr(gather_module, "_kernel_works", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather_samples(columns, numbers, row, SIZE) is None
        # A graph of nothing is an error of its own.
        assert columns["y"].index_select(0, numbers[3]) is not None
    assert not gather_module._kernel_works
    assert gather_samples(columns, numbers, row, SIZE) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather_samples(columns, numbers, row, 5) is not None  # any n, once compiled
    assert list(gather_module._kernel_works.values()) == [True]


def cuda_event_names(profiler: profile) -> list[str]:
    on_cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profiler.events() if event.device_type == on_cuda]


def test_one_launch_and_no_wait() -> None:
    columns = make_columns()
    numbers, passes, row = make_tables()
    gather_samples(columns, numbers, row, SIZE, (numbers, passes))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        with no_sync():
            gather_samples(columns, numbers, row, SIZE, (numbers, passes))
        torch.cuda.synchronize()
    assert cuda_event_names(profiler) == ["_gather"]


def test_columns_beyond_int32() -> None:
    """2.7 · 10^9 words of one byte: the last row begins beyond 2^31."""
    numbers, _, row = make_tables()
    column = torch.zeros(40, 2**26 + 1, dtype=torch.uint8, device=CUDA)
    column[39] = 1
    column[39, -1] = 2
    result = gather_samples({"x": column}, numbers, row, 2)  # samples 0 and 39
    assert result is not None
    assert torch.equal(result[0]["x"], column[[0, 39]])


def test_a_polished_run_gathers_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of many steps, a short batch included: the same records, and the kernel ran."""
    monkeypatch.setattr(gather_module, "_kernel_works", {})
    eager = make_step(CUDA, "fp32", deterministic=True)
    captured = make_step(CUDA, "fp32", deterministic=True)
    torch.manual_seed(7)
    expected = run_by_hand(eager, make_data(CUDA, samples=420), 3)
    torch.manual_seed(7)
    columns, _ = run_captured(
        captured, make_data(CUDA, samples=420), 3, every=50, direct=False, polished=True
    )
    assert columns["loss"] == expected["loss"]
    assert list(gather_module._kernel_works.values()) == [True]


@pytest.mark.parametrize("case", BURSTS)
def test_a_burst_is_equal_to_eager(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All batches of a graph by one call, where they can be: the bits of steps by hand."""
    counts = count_gathered(monkeypatch, gather_samples)
    equal_to_eager(BURSTS[case], CUDA, hs.sink, deterministic=True)
    batches_at_once = 16 if BURSTS[case].at_once else 1
    assert max(counts) == BURSTS[case].batch * batches_at_once


def test_a_compiled_burst_is_equal_to_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program compiled for a batch by itself takes one among others; no second compilation."""
    counts = count_gathered(monkeypatch, gather_samples)
    equal_to_eager(BURSTS["random, a tail"], CUDA, hs.sink, deterministic=True, compile=True)
    assert max(counts) == 16 * BATCH


def launched_kernels(burst: Case) -> list[str]:
    """What one pass of 20 steps launches, once captured: 16 are one graph, 4 are single."""
    sink = hs.sink(burst.step(CUDA), burst.data(CUDA), every=100)
    assert isinstance(sink.runner.program, StepProgram)
    sink.runner.program.polish()
    sink.runner.throttle = ShortSteps(CUDA)
    collect_columns(sink, 3)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        collect_columns(sink, 1)
        torch.cuda.synchronize()
    return cuda_event_names(profiler)


@pytest.mark.parametrize("case", ["bytes", "random", "odd"])
def test_one_launch_in_a_burst(case: str) -> None:
    """One kernel gathers for all of them; one for each step where it must be so."""
    burst = BURSTS[case]
    expected = 5 if burst.at_once else STEPS
    assert launched_kernels(burst).count("_gather") == expected


def test_the_deciding_kernel_writes_the_record() -> None:
    """Of a cycle of one batch; in a longer one every step has its own."""
    names = launched_kernels(BURSTS["bytes"])
    assert (names.count("decide"), names.count("record")) == (STEPS, 0)
    names = launched_kernels(BURSTS["cycles"])
    assert (names.count("decide"), names.count("record")) == (STEPS // 4, STEPS)


def test_batches_of_a_burst_begin_where_their_own_memory_would() -> None:
    dataset = BURSTS["random"].data(CUDA)
    expected_batches = list(dataset.fresh())
    records = RecordBuffer(64, CUDA)
    feed = Feed(dataset)
    assert isinstance(feed.data, hs.data.Dataset)
    resident = ResidentInputs(feed, records, feed.data)
    records.use_kernels = True
    resident.start()
    resident.next()
    gathered = resident._gather_by_kernel(4)
    assert gathered is not None
    tensors = []
    for batch in gathered:
        tensors += [*batch.columns.values(), batch.samples, batch.epochs]
    assert len(tensors) == 16
    assert [t.data_ptr() % ALLOCATION_BYTES for t in tensors] == [0] * 16
    for args, expected in zip(resident.batches(4), expected_batches, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(args, expected, strict=True))


def test_bursts_captured_and_replayed() -> None:
    """The rows from `row` on, as it stands at a replay."""
    columns = make_columns()
    numbers, passes, row = make_tables()
    gather_samples(columns, numbers, row, SIZE, (passes,))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gather_samples(columns, numbers, row, 2 * SIZE, (passes,))
        assert result is not None
        x_parts = split_storage(result[0]["x"], 2)
        y_parts = split_storage(result[0]["y"], 2)
        pass_parts = split_storage(result[1][0], 2)
    del result  # memory lives as long as one of its parts
    for row_number in (0, 3, 1):
        row.fill_(row_number)
        graph.replay()
        for i in range(2):
            assert torch.equal(x_parts[i], columns["x"][numbers[row_number + i]])
            assert torch.equal(y_parts[i], columns["y"][numbers[row_number + i]])
            assert torch.equal(pass_parts[i], passes[row_number + i])
