"""The whole step as one compiled program on a CPU.

The recorded operations repeat the step, the compiled program keeps to it, and what cannot be
recorded is refused by name.
"""

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
from halfstep.cuda_graphs import capture
from halfstep.engine.captured import whole_step
from halfstep.step.fast import compiled_forward
from tests.support.captured_runs import (
    collect_columns,
    differing_columns,
    differing_tensors,
    make_data,
    make_step,
    run_by_hand,
)

CPU = torch.device("cpu")

# Those that read nothing on the host; on a CPU torch has no others.
ON_CPU = ("sgd", "sgd-foreach", "adam", "adamw")

pytestmark = pytest.mark.filterwarnings("ignore:.*batch-coupled")


@pytest.fixture
def early_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program from the third batch of a kind on, checked on two batches before it is compiled."""
    monkeypatch.setattr("halfstep.engine.captured.step_program.BATCHES_BEFORE_COMPILE", 2)
    monkeypatch.setattr(whole_step, "CHECKED_BATCHES", 2)


@pytest.fixture
def uncompiled_program(monkeypatch: pytest.MonkeyPatch, early_program: None) -> None:
    """Programs run as they were recorded: torch's own operations, so the same bits."""
    monkeypatch.setattr("halfstep.compiler.trace.DECOMPOSITIONS", {})
    monkeypatch.setattr(whole_step, "generate", lambda module, inputs, **_: module)


