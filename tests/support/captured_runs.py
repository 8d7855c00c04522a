"""Runs to compare: the same network, data and seeds, stepped by hand and captured."""

from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.runner import CapturedRunner, HostThrottle
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed

FIELDS = ("loss", "cycle_loss", "lr", "scale", "grad_norm", "skipped", "updated", "fingerprint")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adam-capturable": lambda p: torch.optim.Adam(p, lr=0.01, capturable=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, capturable=True),
}
SHORT_STEP_S = 1e-5


class ShortSteps(HostThrottle):
    """Steps that count as short from the first on, so that graphs hold many of them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.step_s = SHORT_STEP_S

    def tick(self, steps: int = 1) -> None:
        super().tick(steps)
        self.step_s = SHORT_STEP_S


class Net(nn.Module):
    """Dropout, BatchNorm and a head: enough to go wrong in every way a graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.25))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def make_step(
    device: torch.device, precision: str, optimizer: str = "sgd", **options: Any
) -> hs.TrainStep:
    """A TrainStep over a new Net, always with the same weights."""
    torch.manual_seed(0)
    net = Net().to(device)
    options = {"decide": "device", "nonfinite": "skip", **options}
    make_optimizer = OPTIMIZERS[optimizer]
    return hs.TrainStep(
        net, nn.CrossEntropyLoss(), make_optimizer(net.parameters()), precision=precision, **options
    )


def make_data(
    device: torch.device, *, samples: int = 100, batch: int = 8, poison: tuple[int, ...] = ()
) -> hs.data.Dataset:
    """Shuffled batches on a device. `poison`: samples that overflow every precision."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    for i in poison:
        x[i] = 3e38
    return hs.data.Dataset((x.to(device), y.to(device)), seed=3).shuffle().batch(batch)


def run_by_hand(step: hs.TrainStep, batches: Any, passes: int) -> dict[str, list[Any]]:
    """The columns of eager steps' records, the tail's flush joined to the last of its pass."""
    records: list[hs.Record] = []
    for _ in range(passes):
        for batch in batches:
            records.append(step(*batch))
        tail = step.flush()
        if tail is not None:
            records[-1] = tail._replace(loss=records[-1].loss)
    columns: dict[str, list[Any]] = {}
    for name in FIELDS:
        values = [getattr(record, name) for record in records]
        if name != "fingerprint":
            values = [value.double() for value in values]
        columns[name] = [value.tolist() for value in values]
    return columns


def run_captured(
    step: hs.TrainStep,
    batches: Any,
    passes: int,
    *,
    every: int,
    direct: bool,
    polished: bool = False,
) -> tuple[dict[str, Any], Sink]:
    """The columns of the same steps through hs.sink.

    `direct` replays by calling the step, for devices without graphs. `polished`: as a long run.
    """
    sink = hs.sink(step, batches, every=every)
    if direct:
        sink.runner = CapturedRunner.for_step(step, Feed(batches), direct=True)
    if polished:
        assert isinstance(sink.runner.program, StepProgram)
        sink.runner.program.polish()
        sink.runner.throttle = ShortSteps(step.device)
    return collect_columns(sink, passes), sink


def collect_columns(sink: Sink, passes: int) -> dict[str, Any]:
    """The columns of all records of some passes."""
    columns: dict[str, list[Any]] = {name: [] for name in FIELDS}
    for _ in range(passes):
        for records in sink:
            for name in FIELDS:
                values = getattr(records, name)
                if name != "fingerprint":
                    values = values.double()
                columns[name] += values.tolist()
    return columns


def differing_columns(columns: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of the columns in which they differ; NaN is like NaN."""
    differing = []
    for name in expected:
        column = torch.tensor(columns[name]).nan_to_num(7)
        expected_column = torch.tensor(expected[name]).nan_to_num(7)
        if not torch.equal(column, expected_column):
            differing.append(name)
    return differing


def differing_tensors(a: hs.TrainStep, b: hs.TrainStep) -> list[str]:
    """Names of the tensors in which two steps differ, bit by bit."""
    prints_a = {name: value.item() for name, value in a.fingerprints().items()}
    prints_b = {name: value.item() for name, value in b.fingerprints().items()}
    names = dict.fromkeys([*prints_a, *prints_b])
    return [name for name in names if prints_a.get(name) != prints_b.get(name)]
