"""A graph of many steps gathers all of its batches at once.

They are the same batches, whatever a network does to one of them. Without Triton a function of
torch's stands in for the kernel; tests/gpu/engine/test_inputs.py runs the same cases with it.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured import inputs
from halfstep.engine.captured.gather import split_storage
from halfstep.engine.captured.inputs import ResidentInputs, StagedInputs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import BurstKind, StepProgram
from halfstep.engine.feed import Feed
from tests.support.captured_runs import (
    ShortSteps,
    collect_columns,
    differing_columns,
    differing_tensors,
    run_by_hand,
)
from tests.support.emulated_graphs import CPU, sink_with_emulated_graphs

PASSES = 2
STEPS = 20
BATCH = 64
RANDOM = (hs.data.Rescale(1 / 255), hs.data.PadCrop(8, 2), hs.data.Flip())
Gather = Callable[..., tuple[dict[str, Tensor], list[Tensor]] | None]


def gather_by_torch(
    columns: dict[str, Tensor],
    table: Tensor,
    row: Tensor,
    count: int,
    copied: tuple[Tensor, ...] = (),
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What `gather_samples` promises, by torch's indexing: `count` numbers from a row on."""
    positions = row * table.shape[1] + torch.arange(count, device=table.device)
    numbers = table.view(-1).index_select(0, positions)
    batch = {name: column.index_select(0, numbers) for name, column in columns.items()}
    return batch, [t.view(-1).index_select(0, positions) for t in copied]


def count_gathered(monkeypatch: pytest.MonkeyPatch, gather: Gather) -> list[int]:
    """Lets `gather` make the batches. The list gets the number of samples of each call."""
    counts: list[int] = []

    def counting_gather(
        columns: Any, table: Tensor, row: Tensor, count: int, copied: Any = ()
    ) -> Any:
        counts.append(count)
        return gather(columns, table, row, count, copied)

    monkeypatch.setattr(inputs, "gather_samples", counting_gather)
    return counts


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.25), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.float() / 128)
        return out


class WritesToBatch(SmallNet):
    """Changes its batch in place."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x.bitwise_not_()
        else:
            x.mul_(-2).clamp_(min=-200)
        return super().forward(x)


class ReadsFromStorage(SmallNet):
    """Reads from the beginning of its batch's memory."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.as_strided(x.shape, x.stride(), 0))


class Case(NamedTuple):
    net: type[nn.Module] = SmallNet
    dtype: torch.dtype = torch.uint8
    maps: tuple[Any, ...] = ()
    batch: int = BATCH
    tail: int = 0
    accumulate: int = 1
    at_once: bool = True  # whether batches can be gathered at once

    def data(self, device: torch.device) -> hs.data.Dataset:
        """Images as bytes or floats, and labels: 512 bytes of them in a batch of 64."""
        samples = STEPS * self.batch + self.tail
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(0, 256, (samples, 1, 8, 8), generator=generator).to(self.dtype)
        y = torch.arange(samples, device=device) % 3
        dataset = hs.data.Dataset({"x": x.to(device), "y": y}, seed=3).shuffle()
        if self.maps:
            dataset = dataset.map(list(self.maps), "x")
        return dataset.batch(self.batch)

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
    "random": Case(maps=RANDOM),
    "random, a tail": Case(maps=RANDOM, tail=13),
    "a tail": Case(tail=37),
    "cycles": Case(maps=RANDOM, accumulate=4),
    "written bytes": Case(net=WritesToBatch),
    "written floats": Case(net=WritesToBatch, dtype=torch.float32),
    "strides": Case(net=ReadsFromStorage, dtype=torch.float32),
    "odd": Case(batch=24, at_once=False),  # labels of 192 bytes
    "odd, random": Case(maps=RANDOM, batch=24, tail=5, at_once=False),
}


def equal_to_eager(
    case: Case, device: torch.device, make_sink: Callable[..., Sink], **options: Any
) -> Sink:
    """Records and the whole state after passes in graphs of many steps, against steps by hand."""
    eager = case.step(device, **options)
    captured = case.step(device, **options)
    torch.manual_seed(7)
    expected = run_by_hand(eager, case.data(device), PASSES)
    torch.manual_seed(7)
    sink = make_sink(captured, case.data(device), every=100)
    program = sink.runner.program
    assert isinstance(program, StepProgram)
    program.polish()
    sink.runner.throttle = ShortSteps(device)
    assert differing_columns(collect_columns(sink, PASSES), expected) == []
    assert differing_tensors(eager, captured) == []
    assert not program.refusal_reason
    assert BurstKind(case.batch, 16) in program.graphs._graphs
    return sink