@pytest.fixture
def uncompiled_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program is refused, forward and loss would be compiled: that is not tested here."""
    monkeypatch.setattr(
        compiled_forward.CompiledForward,
        "_forward_and_loss",
        lambda self, *args, **kwargs: self.objective(*args, **kwargs),
    )


def compiled_sink(run: hs.TrainStep, batches: Any, every: int = 7) -> Any:
    sink = hs.sink(run, batches, every=every)
    assert sink.runner.program.graphs.compile_body is not None
    return sink


@pytest.mark.usefixtures("uncompiled_program")
@pytest.mark.parametrize("optimizer", ON_CPU)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "O3", "bf16", "fp16"])
def test_the_recorded_operations_repeat_the_step_bit_for_bit(
    precision: str, accumulate: int, optimizer: str
) -> None:
    if precision in ("bf16", "fp16") and optimizer != "sgd-foreach":
        pytest.skip("torch's fused kernels leave half parameters on a CPU alone")
    options = {"accumulate": accumulate, "fingerprint_every": 5, "ema": 0.9, "clip_norm": 1.0}
    eager = make_step(CPU, precision, optimizer, compile=False, **options)
    compiled = make_step(CPU, precision, optimizer, compile=True, **options)
    torch.manual_seed(7)
    expected = run_by_hand(eager, make_data(CPU, poison=(3, 40)), passes=2)
    sink = compiled_sink(compiled, make_data(CPU, poison=(3, 40)))
    torch.manual_seed(7)
    assert differing_columns(collect_columns(sink, 2), expected) == []
    assert sink.captures >= min(2, accumulate)
    assert sink.runner.program.replays >= 10
    assert differing_tensors(compiled, eager) == []


@pytest.mark.usefixtures("uncompiled_program")
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_the_recorded_operations_repeat_other_roundings(rounding: Any) -> None:
    precision: Any = hs.Precision("bf16", rounding=rounding)
    eager = make_step(CPU, precision, "sgd-foreach", compile=False)
    compiled = make_step(CPU, precision, "sgd-foreach", compile=True)
    torch.manual_seed(7)
    expected = run_by_hand(eager, make_data(CPU), passes=2)
    sink = compiled_sink(compiled, make_data(CPU))
    torch.manual_seed(7)
    assert differing_columns(collect_columns(sink, 2), expected) == []
    assert sink.captures == 1


def test_recording_a_step_changes_nothing() -> None:
    train_step = make_step(CPU, "fp32", "adamw", compile=True)
    batches = list(make_data(CPU, samples=80))
    for batch in batches[:3]:
        train_step(*batch)

    def train_once() -> None:
        train_step.objective.net(batches[0][0]).sum().backward()
        train_step.optimizer.step()

    before = {name: int(value) for name, value in train_step.fingerprints().items()}
    rng_state = torch.get_rng_state()
    traced = written_down(train_once)
    assert traced.random  # dropout
    assert {name: int(value) for name, value in train_step.fingerprints().items()} == before
    assert torch.equal(torch.get_rng_state(), rng_state)


def identity(x: Tensor) -> Tensor:
    return x


class Small(nn.Module):
    """Two layers and a batch norm, with any operation `extra` between them."""

    def __init__(self, extra: Any = identity) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 3)
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.extra(self.norm(self.body(x)).relu()))
        return out


def sgd_with_momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def small_step(
    extra: Any = identity,
    *,
    compile: bool = True,
    make_optimizer: Any = sgd_with_momentum,
    **options: Any,
) -> hs.TrainStep:
    torch.manual_seed(0)
    net = Small(extra)
    optimizer = make_optimizer(net.parameters())
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, compile=compile, **options)


def small_model(net: Small | None = None, **options: Any) -> hs.Model:
    torch.manual_seed(0)
    if net is None:
        net = Small()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, **options)


@pytest.mark.usefixtures("early_program")
def test_a_real_program_trains_as_the_step_does() -> None:
    eager = small_step(compile=False, nonfinite="skip")
    compiled = small_step(nonfinite="skip")
    expected = run_by_hand(eager, make_data(CPU, samples=96, poison=(50,)), passes=4)
    sink = compiled_sink(compiled, make_data(CPU, samples=96, poison=(50,)))
    got = collect_columns(sink, 4)
    assert sink.captures == 1
    assert sink.runner.program.replays == 4 * 12 - 3
    assert got["skipped"] == expected["skipped"]
    assert sum(got["skipped"]) == 4

    # 44 updates of rounding in another order: float32's eps is 1.2e-7.
    updates = [i for i, skipped in enumerate(got["skipped"]) if not skipped]
    for name in ("loss", "grad_norm"):
        got_values = torch.tensor(got[name])[updates]
        expected_values = torch.tensor(expected[name])[updates]
        torch.testing.assert_close(got_values, expected_values, rtol=1e-4, atol=0)
    expected_state = eager.net.state_dict()
    for name, value in compiled.net.state_dict().items():
        torch.testing.assert_close(value, expected_state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("early_program")
def test_a_real_program_with_cycles_half_precision_and_a_fused_optimizer() -> None:
    options: dict[str, Any] = {
        "make_optimizer": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
        "precision": "O2",
        "accumulate": 2,
        "ema": 0.9,
        "clip_norm": 1.0,
        "deterministic": True,
    }
    eager = small_step(compile=False, **options)
    compiled = small_step(**options)
    expected = run_by_hand(eager, make_data(CPU, samples=96), passes=4)
    sink = compiled_sink(compiled, make_data(CPU, samples=96))
    got = collect_columns(sink, 4)
    assert sink.captures == 2
    assert sink.runner.program.refusal_reason == ""

    # float16's eps is 1e-3, and 24 updates of Adam carry it on.
    for name in ("loss", "grad_norm"):
        got_values = torch.tensor(got[name])
        expected_values = torch.tensor(expected[name])
        torch.testing.assert_close(got_values, expected_values, rtol=2e-2, atol=0)


def add_masked_sum(x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def change_shape_in_place(x: Tensor) -> Tensor:
    return x.clone().unsqueeze_(0)[0]


OWN_GENERATOR = torch.Generator()

# An operation between the layers, and what the message says about it.
UNRECORDABLE: dict[str, Any] = {
    "item": (lambda x: x * x.detach().abs().max().item(), "on the host"),
    "branch": (lambda x: x * 2 if x.sum() > 0 else x, "on the host"),
    "numpy": (lambda x: x * torch.from_numpy(np.tanh(x.detach().numpy())), "on the host"),
    "dlpack": (lambda x: x * torch.from_dlpack(np.from_dlpack(x.detach())).abs(), "on the host"),
    "tolist": (lambda x: x * max(x.detach().flatten().tolist()), "on the host"),
    "mask": (add_masked_sum, "shape depends on values"),
    "shape in place": (change_shape_in_place, "shape of a tensor in place"),
    "generator": (
        lambda x: x + torch.rand(x.shape, generator=OWN_GENERATOR.manual_seed(1)),
        "generator of its own",
    ),
    "sparse": (lambda x: x + torch.sparse.mm(torch.eye(len(x)).to_sparse(), x), "sparse tensor"),
}


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
@pytest.mark.parametrize("name", UNRECORDABLE)
def test_what_cannot_be_recorded_is_refused_by_name(name: str) -> None:
    operation, message = UNRECORDABLE[name]
    eager = small_step(operation, compile=False)
    compiled = small_step(operation)
    expected = run_by_hand(eager, make_data(CPU), passes=1)
    sink = compiled_sink(compiled, make_data(CPU))
    location = r"test_whole_step.py:\d+" if name != "mask" else ""
    pattern = rf"cannot be one compiled program(.|\n)*{message}(.|\n)*{location}"
    with pytest.warns(hs.Notice, match=pattern):
        assert differing_columns(collect_columns(sink, 1), expected) == []
    assert sink.captures == 0


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
def test_a_refused_step_leaves_nothing_of_itself_behind() -> None:
    activations: list[weakref.ref[Tensor]] = []

    def read_on_host(x: Tensor) -> Tensor:
        y = x * 2
        activations.append(weakref.ref(y))
        return y * y.detach().abs().max().item()

    sink = compiled_sink(small_step(read_on_host), make_data(CPU))
    # A reference cycle would hold the step's graph and its memory until the next collection.
    gc.disable()
    try:
        with pytest.warns(hs.Notice, match="cannot be one compiled program"):
            collect_columns(sink, 1)
        assert len(activations) > 3
        assert [activation for activation in activations if activation() is not None] == []
    finally:
        gc.enable()


class Stateful(nn.Module):
    """Keeps its last output, as networks over streams do."""

    def __init__(self) -> None:
        super().__init__()
        self.state = torch.zeros(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.state = (0.5 * self.state + x).detach()
        return x + self.state


class Counting(nn.Module):
    """Counts its calls in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return x * (1 + 0.01 * self.state["calls"])


