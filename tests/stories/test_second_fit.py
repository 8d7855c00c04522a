"""Learning rates over several fits and over a resumed run.

torch's schedulers continue where they are, others begin anew; a checkpoint continues the same way.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import halfstep as hs
from halfstep.model import Model

X = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
# Five batches an epoch. They are copies: MKL's results depend on the alignment of memory.
BATCHES = [(X[i : i + 6].clone(), Y[i : i + 6]) for i in range(0, 30, 6)]
DATA = hs.data.Dataset((X, Y)).batch(6)  # the same batches

Optimizer = torch.optim.Optimizer
MakeSchedule = Callable[[Optimizer], Any]

SCHEDULERS: dict[str, MakeSchedule] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=25, cycle_momentum=False
    ),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(
        optimizer, [lambda update: 1 / (1 + update), lambda update: 0.9**update]
    ),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, 4),
            lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [8],
    ),
}


def make_net_and_optimizer(kind: Any = torch.optim.SGD) -> tuple[nn.Sequential, Optimizer]:
    """Two layers in two parameter groups, with rates of 0.3 and 0.1."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [
        {"params": net[0].parameters(), "lr": 0.3},
        {"params": net[2].parameters(), "lr": 0.1},
    ]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    return net, kind(groups, lr=0.1, foreach=False, **options)


def make_model(
    make_schedule: MakeSchedule,
    kind: Any = torch.optim.SGD,
    precision: Any = "fp32",
    accumulate: int = 1,
    schedule_every: Any = "update",
) -> Model:
    net, optimizer = make_net_and_optimizer(kind)
    return Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision,
        schedule=make_schedule(optimizer),
        schedule_every=schedule_every,
        accumulate=accumulate,
    )


def for_both_groups(schedule: Any) -> MakeSchedule:
    """The same schedule for each of the two parameter groups."""
    return lambda optimizer: [schedule, schedule]


def flat_weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train_plain_torch(
    make_schedule: MakeSchedule, epochs: int, kind: Any = torch.optim.SGD
) -> Tensor:
    """The weights after the usual loop: optimizer.step(), scheduler.step()."""
    net, optimizer = make_net_and_optimizer(kind)
    scheduler = make_schedule(optimizer)
    for x, y in BATCHES * epochs:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return flat_weights(net)


def fit_and_record_rates(model: Model) -> list[tuple[float, float]]:
    """Fits one epoch; the rates of both groups at every step."""
    history = hs.History()
    model.fit(1, DATA, callbacks=[history])
    return list(history.rows["lr"])


def stop_at(step: int) -> hs.Callback:
    def stop(run: Any) -> None:
        if run.position == step:
            run.stop("enough")

    return hs.Lambda(visit=stop)


# --- One fit after another ---


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_consecutive_fits_equal_the_plain_loop(name: str, kind: Any) -> None:
    model = make_model(SCHEDULERS[name], kind)
    for epochs in (2, 1, 2):
        model.fit(epochs, DATA)
    expected = train_plain_torch(SCHEDULERS[name], 5, kind)
    assert torch.equal(flat_weights(model.net), expected)


def test_a_fit_that_was_stopped_early_continues_from_where_it_stopped() -> None:
    def stop_after_epoch_2(run: Any) -> None:
        if run.epoch == 2:
            run.stop("enough")

    model = make_model(SCHEDULERS["ExponentialLR"])
    model.fit(9, DATA, callbacks=hs.Lambda(epoch_end=stop_after_epoch_2))
    model.fit(1, DATA)
    expected = train_plain_torch(SCHEDULERS["ExponentialLR"], 3)
    assert torch.equal(flat_weights(model.net), expected)


