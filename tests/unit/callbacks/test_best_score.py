"""The score that tells the best: its name, a fit without evaluations, its checkpoint."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.callbacks import Checkpoint, EarlyStopping, Lambda, ReduceLROnPlateau
from halfstep.checkpoint import latest, listing, load, name_of
from tests.unit.callbacks.test_monitors import fit, make_samples
from tests.unit.callbacks.test_plateau import planned_model, train_planned


@pytest.mark.parametrize(
    "make", [EarlyStopping, ReduceLROnPlateau, lambda name: Checkpoint("run", best=name)]
)
def test_the_name_of_the_logs_is_answered_with_the_name_of_the_score(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a Checkpoint makes its folder
    for name, bare in (("val_acc", "acc"), ("val_loss", "loss")):
        message = f"got '{name}'. Did you mean '{bare}' (the history's 'valid_{bare}')?"
        with pytest.raises(ValueError, match=re.escape(message)):
            fit(1, make(name), valid=make_samples(6).batch(6))
    with pytest.raises(
        ValueError,
        match=re.escape("got 'valid_auc'. More of them: Model(metrics={'valid_auc': …})"),
    ):
        fit(1, make("valid_auc"), valid=make_samples(6).batch(6))
    # The advice works, and the history's names do.
    run = fit(1, EarlyStopping("acc"), EarlyStopping("loss"), valid=make_samples(6).batch(6))
    fit(1, make("valid_acc"), valid=make_samples(6).batch(6))
    assert {"valid_acc", "valid_loss"} <= set(run.history[0])


def test_a_best_without_evaluations_is_a_notice_before_the_first_step(tmp_path: Path) -> None:
    notices_before: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = Lambda(epoch_begin=lambda run: notices_before.append(len(caught)))
        saver = Checkpoint(tmp_path / "a", best="acc")
        fit(1, count, saver)
    message = "Checkpoint: nothing will be evaluated in this run, so best='acc' does nothing"
    assert [(w.category, str(w.message)) for w in caught] == [
        (hs.Notice, f"{message}; give fit(valid=…)")
    ]
    assert notices_before == [1]
    assert saver.best_path is None
    # A warning would be an error here.
    fit(1, Checkpoint(tmp_path / "b", best="acc"), valid=make_samples(6).batch(6))


def test_the_best_checkpoint_has_a_path_and_the_weights_of_its_evaluation(tmp_path: Path) -> None:
    seen: dict[int, Tensor] = {}
    saver = Checkpoint(tmp_path, keep=1, best="err")
    trained = planned_model("err", [3, 1, 2, 2])
    train_planned(
        trained,
        saver,
        Lambda(epoch_end=lambda run: seen.update({run.epoch: run.net.weight.clone()})),
        epochs=4,
    )
    assert saver.best_path == tmp_path / "step-000000006"
    assert listing(tmp_path) == [saver.best_path, tmp_path / "step-000000012"]
    other = planned_model("err", [])
    other.load(saver.best_path)
    assert torch.equal(other.net.weight, seen[2])
    assert not torch.equal(other.net.weight, seen[4])
    plain = Checkpoint(tmp_path / "plain")
    train_planned(planned_model("err", [1]), plain, epochs=1)
    assert plain.best_path is None


def test_another_process_finds_the_best_in_the_newest_checkpoint(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, keep=2, best="err")
    train_planned(planned_model("err", [3, 1, 2, 2]), saver, epochs=4)
    newest = latest(tmp_path)
    assert newest == tmp_path / name_of(12)
    assert load(newest).tree["writers"]["Checkpoint"] == {"score": 1.0, "best_step": 6}
    assert saver.best_path == tmp_path / name_of(6)