def checkpointed_dropout(x: Tensor) -> Tensor:
    """Checkpointing draws the same mask again by setting the random state."""
    dropped: Any = torch.utils.checkpoint.checkpoint(
        nn.functional.dropout, x, 0.5, use_reentrant=False
    )
    return dropped * dropped


def add_seeded_noise(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return x + torch.randn(x.shape)


# What makes an operation whose recording does not repeat it.
UNSEEN: dict[str, Any] = {
    "Python's random numbers": lambda: lambda x: x * (0.5 + random.random()),
    "numpy's random numbers": lambda: lambda x: x * np.random.beta(2, 2),  # noqa: NPY002
    "a tensor in an attribute": Stateful,
    "a counter in a dict": Counting,
    "checkpointed dropout": lambda: checkpointed_dropout,
    "a seed of its own": lambda: add_seeded_noise,
}


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_recording_does_not_see_is_found_on_the_next_batches(name: str) -> None:
    def seed_all() -> None:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)

    eager = small_step(UNSEEN[name](), compile=False)
    seed_all()
    expected = run_by_hand(eager, make_data(CPU, samples=96), passes=1)

    compiled = small_step(UNSEEN[name](), compile=True)
    seed_all()
    with pytest.warns(hs.Notice, match="gives other values than when it runs|counts in Python"):
        got = collect_columns(compiled_sink(compiled, make_data(CPU, samples=96)), 1)
    assert differing_columns(expected, got) == []


