"""A graph of many steps gathers all of its batches at once: the same batches, whatever a network does to one of them.

Without Triton a function of torch's stands in for the kernel; tests/gpu/engine/test_inputs.py runs the same cases with it.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured import inputs
from halfstep.engine.captured.gather import split_storage
from halfstep.engine.captured.inputs import Resident, Staged
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from tests.support.captured_runs import Hasty, by_hand, rows, same_rows, same_state
from tests.support.emulated_graphs import CPU, sinking

PASSES, STEPS, BATCH = 2, 20, 64
DRAWING = (hs.data.Rescale(1 / 255), hs.data.PadCrop(8, 2), hs.data.Flip())
Gather = Callable[..., tuple[dict[str, Tensor], list[Tensor]] | None]


def plain(
    columns: dict[str, Tensor], table: Tensor, at: Tensor, n: int, told: tuple[Tensor, ...] = ()
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What `gather` promises, by torch's indexing: n numbers from row `at` on."""
    places = at * table.shape[1] + torch.arange(n, device=table.device)
    numbers = table.view(-1).index_select(0, places)
    found = {name: column.index_select(0, numbers) for name, column in columns.items()}
    return found, [t.view(-1).index_select(0, places) for t in told]


def noted(monkeypatch: pytest.MonkeyPatch, gather: Gather) -> list[int]:
    """Batches are gathered by `gather`; how many samples each call asked for."""
    asked: list[int] = []

    def noting(columns: Any, table: Tensor, at: Tensor, n: int, told: Any = ()) -> Any:
        asked.append(n)
        return gather(columns, table, at, n, told)

    monkeypatch.setattr(inputs, "gather_samples", noting)
    return asked


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.float() / 128)
        return out


class Writes(Small):
    """Changes its batch in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(
            x.bitwise_not_() if x.dtype == torch.uint8 else x.mul_(-2).clamp_(min=-200)
        )


class Strides(Small):
    """Counts from the beginning of its batch's memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided(x.shape, x.stride(), 0))


class Case(NamedTuple):
    net: type[nn.Module] = Small
    dtype: torch.dtype = torch.uint8
    maps: tuple[Any, ...] = ()
    batch: int = BATCH
    tail: int = 0
    accumulate: int = 1
    ahead: bool = True  # whether batches can be gathered at once

    def data(self, device: torch.device) -> hs.data.Dataset:
        """Images as bytes or floats, and labels: 512 bytes of them in a batch of 64."""
        samples, g = STEPS * self.batch + self.tail, torch.Generator().manual_seed(1)
        x = torch.randint(0, 256, (samples, 1, 8, 8), generator=g).to(self.dtype)
        made = hs.data.Dataset(
            {"x": x.to(device), "y": torch.arange(samples, device=device) % 3}, seed=3
        ).shuffle()
        return (made.map(list(self.maps), "x") if self.maps else made).batch(self.batch)

    def step(self, device: torch.device, **options: Any) -> hs.TrainStep:
        torch.manual_seed(0)
        net = self.net().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
        options = {
            "decide": "device",
            "nonfinite": "skip",
            "accumulate": self.accumulate,
            **options,
        }
        return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="fp32", **options)


CASES = {
    "bytes": Case(),
    "floats": Case(dtype=torch.float32),
    "drawn": Case(maps=DRAWING),
    "drawn, a tail": Case(maps=DRAWING, tail=13),
    "a tail": Case(tail=37),
    "cycles": Case(maps=DRAWING, accumulate=4),
    "written bytes": Case(net=Writes),
    "written floats": Case(net=Writes, dtype=torch.float32),
    "strides": Case(net=Strides, dtype=torch.float32),
    "odd": Case(batch=24, ahead=False),  # labels of 192 bytes
    "odd, drawn": Case(maps=DRAWING, batch=24, tail=5, ahead=False),
}


