"""What a graph bakes in, changed between visits; and what an error leaves behind.

Graphs are emulated on the CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

import halfstep as hs
from halfstep.engine.captured.eval_runner import EvalRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.evaluate import evaluate
from halfstep.engine.feed import Feed
from halfstep.metrics import Accuracy, Metrics
from tests.support.captured_runs import differing_tensors, make_data
from tests.support.emulated_graphs import CPU, EmulatedGraphs, sink_with_emulated_graphs

Batches = list[tuple[Tensor, Tensor]]


def make_batches(sizes: str = "A" * 30) -> Batches:
    """Eight samples for each A, six for each B."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for size in sizes:
        samples = 8 if size == "A" else 6
        x = torch.randn(samples, 6, generator=generator)
        y = torch.randint(0, 3, (samples,), generator=generator)
        batches.append((x, y))
    return batches


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.act(self.body(x))))
        return out


def make_step(net_type: type[nn.Module] = Plain, **options: Any) -> hs.TrainStep:
    """A TrainStep over a new network, always with the same weights."""
    torch.manual_seed(0)
    net = net_type()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide="device", **options)


Change = Callable[[hs.TrainStep], object]


def no_change(step: hs.TrainStep) -> None:
    pass


def eager_losses(step: hs.TrainStep, batches: Batches, change: Change) -> list[float]:
    """The losses of steps by hand; `change` happens after half of them."""
    torch.manual_seed(7)
    losses = []
    for i, batch in enumerate(batches):
        if i == len(batches) // 2:
            change(step)
        losses.append(step(*batch).loss.item())
    return losses


def captured_losses(
    step: hs.TrainStep, batches: Batches, change: Change
) -> tuple[list[float], Sink]:
    """The same from graphs, in two visits."""
    torch.manual_seed(7)
    half = len(batches) // 2
    sink = sink_with_emulated_graphs(step, batches, every=half)
    losses: list[float] = []
    for records in sink:
        losses += records.loss.tolist()
        if len(losses) == half:
            change(step)
    return losses, sink


CHANGES: dict[str, Change] = {
    "nothing": no_change,
    "a dropout's p": lambda s: setattr(s.net.drop, "p", 0.6),
    "a submodule": lambda s: setattr(s.net, "act", nn.GELU()),
    "label smoothing": lambda s: setattr(s.objective.loss, "label_smoothing", 0.3),
    "class weights": lambda s: setattr(s.objective.loss, "weight", torch.tensor([0.2, 1.0, 3.0])),
    "eval mode": lambda s: s.net.eval(),
    "a frozen layer": lambda s: s.net.body.requires_grad_(False),
    "the rate": lambda s: s.optimizer.param_groups[0].update(lr=0.5),
    "weight decay": lambda s: s.optimizer.param_groups[0].update(weight_decay=0.5),
    "a forward hook": lambda s: s.net.act.register_forward_hook(lambda m, args, out: out * 2),
    "a tensor's hook": lambda s: s.net.head.weight.register_hook(lambda g: g * 0),
    "loaded weights": lambda s: s.load_state_dict(s.state_dict()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_visits_acts_on_the_next_step(name: str) -> None:
    eager = make_step()
    captured = make_step()
    batches = make_batches()
    expected = eager_losses(eager, batches, CHANGES[name])
    losses, sink = captured_losses(captured, batches, CHANGES[name])
    assert losses == expected
    assert differing_tensors(eager, captured) == []
    assert sink.captures == (1 if name == "nothing" else 2)


class Weighted(Plain):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.body(x)) * self.factors)
        return out


def test_a_tensor_attribute_that_is_replaced_between_visits_is_read_from_its_new_place() -> None:
    def replace_factors(step: hs.TrainStep) -> None:
        step.net.factors = torch.linspace(0, 2, 16)

    batches = make_batches()
    expected = eager_losses(make_step(Weighted), batches, replace_factors)
    losses, sink = captured_losses(make_step(Weighted), batches, replace_factors)
    assert losses == expected
    assert sink.captures == 2


class StoresTensors(Plain):
    """Reads a tensor from a list, and stores its activations in a dict.

    It also puts another tensor object over the same memory in the place of a buffer.
    """

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factors = [torch.ones(16)]
        self.activations: dict[str, Tensor] = {}
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.body(x)) * self.factors[0]
        self.activations["hidden"] = hidden.detach()
        self.mean.copy_(hidden.detach().mean(0))
        self.mean = self.mean.detach()
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("replaced", [False, True])
def test_a_tensor_in_a_list_is_guarded_unless_the_step_stores_it_there(replaced: bool) -> None:
    def change(step: hs.TrainStep) -> None:
        if replaced:
            step.net.factors[0] = torch.linspace(0, 2, 16)  # type: ignore[index, operator]

    eager = make_step(StoresTensors)
    captured = make_step(StoresTensors)
    batches = make_batches()
    expected = eager_losses(eager, batches, change)
    losses, sink = captured_losses(captured, batches, change)
    assert losses == expected
    hidden = captured.net.activations["hidden"]  # type: ignore[index]
    assert torch.equal(hidden, eager.net.activations["hidden"])  # type: ignore[index]
    assert sink.captures == 1 + replaced