class Shifted(nn.Module):
    """Adds a tensor of its own: an attribute, or an entry of a list or a dict."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.shift: Any = torch.zeros(16)
        if container == "list":
            self.shift = [torch.zeros(16)]
        elif container == "dict":
            self.shift = {0: torch.zeros(16)}

    def forward(self, x: Tensor) -> Tensor:
        shift: Tensor = self.shift if self.container == "attribute" else self.shift[0]
        return x + shift

    def replace(self) -> None:
        if self.container == "attribute":
            self.shift = torch.ones(16)
        else:
            self.shift[0] = torch.ones(16)


@pytest.mark.usefixtures("uncompiled_program")
@pytest.mark.parametrize("container", ["attribute", "list", "dict"])
def test_a_tensor_of_the_networks_own_that_is_replaced_between_visits_acts_on_the_next_step(
    container: str,
) -> None:
    eager_shift = Shifted(container)
    eager = small_step(eager_shift, compile=False)
    expected_losses = []
    for i, batch in enumerate(make_data(CPU, samples=96)):
        if i == 8:
            eager_shift.replace()
        expected_losses.append(float(eager(*batch).loss))

    compiled_shift = Shifted(container)
    compiled = small_step(compiled_shift, compile=True)
    losses: list[float] = []
    for records in compiled_sink(compiled, make_data(CPU, samples=96), every=8):
        losses += records.loss.tolist()
        compiled_shift.replace()
    assert losses == expected_losses


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
@pytest.mark.parametrize("weight_factor", [1.0, 100.0])
def test_a_program_that_torch_compiled_wrongly_is_given_up_and_the_steps_result_stays(
    weight_factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that does not train, though a batch norm's statistics change 1,000 times as much."""

    def compile_wrongly(module: Any, inputs: list[Tensor], **_: Any) -> Any:
        head = next(t for t in inputs if t.shape == (3, 16))

        def run(*args: Tensor) -> None:
            before = head.clone()
            module(*args)
            head.copy_(before)

        return run

    monkeypatch.setattr(whole_step, "generate", compile_wrongly)
    eager = small_step(compile=False)
    compiled = small_step(compile=True)
    for train_step in (eager, compiled):
        train_step.net.body.weight.data.mul_(weight_factor)  # type: ignore[union-attr, operator]
    expected = run_by_hand(eager, make_data(CPU), passes=1)
    with pytest.warns(hs.Notice, match="torch's compiler makes other values"):
        assert (
            differing_columns(collect_columns(compiled_sink(compiled, make_data(CPU)), 1), expected)
            == []
        )


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
def test_a_program_that_fails_is_given_up_and_the_step_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_to_failing(module: Any, inputs: list[Tensor], **_: Any) -> Any:
        def run(*args: Tensor) -> None:
            module(*args)
            raise TypeError("no such kernel")

        return run

    monkeypatch.setattr(whole_step, "generate", compile_to_failing)
    eager = small_step(compile=False)
    compiled = small_step()
    expected = run_by_hand(eager, make_data(CPU), passes=1)
    with pytest.warns(hs.Notice, match="as a program it fails: no such kernel"):
        assert (
            differing_columns(collect_columns(compiled_sink(compiled, make_data(CPU)), 1), expected)
            == []
        )


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
def test_rates_moved_by_hand_are_seen_and_end_it_when_they_move_often() -> None:
    eager = small_step(compile=False)
    expected_losses = []
    for i, batch in enumerate(make_data(CPU, samples=96)):
        expected_losses.append(float(eager(*batch).loss))
        if i % 4 == 3:
            eager.optimizer.param_groups[0]["lr"] *= 0.5

    compiled = small_step(compile=True)
    losses: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for records in compiled_sink(compiled, make_data(CPU, samples=96), every=4):
            losses += records.loss.tolist()
            compiled.optimizer.param_groups[0]["lr"] *= 0.5
    assert losses == expected_losses
    assert re.search("changed 2 times", str(caught[0].message))
    assert len(caught) == 1


