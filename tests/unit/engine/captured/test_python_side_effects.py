"""A forward that also writes into Python values: each step leaves there what a plain step leaves.

A capture, a trace and a verification run forward once more than asked for, and a replay runs none.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured.eval_runner import EvalRunner
from halfstep.engine.captured.verify import VerifiedStep, verify
from halfstep.engine.evaluate import evaluate
from halfstep.engine.feed import Feed
from halfstep.metrics import Metrics
from halfstep.utils.python_state import PythonState
from tests.support.emulated_graphs import CPU, EmulatedGraphs, sink_with_emulated_graphs

STEPS = 40
AROUND: list[int] = []  # a global that a forward writes into


class Box:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.n = 0
        self.inner: list[int] = []


class Net(nn.Module):
    def __init__(self, effect: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        self.effect = effect
        self.items: list[Any] = []
        self.names: dict[Any, Any] = {}
        self.bag: set[int] = set()
        self.ring: deque[Any] = deque(maxlen=4)
        self.counts: Counter[str] = Counter()
        self.nested: dict[str, Any] = {"a": [[]]}
        self.box = Box()
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        EFFECTS[self.effect](self, x)
        if self.effect == "a list around forward":
            AROUND.append(1)
        out: Tensor = self.layer(x)
        return out

    def seen(self) -> tuple[Any, ...]:
        """How much of everything there is."""
        return (
            *(len(self.items), len(self.names), len(self.bag), len(self.ring), self.counts["n"]),
            *(len(self.nested["a"][0]), self.box.n, len(self.box.inner), self.count),
            *(getattr(self, "late", None), len(AROUND)),
        )


EFFECTS: dict[str, Callable[[Any, Tensor], object]] = {
    "numbers in a list": lambda net, x: net.items.append(1),
    "tensors in a list": lambda net, x: net.items.append(x.detach().sum()),
    "numbers in a dict": lambda net, x: net.names.update({len(net.names): 1}),
    "tensors in a dict": lambda net, x: net.names.update({len(net.names): x.detach()}),
    "a set": lambda net, x: net.bag.add(len(net.bag)),
    "a full ring of tensors": lambda net, x: net.ring.append(x.detach()),
    "a counter": lambda net, x: net.counts.update(["n"]),
    "a nested list": lambda net, x: net.nested["a"][0].append(1),
    "an object": lambda net, x: setattr(net.box, "n", net.box.n + 1),
    "a list in an object": lambda net, x: net.box.inner.append(1),
    "a number": lambda net, x: setattr(net, "count", net.count + 1),
    "a new list": lambda net, x: setattr(net, "items", [*net.items, x.detach()]),
    "a new attribute": lambda net, x: setattr(net, "late", getattr(net, "late", 0) + 1),
    "a list around forward": lambda net, x: None,
}


@pytest.fixture(autouse=True)
def empty_global() -> Iterator[None]:
    AROUND.clear()
    yield
    AROUND.clear()


def make_batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def make_step(effect: str, **options: Any) -> hs.TrainStep:
    net = Net(effect)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **options)


def run_plainly(effect: str) -> tuple[tuple[Any, ...], list[float]]:
    net = Net(effect)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    losses = []
    for x, y in make_batches():
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seen = net.seen()
    AROUND.clear()
    return seen, losses


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_step_with_side_effects_is_not_captured_and_leaves_them_once(effect: str) -> None:
    seen, losses = run_plainly(effect)
    step = make_step(effect, decide="device")
    sink = sink_with_emulated_graphs(step, make_batches(), policy="eager")
    with pytest.warns(hs.Notice, match="in Python, which a replay would not repeat"):
        received = [loss for records in sink for loss in records.loss.tolist()]
    assert received == losses
    assert step.net.seen() == seen


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_whole_step_with_side_effects_is_not_compiled_and_leaves_them_once(effect: str) -> None:
    seen, losses = run_plainly(effect)
    net = Net(effect)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, compile=True)
    # Forward and loss stay uncompiled here: what is tried is the program of the whole step.
    step.compiled.forward_and_loss = step.objective
    step.compiled._forward_and_loss = step.objective.__call__
    sink = hs.sink(step, make_batches(), every=5, on_uncapturable="eager")
    with pytest.warns(hs.Notice, match="in Python, which a replay would not repeat"):
        received = [loss for records in sink for loss in records.loss.tolist()]
    assert received == losses
    assert net.seen() == seen


@pytest.mark.parametrize("effect", EFFECTS)
def test_an_evaluation_with_side_effects_is_not_captured(effect: str) -> None:
    step = make_step(effect)
    batches = make_batches(6)
    evaluate(step.evaluator(), Feed(batches), Metrics(None), lambda batch: batch[-1])
    seen = step.net.seen()
    AROUND.clear()

    step = make_step(effect)
    runner = EvalRunner(step.evaluator(), Metrics(None), lambda batch: batch[-1])
    runner.forward.graphs = EmulatedGraphs(CPU)
    with pytest.warns(hs.Notice, match="evaluation cannot be captured"):
        runner(Feed(batches), lambda: False)
    assert step.net.seen() == seen


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_function_with_side_effects_is_not_captured(effect: str) -> None:
    seen, losses = run_plainly(effect)
    net = Net(effect)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = make_batches()
    sink = sink_with_emulated_graphs(train, batches, policy="eager", state=(net, optimizer))
    with pytest.warns(hs.Notice, match="in Python, which a replay would not repeat"):
        received = [loss for records in sink for loss in records.loss.tolist()]
    assert received == losses
    assert net.seen() == seen


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_verification_leaves_nothing_behind(effect: str) -> None:
    step = make_step(effect)
    step(*make_batches()[0])
    before = step.net.seen()
    verify(VerifiedStep(step), make_batches(3), run_eagerly_in_place_of_replays(step))
    assert step.net.seen() == before


def run_eagerly_in_place_of_replays(step: hs.TrainStep) -> Any:
    def run(batches: list[Any], after_step: Callable[[], None]) -> None:
        for batch in batches:
            step(*batch)
            after_step()

    return run


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_program_that_fails_leaves_nothing_behind(
    effect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, losses = run_plainly(effect)
    net = Net(effect)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)
    step.compiled(True)

    def fail(*arguments: Any, weighted: bool = False) -> Any:
        net(make_batches(1)[0][0])  # the part that ran before the failure
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(step.compiled, "_run_program", fail)
    batches = make_batches()
    received = [step(*batches[0]).loss.item()]
    with pytest.warns(hs.Notice, match="no such kernel"):
        received.append(step(*batches[1]).loss.item())
    received += [step(*batch).loss.item() for batch in batches[2:]]
    assert received == losses
    assert net.seen() == seen


class Stateful(nn.Module):
    """What a capture may do: other tensors in places that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.last: list[Tensor] = [torch.zeros(())]
        self.by_name = {"mean": torch.zeros(())}
        self.config = Box()

    def forward(self, x: Tensor) -> Tensor:
        self.last[0] = x.detach().sum()
        self.by_name["mean"] = x.detach().mean()
        out: Tensor = self.layer(x)
        return out


