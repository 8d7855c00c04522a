"""Captured runs on a real device: what they launch, copy, refuse and keep."""

import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import halfstep as hs
from halfstep.model import Model
from tests.support.captured_runs import Net, make_data, make_step
from tests.support.no_sync import no_sync

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:.*batch-coupled"),
]
CUDA = torch.device("cuda")


def make_model(precision: str = "O2", *, capture: Any = "auto", **options: Any) -> Model:
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


def sgd_step(net: nn.Module) -> hs.TrainStep:
    net = net.to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)


def same_weights(a: hs.TrainStep, b: hs.TrainStep) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.params, b.params, strict=True))


class StateFingerprints(hs.Callback):
    """What a checkpoint every 5 steps would save.

    The step, the position in the cycle, and a fingerprint of everything.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.states: list[tuple[int, int, int]] = []

    def next_stop(self, run: Any) -> int:
        return (run.position // 5 + 1) * 5

    def visit(self, run: Any) -> None:
        if run.position % 5 == 0:
            step = self.model.step
            fingerprint = int(step.state_fingerprint().item())
            self.states.append((run.position, step.state.cycle.micro, fingerprint))


def fit_model(capture: Any, sink: int | None, **options: Any) -> tuple[Model, list[Any], Any]:
    """A model that was trained, all rows and states that callbacks saw, and the run."""
    model = make_model(capture=capture, **options)
    rows: list[Any] = []
    torch.manual_seed(5)
    collect_rows = hs.Lambda(step=lambda run, row: rows.append(row))
    collect_states = StateFingerprints(model)
    run = model.fit(
        4,
        make_data(CUDA),
        valid=make_data(CUDA, samples=50),
        callbacks=[collect_rows, collect_states],
        sink=sink,
        valid_every_steps=9,
    )
    return model, [*rows, *collect_states.states], run


@pytest.mark.parametrize("sink", [1, 7, 100, None])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_fit_is_the_same_captured_or_not(sink: int | None, accumulate: int) -> None:
    """Weights, rows, history, evaluations: bit for bit, in visits of any length."""
    eager, eager_rows, eager_run = fit_model(False, 1, accumulate=accumulate)
    captured, captured_rows, captured_run = fit_model(True, sink, accumulate=accumulate)
    assert captured_rows == eager_rows
    assert captured_run.history == eager_run.history
    for name, value in eager.net.state_dict().items():
        assert torch.equal(value, captured.net.state_dict()[name]), name
    assert captured.captures._runner is not None
    assert captured.captures._runner.program.graphs.captures >= 2

    # The second prediction and evaluation come from graphs.
    x = next(iter(make_data(CUDA, samples=50)))[0]
    for _ in range(2):
        assert torch.equal(eager.predict(x), captured.predict(x))
    scores = eager.evaluate(make_data(CUDA))
    for _ in range(2):
        assert captured.evaluate(make_data(CUDA)) == scores


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_between_visits_there_are_graph_launches_and_nothing_else(precision: str) -> None:
    """A captured pass with overflows under the profiler: one graph launch a step, no copies."""
    train_step = make_step(CUDA, precision)
    batches = make_data(CUDA, samples=800, poison=(5, 300, 641))
    sink = hs.sink(train_step, batches, every=1000)
    for _ in range(2):
        list(sink)
    skips_before = train_step.state.skips.item()
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, acc_events=True) as profiler, no_sync():
        [records] = list(sink)
    assert len(records) == 100
    skips = train_step.state.skips.item() - skips_before
    assert records.skipped.sum().item() == skips > 0

    names = [event.name for event in profiler.events()]
    assert names.count("cudaGraphLaunch") == 100
    assert not any("Memcpy HtoD" in name for name in names)
    # The visit: the rows, and whether the device has stopped.
    assert sum("Memcpy DtoH" in name for name in names) == 2
    # The numbers of the pass's samples are computed once: no launch belongs to a step.
    launches = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC")
    assert sum(names.count(name) for name in launches) <= 400


class ReadsOnHost(nn.Module):
    """A forward that reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        if out.sum().item() > 1e30:  # READS HERE
            return out * 2
        return out


