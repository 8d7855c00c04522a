"""The whole step as one compiled program on a CPU: the tape repeats the step, the program keeps to it, and what cannot
be written down is refused by name."""

import gc
import random
import re
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.compiler.trace import written_down
from halfstep.cuda_graphs import capture__graph as graph
from halfstep.engine.captured import whole_step as whole
from halfstep.step.fast import compiled_forward as compiled
from tests.support.captured_runs import by_hand, data, rows, same_rows, same_state, step

CPU = torch.device("cpu")
ON_CPU = (
    "sgd",
    "sgd-foreach",
    "adam",
    "adamw",
)  # torch has no others that read nothing on the host there
pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


@pytest.fixture
def taped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as they were written down, not compiled, and from the third batch of a kind on."""
    monkeypatch.setattr(
        "halfstep.compiler.trace.PLAIN", {}
    )  # torch's own operations: the same bits
    monkeypatch.setattr(whole, "generate", lambda module, inputs, **_: module)
    monkeypatch.setattr(whole, "CHECKS", 2)
    monkeypatch.setattr("halfstep.engine.captured.step_program.OFTEN", 2)


def compiled_sink(run: hs.TrainStep, batches: Any, every: int = 7) -> Any:
    sink = hs.sink(run, batches, every=every)
    assert sink.runner.program.graphs.compile_body is not None
    return sink


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("optimizer", ON_CPU)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3", "bf16", "fp16"])
def test_the_tape_repeats_the_step_bit_for_bit(
    precision: str, accumulate: int, optimizer: str
) -> None:
    if precision in ("bf16", "fp16") and optimizer != "sgd-foreach":
        pytest.skip("torch's fused kernels leave half parameters on a CPU alone")
    options = {"accumulate": accumulate, "fingerprint_every": 5, "ema": 0.9, "clip_norm": 1.0}
    eager, mine = (step(CPU, precision, optimizer, compile=c, **options) for c in (False, True))
    torch.manual_seed(7)
    right = by_hand(eager, data(CPU, poison=(3, 40)), passes=2)
    sink = compiled_sink(mine, data(CPU, poison=(3, 40)))
    torch.manual_seed(7)
    assert same_rows(rows(sink, 2), right) == []
    assert sink.captures >= min(2, accumulate)
    assert sink.runner.program.replays >= 10
    assert same_state(mine, eager) == []


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_tape_repeats_other_roundings(rounding: Any) -> None:
    precision: Any = hs.Precision("bf16", rounding=rounding)
    eager, mine = (step(CPU, precision, "sgd-foreach", compile=c) for c in (False, True))
    torch.manual_seed(7)
    right = by_hand(eager, data(CPU), passes=2)
    sink = compiled_sink(mine, data(CPU))
    torch.manual_seed(7)
    assert same_rows(rows(sink, 2), right) == []
    assert sink.captures == 1


def test_writing_down_changes_nothing() -> None:
    mine = step(CPU, "fp32", "adamw", compile=True)
    batches = list(data(CPU, samples=80))
    for batch in batches[:3]:
        mine(*batch)
    before, numbers = mine.fingerprints(), torch.get_rng_state()
    written = written_down(
        lambda: [mine.objective.net(batches[0][0]).sum().backward(), mine.optimizer.step()]
    )
    assert written.random  # dropout
    assert {n: int(v) for n, v in mine.fingerprints().items()} == {
        n: int(v) for n, v in before.items()
    }
    assert torch.equal(torch.get_rng_state(), numbers)


class Small(nn.Module):
    def __init__(self, extra: Any = lambda x: x) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.extra = (
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.Linear(16, 3),
            extra,
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.extra(self.norm(self.a(x)).relu()))
        return out


def small(
    extra: Any = lambda x: x, *, compile: Any = True, make: Any = None, **options: Any
) -> hs.TrainStep:
    torch.manual_seed(0)
    net = Small(extra)
    optimizer = (
        make(net.parameters()) if make else torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    )
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, compile=compile, **options)


def test_a_real_program_trains_as_the_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.engine.captured.step_program.OFTEN", 2)
    monkeypatch.setattr(whole, "CHECKS", 2)
    right, mine = small(compile=False, nonfinite="skip"), small(nonfinite="skip")
    losses = by_hand(right, data(CPU, samples=96, poison=(50,)), passes=4)
    sink = compiled_sink(mine, data(CPU, samples=96, poison=(50,)))
    got = rows(sink, 4)
    assert sink.captures == 1
    assert sink.runner.program.replays == 4 * 12 - 3
    assert got["skipped"] == losses["skipped"]
    assert sum(got["skipped"]) == 4
    steps = [i for i, skipped in enumerate(got["skipped"]) if not skipped]
    for name in (
        "loss",
        "grad_norm",
    ):  # 44 updates of rounding in another order: float32's eps is 1.2e-7
        a, b = (torch.tensor(rows[name])[steps] for rows in (got, losses))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0)
    for a, b in zip(mine.net.state_dict().values(), right.net.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_real_program_with_cycles_half_precision_and_a_fused_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfstep.engine.captured.step_program.OFTEN", 2)
    monkeypatch.setattr(whole, "CHECKS", 2)
    options: dict[str, Any] = {
        "make": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        "precision": "O2",
    }
    options |= {"accumulate": 2, "ema": 0.9, "clip_norm": 1.0, "deterministic": True}
    right, mine = small(compile=False, **options), small(**options)
    expected = by_hand(right, data(CPU, samples=96), passes=4)
    sink = compiled_sink(mine, data(CPU, samples=96))
    got = rows(sink, 4)
    assert sink.captures == 2
    assert sink.runner.program.why == ""
    for name in ("loss", "grad_norm"):  # float16's eps is 1e-3, and 24 updates of Adam carry it on
        torch.testing.assert_close(
            torch.tensor(got[name]), torch.tensor(expected[name]), rtol=2e-2, atol=0
        )


def masked(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def squeezed(x: Tensor) -> Tensor:
    return x.clone().unsqueeze_(0)[0]


OWN = torch.Generator()
UNWRITABLE: dict[str, Any] = {
    "item": (lambda x: x * x.detach().abs().max().item(), "on the host"),
    "branch": (lambda x: x * 2 if x.sum() > 0 else x, "on the host"),
    "numpy": (lambda x: x * torch.from_numpy(np.tanh(x.detach().numpy())), "on the host"),
    "dlpack": (lambda x: x * torch.from_dlpack(np.from_dlpack(x.detach())).abs(), "on the host"),
    "tolist": (lambda x: x * max(x.detach().flatten().tolist()), "on the host"),
    "mask": (masked, "shape depends on values"),
    "shape in place": (squeezed, "shape of a tensor in place"),
    "generator": (
        lambda x: x + torch.rand(x.shape, generator=OWN.manual_seed(1)),
        "generator of its own",
    ),
    "sparse": (lambda x: x + torch.sparse.mm(torch.eye(len(x)).to_sparse(), x), "sparse tensor"),
}


@pytest.fixture
def forward_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left when a program is refused would be compiled: that is not what is tested."""
    monkeypatch.setattr(
        compiled.CompiledForward, "_forward_and_loss", lambda self, *a, **k: self.objective(*a, **k)
    )