def direct_sink(step: hs.TrainStep, batches: Any, *, every: int) -> Sink:
    sink = hs.sink(step, batches, every=every)
    sink.runner = CapturedRunner.for_step(step, Feed(batches), direct=True)
    return sink


@pytest.mark.parametrize("make_sink", [direct_sink, sink_with_emulated_graphs])
@pytest.mark.parametrize("case", CASES)
def test_equal_to_eager(
    case: str, make_sink: Callable[..., Sink], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_gathered(monkeypatch, gather_by_torch)
    equal_to_eager(CASES[case], CPU, make_sink)
    samples = STEPS * CASES[case].batch + CASES[case].tail
    if make_sink is not sink_with_emulated_graphs:  # no Python runs in its replays
        assert sum(counts) == PASSES * samples  # each once
    batches_at_once = 16 if CASES[case].at_once else 1
    assert max(counts) == CASES[case].batch * batches_at_once


@pytest.mark.parametrize("make_sink", [direct_sink, sink_with_emulated_graphs])
def test_without_a_kernel_torch_does_it(make_sink: Callable[..., Sink]) -> None:
    equal_to_eager(CASES["random, a tail"], CPU, make_sink)


def start_resident(
    data: hs.data.Dataset, *, use_kernels: bool = True, at_batch: int = 0
) -> ResidentInputs:
    """Inputs in the middle of a pass."""
    records = RecordBuffer(64, CPU)
    feed = Feed(data)
    assert isinstance(feed.data, hs.data.Dataset)
    resident = ResidentInputs(feed, records, feed.data)
    records.use_kernels = use_kernels
    resident.start()
    for _ in range(at_batch + 1):
        resident.next()
    records.next_row.fill_(at_batch)
    return resident


def next_batches(resident: ResidentInputs, count: int) -> Iterator[tuple[Any, ...]]:
    """Its batches. After each the next row is counted, as a step's record does it."""
    for batch in resident.batches(count):
        yield batch
        resident.records.next_row.add_(1)


def same(batch: Any, expected: Any) -> bool:
    pairs = zip(batch, expected, strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("case", ["bytes", "floats", "random"])
def test_all_at_once_when_the_first_is_requested(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = count_gathered(monkeypatch, gather_by_torch)
    data = CASES[case].data(CPU)
    expected_batches = list(data.fresh())[3:8]
    batches = next_batches(start_resident(data, at_batch=3), 5)
    assert counts == []
    for batch, expected in zip(batches, expected_batches, strict=True):
        assert same(batch, expected)
        assert counts == [5 * BATCH]
        batch[0].zero_()  # reaches no other batch
        batch[1].fill_(9)


def test_each_batch_is_a_tensor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    count_gathered(monkeypatch, gather_by_torch)
    images, labels = zip(*start_resident(CASES["bytes"].data(CPU)).batches(4), strict=True)
    for column, size in ((images, BATCH * 64), (labels, BATCH * 8)):
        versions = [t._version for t in column]
        column[1].add_(1)
        assert [t._version - v for t, v in zip(column, versions, strict=True)] == [0, 1, 0, 0]
        assert not any(t._is_view() for t in column)
        assert [t.storage_offset() for t in column] == [0] * 4
        assert [t.untyped_storage().nbytes() for t in column] == [size] * 4
        offsets = [t.data_ptr() - column[0].data_ptr() for t in column]
        assert offsets == [0, size, 2 * size, 3 * size]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.float64, torch.bool, torch.bfloat16, torch.uint16, torch.cfloat]
)
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 1, 2)])
def test_parts_lie_where_they_were(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    copy = tensor.clone()
    for count in (1, 2, 3):
        parts = split_storage(tensor, count)
        joined = torch.cat([part.to(torch.cfloat) for part in parts])
        assert torch.equal(joined, copy.to(torch.cfloat))
        assert all(part.dtype == dtype for part in parts)
        assert all(part.stride() == tensor.stride() for part in parts)
    split_storage(tensor, 3)[1].zero_()
    copy[2:4] = 0
    assert torch.equal(tensor.to(torch.cfloat), copy.to(torch.cfloat))


def test_memory_lives_as_long_as_one_of_its_parts() -> None:
    last = split_storage(torch.arange(1 << 20), 4)[3]
    for _ in range(4):
        torch.zeros(1 << 20)
    assert torch.equal(last, torch.arange(3 << 18, 1 << 20))


def make_dataset(batch: int, *, random: bool) -> hs.data.Dataset:
    """Columns of 512 bytes in a batch of 8; seeds of random transforms have 512 in one of 64."""
    x = torch.randint(0, 256, (640, 8, 8, 1)).byte()
    y = torch.randn(640, 16)
    dataset = hs.data.Dataset({"x": x, "y": y}, seed=2)
    if random:
        dataset = dataset.map(hs.data.Flip(), "x")
    return dataset.shuffle().batch(batch)


def short_batches() -> hs.data.Dataset:
    """The short batch of a pass, again and again."""
    return make_dataset(192, random=False).skip(3).repeat(4)


class GatherCase(NamedTuple):
    make_dataset: Callable[[], hs.data.Dataset]
    use_kernels: bool = True
    count: int = 4
    at_once: bool = False


GATHER_CASES = {
    "full": GatherCase(lambda: make_dataset(8, random=False), at_once=True),
    "random": GatherCase(lambda: make_dataset(64, random=True), at_once=True),
    "one": GatherCase(lambda: make_dataset(8, random=False), count=1),
    "without kernels": GatherCase(lambda: make_dataset(8, random=False), use_kernels=False),
    "odd columns": GatherCase(lambda: make_dataset(12, random=False)),
    "odd seeds": GatherCase(lambda: make_dataset(8, random=True)),
    "short batches": GatherCase(short_batches),
}


@pytest.mark.parametrize("name", GATHER_CASES)
def test_when_they_are_gathered_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or one by one, each when its step begins: the same batches."""
    case = GATHER_CASES[name]
    counts = count_gathered(monkeypatch, gather_by_torch)
    dataset = case.make_dataset()
    resident = start_resident(dataset, use_kernels=case.use_kernels)
    assert resident.count_same_shape(case.count) == case.count
    expected_batches = list(islice(dataset.fresh(), case.count))
    size = len(expected_batches[0][0])
    expected_counts: list[int] = []
    if case.at_once:
        expected_counts = [case.count * size]
    batches = next_batches(resident, case.count)
    for batch, expected in zip(batches, expected_batches, strict=True):
        if case.use_kernels and not case.at_once:
            expected_counts.append(size)
        assert same(batch, expected)
        assert counts == expected_counts


@pytest.mark.parametrize(
    ("name", "batch_bytes"), [("full", 2 * 512), ("random", 64 * (64 + 64 + 2 * 8))]
)
def test_not_more_than_a_cache_holds(
    name: str, batch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, calls in ((4 * batch_bytes, 1), (4 * batch_bytes - 1, 4)):
        counts = count_gathered(monkeypatch, gather_by_torch)
        dataset = GATHER_CASES[name].make_dataset()
        monkeypatch.setattr(inputs, "MAX_GATHER_BYTES", limit)
        batches = next_batches(start_resident(dataset), 4)
        for batch, expected in zip(batches, dataset.fresh(), strict=False):
            assert same(batch, expected)
        assert len(counts) == calls


def test_refused_at_once_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather_one_batch(columns: Any, table: Tensor, row: Tensor, count: int, copied: Any) -> Any:
        if count != 64:
            return None
        return gather_by_torch(columns, table, row, count, copied)

    dataset = make_dataset(64, random=True)
    counts = count_gathered(monkeypatch, gather_one_batch)
    batches = next_batches(start_resident(dataset), 4)
    for batch, expected in zip(batches, dataset.fresh(), strict=False):
        assert same(batch, expected)
    assert counts == [256, 64, 64, 64, 64]


def test_staged_batches_come_one_by_one() -> None:
    feed = Feed([(torch.ones(2), torch.zeros(2))])
    staged = StagedInputs(feed, RecordBuffer(8, CPU))
    staged.start()
    staged.next()
    [batch] = staged.batches(1)
    assert same(batch, (torch.ones(2), torch.zeros(2)))