class CopiesFromHost(nn.Module):
    """A forward that brings a number from pageable memory: no wait, but no graph either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out * torch.tensor([2.0, 2.0, 2.0], device=x.device)  # COPIES HERE


@pytest.mark.parametrize(
    ("block_type", "line"), [(ReadsOnHost, "READS HERE"), (CopiesFromHost, "COPIES HERE")]
)
def test_what_cannot_be_captured_is_named_with_its_line(
    block_type: type[nn.Module], line: str
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block_type()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.block(x)
            return out

    message = rf"(?s)module block.*test_captured.py:\d+.*{line}"
    with pytest.raises(hs.UncapturableError, match=message):
        list(hs.sink(sgd_step(Outer()), make_data(CUDA)))


@pytest.mark.parametrize("block_type", [ReadsOnHost, CopiesFromHost])
def test_an_uncapturable_network_trains_eagerly_and_says_so(block_type: type[nn.Module]) -> None:
    """The weights are the same as without capture, and other captures still work afterwards."""
    weights = []
    for capture in (False, "auto"):
        torch.manual_seed(0)
        net = nn.Sequential(block_type(), nn.Dropout(0.1)).to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
        model = Model(net, nn.CrossEntropyLoss(), optimizer, capture=capture)
        if capture:
            with pytest.warns(hs.Notice, match="cannot be captured"):
                model.fit(2, make_data(CUDA))
            assert "eager" in model.report().choices["engine"]
        else:
            model.fit(2, make_data(CUDA))
        weights.append([p.detach().clone() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    fit_model(True, 7)


def test_a_changed_setting_acts_on_the_next_replay_and_costs_one_capture() -> None:
    eager = make_step(CUDA, "fp32", deterministic=True)
    captured = make_step(CUDA, "fp32", deterministic=True)
    batches = list(make_data(CUDA, samples=160))
    torch.manual_seed(7)
    for i, batch in enumerate(batches * 3):
        if i == 30:
            eager.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1)
        eager(*batch)

    sink = hs.sink(captured, batches, every=10)
    torch.manual_seed(7)
    visits = 0
    for _ in range(3):
        for _ in sink:
            visits += 1
            if visits == 3:
                captures_before = sink.captures
                captured.optimizer.param_groups[0].update(lr=0.01, weight_decay=0.1)
    assert sink.captures == captures_before + 1
    assert same_weights(eager, captured)


def test_a_schedule_costs_no_capture() -> None:
    train_step = make_step(CUDA, "O2", lr=[0.1 / (i + 1) for i in range(60)])
    sink = hs.sink(train_step, make_data(CUDA, samples=160), every=10)
    rates = torch.cat([records.lr for _ in range(3) for records in sink])
    assert sink.captures == 1
    assert rates.unique().numel() > 50


@pytest.mark.parametrize("autocast", [False, True])
def test_a_hand_written_step_is_captured_too(autocast: bool) -> None:
    """With hs.amp: autocast, GradScaler, a fused optimizer."""

    def train(*, captured: bool) -> tuple[list[Tensor], list[float]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
        scaler = hs.amp.GradScaler(device="cuda", enabled=autocast)

        def train_batch(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            with hs.amp.autocast(enabled=autocast):
                loss = nn.functional.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        batches = make_data(CUDA, samples=160)
        losses: list[float] = []
        if captured:
            sink = hs.sink(train_batch, batches, every=6)
            for _ in range(3):
                for records in sink:
                    losses += records.loss.tolist()
            assert sink.captures == 1
        else:
            losses = [train_batch(*batch).item() for _ in range(3) for batch in batches]
        return [p.detach() for p in net.parameters()], losses

    eager_params, eager_losses = train(captured=False)
    captured_params, captured_losses = train(captured=True)
    assert captured_losses == eager_losses
    assert all(torch.equal(p, q) for p, q in zip(captured_params, eager_params, strict=True))


def test_batches_of_a_data_loader_are_staged() -> None:
    x, y = next(iter(make_data(torch.device("cpu"), samples=96, batch=96)))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    eager = make_step(CUDA, "O1", deterministic=True)
    captured = make_step(CUDA, "O1", deterministic=True)
    torch.manual_seed(7)
    for _ in range(4):
        for batch in loader:
            eager(*batch)
    torch.manual_seed(7)
    sink = hs.sink(captured, loader, every=4)
    for _ in range(4):
        list(sink)
    assert sink.captures == 2  # ten samples, and the six of the last batch
    assert same_weights(eager, captured)


def test_twenty_thousand_steps_keep_the_memory_flat() -> None:
    import resource

    def host_kib() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    sink = hs.sink(make_step(CUDA, "O2"), make_data(CUDA, samples=8000), every=100)
    for _ in range(8):  # past the point from which kernels are compiled and graphs hold many steps
        list(sink)
    gc.collect()
    device_bytes_before = torch.cuda.memory_allocated()
    host_kib_before = host_kib()
    for _ in range(20):
        for _ in sink:
            pass
    assert torch.cuda.memory_allocated() == device_bytes_before
    assert host_kib() - host_kib_before < 20_000


def test_captures_are_as_many_as_shapes() -> None:
    x = torch.randn(64, 6, device=CUDA)
    y = torch.randint(0, 3, (64,), device=CUDA)
    ragged = [(x[:n], y[:n]) for n in (8, 16, 24, 8, 16, 24, 32, 40, 32, 40) * 6]
    sink = hs.sink(make_step(CUDA, "fp32"), ragged, every=7)
    list(sink)
    assert sink.captures == 5


def test_verify_passes_and_leaves_no_trace() -> None:
    plain = make_step(CUDA, "O2", deterministic=True, accumulate=2)
    verified = make_step(CUDA, "O2", deterministic=True, accumulate=2)
    torch.manual_seed(7)
    [expected] = list(hs.sink(plain, make_data(CUDA), every=100))
    torch.manual_seed(7)
    [records] = list(hs.sink(verified, make_data(CUDA), every=100, verify=4))
    assert torch.equal(records.loss, expected.loss)
    assert same_weights(plain, verified)


class CountsCalls(nn.Module):
    """A forward that counts in Python: a graph bakes the number in."""

    def __init__(self, next_count: Callable[[], int]) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.next_count = next_count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * (1 + self.next_count() % 2)
        return out


class CountsInAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        out: Tensor = self.inner(x) * (1 + self.calls[0] % 2)
        return out


def test_a_number_that_the_network_keeps_and_changes_is_seen_at_the_capture() -> None:
    with pytest.raises(hs.UncapturableError, match="counts in Python"):
        list(hs.sink(sgd_step(CountsInAttribute()), make_data(CUDA)))


def test_verify_finds_what_a_graph_bakes_in() -> None:
    # The count is where no guard sees it: an attribute would be seen.
    train_step = sgd_step(CountsCalls(itertools.count().__next__))
    before = [p.detach().clone() for p in train_step.params]
    message = r"verify: step \d+ differs in .*captured step is not the eager one"
    with pytest.raises(AssertionError, match=message):
        # Twelve steps: the counter is then where it was at the beginning.
        hs.sink(train_step, make_data(CUDA, samples=160), verify=5)
    assert all(torch.equal(p, q) for p, q in zip(before, train_step.params, strict=True))