def test_skipped_steps_between_two_fits_do_not_move_the_scheduler() -> None:
    """The last step of the first fit is skipped: the next update has its rate."""
    model = make_model(SCHEDULERS["ExponentialLR"], precision=hs.Precision("fp32", scale=8.0))
    infinite_batch = (X[:6] * torch.inf, Y[:6])
    history = hs.History()
    model.fit(1, [*BATCHES[:3], infinite_batch], callbacks=history)
    assert history.rows["skipped"] == [False] * 3 + [True]

    model.fit(1, BATCHES[:2], callbacks=history)
    # torch multiplies again and again, which rounds a little differently.
    expected = [0.3 * 0.9**3, 0.3 * 0.9**4]
    assert [lr[0] for lr in history.rows["lr"]] == pytest.approx(expected, rel=1e-15)


def test_a_halfstep_schedule_begins_anew_with_every_fit() -> None:
    model = make_model(for_both_groups(hs.schedules.linear(0.5, 5)))
    first_rates = fit_and_record_rates(model)
    assert fit_and_record_rates(model) == first_rates
    assert first_rates[0] == (0.5, 0.5)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "linear"])
def test_a_second_fit_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    """By a new model, which knows nothing of the first fit, and by the same one."""
    if name == "linear":
        make_schedule = for_both_groups(hs.schedules.linear(0.5, 10))
    else:
        make_schedule = SCHEDULERS[name]
    uninterrupted = make_model(make_schedule)
    uninterrupted.fit(1, DATA)
    uninterrupted.fit(2, DATA)

    interrupted = make_model(make_schedule)
    interrupted.fit(1, DATA)
    callbacks = [hs.Checkpoint(tmp_path, every_steps=3), stop_at(7)]
    interrupted.fit(2, DATA, callbacks=callbacks, sink=1)
    for model in (make_model(make_schedule), interrupted):
        model.fit(2, DATA, resume=tmp_path / "step-000000006")  # a Notice would be an error
        assert torch.equal(flat_weights(model.net), flat_weights(uninterrupted.net))


def test_a_first_fit_is_resumed_exactly_by_a_model_that_is_further(tmp_path: Path) -> None:
    make_schedule = SCHEDULERS["CosineAnnealingLR"]
    model = make_model(make_schedule)
    model.fit(2, DATA, callbacks=hs.Checkpoint(tmp_path, every_steps=4))
    model.fit(1, DATA)
    model.fit(2, DATA, resume=tmp_path / "step-000000004")
    assert torch.equal(flat_weights(model.net), train_plain_torch(make_schedule, 2))
    model.fit(1, DATA)
    assert torch.equal(flat_weights(model.net), train_plain_torch(make_schedule, 3))


def one_cycle(total_steps: int) -> MakeSchedule:
    return lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, 0.5, total_steps=total_steps, cycle_momentum=False
    )


def test_past_the_end_of_one_cycle_fit_is_refused_and_the_advice_works() -> None:
    model = make_model(one_cycle(10))
    model.fit(2, DATA)
    weights_before = flat_weights(model.net)
    message = "built for 10 updates; the fits before made 10 and this one has 5"
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(1, DATA)
    assert "total_steps=15" in str(caught.value)
    assert "model.schedule = OneCycleLR(optimizer, …, total_steps=5)" in str(caught.value)
    assert torch.equal(flat_weights(model.net), weights_before)

    # First advice: build it for all updates.
    longer = make_model(one_cycle(15))
    longer.fit(2, DATA)
    longer.fit(1, DATA)
    assert torch.equal(flat_weights(longer.net), train_plain_torch(one_cycle(15), 3))

    # Second advice: a new cycle for this fit. The tolerance is that of torch's cosine.
    assert model.optimizer is not None
    model.schedule = one_cycle(5)(model.optimizer)
    first_rates = fit_and_record_rates(model)[0]
    assert first_rates == pytest.approx((0.5 / 25, 0.5 / 25), rel=1e-14)