def equal_to_eager(
    case: Case, device: torch.device, sink_of: Callable[..., Sink], **options: Any
) -> Sink:
    """Records and the whole state after passes in graphs of many steps, against steps by hand."""
    one, two = (case.step(device, **options) for _ in range(2))
    torch.manual_seed(7)
    expected = by_hand(one, case.data(device), PASSES)
    torch.manual_seed(7)
    sink = sink_of(two, case.data(device), every=100)
    program = sink.runner.program
    assert isinstance(program, StepProgram)
    program.polish()
    sink.runner.throttle = Hasty(device)
    assert same_rows(rows(sink, PASSES), expected) == []
    assert same_state(one, two) == []
    assert not program.why
    assert any(key == (case.batch, 16) for key in program.graphs._held)
    return sink


def direct(step: hs.TrainStep, batches: Any, *, every: int) -> Sink:
    sink = hs.sink(step, batches, every=every)
    sink.runner = CapturedRunner.for_step(step, Feed(batches), direct=True)
    return sink


@pytest.mark.parametrize("sink_of", [direct, sinking])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_eager(
    case: str, sink_of: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = noted(monkeypatch, plain)
    equal_to_eager(CASES[case], CPU, sink_of)
    samples = STEPS * CASES[case].batch + CASES[case].tail
    assert (
        sink_of is sinking or sum(asked) == PASSES * samples
    )  # no Python runs in its replays; otherwise each once
    assert max(asked) == CASES[case].batch * (16 if CASES[case].ahead else 1)


@pytest.mark.parametrize("sink_of", [direct, sinking])
def test_without_a_kernel_torch_does_it(sink_of: Callable[..., Sink]) -> None:
    equal_to_eager(CASES["drawn, a tail"], CPU, sink_of)


def started(data: hs.data.Dataset, *, quick: bool = True, at: int = 0) -> Resident:
    """At batch number `at` of a pass."""
    ring, feed = RecordBuffer(64, CPU), Feed(data)
    assert isinstance(feed.data, hs.data.Dataset)
    found = Resident(feed, ring, feed.data)
    ring.use_kernels = quick
    found.start()
    for _ in range(at + 1):
        found.next()
    ring.next_row.fill_(at)
    return found


def steps(found: Resident, count: int) -> Iterator[tuple[Any, ...]]:
    """Its batches, with a counter that moves after each as a step's record moves it."""
    for batch in found.batches(count):
        yield batch
        found.records.next_row.add_(1)


def same(got: Any, expected: Any) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("case", ["bytes", "floats", "drawn"])
def test_all_at_once_when_the_first_is_asked_for(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, data = noted(monkeypatch, plain), CASES[case].data(CPU)
    expected = list(data.fresh())[3:8]
    given = steps(started(data, at=3), 5)
    assert asked == []
    for batch, other in zip(given, expected, strict=True):
        assert same(batch, other)
        assert asked == [5 * BATCH]
        batch[0].zero_()  # reaches no other batch
        batch[1].fill_(9)


def test_each_batch_is_a_tensor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    noted(monkeypatch, plain)
    images, labels = zip(*started(CASES["bytes"].data(CPU)).batches(4), strict=True)
    for column, size in ((images, BATCH * 64), (labels, BATCH * 8)):
        versions = [t._version for t in column]
        column[1].add_(1)
        assert [t._version - v for t, v in zip(column, versions, strict=True)] == [0, 1, 0, 0]
        assert not any(t._is_view() for t in column)
        assert [t.storage_offset() for t in column] == [0] * 4
        assert [t.untyped_storage().nbytes() for t in column] == [size] * 4
        assert [t.data_ptr() - column[0].data_ptr() for t in column] == [
            0,
            size,
            2 * size,
            3 * size,
        ]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.uint16, torch.cfloat]
)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 1, 2)])
def test_parts_lie_where_they_were(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, shape).to(dtype)
    copy = whole.clone()
    for count in (1, 2, 3):
        parts = split_storage(whole, count)
        assert torch.equal(torch.cat([p.to(torch.cfloat) for p in parts]), copy.to(torch.cfloat))
        assert all(p.dtype == dtype and p.stride() == whole.stride() for p in parts)
    split_storage(whole, 3)[1].zero_()
    copy[2:4] = 0
    assert torch.equal(whole.to(torch.cfloat), copy.to(torch.cfloat))