@pytest.mark.usefixtures("uncompiled_program")
def test_rare_shapes_get_no_program() -> None:
    sink = compiled_sink(small_step(), make_data(CPU, samples=8 * 8 + 3))
    collect_columns(sink, 2)
    assert sink.captures == 1  # the last batch, of 3 samples, has come twice


@pytest.mark.usefixtures("uncompiled_program", "uncompiled_forward")
def test_programs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "MAX_PROGRAMS", 2)
    generator = torch.Generator().manual_seed(0)
    batches = []
    for size in [4, 5, 6, 7] * 5:
        x = torch.randn(size, 6, generator=generator)
        y = torch.randint(0, 3, (size,), generator=generator)
        batches.append((x, y))
    expected = run_by_hand(small_step(compile=False), batches, passes=1)
    sink = compiled_sink(small_step(), batches)
    assert differing_columns(collect_columns(sink, 1), expected) == []
    assert sink.captures == 2


@pytest.mark.usefixtures("uncompiled_program")
def test_a_gradient_that_is_not_finite_stops_the_fit_as_it_would_eagerly() -> None:
    weights = []
    for compile in (False, True):
        model = small_model(compile=compile)
        with pytest.raises(hs.NonFiniteError):
            model.fit(1, make_data(CPU, samples=160, poison=(5,)))
        weights.append(model.net.state_dict())
    eager_weights, compiled_weights = weights
    for name, value in eager_weights.items():
        assert torch.equal(value, compiled_weights[name])


@pytest.mark.usefixtures("uncompiled_program")
def test_fit_says_how_it_runs_and_capture_false_compiles_forward_and_loss_only() -> None:
    net = Small()
    net.unused = torch.eye(3).to_sparse()  # type: ignore[assignment]
    model = small_model(net, compile=True)
    model.fit(1, make_data(CPU))
    assert "programs of the whole step: 1 held" in str(model.report())
    with pytest.raises(ValueError, match="verify: expected a step that is not compiled"):
        hs.sink(model.step, make_data(CPU), verify=2)
    uncaptured = small_model(net, compile=True, capture=False)
    assert "capture=False" in str(uncaptured.report())


@pytest.mark.usefixtures("uncompiled_program")
@pytest.mark.parametrize("make_optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_that_reads_on_the_host_is_fused_where_that_was_left_open(
    make_optimizer: Any,
) -> None:
    net = Small()
    optimizer = make_optimizer(net.parameters())
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, compile=True)
    model.fit(1, make_data(CPU))
    assert "programs of the whole step: 1 held" in str(model.report())
    assert "fused" in str(model.report())

    unfused = make_optimizer(net.parameters(), foreach=False)
    other = hs.Model(net, nn.CrossEntropyLoss(), unfused, compile=True)
    assert "reads values on the host" in str(other.report())


@pytest.mark.usefixtures("uncompiled_program")
def test_a_schedule_costs_no_program() -> None:
    model = small_model(schedule=hs.schedules.cosine(0.1, 26), compile=True)
    model.fit(2, make_data(CPU))
    assert "programs of the whole step: 1 held, 1 made" in str(model.report())


@pytest.mark.usefixtures("uncompiled_program")
def test_auto_compiles_from_the_next_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.engine.auto_compile.MIN_STEPS", 10)
    monkeypatch.setattr("halfstep.engine.auto_compile.TIMING_STARTS_AT", 2)
    monkeypatch.setattr("halfstep.engine.auto_compile.TIMING_ENDS_AT", 4)
    monkeypatch.setattr("halfstep.step.compiled.pays", lambda *_: (True, "asked for"))
    auto = small_model(compile="auto")
    auto.fit(3, make_data(CPU))
    never = small_model(compile=False)
    never.fit(3, make_data(CPU))
    assert "programs of the whole step: 1 held" in str(auto.report())
    assert differing_tensors(auto.step, never.step) == []
    assert not auto.step.compiled.inside_whole_step