def test_tensors_in_places_that_are_there_may_be_captured() -> None:
    torch.manual_seed(0)
    net = Stateful()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide="device")
    batches = make_batches()
    sink = sink_with_emulated_graphs(step, batches)
    for _ in sink:
        pass
    assert sink.runner.program.replays > 0
    assert torch.equal(net.last[0], batches[-1][0].sum())
    assert torch.equal(net.by_name["mean"], batches[-1][0].mean())


def test_a_state_is_restored_with_its_order_and_identities() -> None:
    net = Net("a number")
    net.items = [1, [2], {"x": 3}]
    net.names = {"b": 1, "a": 2}
    inner = net.items[1]
    long_list = list(range(5000))
    net.nested["long"] = long_list
    state = PythonState(net)
    assert state.changes() == []

    inner.append(9)
    net.items.insert(0, 0)
    net.names.pop("b")
    net.names["b"] = 1
    net.late = 5
    long_list.append(1)
    net.box.n = 7
    del net.count
    changed = ["box", "count", "items", "late", "nested"]
    assert sorted(set(state.changes())) == [f"'{name}' of Net" for name in changed]
    state.restore()
    assert state.changes() == []
    assert net.items == [1, [2], {"x": 3}]
    assert net.items[1] is inner
    assert list(net.names) == ["b", "a"]
    assert net.box.n == 0
    assert len(long_list) == 5000
    assert net.count == 0
    assert not hasattr(net, "late")


