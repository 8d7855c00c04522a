"""The captured engine on a real device: what it launches, what it copies, what it refuses, what it keeps."""

import gc
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.model import Model
from tests.support.captured_runs import Net, data, step
from tests.support.no_sync import no_sync

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:.*batch-coupled"),
]
CUDA = torch.device("cuda")


def model(precision: str = "O2", *, capture: Any = "auto", **options: Any) -> Model:
    torch.manual_seed(0)
    net = Net().to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    options = {
        "nonfinite": "skip",
        "deterministic": True,
        "metrics": {"acc": hs.metrics.Accuracy()},
        **options,
    }
    return Model(net, nn.CrossEntropyLoss(), optimizer, precision, capture=capture, **options)


def fitted(capture: Any, sink: int | None, **options: Any) -> tuple[Model, list[Any], Any]:
    m = model(capture=capture, **options)
    seen: list[Any] = []
    torch.manual_seed(5)
    note = hs.Lambda(step=lambda run, row: seen.append(row))
    save = Weights(m)
    run = m.fit(
        4,
        data(CUDA),
        valid=data(CUDA, samples=50),
        callbacks=[note, save],
        sink=sink,
        valid_every_steps=9,
    )
    return m, [*seen, *save.kept], run


class Weights(hs.Callback):
    """What a checkpoint every 5 steps would save: its step, its place in the cycle, a fingerprint of everything."""

    def __init__(self, m: Model) -> None:
        self.model, self.kept = m, list[tuple[int, int, int]]()

    def next_stop(self, run: Any) -> int:
        return (run.position // 5 + 1) * 5

    def visit(self, run: Any) -> None:
        if run.position % 5 == 0:
            step = self.model.step
            self.kept.append(
                (run.position, step.state.cycle.micro, step.state_fingerprint().item())
            )


@pytest.mark.parametrize("sink", [1, 7, 100, None])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_is_the_same_captured_or_not(sink: int | None, accumulate: int) -> None:
    """Weights, rows, history, evaluations: bit for bit, in any length of sink."""
    a, rows, run = fitted(False, 1, accumulate=accumulate)
    b, other, again = fitted(True, sink, accumulate=accumulate)
    assert rows == other
    assert run.history == again.history
    for name, value in a.net.state_dict().items():
        assert torch.equal(value, b.net.state_dict()[name]), name
    assert b.graphs._runner is not None
    assert b.graphs._runner.program.graphs.captures >= 2
    x = next(iter(data(CUDA, samples=50)))[0]
    assert torch.equal(a.predict(x), b.predict(x))
    assert torch.equal(a.predict(x), b.predict(x))  # the second time from a graph
    assert a.evaluate(data(CUDA)) == b.evaluate(data(CUDA)) == b.evaluate(data(CUDA))


def launches(events: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for event in events:
        counts[event.name] = counts.get(event.name, 0) + 1
    return counts


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_between_visits_there_are_graph_launches_and_nothing_else(precision: str) -> None:
    """A whole sunk pass with forced overflows under the profiler: as many graph launches as steps, no copies."""
    s = step(CUDA, precision)
    batches = data(CUDA, samples=800, poison=(5, 300, 641))
    sink = hs.sink(s, batches, every=1000)
    for _ in range(2):
        list(sink)
    before = s.state.skips.item()
    with (
        profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as prof,
        no_sync(),
    ):
        [records] = list(sink)
    names = launches(prof.events())
    assert len(records) == 100
    assert records.skipped.sum().item() == s.state.skips.item() - before > 0
    assert names["cudaGraphLaunch"] == 100
    copies = [e for e in prof.events() if re.search(r"Memcpy (HtoD|DtoH)", e.name)]
    assert sum("HtoD" in e.name for e in copies) == 0
    assert (
        sum("DtoH" in e.name for e in copies) == 2
    )  # the visit: the rows, and whether the device has stopped
    kernels = (
        names.get("cudaLaunchKernel", 0)
        + names.get("cuLaunchKernel", 0)
        + names.get("cudaLaunchKernelExC", 0)
    )
    assert kernels <= 400  # the numbers of the pass's samples, computed once: none per step


class Reads(nn.Module):
    """A forward that reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if out.sum().item() > 1e30:  # READS HERE
            return out * 2
        return out


class Copies(nn.Module):
    """A forward that brings a number from pageable memory: no wait, but no graph either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * torch.tensor([2.0, 2.0, 2.0], device=x.device)  # COPIES HERE


@pytest.mark.parametrize(("kind", "line"), [(Reads, "READS HERE"), (Copies, "COPIES HERE")])
def test_what_cannot_be_captured_is_named_with_its_line(kind: type[nn.Module], line: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = kind()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return out

    net = Outer().to(CUDA)
    s = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    )
    with pytest.raises(
        hs.UncapturableError, match=rf"(?s)module block.*test_captured.py:\d+.*{line}"
    ):
        for _ in hs.sink(s, data(CUDA)):
            pass


@pytest.mark.parametrize("kind", [Reads, Copies])
def test_an_uncapturable_network_trains_eagerly_and_says_so(kind: type[nn.Module]) -> None:
    """And the process is whole afterwards: random numbers, other captures, the same weights as without capture."""
    weights = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        net = nn.Sequential(kind(), nn.Dropout(0.1)).to(CUDA)
        m = Model(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=0.1, fused=True),
            capture=capture,
        )
        if capture:
            with pytest.warns(hs.Notice, match="cannot be captured"):
                m.fit(2, data(CUDA))
            assert "eager" in m.report().choices["engine"]
        else:
            m.fit(2, data(CUDA))
        weights.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    fitted(True, 7)


def test_a_changed_setting_acts_on_the_next_replay_and_costs_one_capture() -> None:
    a, b = step(CUDA, "fp32", deterministic=True), step(CUDA, "fp32", deterministic=True)
    batches = list(data(CUDA, samples=160))
    sink = hs.sink(b, batches, every=10)
    torch.manual_seed(7)
    for k, batch in enumerate(batches * 3):
        if k == 30:
            a.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1)
        a(*batch)
    torch.manual_seed(7)
    visits = 0
    for _ in range(3):
        for _ in sink:
            visits += 1
            if visits == 3:
                before = sink.captures
                b.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1)
    assert sink.captures == before + 1
    assert all(torch.equal(p, q) for p, q in zip(a.params, b.params, strict=True))


