"""A second fit: torch's schedulers go on where they stand, others begin anew; and a checkpoint of it does the same."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

import halfstep as hs
from halfstep.model import Model

X = torch.randn(30, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
BATCHES = [
    (X[i : i + 6].clone(), Y[i : i + 6]) for i in range(0, 30, 6)
]  # five a pass, where memory begins: MKL asks
DATA = hs.data.Dataset((X, Y)).batch(6)  # the same
Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=25, cycle_momentum=False),
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.9**i]),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.ConstantLR(o, 0.5, 4), lrs.ExponentialLR(o, 0.9)], [8]
    ),
}


def parts(kind: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [
        {"params": net[0].parameters(), "lr": 0.3},
        {"params": net[2].parameters(), "lr": 0.1},
    ]
    return net, kind(
        groups, lr=0.1, foreach=False, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
    )


def plain(make: Make, passes: int, kind: Any = torch.optim.SGD) -> Tensor:
    """The loop that everybody has: optimizer.step(), scheduler.step()."""
    net, optimizer = parts(kind)
    scheduler = make(optimizer)
    for x, y in BATCHES * passes:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        scheduler.step()
    return weights(net)


def model(
    make: Make, kind: Any = torch.optim.SGD, precision: Any = "fp32", **options: Any
) -> Model:
    net, optimizer = parts(kind)
    return Model(
        net, nn.CrossEntropyLoss(), optimizer, precision, schedule=make(optimizer), **options
    )


def weights(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def rates(fits: Model, epochs: int = 1, **arguments: Any) -> list[Any]:
    history = hs.History()
    fits.fit(epochs, DATA, callbacks=[history, *arguments.pop("callbacks", [])], **arguments)
    return list(history.rows["lr"])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_fits_one_after_the_other_are_the_plain_loop(name: str, kind: Any) -> None:
    ours = model(SCHEDULERS[name], kind)
    for epochs in (2, 1, 2):
        ours.fit(epochs, DATA)
    assert torch.equal(weights(ours.net), plain(SCHEDULERS[name], 5, kind))


def test_a_fit_that_was_stopped_early_goes_on_from_where_it_stopped() -> None:
    ours = model(SCHEDULERS["ExponentialLR"])
    ours.fit(
        9,
        DATA,
        callbacks=hs.Lambda(epoch_end=lambda run: run.stop("enough") if run.epoch == 2 else None),
    )
    ours.fit(1, DATA)
    assert torch.equal(weights(ours.net), plain(SCHEDULERS["ExponentialLR"], 3))


def test_skipped_steps_between_two_fits_do_not_move_it() -> None:
    """The very last step of a fit is skipped: its rate is that of the update to come."""
    made = model(SCHEDULERS["ExponentialLR"], precision=hs.Precision("fp32", scale=8.0))
    broken = [*BATCHES[:3], (X[:6] * torch.inf, Y[:6])]
    history = hs.History()
    made.fit(1, broken, callbacks=history)
    assert history.rows["skipped"] == [False] * 3 + [True]
    made.fit(1, BATCHES[:2], callbacks=history)
    expected = [0.3 * 0.9**n for n in (3, 4)]
    assert [lr[0] for lr in history.rows["lr"]] == pytest.approx(
        expected, rel=1e-15
    )  # by repeated multiplication


def test_a_halfstep_schedule_begins_with_each_fit() -> None:
    ours = model(lambda o: [hs.schedules.linear(0.5, 5)] * 2)
    first = rates(ours)
    assert rates(ours) == first
    assert first[0] == (0.5, 0.5)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "linear"])
def test_a_second_fit_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    """In a new process, whose model knows nothing of the first fit, and in the same one."""
    make: Make = SCHEDULERS.get(name, lambda o: [hs.schedules.linear(0.5, 10)] * 2)
    straight = model(make)
    straight.fit(1, DATA)
    straight.fit(2, DATA)
    cut = model(make)
    cut.fit(1, DATA)
    cut.fit(2, DATA, callbacks=[hs.Checkpoint(tmp_path, every_steps=3), stop_at(7)], sink=1)
    for goes_on in (model(make), cut):
        goes_on.fit(2, DATA, resume=tmp_path / "step-000000006")  # a Notice would be an error here
        assert torch.equal(weights(goes_on.net), weights(straight.net))


def stop_at(step: int) -> hs.Callback:
    return hs.Lambda(visit=lambda run: run.stop("enough") if run.position == step else None)


def test_a_first_fit_is_resumed_exactly_by_the_model_that_has_gone_further(tmp_path: Path) -> None:
    make = SCHEDULERS["CosineAnnealingLR"]
    ours = model(make)
    ours.fit(2, DATA, callbacks=hs.Checkpoint(tmp_path, every_steps=4))
    ours.fit(1, DATA)
    ours.fit(2, DATA, resume=tmp_path / "step-000000004")
    assert torch.equal(weights(ours.net), plain(make, 2))
    ours.fit(1, DATA)
    assert torch.equal(weights(ours.net), plain(make, 3))


def test_past_the_end_of_one_cycle_the_advice_works() -> None:
    def make(steps: int) -> Make:
        return lambda o: lrs.OneCycleLR(o, 0.5, total_steps=steps, cycle_momentum=False)

    ours = model(make(10))
    ours.fit(2, DATA)
    before = weights(ours.net)
    with pytest.raises(
        ValueError, match="built for 10 updates; the fits before made 10 and this one has 5"
    ) as caught:
        ours.fit(1, DATA)
    assert "total_steps=15" in str(caught.value)
    assert "model.schedule = OneCycleLR(optimizer, …, total_steps=5)" in str(caught.value)
    assert torch.equal(weights(ours.net), before)
    longer = model(make(15))
    longer.fit(2, DATA)
    longer.fit(1, DATA)
    assert torch.equal(weights(longer.net), plain(make(15), 3))
    assert ours.optimizer is not None
    ours.schedule = make(5)(ours.optimizer)
    assert rates(ours)[0] == pytest.approx(
        (0.5 / 25, 0.5 / 25), rel=1e-14
    )  # a cycle of its own, from torch's cosine


def test_what_was_changed_between_two_fits_is_told() -> None:
    ours = model(SCHEDULERS["StepLR"])
    ours.fit(1, DATA)
    assert ours.optimizer is not None
    ours.optimizer.param_groups[1]["lr"] = 0.7
    with pytest.raises(
        ValueError, match=r"rates as the last fit left them, \[0.15, 0.05\], received \[0.15, 0.7\]"
    ):
        ours.fit(1, DATA)
    ours.schedule = lrs.ExponentialLR(ours.optimizer, 0.5)  # the advice: it begins at what was set
    assert [lr[1] for lr in rates(ours)][:3] == [0.7, 0.35, 0.175]
    other = model(SCHEDULERS["StepLR"])
    other.fit(1, DATA)
    other.schedule.step()
    with pytest.raises(
        ValueError, match=r"StepLR was stepped by hand between two fits; fit moves it by itself"
    ):
        other.fit(1, DATA)


# a run that goes on with batches of another size: 16 of 4 a pass, or 8 of 8


def batches(size: int) -> hs.data.Dataset:
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(3))
    return hs.data.Dataset((x, torch.arange(64) % 3)).shuffle(seed=1).batch(size)


def cut(folder: Path, size: int, schedule: Any, stop: int, **options: Any) -> None:
    model(lambda o: [schedule] * 2, **options).fit(
        2, batches(size), callbacks=[hs.History(), hs.Checkpoint(folder), stop_at(stop)], sink=1
    )


def goes_on(folder: Path, size: int, schedule: Any, **options: Any) -> list[float]:
    """The rates of all steps, those before the checkpoint too."""
    history, again = hs.History(), model(lambda o: [schedule] * 2, **options)
    with pytest.warns(hs.Notice, match="resume: (the data had|accumulate was|the schedule's rate)"):
        again.fit(2, batches(size), callbacks=[history, hs.Checkpoint(folder)], resume="auto")
    return [lr[0] for lr in history.rows["lr"]]


def cosine_by_hand(total: int) -> list[float]:
    return [0.1 * (1 + math.cos(math.pi * i / total)) / 2 for i in range(total)]


# epochs of 64 samples, two of them: batch, where it stopped, batch then, and the updates in all by hand
CHANGES = {
    "larger batches": (4, 16, 8, 16 + 8),
    "smaller batches": (8, 8, 4, 8 + 16),
    "in the middle of an epoch, which begins anew": (4, 5, 8, 5 + 8 + 8),
    "a short last batch": (8, 8, 12, 8 + 6),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_schedule_covers_what_was_done_and_what_is_to_come(case: str, tmp_path: Path) -> None:
    before, stop, after, total = CHANGES[case]
    cut(tmp_path, before, hs.schedules.constant(0.1), stop)
    short = model(lambda o: [hs.schedules.cosine(0.1, total - 1)] * 2)
    start = weights(short.net)
    said = f"expected rates for {total} updates, received {total - 1}; build it for {total} updates"
    with pytest.raises(ValueError, match=said):
        short.fit(2, batches(after), callbacks=hs.Checkpoint(tmp_path), resume="auto")
    assert torch.equal(weights(short.net), start)
    found = goes_on(tmp_path, after, hs.schedules.cosine(0.1, total))
    assert found == pytest.approx(
        [0.1] * stop + cosine_by_hand(total)[stop:], rel=1e-12
    )  # 1 + cos loses a few digits at the end


def test_another_accumulation_counts_too(tmp_path: Path) -> None:
    """Five batches in twos: two updates and an open cycle. Then in fours: 1 + 11 over 4, and a pass of 16."""
    cut(tmp_path, 4, hs.schedules.constant(0.1), 5, accumulate=2)
    with pytest.raises(ValueError, match="expected rates for 9 updates, received 8"):
        model(lambda o: [[0.1] * 8] * 2, accumulate=4).fit(2, batches(4), resume=tmp_path)
    assert len(goes_on(tmp_path, 4, [0.1] * 9, accumulate=4)) == 32


def test_steps_per_epoch_count_what_is_left(tmp_path: Path) -> None:
    """Two epochs of ten steps: 10 over and 10 to come, though a pass has 8 batches now."""
    arguments: dict[str, Any] = {
        "steps_per_epoch": 10,
        "callbacks": [hs.Checkpoint(tmp_path), stop_at(10)],
    }
    model(lambda o: [[0.1] * 20] * 2).fit(2, batches(4), **arguments)
    with pytest.warns(hs.Notice, match="the data had"):
        assert (
            model(lambda o: [[0.1] * 20] * 2)
            .fit(2, batches(8), resume=tmp_path, steps_per_epoch=10)
            .position
            == 20
        )


def test_one_cycle_goes_on_with_other_batches(tmp_path: Path) -> None:
    def make(o: Any) -> Any:
        return lrs.OneCycleLR(o, 0.5, total_steps=24, cycle_momentum=False)

    model(make).fit(2, batches(8), callbacks=[hs.Checkpoint(tmp_path), stop_at(8)])
    with pytest.warns(hs.Notice, match="the data had"):
        assert model(make).fit(2, batches(4), resume=tmp_path).position == 24


def test_a_schedule_too_short_is_refused_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    short = model(lambda o: [hs.schedules.cosine(0.1, 15)] * 2)
    for more in ({}, {"resume": "auto", "callbacks": hs.Checkpoint(tmp_path)}):
        with pytest.raises(ValueError, match="expected rates for 16 updates, received 15"):
            short.fit(2, batches(8), **more)


# what may not have been meant

EPOCHS: dict[str, tuple[Make, str]] = {  # 4 epochs of 5 updates
    "CosineAnnealingLR": (lambda o: lrs.CosineAnnealingLR(o, 4), r"T_max=20, …\)"),
    "StepLR": (lambda o: lrs.StepLR(o, 2), r"step_size=10, …\)"),
    "LinearLR": (lambda o: lrs.LinearLR(o, total_iters=4), r"total_iters=20, …\)"),
    "CosineAnnealingWarmRestarts": (lambda o: lrs.CosineAnnealingWarmRestarts(o, 2), r"T_0=10, …\)"),
    "MultiStepLR": (lambda o: lrs.MultiStepLR(o, [2, 3]), r"milestones=\[10, 15\], …\)"),
    "SequentialLR": (
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=1), lrs.CosineAnnealingLR(o, 3)], [1]),
        r"\[LinearLR\(optimizer, total_iters=5, …\), CosineAnnealingLR\(optimizer, T_max=15, …\)\], milestones=\[5\]\)",
    ),
    "ChainedScheduler": (
        lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.CosineAnnealingLR(o, 4)]),
        r"\[ExponentialLR\(optimizer, …\), CosineAnnealingLR\(optimizer, T_max=20, …\)\]\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EPOCHS)
def test_a_scheduler_that_counts_epochs_is_told_once(name: str) -> None:
    make, line = EPOCHS[name]
    ours = model(make)
    with pytest.warns(
        hs.Notice, match=rf"schedule: {name} is moved once per update.* of the 20 .*{line}"
    ) as caught:
        ours.fit(4, DATA)
    assert [each.filename for each in caught] == [__file__]
    ours.fit(4, DATA)


@pytest.mark.parametrize("make", [
    lambda o: lrs.CosineAnnealingLR(o, 20),
    lambda o: lrs.StepLR(o, 5),
    lambda o: lrs.ExponentialLR(o, 0.9),
    lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=3), lrs.CosineAnnealingLR(o, 17)], [3]),
    lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o, total_iters=3), lrs.ExponentialLR(o, 0.9)], [3]),
    lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 3), lrs.CosineAnnealingLR(o, 20)]),
])  # fmt: skip
def test_a_scheduler_that_counts_updates_is_left_alone(make: Make) -> None:
    model(make).fit(4, DATA)


def test_as_many_epochs_as_updates_are_left_alone() -> None:
    model(lambda o: lrs.CosineAnnealingLR(o, 2)).fit(2, BATCHES[:1])


def test_the_advice_for_a_scheduler_that_counts_epochs_is_the_loop_that_steps_it_per_epoch() -> (
    None
):
    def make(o: Any) -> Any:
        return hs.schedules.from_torch(lrs.CosineAnnealingLR(o, 4), 20, every=5)

    net, optimizer = parts()
    scheduler = lrs.CosineAnnealingLR(optimizer, 4)
    for _ in range(4):
        for x, y in BATCHES:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        scheduler.step()
    ours = model(make)
    ours.fit(4, DATA)
    assert torch.equal(weights(ours.net), weights(net))


@pytest.mark.parametrize(("schedule", "line"), [
    (hs.schedules.cosine(0.1, 5), r"\{0: cosine\(0.3, …\), 1: cosine\(0.1, …\)\}"),
    (0.2, r"\{0: constant\(0.3, …\), 1: constant\(0.1, …\)\}"),
    ([0.2] * 5, r"\{0: …, 1: …\}"),
    (lambda update: 0.2, r"\{0: …, 1: …\}"),
], ids=["formula", "number", "list", "function"])  # fmt: skip
def test_one_schedule_for_groups_of_different_rates_is_told(schedule: Any, line: str) -> None:
    ours = model(lambda o: schedule)
    with pytest.warns(
        hs.Notice, match=rf"their rates are 0.3, 0.1, received .*: schedule={line}"
    ) as caught:
        first = rates(ours)
    assert [each.filename for each in caught] == [__file__]
    assert all(a == b for a, b in first)
    rates(ours)  # they are the same now


def test_one_schedule_for_groups_of_one_rate_or_one_for_each_is_left_alone() -> None:
    each = hs.schedules.cosine(0.1, 5)
    for given in ([each, each], {0: each, 1: each}, {0: each}):
        model(lambda o, given=given: given).fit(1, DATA)
    net, _ = parts()
    groups = [{"params": layer.parameters()} for layer in (net[0], net[2])]  # type: ignore[index]
    Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(groups, lr=0.1), schedule=each).fit(1, DATA)