@pytest.mark.usefixtures("taped", "forward_uncompiled")
@pytest.mark.parametrize("name", UNWRITABLE)
def test_what_cannot_be_written_down_is_refused_by_name(name: str) -> None:
    act, said = UNWRITABLE[name]
    right, mine = small(act, compile=False), small(act)
    expected = by_hand(right, data(CPU), passes=1)
    sink = compiled_sink(mine, data(CPU))
    place = r"test_whole_step.py:\d+" if name != "mask" else ""
    with pytest.warns(
        hs.Notice, match=rf"cannot be one compiled program(.|\n)*{said}(.|\n)*{place}"
    ):
        assert same_rows(rows(sink, 1), expected) == []
    assert sink.captures == 0


@pytest.mark.usefixtures("taped", "forward_uncompiled")
def test_a_refused_step_leaves_nothing_of_itself_behind() -> None:
    kept: list[weakref.ref[Tensor]] = []

    def read(x: Tensor) -> Tensor:
        y = x * 2
        kept.append(weakref.ref(y))
        return y * y.detach().abs().max().item()

    sink = compiled_sink(small(read), data(CPU))
    gc.disable()  # a cycle would hold its graph, and the memory of it, until somebody collects
    try:
        with pytest.warns(hs.Notice, match="cannot be one compiled program"):
            rows(sink, 1)
        assert len(kept) > 3
        assert [held for held in kept if held() is not None] == []
    finally:
        gc.enable()