def test_an_optimizers_hook_runs_at_every_update() -> None:
    step = make_step()
    calls = []
    for visit, _ in enumerate(sink_with_emulated_graphs(step, make_batches(), every=10)):
        if visit == 0:
            step.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert len(calls) == 20


class TwoHeads(nn.Module):
    """Which head depends on the shape: the other one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.one = nn.Linear(8, 3)
        self.two = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        head = self.one if len(x) == 8 else self.two
        out: Tensor = head(self.body(x))
        return out


@pytest.mark.parametrize(
    "order", ["AB" * 12, "ABBA" * 6 + "AB", "AABB" * 6, "AB" * 6 + "BB" * 6 + "A"]
)
def test_gradients_that_only_some_batches_have(order: str) -> None:
    eager = make_step(TwoHeads, accumulate=2)
    captured = make_step(TwoHeads, accumulate=2)
    batches = make_batches(order)
    for batch in batches:
        eager(*batch)
    sink = sink_with_emulated_graphs(captured, batches, every=1000)
    sink.runner.run(len(batches), lambda: False)
    assert sink.captures >= 2
    assert differing_tensors(eager, captured) == []


class ReplacesBuffer(nn.Module):
    """A buffer that is replaced instead of being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.inner(x - self.mean)
        return out


def test_a_replaced_buffer_is_refused_and_training_goes_on_with_the_right_one() -> None:
    eager = make_step(ReplacesBuffer)
    captured = make_step(ReplacesBuffer)
    batches = make_batches()
    expected = eager_losses(eager, batches, no_change)
    torch.manual_seed(7)
    with pytest.warns(hs.Notice, match=r"(?s)cannot be captured.*write in place"):
        visits = list(sink_with_emulated_graphs(captured, batches, policy="eager"))
    assert torch.cat([records.loss for records in visits]).tolist() == expected
    assert differing_tensors(eager, captured) == []


def test_a_rate_set_by_hand_reaches_a_function_whose_state_is_named() -> None:
    weights = []
    batches = make_batches()
    for captured in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

        def train_batch(
            x: Tensor, y: Tensor, net: nn.Module = net, opt: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            opt.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        if captured:
            sink = sink_with_emulated_graphs(train_batch, batches, every=10, state=(net, optimizer))
            for visit, _ in enumerate(sink):
                optimizer.param_groups[0]["lr"] = 0.1 / (visit + 2)
        else:
            for i, batch in enumerate(batches):
                if i and i % 10 == 0:
                    optimizer.param_groups[0]["lr"] = 0.1 / (i // 10 + 1)
                train_batch(*batch)
        weights.append(net.weight.detach().clone())
    assert torch.equal(*weights)


def test_values_that_are_no_tensors_reach_the_step_as_they_are() -> None:
    """Arrays whose text is the same, and numbers that are equal without being the same."""
    received: list[Any] = []

    def function(x: Tensor, extra: Any) -> Tensor:
        received.append(extra)
        return x.sum()

    arrays = [np.zeros((40, 40)) for _ in range(4)]
    for i, array in enumerate(arrays):
        array[20, 20] = i
    extras = [*arrays, 1, True, 1.0, 0.0, -0.0, "1"]
    with pytest.warns(hs.Notice, match="values of unknown types"):
        list(sink_with_emulated_graphs(function, [(torch.ones(2), extra) for extra in extras]))
    assert [type(x) for x in received] == [type(x) for x in extras]
    assert all(np.array_equal(a, b) for a, b in zip(received, extras, strict=True))
    assert str(received[-2]) == "-0.0"


def test_ragged_batches_are_bounded_with_a_warning() -> None:
    ragged = [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in range(1, 90)] * 2
    sink = sink_with_emulated_graphs(make_step(), ragged)
    with pytest.warns(hs.Notice, match="more than 64 kinds"):
        list(sink)
    assert sink.captures <= 64
    assert len(sink.runner.inputs._static_tensors) == 64


class FailingData:
    """Batches of which one cannot be read."""

    def __init__(self, batches: Batches, fails_at: int) -> None:
        self.batches = batches
        self.fails_at = fails_at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(self.batches):
            if i == self.fails_at:
                raise OSError("the disk is gone")
            yield batch


def test_an_error_of_the_data_leaves_the_open_cycle_as_it_was() -> None:
    eager = make_step(accumulate=4)
    captured = make_step(accumulate=4)
    batches = make_batches()
    torch.manual_seed(7)
    for batch in batches[:26]:
        eager(*batch)
    torch.manual_seed(7)
    sink = sink_with_emulated_graphs(captured, FailingData(batches, 26), every=100)
    with pytest.raises(OSError, match="disk"):
        list(sink)
    assert captured.state.cycle.micro == 2
    assert differing_tensors(eager, captured) == []
    assert len(sink.runner.rows()[0]) == 26


def test_an_error_in_a_step_leaves_the_rows_before_it() -> None:
    batches = make_batches("A" * 12 + "B")
    batches[-1] = (torch.randn(6, 5), batches[-1][1])  # a shape the network does not take
    sink = sink_with_emulated_graphs(make_step(), batches, every=100)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        list(sink)
    assert len(sink.runner.step_samples) == 12
    assert len(sink.runner.rows()[0]) == 12


class UnsizedData:
    """One batch again and again, without a length."""

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        self.batch = batch
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch for _ in range(self.count))


@pytest.mark.parametrize("count", [8191, 8192, 8193])
def test_a_pass_as_long_as_the_record_buffer(count: int) -> None:
    [batch] = make_batches("A")
    visits = list(
        sink_with_emulated_graphs(lambda x, y: x[0, 0], UnsizedData(batch, count), every=8000)
    )
    assert [len(records) for records in visits] == [8000, count - 8000]
    assert [len(records.loss) for records in visits] == [8000, count - 8000]


def test_rows_of_a_failed_pass_do_not_reach_the_next_one() -> None:
    failing = FailingData(make_batches("A") * 9000, 8500)
    sink = sink_with_emulated_graphs(lambda x, y: x.sum(), failing, every=20_000)
    with pytest.raises(OSError, match="disk"):
        list(sink)
    failing.fails_at = -1
    [records] = list(sink)
    assert len(records) == len(records.loss) == 9000


def test_compiling_begins_although_graphs_are_there() -> None:
    step = make_step()
    sink = sink_with_emulated_graphs(step, make_batches(), every=10)
    list(sink)
    captures_before = sink.captures
    step.compiled.on = True  # as compiled(True) sets it; nothing is compiled here
    list(sink)
    assert sink.captures == captures_before + 1


def second_column(batch: Any) -> Tensor:
    labels: Tensor = batch[1]
    return labels


def test_metrics_that_keep_the_outputs_they_get() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(6):
        x = torch.randn(8, 6, generator=generator)
        y = torch.randint(0, 2, (8,), generator=generator).float()
        batches.append((x, y))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0))
    eval_step = hs.EvalStep(net, nn.BCELoss())

    def labels(batch: Any) -> Tensor:
        truth: Tensor = batch[1].long()
        return truth

    expected = evaluate(eval_step, Feed(batches), Metrics({"auc": BinaryAUROC()}), labels)
    scores = EvalRunner(eval_step, Metrics({"auc": BinaryAUROC()}), labels)
    scores.forward.graphs = EmulatedGraphs(CPU)
    assert scores(Feed(batches), lambda: False) == expected
    assert scores(Feed(batches), lambda: False) == expected