def test_memory_lives_as_long_as_one_of_its_parts() -> None:
    last = split_storage(torch.arange(1 << 20), 4)[3]
    for _ in range(4):
        torch.zeros(1 << 20)
    assert torch.equal(last, torch.arange(3 << 18, 1 << 20))


def wide(batch: int, *, drawn: bool) -> hs.data.Dataset:
    """512 bytes of each column in a batch of 8, and of the numbers that are drawn by in one of 64."""
    made = hs.data.Dataset(
        {"x": torch.randint(0, 256, (640, 8, 8, 1)).byte(), "y": torch.randn(640, 16)}, seed=2
    )
    return (made.map(hs.data.Flip(), "x") if drawn else made).shuffle().batch(batch)


def tails() -> hs.data.Dataset:
    """The short batch of a pass, again and again."""
    return wide(192, drawn=False).skip(3).repeat(4)


FITS: dict[str, tuple[Callable[[], hs.data.Dataset], bool, int, bool]] = {
    "whole": (lambda: wide(8, drawn=False), True, 4, True),
    "drawn": (lambda: wide(64, drawn=True), True, 4, True),
    "one": (lambda: wide(8, drawn=False), True, 1, False),
    "not quick": (lambda: wide(8, drawn=False), False, 4, False),
    "odd columns": (lambda: wide(12, drawn=False), True, 4, False),
    "odd numbers": (lambda: wide(8, drawn=True), True, 4, False),
    "tails": (tails, True, 4, False),
}


@pytest.mark.parametrize("case", FITS)
def test_when_they_are_gathered_at_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one by one, each when its step begins: the same batches."""
    make, quick, count, once = FITS[case]
    asked, data = noted(monkeypatch, plain), make()
    found = started(data, quick=quick)
    assert found.count_same_shape(count) == count
    expected = [batch for batch, _ in zip(data.fresh(), range(count), strict=False)]
    size = len(expected[0][0])
    for i, (batch, other) in enumerate(zip(steps(found, count), expected, strict=True)):
        assert same(batch, other)
        assert asked == ([count * size] if once else [size] * (i + 1) if quick else [])


@pytest.mark.parametrize(
    ("case", "of_a_batch"), [("whole", 2 * 512), ("drawn", 64 * (64 + 64 + 2 * 8))]
)
def test_not_more_than_a_cache_holds(
    case: str, of_a_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, calls in ((4 * of_a_batch, 1), (4 * of_a_batch - 1, 4)):
        asked, data = noted(monkeypatch, plain), FITS[case][0]()
        monkeypatch.setattr(inputs, "MAX_GATHER_BYTES", limit)
        for batch, other in zip(steps(started(data), 4), data.fresh(), strict=False):
            assert same(batch, other)
        assert len(asked) == calls


def test_refused_at_once_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    data = wide(64, drawn=True)
    asked = noted(monkeypatch, lambda *given: plain(*given) if given[3] == 64 else None)
    for batch, other in zip(steps(started(data), 4), data.fresh(), strict=False):
        assert same(batch, other)
    assert asked == [256, 64, 64, 64, 64]


def test_staged_batches_come_one_by_one() -> None:
    feed = Feed([(torch.ones(2), torch.zeros(2))])
    found = Staged(feed, RecordBuffer(8, CPU))
    found.start()
    found.next()
    [batch] = found.batches(1)
    assert same(batch, (torch.ones(2), torch.zeros(2)))
