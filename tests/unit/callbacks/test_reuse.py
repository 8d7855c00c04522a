"""A callback used for a second run begins like a new one; a resumed run keeps its state."""

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep as hs
from halfstep.callbacks import (
    Checkpoint,
    EarlyStopping,
    History,
    Lambda,
    LRMonitor,
    ProgressBar,
    ProgressLines,
    ReduceLROnPlateau,
    StepTimer,
    TimeMonitor,
)
from halfstep.checkpoint import listing
from halfstep.engine import Callback, Run
from tests.unit.callbacks.test_monitors import data_with_inf, fit, make_model, make_samples
from tests.unit.callbacks.test_plateau import planned_model, train_planned

MAKERS: dict[str, Callable[[], Callback]] = {
    "stopping": lambda: EarlyStopping("loss", 99, restore_best=True),
    "plateau": lambda: ReduceLROnPlateau("loss", 0.5, 99),
    "history": History,
    "rates": lambda: LRMonitor(3, file=io.StringIO()),
    "step times": lambda: StepTimer(warmup=2, file=io.StringIO()),
    "epoch times": lambda: TimeMonitor(file=io.StringIO()),
    "lines": lambda: ProgressLines(5, file=io.StringIO()),
    "bar": ProgressBar,
}


def train(epochs: int, *callbacks: Callback, **how: Any) -> Run:
    """13 steps an epoch, an evaluation at every seventh; the second step is skipped."""
    trained = make_model(precision=hs.Precision("O2", scale=hs.DynamicScale(init=1024.0)))
    how = {"valid": make_samples(30).batch(7), "valid_every_steps": 7, **how}
    return trained.fit(epochs, data_with_inf(2), callbacks=callbacks, sink=1, **how)


def state_at_begin(callback: Callback) -> str:
    """The state of the callback that a checkpoint would have before the first step, as text."""
    seen: list[str] = []
    witness = Lambda(begin=lambda run: seen.append(repr(callback.state_dict())))
    train(1, callback, witness)
    return seen[0]


@pytest.mark.parametrize("name", MAKERS)
def test_a_second_run_begins_with_what_a_new_callback_knows(name: str) -> None:
    used = MAKERS[name]()
    new = state_at_begin(used)
    assert repr(used.state_dict()) != new  # it did learn something
    assert state_at_begin(used) == new


@pytest.mark.parametrize("name", MAKERS)
def test_a_resumed_run_begins_with_what_was_saved(name: str, tmp_path: Path) -> None:
    """Saved by one object in the middle of an epoch, loaded by another that ran elsewhere."""
    callback = MAKERS[name]()
    other = MAKERS[name]()
    saved = []

    def stop(run: Run) -> None:
        if run.position == 7:
            saved.append(callback.state_dict())
            run.stop("seven")

    train(2, callback, Lambda(visit=stop), Checkpoint(tmp_path, every_epochs=None))
    train(1, other)
    loaded: list[Any] = []
    witness = Lambda(begin=lambda run: loaded.append(other.state_dict()))
    train(1, other, witness, resume=tmp_path)
    if name == "lines":
        saved[0]["spent"] = loaded[0]["spent"]  # the clock has gone on in between
    assert repr(loaded[0]) == repr(saved[0])


def test_early_stopping_again_trains_another_model_as_a_new_one_would() -> None:
    plan = [5, 4, 6, 6, 0, 0, 0, 0]
    used = EarlyStopping("err", 2, restore_best=True)
    train_planned(planned_model("err", [3, 1, 2, 2, 2, 2, 2, 2]), used)
    second = planned_model("err", plan)
    fresh = planned_model("err", plan)
    for trained in (second, fresh):
        with torch.no_grad():
            trained.net.weight.neg_()  # another start than the first model's
    run = train_planned(second, used)
    expected = train_planned(fresh, EarlyStopping("err", 2, restore_best=True))
    assert (run.global_step, run.stopped) == (expected.global_step, expected.stopped)
    assert run.global_step == 12
    assert torch.equal(second.net.weight, fresh.net.weight)
    with pytest.warns(hs.Notice, match="nothing was evaluated in this run"):
        fit(1, used, of=planned_model("err", []))


def test_a_plateau_again_forgets_the_first_runs_best() -> None:
    plateau = ReduceLROnPlateau("err", 0.5, 1)
    second = planned_model("err", [9, 8, 7])
    train_planned(planned_model("err", [1, 1]), plateau, epochs=2)
    train_planned(second, plateau, epochs=3)
    assert second.optimizer is not None
    assert second.optimizer.param_groups[0]["lr"] == 0.5  # every score was better: no cut


def test_a_history_again_has_the_second_run_alone_and_leaves_the_first_to_its_reader() -> None:
    history = History()
    new = History()
    fit(2, history)
    first = history.rows
    fit(1, history)
    fit(1, new)
    assert (history.rows, history.epochs) == (new.rows, new.epochs)
    assert [len(first["loss"]), len(history.rows["loss"])] == [26, 13]


def test_a_total_that_was_learned_is_not_the_next_data_sets() -> None:
    """Lists of batches do not say how many samples they have."""
    out = io.StringIO()
    without_total = ProgressLines(100, file=out)
    with_total = ProgressLines(100, total=99, file=out)
    for callback in (without_total, with_total):
        make_model().fit(1, list(make_samples(78).batch(6)), callbacks=callback)
        make_model().fit(2, list(make_samples(30).batch(6)), callbacks=callback)
    totals = [line.split("/")[1].strip(" ]") for line in out.getvalue().splitlines()]
    assert totals == ["?", "?", "30", "99", "99", "99"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_checkpoint_again_looks_for_the_best_of_its_own_run(
    tmp_path: Path, resumed: bool
) -> None:
    """In an emptied folder; or on from a run that was saved without a best."""
    saver = Checkpoint(tmp_path, keep=1, best="err")
    train_planned(planned_model("err", [3, 1, 2]), saver, epochs=3)
    assert saver.best_step == 6
    shutil.rmtree(tmp_path)
    if resumed:
        train_planned(planned_model("err", [9]), Checkpoint(tmp_path), epochs=1)
    how = {"resume": "auto"} if resumed else {}
    train_planned(planned_model("err", [9, 5, 6, 7][resumed:]), saver, epochs=4, **how)
    assert saver.best is not None
    assert (saver.best.value, saver.best_step) == (5, 6)
    assert [path.name for path in listing(tmp_path)] == ["step-000000006", "step-000000012"]


def test_a_resumed_run_keeps_the_saved_best_if_it_has_one(tmp_path: Path) -> None:
    train_planned(planned_model("err", [1, 2]), Checkpoint(tmp_path, keep=1, best="err"), epochs=2)
    train_planned(
        planned_model("err", [3]), Checkpoint(tmp_path, keep=1, best="err"), epochs=3, resume="auto"
    )
    assert [path.name for path in listing(tmp_path)] == ["step-000000003", "step-000000009"]
    train_planned(planned_model("err", [4]), Checkpoint(tmp_path, keep=1), epochs=4, resume="auto")
    assert [path.name for path in listing(tmp_path)] == ["step-000000012"]
