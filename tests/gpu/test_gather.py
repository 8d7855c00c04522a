"""A resident batch by one kernel on a GPU: compiled, captured, replayed; one launch, no copy, no wait."""

from collections.abc import Callable

import pytest
import torch
from gpu.waits import no_sync
from sunk.sinks import by_hand, data, step, sunk
from sunk.test_gather import CASES, RESTS, SIZE, equal_to_indexing, noise, tables
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from halfstep.engine.sunk import gather as room
from halfstep.engine.sunk.gather import gather

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
    assert gather(columns, numbers, at, SIZE, (passes,)) is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gather(columns, numbers, at, SIZE, (passes,))
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
    monkeypatch.setattr(room, "_WORKS", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather(columns, numbers, at, SIZE) is None
        assert columns["y"].index_select(0, numbers[3]) is not None  # a graph of nothing is an error of its own
    assert not room._WORKS
    assert gather(columns, numbers, at, SIZE) is not None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert gather(columns, numbers, at, 5) is not None  # any n, once compiled
    assert list(room._WORKS.values()) == [True]


def test_one_launch_and_no_wait() -> None:
    columns, numbers, passes, at = made()
    gather(columns, numbers, at, SIZE, (numbers, passes))
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        with no_sync():
            gather(columns, numbers, at, SIZE, (numbers, passes))
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["_gather"]


def test_columns_beyond_int32() -> None:
    """2.7 · 10^9 words of one byte: the last row begins beyond 2^31."""
    numbers, _, at = tables()
    column = torch.zeros(40, 2**26 + 1, dtype=torch.uint8, device=CUDA)
    column[39] = 1
    column[39, -1] = 2
    found = gather({"x": column}, numbers, at, 2)  # samples 0 and 39
    assert found is not None
    assert torch.equal(found[0]["x"], column[[0, 39]])


def test_a_polished_run_gathers_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of many steps, a short batch included: the same state and records, and the kernel ran."""
    monkeypatch.setattr(room, "_WORKS", {})
    one, two = (step(CUDA, "fp32", deterministic=True) for _ in range(2))
    torch.manual_seed(7)
    expected = by_hand(one, data(CUDA, samples=420), 3)
    torch.manual_seed(7)
    rows, _ = sunk(two, data(CUDA, samples=420), 3, every=50, direct=False, polished=True)
    assert rows["loss"] == expected["loss"]
    assert list(room._WORKS.values()) == [True]