def test_a_rate_set_by_hand_between_two_fits_is_refused_and_the_advice_works() -> None:
    model = make_model(SCHEDULERS["StepLR"])
    model.fit(1, DATA)
    assert model.optimizer is not None
    model.optimizer.param_groups[1]["lr"] = 0.7
    message = r"rates as the last fit left them, \[0.15, 0.05\], received \[0.15, 0.7\]"
    with pytest.raises(ValueError, match=message):
        model.fit(1, DATA)
    # A new scheduler begins at the rate that was set.
    model.schedule = lr_scheduler.ExponentialLR(model.optimizer, 0.5)
    second_group_rates = [lr[1] for lr in fit_and_record_rates(model)]
    assert second_group_rates[:3] == [0.7, 0.35, 0.175]

    model = make_model(SCHEDULERS["StepLR"])
    model.fit(1, DATA)
    model.schedule.step()
    message = r"StepLR was stepped by hand between two fits; fit moves it by itself"
    with pytest.raises(ValueError, match=message):
        model.fit(1, DATA)


# --- A run that is resumed with batches of another size: 16 of 4 an epoch, or 8 of 8 ---


def make_data(batch_size: int) -> hs.data.Dataset:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
    return hs.data.Dataset((x, torch.arange(64) % 3)).shuffle(seed=1).batch(batch_size)


def interrupt_run(
    folder: Path, batch_size: int, schedule: Any, stop_step: int, accumulate: int = 1
) -> None:
    """Trains up to `stop_step` of two epochs, with a checkpoint there."""
    model = make_model(for_both_groups(schedule), accumulate=accumulate)
    callbacks = [hs.History(), hs.Checkpoint(folder), stop_at(stop_step)]
    model.fit(2, make_data(batch_size), callbacks=callbacks, sink=1)


def resume_and_record_rates(
    folder: Path, batch_size: int, schedule: Any, accumulate: int = 1
) -> list[float]:
    """The rates of all steps, also of those before the checkpoint."""
    history = hs.History()
    model = make_model(for_both_groups(schedule), accumulate=accumulate)
    message = "resume: (the data had|accumulate was|the schedule's rate)"
    with pytest.warns(hs.Notice, match=message):
        model.fit(
            2,
            make_data(batch_size),
            callbacks=[history, hs.Checkpoint(folder)],
            resume="auto",
        )
    return [lr[0] for lr in history.rows["lr"]]


def cosine_rates(updates: int) -> list[float]:
    """The formula, written by hand."""
    return [0.1 * (1 + math.cos(math.pi * i / updates)) / 2 for i in range(updates)]


# Two epochs of 64 samples: batch size, step of the checkpoint, new batch size, updates in all.
CHANGED_BATCH_SIZES = {
    "larger batches": (4, 16, 8, 16 + 8),
    "smaller batches": (8, 8, 4, 8 + 16),
    "in the middle of an epoch, which begins anew": (4, 5, 8, 5 + 8 + 8),
    "a short last batch": (8, 8, 12, 8 + 6),
}


@pytest.mark.parametrize("case", CHANGED_BATCH_SIZES)
def test_a_schedule_covers_past_and_coming_updates(case: str, tmp_path: Path) -> None:
    old_batch_size, stop_step, batch_size, updates = CHANGED_BATCH_SIZES[case]
    interrupt_run(tmp_path, old_batch_size, hs.schedules.constant(0.1), stop_step)

    # One rate too few is refused, and changes nothing.
    short = make_model(for_both_groups(hs.schedules.cosine(0.1, updates - 1)))
    weights_before = flat_weights(short.net)
    message = (
        f"expected rates for {updates} updates, received {updates - 1}; "
        f"build it for {updates} updates"
    )
    with pytest.raises(ValueError, match=message):
        short.fit(2, make_data(batch_size), callbacks=hs.Checkpoint(tmp_path), resume="auto")
    assert torch.equal(flat_weights(short.net), weights_before)

    rates = resume_and_record_rates(tmp_path, batch_size, hs.schedules.cosine(0.1, updates))
    expected = [0.1] * stop_step + cosine_rates(updates)[stop_step:]
    # 1 + cos loses a few digits at the end.
    assert rates == pytest.approx(expected, rel=1e-12)