class Stateful(nn.Module):
    """Keeps its last output, as networks over streams do."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.h = (0.5 * self.h + x).detach()
        return x + self.h


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return x * (1 + 0.01 * self.state["calls"])


def twice_drawn(x: Tensor) -> Tensor:
    """Checkpointing draws the same mask again by setting the random state."""
    dropped: Any = torch.utils.checkpoint.checkpoint(
        nn.functional.dropout, x, 0.5, use_reentrant=False
    )
    return dropped * dropped


def the_same_noise(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.randn(x.shape)


STRAYS: dict[str, Any] = {
    "Python's random numbers": lambda: lambda x: x * (0.5 + random.random()),
    "numpy's random numbers": lambda: lambda x: x * np.random.beta(2, 2),  # noqa: NPY002
    "a tensor in an attribute": Stateful,
    "a counter in a dict": Counting,
    "checkpointed dropout": lambda: twice_drawn,
    "a seed of its own": lambda: the_same_noise,
}


@pytest.mark.usefixtures("taped", "forward_uncompiled")
@pytest.mark.parametrize("name", STRAYS)
def test_what_the_tape_does_not_see_is_found_on_the_next_batches(name: str) -> None:
    outcomes = []
    for compile in (False, True):
        run = small(STRAYS[name](), compile=compile)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        batches = data(CPU, samples=96)
        if not compile:
            outcomes.append(by_hand(run, batches, passes=1))
            continue
        with pytest.warns(hs.Notice, match="gives other values than when it runs|counts in Python"):
            outcomes.append(rows(compiled_sink(run, batches), 1))
    assert same_rows(*outcomes) == []


class Shifted(nn.Module):
    """By a tensor of its own: an attribute, or one of a list or a dict."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.by: Any = {
            "attribute": torch.zeros(16),
            "list": [torch.zeros(16)],
            "dict": {0: torch.zeros(16)},
        }[place]

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = x + (self.by if self.place == "attribute" else self.by[0])
        return shifted

    def replace(self) -> None:
        if self.place == "attribute":
            self.by = torch.ones(16)
        else:
            self.by[0] = torch.ones(16)


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("place", ["attribute", "list", "dict"])
def test_a_tensor_of_the_networks_own_that_is_replaced_between_visits_acts_on_the_next_step(
    place: str,
) -> None:
    runs, losses = (
        {c: small(Shifted(place), compile=c) for c in (False, True)},
        dict[bool, list[float]](),
    )
    losses[False] = []
    for i, batch in enumerate(data(CPU, samples=96)):
        if i == 8:
            runs[False].net.extra.replace()  # type: ignore[union-attr, operator]
        losses[False].append(float(runs[False](*batch).loss))
    losses[True] = []
    for records in compiled_sink(runs[True], data(CPU, samples=96), every=8):
        losses[True] += records.loss.tolist()
        runs[True].net.extra.replace()  # type: ignore[union-attr, operator]
    assert losses[True] == losses[False]


