"""A second fit: torch's schedulers go on where they stand, others begin anew; and a checkpoint of it does the same."""

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
BATCHES = [(X[i : i + 6], Y[i : i + 6]) for i in range(0, 30, 6)]  # five a pass
DATA = hs.data.Dataset((X, Y)).batch(6)  # the same
Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.5, total_steps=25, cycle_momentum=False),
    "LambdaLR": lambda o: lrs.LambdaLR(o, [lambda i: 1 / (1 + i), lambda i: 0.9**i]),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 4), lrs.ExponentialLR(o, 0.9)], [8]),
}


def parts(kind: Any = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    groups = [{"params": net[0].parameters(), "lr": 0.3}, {"params": net[2].parameters(), "lr": 0.1}]
    return net, kind(groups, lr=0.1, foreach=False, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))


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


def model(make: Make, kind: Any = torch.optim.SGD, precision: Any = "fp32", **options: Any) -> Model:
    net, optimizer = parts(kind)
    return Model(net, nn.CrossEntropyLoss(), optimizer, precision, schedule=make(optimizer), **options)


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
    ours = model(SCHEDULERS["StepLR"])
    ours.fit(9, DATA, callbacks=hs.Lambda(epoch_end=lambda run: run.stop("enough") if run.epoch == 2 else None))
    ours.fit(1, DATA)
    assert torch.equal(weights(ours.net), plain(SCHEDULERS["StepLR"], 3))


def test_skipped_steps_between_two_fits_do_not_move_it() -> None:
    """The very last step of a fit is skipped: its rate is that of the update to come."""
    made = model(SCHEDULERS["ExponentialLR"], precision=hs.Precision("fp32", scale=8.0))
    broken = [*BATCHES[:3], (X[:6] * torch.inf, Y[:6])]
    history = hs.History()
    made.fit(1, broken, callbacks=history)
    assert history.rows["skipped"] == [False] * 3 + [True]
    made.fit(1, BATCHES[:2], callbacks=history)
    expected = [0.3 * 0.9**n for n in (3, 4)]
    assert [lr[0] for lr in history.rows["lr"]] == pytest.approx(expected, rel=1e-15)  # by repeated multiplication


def test_a_halfstep_schedule_begins_with_each_fit() -> None:
    ours = model(lambda o: hs.schedules.linear(0.5, 5))
    first = rates(ours)
    assert rates(ours) == first
    assert first[0] == (0.5, 0.5)


@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "linear"])
def test_a_second_fit_is_resumed_exactly(name: str, tmp_path: Path) -> None:
    """In a new process, whose model knows nothing of the first fit, and in the same one."""
    make: Make = SCHEDULERS.get(name, lambda o: hs.schedules.linear(0.5, 10))
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
    with pytest.raises(ValueError, match="built for 10 updates; the fits before made 10 and this one has 5") as caught:
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
    assert rates(ours)[0] == pytest.approx((0.5 / 25, 0.5 / 25), rel=1e-14)  # a cycle of its own, from torch's cosine


def test_what_was_changed_between_two_fits_is_told() -> None:
    ours = model(SCHEDULERS["StepLR"])
    ours.fit(1, DATA)
    assert ours.optimizer is not None
    ours.optimizer.param_groups[1]["lr"] = 0.7
    with pytest.raises(ValueError, match=r"rates as the last fit left them, \[0.15, 0.05\], received \[0.15, 0.7\]"):
        ours.fit(1, DATA)
    ours.schedule = lrs.ExponentialLR(ours.optimizer, 0.5)  # the advice: it begins at what was set
    assert [lr[1] for lr in rates(ours)][:3] == [0.7, 0.35, 0.175]
    other = model(SCHEDULERS["StepLR"])
    other.fit(1, DATA)
    other.schedule.step()
    with pytest.raises(ValueError, match=r"StepLR was stepped by hand between two fits; fit moves it by itself"):
        other.fit(1, DATA)
