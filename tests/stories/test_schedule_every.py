"""Schedulers of torch move once per epoch, as in the loop that they were written for.

Every expectation is a plain torch loop with scheduler.step() at the end of an epoch, bit for bit.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import halfstep as hs
from halfstep import checkpoint
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.step_program import StepProgram
from halfstep.model import Model
from tests.support.emulated_graphs import CPU, EmulatedGraphs

X = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
# Five batches an epoch. They are copies: MKL's results depend on the alignment of memory.
BATCHES = [(X[i : i + 6].clone(), Y[i : i + 6]) for i in range(0, 30, 6)]
DATA = hs.data.Dataset((X, Y)).batch(6)  # the same batches
EPOCHS = 6

Optimizer = torch.optim.Optimizer
MakeScheduler = Callable[[Optimizer], Any]

# Built for the epochs of a fit.
SCHEDULERS: dict[str, MakeScheduler] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3], 0.3),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 2),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, EPOCHS, 2.0),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, 2
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda epoch: 1 / (1 + epoch), lambda epoch: 0.9**epoch]
    ),
    "MultiplicativeLR": lambda optimizer: lr_scheduler.MultiplicativeLR(
        optimizer, lambda epoch: 0.8
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(optimizer, 4),
        ],
        [2],
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, 3),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]
    ),
}
STEP_LR = SCHEDULERS["StepLR"]


def step_lr_by_update(optimizer: Optimizer) -> Any:
    """Built for the updates of a fit of a few epochs."""
    return lr_scheduler.StepLR(optimizer, 4, 0.5)


def make_net_and_optimizer(kind: Any = torch.optim.SGD) -> tuple[nn.Sequential, Optimizer]:
    """Two layers in two parameter groups, with rates of 0.3 and 0.1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [
        {"params": net[0].parameters(), "lr": 0.3},
        {"params": net[2].parameters(), "lr": 0.1},
    ]
    return net, kind(groups, lr=0.1, foreach=False)


def fused_adam(groups: Any, lr: float, foreach: bool) -> Optimizer:
    return torch.optim.Adam(groups, lr=lr, fused=True)


def make_model(
    make_scheduler: MakeScheduler,
    kind: Any = torch.optim.SGD,
    precision: Any = "fp32",
    every: Any = "epoch",
    **options: Any,
) -> Model:
    net, optimizer = make_net_and_optimizer(kind)
    schedule = make_scheduler(optimizer)
    loss = nn.CrossEntropyLoss()
    return Model(
        net, loss, optimizer, precision, schedule=schedule, schedule_every=every, **options
    )


def flat_weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


class PlainLoop:
    """Plain torch: scheduler.step() after every epoch. `rates`: of both groups, by step."""

    def __init__(self, make_scheduler: MakeScheduler, kind: Any = torch.optim.SGD) -> None:
        self.net, self.optimizer = make_net_and_optimizer(kind)
        self.scheduler = make_scheduler(self.optimizer)
        self.rates: list[tuple[float, ...]] = []

    def train(self, epochs: int, batches: Any = BATCHES) -> "PlainLoop":
        for _ in range(epochs):
            self.train_part(batches)
            self.scheduler.step()
        return self

    def train_part(self, batches: Any) -> None:
        for x, y in batches:
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x), y).backward()
            self.rates.append(tuple(group["lr"] for group in self.optimizer.param_groups))
            self.optimizer.step()

    @property
    def weights(self) -> Tensor:
        return flat_weights(self.net)


def stop_at(step: int) -> hs.Callback:
    def stop(run: Any) -> None:
        if run.position == step:
            run.stop("enough")

    return hs.Lambda(visit=stop)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adadelta])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_has_the_rates_of_the_loop_that_steps_it_per_epoch(
    name: str, kind: Any
) -> None:
    expected = PlainLoop(SCHEDULERS[name], kind).train(EPOCHS)
    history = hs.History()
    model = make_model(SCHEDULERS[name], kind)
    model.fit(EPOCHS, DATA, callbacks=history)
    assert history.rows["lr"] == expected.rates
    assert torch.equal(flat_weights(model.net), expected.weights)