def test_an_evaluation_sees_what_changed_in_the_loss_and_the_counters() -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss()
    metrics = Metrics({"acc": Accuracy()})
    batches = make_batches()
    eval_step = hs.EvalStep(nn.Linear(6, 3), loss)
    scores = EvalRunner(eval_step, metrics, second_column)
    scores.forward.graphs = EmulatedGraphs(CPU)
    scores(Feed(batches), lambda: False)
    loss.label_smoothing = 0.3
    accuracy: Any = metrics.by_name["acc"]
    accuracy.total = accuracy.total.clone()
    accuracy.count = accuracy.count.clone()
    expected = evaluate(eval_step, Feed(batches), Metrics({"acc": Accuracy()}), second_column)
    assert scores(Feed(batches), lambda: False) == expected


def test_an_evaluation_of_one_batch_is_captured_anew_when_a_list_has_another_tensor() -> None:
    """Nothing is captured in the pass that finds it; the one after it captures."""
    net = StoresTensors()
    eval_step = hs.EvalStep(net, nn.CrossEntropyLoss())
    batches = make_batches()[:1]
    scores = EvalRunner(eval_step, Metrics({}), second_column)
    scores.forward.graphs = EmulatedGraphs(CPU)
    graph_counts = []
    for i in range(6):
        if i == 3:
            net.factors[0] = torch.linspace(0, 2, 16)
        expected = evaluate(eval_step, Feed(batches), Metrics({}), second_column)
        assert scores(Feed(batches), lambda: False) == expected
        graph_counts.append(len(scores.forward.graphs))
    assert graph_counts == [0, 1, 1, 0, 1, 1]


def test_passes_go_on_where_the_data_stands() -> None:
    """A sink made anew for every epoch shuffles anew, as a plain loop over the data does."""
    passes: list[list[float]] = []
    dataset = make_data(CPU)
    for _ in range(3):
        visits = list(hs.sink(lambda x, y: x[0, 0], dataset))
        passes.append(torch.cat([records.loss for records in visits]).tolist())
    same_dataset = make_data(CPU)
    assert passes == [[x[0, 0].item() for x, _ in same_dataset] for _ in range(3)]
