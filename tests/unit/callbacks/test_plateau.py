"""Early stopping and cuts of learning rates, on planned scores and against torch's scheduler."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.callbacks import Checkpoint, EarlyStopping, Lambda, ReduceLROnPlateau
from halfstep.checkpoint import listing
from halfstep.engine import Callback, Run
from halfstep.model import Model
from tests.unit.callbacks.test_monitors import fit, make_model, make_samples


class PlannedMetric:
    """A metric whose n-th evaluation gives the n-th number of a plan."""

    def __init__(self, plan: list[float]) -> None:
        self.plan = plan
        self.evaluations = 0

    def update(self, outputs: Tensor, labels: Tensor) -> None: ...

    def compute(self) -> Tensor:
        self.evaluations += 1
        return torch.tensor(self.plan[self.evaluations - 1], dtype=torch.float64)

    def reset(self) -> None: ...


def planned_model(name: str, plan: list[float], **options: Any) -> Model:
    torch.manual_seed(3)
    net = nn.Linear(4, 3)
    options = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.5), **options}
    return Model(
        net,
        nn.CrossEntropyLoss(),
        metrics={name: PlannedMetric(plan)},
        train_metrics=False,
        **options,
    )


def train_planned(
    trained: Model, *callbacks: Callback, epochs: int = 8, sink: int | None = None, **how: Any
) -> Run:
    how = {"valid": make_samples(6).batch(6), **how}
    three_batches = make_samples().batch(26)
    return trained.fit(epochs, three_batches, callbacks=callbacks, sink=sink, **how)


NAN = math.nan
INF = math.inf

# NaN and an infinite best get a notice: test_a_score_that_is_not_finite_is_announced_once.
ignore_nonfinite_notice = pytest.mark.filterwarnings("ignore:.*the score:halfstep.errors.Notice")


@ignore_nonfinite_notice
@pytest.mark.parametrize("sink", [1, 2, 100, None])
@pytest.mark.parametrize(
    ("plan", "how", "last"),
    [
        # Always better; MindSpore's patience=0 would stop at 1.
        ([3, 2, 1, 0, -1, -2, -3, -4], {"patience": 0}, 8),
        ([3, 2, 2, 0, 0, 0, 0, 0], {"patience": 0}, 3),  # an equal score is not better
        ([3, 2, 2, 0, 0, 0, 0, 0], {"patience": 1}, 3),
        ([3, 2, 2, 1, 1, 1, 0, 0], {"patience": 2}, 6),  # a better one starts the count again
        ([3, 4, 5, 6, 7, 8, 9, 9], {"patience": 3}, 4),
        # 2.7 and 2.0 are better by more.
        ([3, 2.9, 2.8, 2.7, 2.6, 2.5, 2, 2], {"patience": 3, "min_delta": 0.25}, 8),
        ([NAN, NAN, 1, NAN, NAN, 0, 0, 0], {"patience": 3}, 8),
        ([NAN, NAN, NAN, 1, 0, 0, 0, 0], {"patience": 3}, 3),  # never better than nothing at all
        # 9 at epoch 5 is the first that counts.
        ([1, 9, 9, 9, 9, 9, 9, 9], {"patience": 2, "start_epoch": 4}, 7),
        ([INF, 5, INF, INF, 0, 0, 0, 0], {"patience": 2}, 4),
    ],
)
def test_stops_where_the_plan_says(
    plan: list[float], how: dict[str, Any], last: int, sink: int | None
) -> None:
    run = train_planned(planned_model("err", plan), EarlyStopping("err", **how), sink=sink)
    assert (run.epoch, run.global_step) == (last, 3 * last)
    assert (run.stopped is None) == (last == 8)
    up = train_planned(
        planned_model("acc", [-v for v in plan]), EarlyStopping("acc", **how), sink=sink
    )
    assert (up.epoch, up.global_step) == (last, 3 * last)


@ignore_nonfinite_notice
def test_the_reason_has_the_best_and_the_patience() -> None:
    words = "EarlyStopping: acc was not better than its best"
    run = train_planned(
        planned_model("acc", [0.5, 0.75, 0.5, 0.75, 0.5, 1, 1, 1]), EarlyStopping("acc", 2)
    )
    assert run.stopped == f"{words} (0.75 at step 6) in 2 evaluations in a row"
    run = train_planned(planned_model("acc", [NAN] * 8), EarlyStopping("acc", 0))
    assert run.stopped == f"{words} (there was none) in 1 evaluation in a row"


def test_evaluations_between_epochs_count_too() -> None:
    run = train_planned(
        planned_model("err", [3, 2, 2, 2, 1, 0]),
        EarlyStopping("err", 2),
        valid_every=0,
        valid_every_steps=5,
    )
    assert run.global_step == 20


def test_what_early_stopping_refuses() -> None:
    with pytest.raises(
        ValueError, match="expected metric as one of the scores 'loss', 'acc', got 'top1_acc'"
    ):
        fit(1, EarlyStopping("top1_acc"))
    with pytest.raises(
        ValueError, match="'kappa' does not say whether less is better; give mode='min' or 'max'"
    ):
        EarlyStopping("kappa")
    modes = "'auto', 'min', 'max'"
    with pytest.raises(ValueError, match=f"mode: expected one of {modes}, received 'lower'"):
        EarlyStopping(mode="lower")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="patience: expected a whole number, 0 or more, received -1"
    ):
        EarlyStopping(patience=-1)
    with pytest.raises(
        ValueError, match="min_delta: expected a finite number, 0 or more, received nan"
    ):
        EarlyStopping(min_delta=NAN)
    for callback in (EarlyStopping(), ReduceLROnPlateau()):
        with pytest.warns(
            hs.Notice,
            match=r"nothing was evaluated in this run, so it did nothing; give fit\(valid=…\)",
        ):
            fit(1, callback)


@pytest.mark.parametrize(
    ("names", "lower"),
    [
        (("loss", "valid.loss", "loss2", "WER", "rmse", "mean_abs_error", "err-5x", "nll"), True),
        (
            (
                "acc",
                "Accuracy",
                "top5",
                "top1_acc",
                "F1",
                "macro-f1",
                "f1score",
                "iou50",
                "roc_auc",
                "mean/IoU",
            ),
            False,
        ),
        (("error_free_acc", "dice_loss", "top1_error"), None),  # words of both kinds
        (
            ("lossless_ratio", "interrupt", "stop_rate", "laptop", "f10", "étop", "accent", ""),
            None,
        ),  # and of none
    ],
)
def test_a_name_says_by_whole_words_which_way_is_better(
    names: tuple[str, ...], lower: bool | None
) -> None:
    for name in names:
        if lower is None:
            with pytest.raises(
                ValueError, match="does not say whether less is better; give mode='min' or 'max'"
            ):
                EarlyStopping(name)
        else:
            assert EarlyStopping(name).best.lower_is_better is lower
        assert EarlyStopping(name, mode="min").best.lower_is_better
        assert not EarlyStopping(name, mode="max").best.lower_is_better
    if "dice_loss" in names:
        with pytest.raises(
            ValueError, match="the name 'dice_loss', with 'loss' and 'dice' in it, does not say"
        ):
            Checkpoint("never made", best="dice_loss")


@pytest.mark.parametrize("options", [{}, {"precision": "O2"}, {"ema": 0.9}], ids=str)
def test_the_best_weights_come_back(options: dict[str, Any]) -> None:
    """The weights of epoch 2, the best, as the evaluation saw them."""
    seen: list[dict[str, Tensor]] = []

    def witness(run: Run) -> None:
        seen.append({k: v.clone() for k, v in run.net.state_dict().items()})
        averages.append([t.clone() for t in run.model.step.state.ema])

    averages: list[list[Tensor]] = []
    trained = planned_model("err", [3, 1, 2, 2, 2, 2, 2, 2], **options)
    train_planned(trained, EarlyStopping("err", 2, restore_best=True), Lambda(epoch_end=witness))
    assert len(seen) == 4
    assert not torch.equal(seen[1]["weight"], seen[3]["weight"])
    assert all(torch.equal(v, seen[1][k]) for k, v in trained.net.state_dict().items())
    assert all(map(torch.equal, trained.step.state.ema, averages[1]))


def test_an_error_keeps_the_last_weights() -> None:
    last: list[Tensor] = []

    def fail(run: Run) -> None:
        last.append(run.net.weight.clone())
        if run.epoch == 3:
            raise OSError("disk")

    trained = planned_model("err", [3, 4, 5, 6, 7, 8, 9, 9])
    with pytest.raises(OSError, match="disk"):
        train_planned(trained, EarlyStopping("err", 5, restore_best=True), Lambda(epoch_end=fail))
    assert torch.equal(trained.net.weight, last[-1])
    assert not torch.equal(last[0], last[-1])


def test_a_resumed_run_stops_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    plan = [3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    whole = planned_model("err", plan)
    run = train_planned(whole, EarlyStopping("err", 3, restore_best=True))
    train_planned(
        planned_model("err", plan),
        EarlyStopping("err", 3, restore_best=True),
        Checkpoint(tmp_path),
        epochs=3,
    )
    second = planned_model("err", plan[3:])
    stopping = EarlyStopping("err", 3, restore_best=True)
    again = train_planned(second, stopping, Checkpoint(tmp_path), resume="auto")
    assert (again.epoch, again.stopped) == (run.epoch, run.stopped)
    assert stopping.best_step == 6
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.net.parameters(), second.net.parameters(), strict=True)
    )
    third = planned_model("err", [])  # stopped stays stopped: nothing is evaluated any more
    last = train_planned(
        third, EarlyStopping("err", 3, restore_best=True), Checkpoint(tmp_path), resume="auto"
    )
    assert (last.global_step, last.stopped) == (run.global_step, run.stopped)
    assert torch.equal(third.net.weight, whole.net.weight)
    assert len(listing(tmp_path)) == 5


# plateaus


@ignore_nonfinite_notice
@pytest.mark.parametrize(("tensors", "sink"), [(False, 1), (True, 100)])
@pytest.mark.parametrize(
    "how",
    [
        {"factor": 0.5, "patience": 0},
        {"factor": 0.1, "patience": 1, "cooldown": 2},
        {"factor": 0.3, "patience": 0, "min_lr": [0.05, 0.01]},
        {"factor": 0.5, "patience": 2, "min_delta": 0.3},
    ],
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateaus_as_torch_sees_them(
    how: dict[str, Any], mode: Any, sink: int, tensors: bool
) -> None:
    plan = [3, 2.9, 3.1, NAN, 2, 2, 2.5, 1.9, 1.8, 1.85, 1.85, INF, 1.7, 1.7, 1.7, 1.7]
    plan = plan if mode == "min" else [-v for v in plan]
    net = nn.Linear(4, 3)
    rates = [torch.tensor(lr, dtype=torch.float64) if tensors else lr for lr in (0.5, 0.1)]
    optimizer = torch.optim.SGD(
        [{"params": [p], "lr": lr} for p, lr in zip(net.parameters(), rates, strict=True)]
    )
    used_rates: list[list[float]] = []
    witness = Lambda(
        visit=lambda run: (
            run.scores and used_rates.append([float(g["lr"]) for g in optimizer.param_groups])
        )
    )
    trained = Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        metrics={"m": PlannedMetric(plan)},
        train_metrics=False,
    )
    data = make_samples().batch(26)
    plateau = ReduceLROnPlateau("m", mode=mode, **{"min_delta": 0.0, **how})
    trained.fit(
        len(plan), data, valid=make_samples(6).batch(6), callbacks=[plateau, witness], sink=sink
    )
    assert used_rates == rates_by_torch(plan, mode, **how)
    assert len({tuple(rates) for rates in used_rates}) > 1
    assert all(
        not tensors or g["lr"] is lr for g, lr in zip(optimizer.param_groups, rates, strict=True)
    )


def rates_by_torch(
    plan: list[float], mode: Any, min_delta: float = 0.0, **how: Any
) -> list[list[float]]:
    a = nn.Parameter(torch.zeros(()))
    b = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 0.1}])
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode, threshold=min_delta, threshold_mode="abs", eps=0, **how
    )
    rates = []
    for value in plan:
        scheduler.step(value)
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates


def test_a_cut_acts_on_the_next_step() -> None:
    rates: list[float] = []
    watch = Lambda(step=lambda run, row: rates.append(row.lr))  # type: ignore[arg-type]
    train_planned(
        planned_model("err", [1, 1, 1]), ReduceLROnPlateau("err", 0.5, 0), watch, epochs=3, sink=100
    )
    assert rates == [0.5] * 6 + [0.25] * 3


def test_a_plateau_goes_on_over_a_resume(tmp_path: Path) -> None:
    plan = [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    whole = planned_model("err", plan)
    second = planned_model("err", plan[3:])
    train_planned(whole, ReduceLROnPlateau("err", 0.5, 1, cooldown=1), epochs=6)
    train_planned(
        planned_model("err", plan),
        ReduceLROnPlateau("err", 0.5, 1, cooldown=1),
        Checkpoint(tmp_path),
        epochs=3,
    )
    train_planned(
        second,
        ReduceLROnPlateau("err", 0.5, 1, cooldown=1),
        Checkpoint(tmp_path),
        epochs=6,
        resume="auto",
    )
    for trained in (whole, second):
        assert trained.optimizer is not None
        assert trained.optimizer.param_groups[0]["lr"] == 0.125
    assert torch.equal(whole.net.weight, second.net.weight)


def test_what_a_plateau_refuses() -> None:
    with pytest.raises(
        ValueError, match=r"has a schedule, .* Leave out Model\(schedule=…\) or this callback"
    ):
        fit(1, ReduceLROnPlateau(), of=make_model(schedule=[0.1] * 13))
    with pytest.raises(ValueError, match="expected one min_lr, or 1, got 2"):
        fit(1, ReduceLROnPlateau(min_lr=[0.1, 0.2]))
    with pytest.raises(ValueError, match="factor: expected a number between 0 and 1, received 1"):
        ReduceLROnPlateau(factor=1)
    own = Model(nn.Linear(4, 3), nn.CrossEntropyLoss(), step=lambda x, y: x.sum())
    with pytest.raises(ValueError, match="expected a model with an optimizer"):
        fit(1, ReduceLROnPlateau(), of=own)


@pytest.mark.parametrize(
    ("name", "plan", "effect"),
    [
        ("err", [2.0, NAN, NAN, 1.0], "is nan: it counts as not better than any other"),
        ("acc", [NAN, 0.5, NAN, 0.6], "is nan: it counts as not better than any other"),
        ("err", [1.0, -INF, 0.0, -1.0], "is -inf: no later score can be better"),
        ("acc", [1.0, INF, 2.0, 3.0], "is inf: no later score can be better"),
    ],
)
@pytest.mark.parametrize("owner", ["EarlyStopping", "ReduceLROnPlateau", "Checkpoint"])
def test_a_score_that_is_not_finite_is_announced_once(
    owner: str, name: str, plan: list[float], effect: str, tmp_path: Path
) -> None:
    callback: Callback
    if owner == "Checkpoint":
        callback = Checkpoint(tmp_path / "run", best=name)
    else:
        callback = {"EarlyStopping": EarlyStopping, "ReduceLROnPlateau": ReduceLROnPlateau}[owner](
            name, patience=8
        )
    with pytest.warns(hs.Notice) as notices:
        train_planned(planned_model(name, plan), callback, epochs=4)
    texts = [str(notice.message) for notice in notices]
    assert len(texts) == 1
    assert texts[0].startswith(f"{owner}: the score {name!r} {effect}")


@pytest.mark.parametrize("plan", [[INF, 3.0, INF, 1.0], [3.0, INF, INF, INF]])
def test_an_infinite_score_that_is_worse_is_an_ordinary_one(plan: list[float]) -> None:
    train_planned(planned_model("err", plan), EarlyStopping("err", patience=8), epochs=4)


class TwoNumbers(PlannedMetric):
    """A metric of two numbers, such as one for each class."""

    def compute(self) -> Tensor:
        return torch.tensor([0.5, 0.75])


@pytest.mark.parametrize("owner", ["EarlyStopping", "ReduceLROnPlateau", "Checkpoint"])
def test_a_score_of_several_numbers_cannot_be_followed(owner: str, tmp_path: Path) -> None:
    callback: Callback
    if owner == "Checkpoint":
        callback = Checkpoint(tmp_path / "run", best="acc", on_error=False)
    else:
        callback = {"EarlyStopping": EarlyStopping, "ReduceLROnPlateau": ReduceLROnPlateau}[owner](
            "acc"
        )
    trained = planned_model("acc", [])
    trained.metrics = hs.metrics.Metrics({"acc": TwoNumbers([])})
    match = rf"{owner}: expected 'acc' as one number, got a tensor of shape \[2\]; follow another"
    with pytest.raises(TypeError, match=match):
        train_planned(trained, callback)
