"""What a graph bakes in, changed between visits; and what an error leaves behind. Graphs are emulated on the CPU."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

import halfstep as hs
from halfstep.engine.captured.eval_runner import Scores
from halfstep.engine.evaluate import evaluate
from halfstep.engine.feed import Feed
from halfstep.metrics import Accuracy, Metrics
from tests.support.captured_runs import data, same_state
from tests.support.emulated_graphs import CPU, Emulated, sinking

Batches = list[tuple[Tensor, Tensor]]


def batches(sizes: str = "A" * 30) -> Batches:
    """Eight samples for each A, six for each B."""
    g = torch.Generator().manual_seed(1)
    counts = [8 if kind == "A" else 6 for kind in sizes]
    return [
        (torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in counts
    ]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.act, self.drop, self.head = (
            nn.Linear(6, 16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.act(self.body(x))))
        return out


def make(
    net: nn.Module | None = None, loss: nn.Module | None = None, **options: Any
) -> hs.TrainStep:
    torch.manual_seed(0)
    net = net or Plain()
    optimizer = torch.optim.SGD(
        [*net.parameters(), *(loss.parameters() if loss else ())], lr=0.05, fused=True
    )
    return hs.TrainStep(net, loss or nn.CrossEntropyLoss(), optimizer, decide="device", **options)


def losses(
    step: hs.TrainStep, given: Batches, change: Callable[[hs.TrainStep], object], at: int
) -> list[float]:
    torch.manual_seed(7)
    found = []
    for i, batch in enumerate(given):
        if i == at:
            change(step)
        found.append(step(*batch).loss.item())
    return found


CHANGES: dict[str, Callable[[hs.TrainStep], object]] = {
    "nothing": lambda s: None,
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
    a, b, given = make(), make(), batches()
    expected = losses(a, given, CHANGES[name], at=15)
    torch.manual_seed(7)
    sink, got = sinking(b, given, every=15), list[float]()
    for records in sink:
        got += records.loss.tolist()
        if len(got) == 15:
            CHANGES[name](b)
    assert got == expected
    assert same_state(a, b) == []
    assert sink.captures == (1 if name == "nothing" else 2)


class Weighted(Plain):
    """Reads a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.ones(16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.act(self.body(x)) * self.by)
        return out


def test_a_tensor_attribute_that_is_replaced_between_visits_is_read_from_its_new_place() -> None:
    a, b, given = make(Weighted()), make(Weighted()), batches()
    expected = losses(a, given, lambda s: setattr(s.net, "by", torch.linspace(0, 2, 16)), at=15)
    torch.manual_seed(7)
    sink, got = sinking(b, given, every=15), list[float]()
    for records in sink:
        got += records.loss.tolist()
        if len(got) == 15:
            b.net.by = torch.linspace(0, 2, 16)
    assert got == expected
    assert sink.captures == 2


class Filing(Plain):
    """Reads a tensor from a list; files its activations in a dict, and a buffer of its own under another object."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.by, self.seen = [torch.ones(16)], dict[str, Tensor]()
        self.register_buffer("kept", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.body(x)) * self.by[0]
        self.seen["hidden"] = hidden.detach()
        self.kept.copy_(hidden.detach().mean(0))
        self.kept = self.kept.detach()
        out: Tensor = self.head(hidden)
        return out


@pytest.mark.parametrize("replaced", [False, True])
def test_a_tensor_in_a_list_is_looked_at_unless_the_step_files_it_there(replaced: bool) -> None:
    def change(step: hs.TrainStep) -> None:
        if replaced:
            step.net.by[0] = torch.linspace(0, 2, 16)  # type: ignore[index, operator]

    a, b, given = make(Filing()), make(Filing()), batches()
    expected = losses(a, given, change, at=15)
    torch.manual_seed(7)
    sink, got = sinking(b, given, every=15), list[float]()
    for records in sink:
        got += records.loss.tolist()
        if len(got) == 15:
            change(b)
    assert got == expected
    assert torch.equal(b.net.seen["hidden"], a.net.seen["hidden"])  # type: ignore[index]
    assert sink.captures == 1 + replaced


def test_an_optimizers_hook_runs_at_every_update() -> None:
    a, given, calls = make(), batches(), []
    sink = sinking(a, given, every=10)
    for i, _ in enumerate(sink):
        if i == 0:
            a.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert len(calls) == 20


class TwoHeads(nn.Module):
    """Which head depends on the shape: the other one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        head = self.one if len(x) == 8 else self.two
        out: Tensor = head(self.body(x))
        return out