@pytest.mark.usefixtures("taped", "forward_uncompiled")
@pytest.mark.parametrize("wide", [1.0, 100.0])
def test_a_program_that_torch_compiled_wrongly_is_given_up_and_the_steps_result_stays(
    wide: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that does not train, though the statistics of a batch norm change a thousand times as much."""

    def wrong(module: Any, inputs: list[Tensor], **_: Any) -> Any:
        head = next(t for t in inputs if t.shape == (3, 16))

        def run(*args: Tensor) -> None:
            before = head.clone()
            module(*args)
            head.copy_(before)

        return run

    monkeypatch.setattr(whole, "generate", wrong)
    right, mine = (small(lambda x: x, compile=c) for c in (False, True))
    for run in (right, mine):
        run.net.a.weight.data.mul_(wide)  # type: ignore[union-attr, operator]
    expected = by_hand(right, data(CPU), passes=1)
    with pytest.warns(hs.Notice, match="torch's compiler makes other values"):
        assert same_rows(rows(compiled_sink(mine, data(CPU)), 1), expected) == []


@pytest.mark.usefixtures("taped", "forward_uncompiled")
def test_a_program_that_fails_is_given_up_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(module: Any, inputs: list[Tensor], **_: Any) -> Any:
        def run(*args: Tensor) -> None:
            module(*args)
            raise TypeError("no such kernel")

        return run

    monkeypatch.setattr(whole, "generate", failing)
    right, mine = small(compile=False), small()
    expected = by_hand(right, data(CPU), passes=1)
    with pytest.warns(hs.Notice, match="as a program it fails: no such kernel"):
        assert same_rows(rows(compiled_sink(mine, data(CPU)), 1), expected) == []


@pytest.mark.usefixtures("taped", "forward_uncompiled")
def test_rates_moved_by_hand_are_seen_and_end_it_when_they_move_often() -> None:
    runs = {c: small(compile=c) for c in (False, True)}
    losses: dict[bool, list[float]] = {False: [], True: []}
    sink = compiled_sink(runs[True], data(CPU, samples=96), every=4)
    for i, batch in enumerate(data(CPU, samples=96)):
        losses[False].append(float(runs[False](*batch).loss))
        if i % 4 == 3:
            runs[False].optimizer.param_groups[0]["lr"] *= 0.5
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for records in sink:
            losses[True] += records.loss.tolist()
            runs[True].optimizer.param_groups[0]["lr"] *= 0.5
    assert losses[True] == losses[False]
    assert re.search("changed 2 times", str(said[0].message))
    assert len(said) == 1


@pytest.mark.usefixtures("taped")
def test_rare_shapes_get_no_program() -> None:
    mine = small(compile=True)
    sink = compiled_sink(mine, data(CPU, samples=8 * 8 + 3))
    rows(sink, 2)
    assert sink.captures == 1  # the tail of 3 has come twice


@pytest.mark.usefixtures("taped", "forward_uncompiled")
def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "PROGRAMS", 2)
    sizes = [4, 5, 6, 7] * 5
    g = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(n, 6, generator=g), torch.randint(0, 3, (n,), generator=g)) for n in sizes
    ]
    right, mine = small(compile=False), small()
    expected = by_hand(right, batches, passes=1)
    sink = compiled_sink(mine, batches)
    assert same_rows(rows(sink, 1), expected) == []
    assert sink.captures == 2


@pytest.mark.usefixtures("taped")
def test_a_gradient_that_is_not_finite_stops_the_fit_as_it_would_eagerly() -> None:
    def model(compile: bool) -> hs.Model:
        torch.manual_seed(0)
        net = Small()
        return hs.Model(
            net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), compile=compile
        )

    weights = []
    for compile in (False, True):
        mine = model(compile)
        with pytest.raises(hs.NonFiniteError):
            mine.fit(1, data(CPU, samples=160, poison=(5,)))
        weights.append(mine.net.state_dict())
    assert all(torch.equal(weights[0][n], weights[1][n]) for n in weights[0])


@pytest.mark.usefixtures("taped")
def test_fit_says_how_it_runs_and_capture_false_leaves_it_in_parts() -> None:
    torch.manual_seed(0)
    net = Small()
    net.unused = torch.eye(3).to_sparse()  # type: ignore[assignment]
    model = hs.Model(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), compile=True
    )
    model.fit(1, data(CPU))
    assert "programs of the whole step: 1 held" in str(model.report())
    with pytest.raises(ValueError, match="verify: expected a step that is not compiled"):
        hs.sink(model.step, data(CPU), verify=2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    off = hs.Model(net, nn.CrossEntropyLoss(), optimizer, compile=True, capture=False)
    assert "capture=False" in str(off.report())


@pytest.mark.usefixtures("taped")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_that_reads_on_the_host_is_fused_where_that_was_left_open(make: Any) -> None:
    net = Small()
    model = hs.Model(net, nn.CrossEntropyLoss(), make(net.parameters()), compile=True)
    model.fit(1, data(CPU))
    assert "programs of the whole step: 1 held" in str(model.report())
    assert "fused" in str(model.report())
    other = hs.Model(
        net, nn.CrossEntropyLoss(), make(net.parameters(), foreach=False), compile=True
    )
    assert "reads values on the host" in str(other.report())


@pytest.mark.usefixtures("taped")
def test_a_schedule_costs_no_program() -> None:
    net = Small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(
        net, nn.CrossEntropyLoss(), optimizer, schedule=hs.schedules.cosine(0.1, 26), compile=True
    )
    model.fit(2, data(CPU))
    assert "programs of the whole step: 1 held, 1 made" in str(model.report())


@pytest.mark.usefixtures("taped")
def test_auto_compiles_from_the_next_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.engine.auto_compile.MIN_STEPS", 10)
    monkeypatch.setattr("halfstep.engine.auto_compile.TIMING_STARTS_AT", 2)
    monkeypatch.setattr("halfstep.engine.auto_compile.TIMING_ENDS_AT", 4)
    monkeypatch.setattr("halfstep.step.compiled.pays", lambda *_: (True, "asked for"))

    def fitted(compile: Any) -> hs.Model:
        torch.manual_seed(0)
        net = Small()
        model = hs.Model(
            net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), compile=compile
        )
        model.fit(3, data(CPU))
        return model

    auto, never = fitted("auto"), fitted(False)
    assert "programs of the whole step: 1 held" in str(auto.report())
    assert same_state(auto.step, never.step) == []
    assert not auto.step.compiled.inside_whole_step