def test_updates_are_counted_with_another_accumulation(tmp_path: Path) -> None:
    """Five batches in cycles of two are two updates and an open cycle.

    In cycles of four, its batch and the 11 others of the epoch are three updates, and the second
    epoch of 16 is four: nine in all.
    """
    interrupt_run(tmp_path, 4, hs.schedules.constant(0.1), stop_step=5, accumulate=2)
    short = make_model(for_both_groups([0.1] * 8), accumulate=4)
    with pytest.raises(ValueError, match="expected rates for 9 updates, received 8"):
        short.fit(2, make_data(4), resume=tmp_path)
    rates = resume_and_record_rates(tmp_path, 4, [0.1] * 9, accumulate=4)
    assert len(rates) == 32


def test_updates_are_counted_with_steps_per_epoch(tmp_path: Path) -> None:
    """Two epochs of ten steps: 10 are done and 10 to come, though the data has 8 batches now."""
    make_schedule = for_both_groups([0.1] * 20)
    callbacks = [hs.Checkpoint(tmp_path), stop_at(10)]
    make_model(make_schedule).fit(2, make_data(4), steps_per_epoch=10, callbacks=callbacks)

    model = make_model(make_schedule)
    with pytest.warns(hs.Notice, match="the data had"):
        run = model.fit(2, make_data(8), resume=tmp_path, steps_per_epoch=10)
    assert run.position == 20


def test_one_cycle_continues_with_batches_of_another_size(tmp_path: Path) -> None:
    callbacks = [hs.Checkpoint(tmp_path), stop_at(8)]
    make_model(one_cycle(24)).fit(2, make_data(8), callbacks=callbacks)
    model = make_model(one_cycle(24))
    with pytest.warns(hs.Notice, match="the data had"):
        run = model.fit(2, make_data(4), resume=tmp_path)
    assert run.position == 24


def test_a_short_schedule_is_refused_also_without_a_checkpoint_to_resume(tmp_path: Path) -> None:
    model = make_model(for_both_groups(hs.schedules.cosine(0.1, 15)))
    message = "expected rates for 16 updates, received 15"
    with pytest.raises(ValueError, match=message):
        model.fit(2, make_data(8))
    with pytest.raises(ValueError, match=message):
        model.fit(2, make_data(8), resume="auto", callbacks=hs.Checkpoint(tmp_path))


# --- Schedules that may not be meant, and the notice about them ---


def sequential(optimizer: Optimizer, first: Any, second: Any, milestone: int) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [first, second], [milestone])


def linear(optimizer: Optimizer, updates: int) -> Any:
    return lr_scheduler.LinearLR(optimizer, total_iters=updates)


# Built for the 4 epochs of a fit, which has 20 updates; and the arguments that the notice advises.
SCHEDULERS_BY_EPOCH: dict[str, tuple[MakeSchedule, str]] = {
    "CosineAnnealingLR": (
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 4),
        r"T_max=20, …\)",
    ),
    "StepLR": (lambda optimizer: lr_scheduler.StepLR(optimizer, 2), r"step_size=10, …\)"),
    "LinearLR": (lambda optimizer: linear(optimizer, 4), r"total_iters=20, …\)"),
    "CosineAnnealingWarmRestarts": (
        lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
        r"T_0=10, …\)",
    ),
    "MultiStepLR": (
        lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 3]),
        r"milestones=\[10, 15\], …\)",
    ),
    "SequentialLR": (
        lambda optimizer: sequential(
            optimizer,
            linear(optimizer, 1),
            lr_scheduler.CosineAnnealingLR(optimizer, 3),
            milestone=1,
        ),
        r"\[LinearLR\(optimizer, total_iters=5, …\), "
        r"CosineAnnealingLR\(optimizer, T_max=15, …\)\], milestones=\[5\]\)",
    ),
    "ChainedScheduler": (
        lambda optimizer: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.ExponentialLR(optimizer, 0.9),
                lr_scheduler.CosineAnnealingLR(optimizer, 4),
            ]
        ),
        r"\[ExponentialLR\(optimizer, …\), CosineAnnealingLR\(optimizer, T_max=20, …\)\]\)",
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS_BY_EPOCH)
def test_a_scheduler_built_for_epochs_gives_one_notice(name: str) -> None:
    make_schedule, advice = SCHEDULERS_BY_EPOCH[name]
    model = make_model(make_schedule)
    message = rf"schedule: {name} is moved once per update.* of the 20 .*{advice}"
    with pytest.warns(hs.Notice, match=message) as caught:
        model.fit(4, DATA)
    assert [warning.filename for warning in caught] == [__file__]
    model.fit(4, DATA)  # a second notice would be an error