def test_a_schedule_costs_no_capture() -> None:
    s = step(CUDA, "O2", lr=[0.1 / (i + 1) for i in range(60)])
    sink = hs.sink(s, data(CUDA, samples=160), every=10)
    rates = torch.cat([records.lr for _ in range(3) for records in sink])
    assert sink.captures == 1
    assert rates.unique().numel() > 50


@pytest.mark.parametrize("autocast", [False, True])
def test_a_hand_written_step_sinks_too(autocast: bool) -> None:
    """With the manual gear: autocast, GradScaler, a fused optimizer."""

    def run(sunk: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
        scaler = hs.amp.GradScaler(device="cuda", enabled=autocast)

        def cell(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with hs.amp.autocast(enabled=autocast):
                loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        batches, losses = data(CUDA, samples=160), []
        if sunk:
            sink = hs.sink(cell, batches, every=6)
            for _ in range(3):
                for records in sink:
                    losses += records.loss.tolist()
            assert sink.captures == 1
        else:
            losses = [cell(*batch).item() for _ in range(3) for batch in batches]
        return [p.detach() for p in net.parameters()], losses

    a, b = run(False), run(True)
    assert a[1] == b[1]
    assert all(torch.equal(p, q) for p, q in zip(a[0], b[0], strict=True))


def test_batches_of_a_data_loader_are_staged() -> None:
    x, y = next(iter(data(torch.device("cpu"), samples=96, batch=96)))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    a, b = step(CUDA, "O1", deterministic=True), step(CUDA, "O1", deterministic=True)
    torch.manual_seed(7)
    for _ in range(4):
        for batch in loader:
            a(*batch)
    torch.manual_seed(7)
    sink = hs.sink(b, loader, every=4)
    for _ in range(4):
        list(sink)
    assert sink.captures == 2  # ten samples, and the six of the last batch
    assert all(torch.equal(p, q) for p, q in zip(a.params, b.params, strict=True))


def test_twenty_thousand_steps_keep_the_memory_flat() -> None:
    import resource

    s = step(CUDA, "O2")
    sink = hs.sink(s, data(CUDA, samples=8000), every=100)
    for _ in range(8):  # past the point from which kernels are compiled and graphs hold many steps
        list(sink)
    gc.collect()
    device, host = torch.cuda.memory_allocated(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(20):
        for _ in sink:
            pass
    assert torch.cuda.memory_allocated() == device
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 20_000  # KiB


def test_captures_are_as_many_as_shapes() -> None:
    x = torch.randn(64, 6, device=CUDA)
    y = torch.randint(0, 3, (64,), device=CUDA)
    ragged = [(x[:n], y[:n]) for n in (8, 16, 24, 8, 16, 24, 32, 40, 32, 40) * 6]
    s = step(CUDA, "fp32")
    sink = hs.sink(s, ragged, every=7)
    list(sink)
    assert sink.captures == 5


def test_verify_passes_and_leaves_no_trace() -> None:
    a, b = (
        step(CUDA, "O2", deterministic=True, accumulate=2),
        step(CUDA, "O2", deterministic=True, accumulate=2),
    )
    torch.manual_seed(7)
    expected = [r.loss for r in hs.sink(a, data(CUDA), every=100)]
    torch.manual_seed(7)
    got = [r.loss for r in hs.sink(b, data(CUDA), every=100, verify=4)]
    assert torch.equal(expected[0], got[0])
    assert all(torch.equal(p, q) for p, q in zip(a.params, b.params, strict=True))


class Counts(nn.Module):
    """A forward that counts in Python: a graph bakes the number in."""

    def __init__(self, calls: Callable[[], int]) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 3), calls

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * (1 + self.calls() % 2)
        return out


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(6, 3), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        out: Tensor = self.inner(x) * (1 + self.calls[0] % 2)
        return out


def test_a_number_that_the_network_keeps_and_changes_is_seen_at_the_capture() -> None:
    net = Kept().to(CUDA)
    s = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    )
    with pytest.raises(hs.UncapturableError, match="counts in Python"):
        list(hs.sink(s, data(CUDA)))


def test_verify_finds_what_a_graph_bakes_in() -> None:
    net = Counts(itertools.count().__next__).to(
        CUDA
    )  # where nobody looks: an attribute would be seen
    s = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    )
    before = [p.detach().clone() for p in net.parameters()]
    with pytest.raises(
        AssertionError, match=r"verify: step \d+ differs in .*captured step is not the eager one"
    ):
        hs.sink(
            s, data(CUDA, samples=160), verify=5
        )  # twelve steps: the counter comes back to where it was
    assert all(torch.equal(p, q) for p, q in zip(before, net.parameters(), strict=True))