class Recorder:
    """Counts its calls, as a method or as a function."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def hook(self, *_: Any) -> None:
        self.calls.append(1)

    __call__ = hook


COUNTS = {"global": 0}
TOTAL = 0


def note_call(x: Tensor) -> Tensor:
    return note_inside(x)


def note_inside(x: Tensor) -> Tensor:
    global TOTAL
    TOTAL += 1
    return x


class ByMethod(nn.Module):
    """Its forward writes nothing itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def body(self, x: Tensor) -> Tensor:
        COUNTS["global"] += 1
        out: Tensor = self.layer(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class ByHelper(ByMethod):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(note_call(x))
        return out


Counted = tuple[nn.Module, Callable[[], int]]


def with_recorder(attach: Callable[[nn.Linear, Recorder], object]) -> Counted:
    net = nn.Sequential(nn.Linear(6, 3))
    recorder = Recorder()
    attach(net[0], recorder)  # type: ignore[arg-type]
    return net, lambda: len(recorder.calls)


def with_closure_list() -> Counted:
    net = nn.Sequential(nn.Linear(6, 3))
    outputs: list[Tensor] = []
    net[0].register_forward_hook(lambda module, inputs, out: outputs.append(out.detach()))
    return net, lambda: len(outputs)


def with_closure_number() -> Counted:
    net = nn.Sequential(nn.Linear(6, 3))
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1

    net[0].register_forward_hook(hook)
    return net, lambda: count


AROUND_CALLS: dict[str, Callable[[], Counted]] = {
    "a list around a hook": with_closure_list,
    "a number around a hook": with_closure_number,
    "a method as hook": lambda: with_recorder(lambda m, r: m.register_forward_hook(r.hook)),
    "an object as hook": lambda: with_recorder(lambda m, r: m.register_forward_pre_hook(r)),
    "a partial as hook": lambda: with_recorder(
        lambda m, r: m.register_forward_hook(partial(lambda calls, *_: calls.append(1), r.calls))
    ),
    "a list's append as hook": lambda: with_recorder(
        lambda m, r: m.weight.register_post_accumulate_grad_hook(r.calls.append)
    ),
    "a hook of backward": lambda: with_recorder(lambda m, r: m.register_full_backward_hook(r.hook)),
    "a hook of a weight": lambda: with_recorder(lambda m, r: m.weight.register_hook(r.hook)),
    "a method that forward calls": lambda: (ByMethod(), lambda: COUNTS["global"]),
    "a global behind two functions": lambda: (ByHelper(), lambda: TOTAL),
}


@pytest.mark.parametrize("place", AROUND_CALLS)
def test_what_hooks_and_called_functions_write_is_known_and_put_back(place: str) -> None:
    net, count = AROUND_CALLS[place]()
    before = count()
    state = PythonState(net)
    assert state.changes() == []
    net(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert count() == before + 1
    assert len(state.changes()) == 1
    state.restore()
    assert count() == before
    assert state.changes() == []


def test_functions_that_write_nothing_change_nothing() -> None:
    net = nn.Sequential(nn.Linear(6, 3))
    scale, table = 2.0, {"a": 1}
    net[0].register_forward_hook(lambda module, inputs, out: out * scale * table["a"])
    state = PythonState(net, nn.CrossEntropyLoss())
    net(torch.randn(4, 6)).sum().backward()
    assert state.changes() == []


@pytest.mark.parametrize("place", ["a number around a hook", "a method that forward calls"])
def test_a_whole_step_with_such_a_hook_is_not_compiled(place: str) -> None:
    net, count = AROUND_CALLS[place]()
    before = count()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, compile=True)
    with pytest.warns(hs.Notice, match="cannot be one compiled program"):
        model.fit(1, make_batches(), progress=False)
    assert count() - before == STEPS