SCHEDULERS_BY_UPDATE: list[MakeSchedule] = [
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    lambda optimizer: lr_scheduler.StepLR(optimizer, 5),
    lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    lambda optimizer: sequential(
        optimizer,
        linear(optimizer, 3),
        lr_scheduler.CosineAnnealingLR(optimizer, 17),
        milestone=3,
    ),
    lambda optimizer: sequential(
        optimizer,
        linear(optimizer, 3),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        milestone=3,
    ),
    lambda optimizer: lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ConstantLR(optimizer, 0.5, 3),
            lr_scheduler.CosineAnnealingLR(optimizer, 20),
        ]
    ),
]


@pytest.mark.parametrize("make_schedule", SCHEDULERS_BY_UPDATE)
def test_a_scheduler_built_for_updates_gives_no_notice(make_schedule: MakeSchedule) -> None:
    make_model(make_schedule).fit(4, DATA)


def test_with_one_update_an_epoch_there_is_no_notice() -> None:
    model = make_model(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 2))
    model.fit(2, BATCHES[:1])


def test_the_advice_for_a_scheduler_by_epoch_equals_the_loop_that_steps_it_per_epoch() -> None:
    def make_schedule(optimizer: Optimizer) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, 4)

    net, optimizer = make_net_and_optimizer()
    scheduler = make_schedule(optimizer)
    for _ in range(4):
        for x, y in BATCHES:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
        scheduler.step()

    with pytest.warns(hs.Notice, match=r"once per epoch: Model\(schedule_every='epoch'\)"):
        make_model(make_schedule).fit(4, DATA)
    model = make_model(make_schedule, schedule_every="epoch")
    model.fit(4, DATA)
    assert torch.equal(flat_weights(model.net), flat_weights(net))


# One schedule for two groups, and the line that the notice advises.
ONE_SCHEDULE: dict[str, tuple[Any, str]] = {
    "formula": (hs.schedules.cosine(0.1, 5), r"\{0: cosine\(0.3, …\), 1: cosine\(0.1, …\)\}"),
    "number": (0.2, r"\{0: constant\(0.3, …\), 1: constant\(0.1, …\)\}"),
    "list": ([0.2] * 5, r"\{0: …, 1: …\}"),
    "function": (lambda update: 0.2, r"\{0: …, 1: …\}"),
}


@pytest.mark.parametrize("name", ONE_SCHEDULE)
def test_one_schedule_for_groups_of_different_rates_gives_one_notice(name: str) -> None:
    schedule, advice = ONE_SCHEDULE[name]
    model = make_model(lambda optimizer: schedule)
    message = rf"their rates are 0.3, 0.1, received .*: schedule={advice}"
    with pytest.warns(hs.Notice, match=message) as caught:
        rates = fit_and_record_rates(model)
    assert [warning.filename for warning in caught] == [__file__]
    assert all(first_group == second_group for first_group, second_group in rates)
    fit_and_record_rates(model)  # the groups have one rate now: no notice


def test_one_schedule_per_group_or_groups_of_one_rate_give_no_notice() -> None:
    schedule = hs.schedules.cosine(0.1, 5)
    schedules: list[Any] = [[schedule, schedule], {0: schedule, 1: schedule}, {0: schedule}]
    for per_group in schedules:
        make_model(lambda optimizer, per_group=per_group: per_group).fit(1, DATA)

    net, _ = make_net_and_optimizer()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    Model(net, nn.CrossEntropyLoss(), optimizer, schedule=schedule).fit(1, DATA)
