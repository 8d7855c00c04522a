"""The score by which a run is the best: its name, a fit without evaluations, and the checkpoint that has it."""

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
from tests.unit.callbacks.test_monitors import fit, samples
from tests.unit.callbacks.test_plateau import go, planned


@pytest.mark.parametrize(
    "make", [EarlyStopping, ReduceLROnPlateau, lambda name: Checkpoint("never made", best=name)]
)
def test_the_name_of_the_logs_is_answered_with_the_name_of_the_score(make: Any) -> None:
    for name, bare in (("valid_acc", "acc"), ("val_acc", "acc"), ("val_loss", "loss")):
        said = f"got '{name}'. Did you mean '{bare}' (the history's 'valid_{bare}')?"
        with pytest.raises(ValueError, match=re.escape(said)):
            fit(1, make(name), valid=samples(6).batch(6))
    with pytest.raises(
        ValueError,
        match=re.escape("got 'valid_auc'. More of them: Model(metrics={'valid_auc': …})"),
    ):
        fit(1, make("valid_auc"), valid=samples(6).batch(6))
    run = fit(
        1, EarlyStopping("acc"), EarlyStopping("loss"), valid=samples(6).batch(6)
    )  # the advice works
    assert {"valid_acc", "valid_loss"} <= set(run.history[0])


def test_a_best_that_nothing_is_evaluated_for_is_told_before_the_first_step(tmp_path: Path) -> None:
    told: list[int] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = Lambda(epoch_begin=lambda run: told.append(len(caught)))
        saver = Checkpoint(tmp_path / "a", best="acc")
        fit(1, count, saver)
    said = "Checkpoint: nothing will be evaluated in this run, so best='acc' does nothing"
    assert [(w.category, str(w.message)) for w in caught] == [
        (hs.Notice, f"{said}; give fit(valid=…)")
    ]
    assert told == [1]
    assert saver.best_path is None
    fit(
        1, Checkpoint(tmp_path / "b", best="acc"), valid=samples(6).batch(6)
    )  # a warning would be an error here


def test_the_best_checkpoint_has_a_path_and_the_weights_of_its_evaluation(tmp_path: Path) -> None:
    seen: dict[int, Tensor] = {}
    saver = Checkpoint(tmp_path, keep=1, best="err")
    trained = planned("err", [3, 1, 2, 2])
    go(
        trained,
        saver,
        Lambda(epoch_end=lambda run: seen.update({run.epoch: run.net.weight.clone()})),
        epochs=4,
    )
    assert saver.best_path == tmp_path / "step-000000006"
    assert listing(tmp_path) == [saver.best_path, tmp_path / "step-000000012"]
    other = planned("err", [])
    other.load(saver.best_path)
    assert torch.equal(other.net.weight, seen[2])
    assert not torch.equal(other.net.weight, seen[4])
    plain = Checkpoint(tmp_path / "plain")
    go(planned("err", [1]), plain, epochs=1)
    assert plain.best_path is None


def test_another_process_finds_the_best_in_the_newest_checkpoint(tmp_path: Path) -> None:
    saver = Checkpoint(tmp_path, keep=2, best="err")
    go(planned("err", [3, 1, 2, 2]), saver, epochs=4)
    newest = latest(tmp_path)
    assert newest == tmp_path / name_of(12)
    assert load(newest).tree["writers"]["Checkpoint"] == {"score": 1.0, "best_step": 6}
    assert saver.best_path == tmp_path / name_of(6)