@pytest.mark.parametrize(
    "order", ["AB" * 12, "ABBA" * 6 + "AB", "AABB" * 6, "AB" * 6 + "BB" * 6 + "A"]
)
def test_gradients_that_only_some_batches_have(order: str) -> None:
    a, b, given = make(TwoHeads(), accumulate=2), make(TwoHeads(), accumulate=2), batches(order)
    for batch in given:
        a(*batch)
    sink = sinking(b, given, every=1000)
    sink.runner.run(len(given), lambda: False)
    assert sink.captures >= 2
    assert same_state(a, b) == []


class Replaces(nn.Module):
    """A buffer that is put in anew instead of being written to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.inner(x - self.mean)
        return out


def test_a_replaced_buffer_is_refused_and_training_goes_on_with_the_right_one() -> None:
    a, b, given = make(Replaces()), make(Replaces()), batches()
    expected = losses(a, given, lambda s: None, at=0)
    torch.manual_seed(7)
    with pytest.warns(hs.Notice, match=r"(?s)cannot be captured.*write in place"):
        got = [x for records in sinking(b, given, policy="eager") for x in records.loss.tolist()]
    assert got == expected
    assert same_state(a, b) == []


def test_a_rate_set_by_hand_reaches_a_function_whose_state_is_named() -> None:
    finals = []
    for sunk in (False, True):
        torch.manual_seed(0)
        net, given = nn.Linear(6, 3), batches()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

        def cell(
            x: Tensor, y: Tensor, net: nn.Module = net, opt: torch.optim.Optimizer = optimizer
        ) -> Tensor:
            opt.zero_grad(set_to_none=False)
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            return loss.detach()

        if sunk:
            for i, _ in enumerate(sinking(cell, given, every=10, state=(net, optimizer))):
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 2)
        else:
            for i, batch in enumerate(given):
                if i and i % 10 == 0:
                    optimizer.param_groups[0]["lr"] = 0.1 / (i // 10 + 1)
                cell(*batch)
        finals.append(net.weight.detach().clone())
    assert torch.equal(*finals)


def test_values_that_are_no_tensors_reach_the_step_as_they_are() -> None:
    """Arrays whose text is the same, and numbers that are equal without being the same."""
    seen: list[Any] = []

    def cell(x: Tensor, extra: Any) -> Tensor:
        seen.append(extra)
        return x.sum()

    arrays = [np.zeros((40, 40)) for _ in range(4)]
    for i, array in enumerate(arrays):
        array[20, 20] = i
    extras = [*arrays, 1, True, 1.0, 0.0, -0.0, "1"]
    with pytest.warns(hs.Notice, match="values of unknown types"):
        list(sinking(cell, [(torch.ones(2), extra) for extra in extras]))
    assert [type(x) for x in seen] == [type(x) for x in extras]
    assert all(np.array_equal(a, b) for a, b in zip(seen, extras, strict=True))
    assert str(seen[-2]) == "-0.0"


def test_ragged_batches_are_bounded_and_told() -> None:
    step = make()
    ragged = [(torch.randn(n, 6), torch.randint(0, 3, (n,))) for n in range(1, 90)] * 2
    sink = sinking(step, ragged)
    with pytest.warns(hs.Notice, match="more than 64 kinds"):
        list(sink)
    assert sink.captures <= 64
    assert len(sink.runner.inputs._static_tensors) == 64


class Fails:
    """An iterable of batches that fails after some of them."""

    def __init__(self, given: Batches, at: int) -> None:
        self.given, self.at = given, at

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for i, batch in enumerate(self.given):
            if i == self.at:
                raise OSError("the disk is gone")
            yield batch


def test_an_error_of_the_data_leaves_the_open_cycle_as_it_was() -> None:
    a, b, given = make(accumulate=4), make(accumulate=4), batches()
    torch.manual_seed(7)
    for batch in given[:26]:
        a(*batch)
    torch.manual_seed(7)
    sink = sinking(b, Fails(given, 26), every=100)
    with pytest.raises(OSError, match="disk"):
        list(sink)
    assert b.state.cycle.micro == 2
    assert same_state(a, b) == []
    assert len(sink.runner.rows()[0]) == 26


def test_an_error_in_a_step_leaves_the_rows_before_it() -> None:
    step, given = make(), batches("A" * 12 + "B")
    given[-1] = (torch.randn(6, 5), given[-1][1])  # a shape the network does not take
    sink = sinking(step, given, every=100)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        list(sink)
    assert len(sink.runner.step_samples) == 12
    assert len(sink.runner.rows()[0]) == 12


class Unsized:
    def __init__(self, given: Batches, count: int) -> None:
        self.given, self.count = given, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.given[i % len(self.given)] for i in range(self.count))


@pytest.mark.parametrize("count", [8191, 8192, 8193])
def test_a_pass_as_long_as_the_ring(count: int) -> None:
    def cell(x: Tensor, y: Tensor) -> Tensor:
        return x[0, 0]

    visits = list(sinking(cell, Unsized(batches("A"), count), every=8000))
    assert [(len(v), len(v.loss)) for v in visits] == [(8000, 8000), (count - 8000, count - 8000)]


def test_rows_of_a_failed_pass_do_not_reach_the_next_one() -> None:
    given = Fails(batches("A") * 9000, 8500)
    sink = sinking(lambda x, y: x.sum(), given, every=20_000)
    with pytest.raises(OSError, match="disk"):
        list(sink)
    given.at = -1
    [records] = list(sink)
    assert len(records) == len(records.loss) == 9000


def test_compiling_begins_although_graphs_are_there() -> None:
    step, given = make(), batches()
    sink = sinking(step, given, every=10)
    list(sink)
    before = sink.captures
    step.compiled.on = True  # as compiled(True) sets it; nothing is compiled here
    list(sink)
    assert sink.captures == before + 1


def test_metrics_that_keep_what_they_are_given() -> None:
    g = torch.Generator().manual_seed(0)
    given = [
        (torch.randn(8, 6, generator=g), torch.randint(0, 2, (8,), generator=g).float())
        for _ in range(6)
    ]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 1), nn.Sigmoid(), nn.Flatten(0))
    cell = hs.EvalStep(net, nn.BCELoss())

    def labels(batch: Any) -> Tensor:
        truth: Tensor = batch[1].long()
        return truth

    expected = evaluate(cell, Feed(given), Metrics({"auc": BinaryAUROC()}), labels)
    scores = Scores(cell, Metrics({"auc": BinaryAUROC()}), labels)
    scores.forward.graphs = Emulated(CPU)
    assert scores(Feed(given), lambda: False) == expected
    assert scores(Feed(given), lambda: False) == expected


def test_an_evaluation_sees_what_changed_in_the_loss_and_the_counters() -> None:
    torch.manual_seed(0)
    loss, metrics, given = nn.CrossEntropyLoss(), Metrics({"acc": Accuracy()}), batches()
    cell = hs.EvalStep(nn.Linear(6, 3), loss)
    scores = Scores(cell, metrics, lambda batch: batch[1])
    scores.forward.graphs = Emulated(CPU)
    scores(Feed(given), lambda: False)
    loss.label_smoothing = 0.3
    accuracy: Any = metrics.each["acc"]
    accuracy.total, accuracy.count = accuracy.total.clone(), accuracy.count.clone()
    expected = evaluate(cell, Feed(given), Metrics({"acc": Accuracy()}), lambda batch: batch[1])
    assert scores(Feed(given), lambda: False) == expected


def test_an_evaluation_of_one_batch_is_captured_anew_when_a_list_has_another_tensor() -> None:
    """Nothing is captured in the pass that finds it; the one after it captures."""
    cell, given = hs.EvalStep(Filing(), nn.CrossEntropyLoss()), batches()[:1]
    scores = Scores(cell, Metrics({}), lambda batch: batch[1])
    scores.forward.graphs = Emulated(CPU)
    counts = []
    for i in range(6):
        if i == 3:
            cell.net.by[0] = torch.linspace(0, 2, 16)  # type: ignore[index, operator]
        assert scores(Feed(given), lambda: False) == evaluate(
            cell, Feed(given), Metrics({}), lambda batch: batch[1]
        )
        counts.append(len(scores.forward.graphs))
    assert counts == [0, 1, 1, 0, 1, 1]


def test_passes_go_on_where_the_data_stands() -> None:
    """A sink made anew for every epoch shuffles anew, as a plain loop over the data does."""
    seen = list[list[float]]()
    given = data(CPU)
    for _ in range(3):
        seen.append([x for r in hs.sink(lambda x, y: x[0, 0], given) for x in r.loss.tolist()])
    plain = data(CPU)
    assert seen == [[x[0, 0].item() for x, _ in plain] for _ in range(3)]