def test_the_default_is_per_epoch_and_a_notice_says_so() -> None:
    expected = PlainLoop(STEP_LR).train(4)
    model = make_model(STEP_LR, every=None)
    message = (
        r"schedule: StepLR moves once per epoch\. .*schedule_every='epoch'.*"
        "schedule_every='update' to move it once per update"
    )
    with pytest.warns(hs.Notice, match=message) as caught:
        model.fit(3, DATA)
    assert [warning.filename for warning in caught] == [__file__]
    model.fit(1, DATA)  # a second notice would be an error
    assert torch.equal(flat_weights(model.net), expected.weights)


class ConvNet(nn.Module):
    """As tutorials on handwritten digits have it: convolutions, dropout, log-probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, stride=2)
        self.second = nn.Conv2d(4, 8, 3)
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8 * 5 * 5, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return F.log_softmax(self.head(self.dropout(features).flatten(1)), dim=1)


def test_a_tutorial_on_images_ported_in_the_obvious_way_has_its_weights() -> None:
    """Adadelta from 1.0, times 0.7 after every epoch: per update, nothing would move any more."""
    images, labels = hs.data.sample()
    x = torch.as_tensor(images)[:480, None].float().div(255)
    data = torch.utils.data.TensorDataset(x, torch.as_tensor(labels)[:480].long())
    loader = torch.utils.data.DataLoader(data, batch_size=32)

    def build() -> tuple[nn.Module, Optimizer, Any]:
        torch.manual_seed(1)
        net = ConvNet()
        optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
        return net, optimizer, lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    net, optimizer, scheduler = build()
    for _ in range(3):
        for batch, target in loader:
            optimizer.zero_grad()
            F.nll_loss(net(batch), target).backward()
            optimizer.step()
        scheduler.step()

    ported, optimizer, scheduler = build()
    metrics = {"acc": hs.metrics.Accuracy()}
    model = Model(ported, F.nll_loss, optimizer, metrics=metrics, schedule=scheduler)
    with pytest.warns(hs.Notice, match="StepLR moves once per epoch"):
        model.fit(3, loader)
    assert torch.equal(flat_weights(ported), flat_weights(net))
    assert model.evaluate(loader)["acc"] > 0.5

    by_update, optimizer, scheduler = build()
    every_update = Model(
        by_update, F.nll_loss, optimizer, schedule=scheduler, schedule_every="update"
    )
    with pytest.warns(hs.Notice, match="as if it counted epochs"):
        every_update.fit(3, loader)
    assert not torch.equal(flat_weights(by_update), flat_weights(net))


def test_with_one_update_an_epoch_both_are_the_same_and_nothing_is_said() -> None:
    def cosine(optimizer: Optimizer) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, 100)

    model = make_model(cosine, every=None)
    model.fit(3, BATCHES[:1])
    expected = PlainLoop(cosine).train(3, BATCHES[:1])
    assert torch.equal(flat_weights(model.net), expected.weights)


def test_per_update_is_there_for_who_says_so() -> None:
    history = hs.History()
    make_model(step_lr_by_update, every="update").fit(2, DATA, callbacks=history)
    expected = [0.3] * 4 + [0.15] * 4 + [0.075] * 2
    assert [rates[0] for rates in history.rows["lr"]] == expected


@pytest.mark.parametrize("accumulate", [1, 2, 7])
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
def test_rates_of_epochs_in_every_precision_and_with_accumulation(
    precision: str, accumulate: int
) -> None:
    """O2 begins with a scale at which updates are skipped: these do not delay the scheduler."""
    history = hs.History()
    model = make_model(STEP_LR, precision=precision, accumulate=accumulate)
    model.fit(EPOCHS, DATA, callbacks=history)
    rates = [lr[0] for lr, ends in zip(*_ends_of_cycles(history), strict=True) if ends]
    updates_per_epoch = -(-5 // accumulate)
    expected = [0.3 * 0.5 ** (epoch // 2) for epoch in range(EPOCHS)]
    assert rates == [rate for rate in expected for _ in range(updates_per_epoch)]


def _ends_of_cycles(history: hs.History) -> tuple[list[Any], list[bool]]:
    rows = history.rows
    ends = [u or s for u, s in zip(rows["updated"], rows["skipped"], strict=True)]
    return rows["lr"], ends


def test_skipped_updates_do_not_delay_the_scheduler() -> None:
    overflow = [(torch.full((6, 5), 3e38), Y[:6])]
    history = hs.History()
    model = make_model(STEP_LR, precision="O2")
    model.fit(EPOCHS, BATCHES[:2] + overflow, callbacks=history)
    assert history.rows["skipped"][2::3] == [True] * EPOCHS
    expected = [0.3 * 0.5 ** (epoch // 2) for epoch in range(EPOCHS) for _ in range(3)]
    assert [lr[0] for lr in history.rows["lr"]] == expected


def test_an_epoch_is_as_many_steps_as_steps_per_epoch_says() -> None:
    history = hs.History()
    model = make_model(STEP_LR)
    model.fit(4, DATA, steps_per_epoch=3, callbacks=history)
    batches = (BATCHES * 3)[:12]
    expected = PlainLoop(STEP_LR)
    for epoch in range(4):
        expected.train(1, batches[3 * epoch : 3 * epoch + 3])
    assert history.rows["lr"] == expected.rates
    assert torch.equal(flat_weights(model.net), expected.weights)


class Stream:
    """Batches whose number nobody says."""

    def __iter__(self) -> Iterator[Any]:
        return iter(BATCHES)


def test_data_without_a_length_has_epochs_too() -> None:
    model = make_model(STEP_LR)
    model.fit(EPOCHS, Stream())
    assert torch.equal(flat_weights(model.net), PlainLoop(STEP_LR).train(EPOCHS).weights)

    by_update = make_model(STEP_LR, every="update")
    with pytest.raises(ValueError, match="the data does not say how long it is; give"):
        by_update.fit(EPOCHS, Stream())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_second_fit_goes_on_where_the_first_has_left_the_scheduler(name: str) -> None:
    model = make_model(SCHEDULERS[name])
    for epochs in (2, 1, 3):
        model.fit(epochs, DATA)
    assert torch.equal(flat_weights(model.net), PlainLoop(SCHEDULERS[name]).train(EPOCHS).weights)


def test_a_fit_that_stops_within_an_epoch_has_not_moved_the_scheduler_for_it() -> None:
    history = hs.History()
    model = make_model(SCHEDULERS["ExponentialLR"])
    model.fit(3, DATA, callbacks=[history, stop_at(7)], sink=1)
    expected = PlainLoop(SCHEDULERS["ExponentialLR"]).train(1)
    expected.train_part(BATCHES[:2])
    assert history.rows["lr"] == expected.rates

    model.fit(2, DATA, callbacks=history)
    expected.rates.clear()
    expected.train(2)
    assert history.rows["lr"] == expected.rates
    assert torch.equal(flat_weights(model.net), expected.weights)


def test_another_unit_for_a_scheduler_that_has_moved_is_refused() -> None:
    model = make_model(STEP_LR)
    model.fit(2, DATA)
    model.schedule_every = "update"
    with pytest.raises(
        ValueError, match="the fits before have moved this scheduler once per epoch"
    ):
        model.fit(2, DATA)
    assert model.optimizer is not None
    model.schedule = lr_scheduler.StepLR(model.optimizer, 2)
    model.fit(2, BATCHES[:1])


# --- Stop and resume ---


@pytest.mark.parametrize("name", ["StepLR", "LambdaLR", "SequentialLR"])
@pytest.mark.parametrize("step", [3, 5, 7, 10])
def test_a_run_stopped_anywhere_is_resumed_exactly(name: str, step: int, tmp_path: Path) -> None:
    """Within an epoch, at its end, and after it was over: by a model that knows nothing of it."""
    callbacks = [hs.Checkpoint(tmp_path / "run"), stop_at(step)]
    make_model(SCHEDULERS[name]).fit(EPOCHS, DATA, callbacks=callbacks, sink=1)
    for every in ("epoch", None):
        folder = tmp_path / f"copy-{every}"
        shutil.copytree(tmp_path / "run", folder)
        model = make_model(SCHEDULERS[name], every=every)
        model.fit(EPOCHS, DATA, callbacks=hs.Checkpoint(folder), resume="auto")
        expected = PlainLoop(SCHEDULERS[name]).train(EPOCHS)
        assert torch.equal(flat_weights(model.net), expected.weights)


def test_a_second_fit_is_resumed_exactly(tmp_path: Path) -> None:
    """By a new model, which knows nothing of the first fit, and by the same one."""
    make_scheduler = SCHEDULERS["ExponentialLR"]
    interrupted = make_model(make_scheduler)
    interrupted.fit(2, DATA)
    callbacks = [hs.Checkpoint(tmp_path, every_steps=4), stop_at(9)]
    interrupted.fit(3, DATA, callbacks=callbacks, sink=1)
    for model in (make_model(make_scheduler), interrupted):
        model.fit(3, DATA, resume=tmp_path / "step-000000008")
        assert torch.equal(flat_weights(model.net), PlainLoop(make_scheduler).train(5).weights)
        model.fit(1, DATA)
        assert torch.equal(flat_weights(model.net), PlainLoop(make_scheduler).train(6).weights)


@pytest.mark.parametrize("every", ["epoch", "update"])
def test_a_run_that_was_over_goes_on_for_more_epochs_without_a_word(
    every: str, tmp_path: Path
) -> None:
    """Its table ended with the last rate, which is no rate that was promised for what follows."""

    def exponential(optimizer: Optimizer) -> Any:
        return lr_scheduler.ExponentialLR(optimizer, 0.9)

    make_model(exponential, every=every).fit(2, DATA, callbacks=hs.Checkpoint(tmp_path))
    whole = make_model(exponential, every=every)
    whole.fit(4, DATA)
    model = make_model(exponential, every=every)
    model.fit(4, DATA, resume=tmp_path)  # a Notice would be an error
    assert torch.equal(flat_weights(model.net), flat_weights(whole.net))


def test_a_run_goes_on_per_update_where_the_checkpoint_was_made_so(tmp_path: Path) -> None:
    make_model(step_lr_by_update, every="update").fit(
        3, DATA, callbacks=[hs.Checkpoint(tmp_path), stop_at(7)], sink=1
    )
    whole = make_model(step_lr_by_update, every="update")
    whole.fit(3, DATA)

    message = (
        r"schedule_every='epoch' is said now, and the saved run moved its schedule \(StepLR\) once "
        "per update"
    )
    contradicting = make_model(step_lr_by_update, every="epoch")
    weights = flat_weights(contradicting.net)
    with pytest.raises(ValueError, match=message):
        contradicting.fit(3, DATA, resume=tmp_path)
    assert torch.equal(flat_weights(contradicting.net), weights)

    for every in ("update", None):  # a Notice would be an error
        model = make_model(step_lr_by_update, every=every)
        model.fit(3, DATA, resume=tmp_path)
        assert torch.equal(flat_weights(model.net), flat_weights(whole.net))


def test_a_checkpoint_of_an_earlier_version_goes_on_per_update(tmp_path: Path) -> None:
    """Those say nothing about a unit; also with a scheduler that a new run would refuse."""

    def cosine(optimizer: Optimizer) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, 15)

    for name, make_scheduler in (("step", step_lr_by_update), ("cosine", cosine)):
        folder = tmp_path / name
        callbacks = [hs.Checkpoint(folder), stop_at(7)]
        make_model(make_scheduler, every="update").fit(3, DATA, callbacks=callbacks, sink=1)
        tree = checkpoint.load(folder / "step-000000007").tree
        del tree["config"]["schedule"]
        del tree["callbacks"]["EpochRates"]
        earlier = tmp_path / f"earlier-{name}"
        checkpoint.save(earlier / "step-000000007", tree)

        whole = make_model(make_scheduler, every="update")
        whole.fit(3, DATA)
        model = make_model(make_scheduler, every=None)
        with pytest.warns(hs.Notice, match="an earlier version of halfstep, which moved .* once"):
            model.fit(3, DATA, resume=earlier)
        assert torch.equal(flat_weights(model.net), flat_weights(whole.net))

        with pytest.raises(ValueError, match="schedule_every='epoch' is said now"):
            make_model(make_scheduler, every="epoch").fit(3, DATA, resume=earlier)


def test_a_schedule_of_another_kind_has_its_own_unit(tmp_path: Path) -> None:
    callbacks = [hs.Checkpoint(tmp_path), stop_at(7)]
    make_model(STEP_LR).fit(3, DATA, callbacks=callbacks, sink=1)
    history = hs.History()
    model = make_model(lambda optimizer: {0: [0.01 * i for i in range(15)]}, every=None)
    with pytest.warns(hs.Notice, match="(the schedule was|the schedule's rate|no History)"):
        model.fit(3, DATA, resume=tmp_path, callbacks=history)
    assert [lr[0] for lr in history.rows["lr"]] == [0.01 * i for i in range(7, 15)]


# --- Captured steps ---


@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_steps_read_the_rate_of_each_epoch(accumulate: int) -> None:
    """Graphs that are captured once: the rates change under them."""
    options = {"decide": "device", "nonfinite": "skip", "accumulate": accumulate}
    programs: list[StepProgram] = []

    def emulated_runner(step: Any, feed: Any, steps: Any) -> CapturedRunner:
        program = StepProgram(step, RecordBuffer(8192, CPU), EmulatedGraphs(CPU), "raise")
        programs.append(program)
        return CapturedRunner(program, feed)

    histories = []
    nets = []
    for captured in (False, True):
        model = make_model(SCHEDULERS["LambdaLR"], fused_adam, **options)
        if captured:
            model.captures.training_runner = emulated_runner
        history = hs.History()
        model.fit(EPOCHS, DATA, callbacks=history)
        histories.append(history.rows)
        nets.append(model.net)
    assert programs[0].replays > EPOCHS
    assert histories[0]["lr"] == histories[1]["lr"]
    if accumulate == 1:
        expected = PlainLoop(SCHEDULERS["LambdaLR"], fused_adam).train(EPOCHS)
        assert histories[1]["lr"] == expected.rates
    assert torch.equal(flat_weights(nets[0]), flat_weights(nets[1]))


# --- halfstep's own kinds of schedules, by epoch ---


def test_formulas_lists_and_functions_may_count_epochs() -> None:
    rates = [0.4, 0.2, 0.1]
    kinds: list[Any] = [rates, hs.schedules.sequence(rates), lambda epoch: rates[epoch]]
    for kind in kinds:
        history = hs.History()
        make_model(lambda optimizer, kind=kind: [kind, kind]).fit(3, DATA, callbacks=history)
        assert [lr[0] for lr in history.rows["lr"]] == [rate for rate in rates for _ in range(5)]

    model = make_model(lambda optimizer: [rates, rates])
    message = "expected rates for 4 epochs, as schedule_every='epoch' says, received 3"
    with pytest.raises(ValueError, match=message):
        model.fit(4, DATA)


# --- Schedulers that may count updates ---


def warmup(step: int, *, num_warmup_steps: int) -> float:
    return min(1.0, step / num_warmup_steps)


def with_closure(optimizer: Optimizer) -> Any:
    total_steps = 30
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)


def sequential(optimizer: Optimizer, total_iters: int, milestone: int) -> Any:
    first = lr_scheduler.LinearLR(optimizer, total_iters=total_iters)
    second = lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lr_scheduler.SequentialLR(optimizer, [first, second], [milestone])


UNCLEAR: dict[str, tuple[MakeScheduler, str]] = {
    "T_max": (
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30),
        r"CosineAnnealingLR\(T_max=30\)",
    ),
    "step_size": (lambda optimizer: lr_scheduler.StepLR(optimizer, 7), r"StepLR\(step_size=7\)"),
    "milestones": (
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 10]),
        r"MultiStepLR\(milestones=\[2, 10\]\)",
    ),
    "total_iters": (
        lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 30),
        r"PolynomialLR\(total_iters=30\)",
    ),
    "T_0": (
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
        r"CosineAnnealingWarmRestarts\(T_0=10\)",
    ),
    "OneCycleLR": (
        lambda optimizer: lr_scheduler.OneCycleLR(
            optimizer, 0.5, total_steps=EPOCHS, cycle_momentum=False
        ),
        r"OneCycleLR\(total_steps=6\)",
    ),
    "CyclicLR": (
        lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.5, 2, cycle_momentum=False),
        r"CyclicLR\(…\)",
    ),
    "inside SequentialLR": (
        lambda optimizer: sequential(optimizer, 10, 2),
        r"LinearLR\(total_iters=10\)",
    ),
    "a milestone of SequentialLR": (
        lambda optimizer: sequential(optimizer, 2, 10),
        r"SequentialLR\(milestones=\[10\]\)",
    ),
    "inside ChainedScheduler": (
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.ExponentialLR(optimizer, 0.9),
                lr_scheduler.CosineAnnealingLR(optimizer, 30),
            ]
        ),
        r"CosineAnnealingLR\(T_max=30\)",
    ),
    "a function with the number of steps": (
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, partial(warmup, num_warmup_steps=10)),
        r"LambdaLR \(num_warmup_steps=10\)",
    ),
    "a function that closes over it": (with_closure, r"LambdaLR \(total_steps=30\)"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_scheduler_that_may_count_updates_is_refused_until_it_is_said(case: str) -> None:
    make_scheduler, code = UNCLEAR[case]
    model = make_model(make_scheduler, every=None)
    weights = flat_weights(model.net)
    message = (
        rf"schedule: {code}: this fit has 6 epochs of 5 updates, 30 in all, so that this may count "
        r"epochs or updates. Say which: Model\(…, schedule_every='epoch'\)"
    )
    with pytest.raises(ValueError, match=message):
        model.fit(EPOCHS, DATA)
    assert torch.equal(flat_weights(model.net), weights)

    # Both answers are taken.
    by_epoch = make_model(make_scheduler)
    by_epoch.fit(EPOCHS, DATA)
    if case != "OneCycleLR":  # ends with its total_steps
        expected = PlainLoop(make_scheduler).train(EPOCHS)
        assert torch.equal(flat_weights(by_epoch.net), expected.weights)
        by_update = make_model(make_scheduler, every="update")
        by_update.fit(EPOCHS, DATA)
        assert not torch.equal(flat_weights(by_update.net), flat_weights(by_epoch.net))


def test_without_a_length_the_refusal_names_the_epochs() -> None:
    model = make_model(UNCLEAR["T_max"][0], every=None)
    with pytest.raises(ValueError, match="this fit has 6 epochs, so that this may count"):
        model.fit(EPOCHS, Stream())


def test_one_cycle_per_epoch_has_the_rates_of_the_loop() -> None:
    def one_cycle(optimizer: Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=7, cycle_momentum=False)

    model = make_model(one_cycle)
    with pytest.raises(
        ValueError, match=r"built for 7 epochs.* has 9; build it with total_steps=9"
    ):
        model.fit(9, DATA)
    model.fit(6, DATA)
    assert torch.equal(flat_weights(model.net), PlainLoop(one_cycle).train(6).weights)
    message = "built for 7 epochs; the fits before made 6 and this one has 3"
    with pytest.raises(ValueError, match=message):
        model.fit(3, DATA)


@pytest.mark.parametrize("every", [None, "epoch", "update"])
def test_one_cycle_that_moves_momentum_is_answered_with_ours(every: Any) -> None:
    net, _ = make_net_and_optimizer()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=30)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, schedule=schedule, schedule_every=every)
    with pytest.raises(ValueError, match=r"give schedule=hs.schedules.one_cycle\(0.5, 30\)"):
        model.fit(EPOCHS, DATA)


def test_a_scheduler_that_follows_a_score_is_answered_when_the_model_is_built() -> None:
    net, optimizer = make_net_and_optimizer()
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    message = r"callback to fit\(\) instead: .*hs.ReduceLROnPlateau\('loss', 0.1, 3\)"
    with pytest.raises(ValueError, match=message):
        Model(net, nn.CrossEntropyLoss(), optimizer, schedule=schedule)


def test_a_unit_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule_every: expected one of 'epoch', 'update'"):
        make_model(STEP_LR, every="epochs")
    with pytest.raises(ValueError, match=r"schedule_every='epoch': expected a schedule beside it"):
        make_model(lambda optimizer: None).fit(1, DATA)
