"""The history of a run by number and by name."""

import json

import pytest

from halfstep.engine.run import HistoryEntries
from tests.unit.model.test_train_metrics import accuracy, fit_data, make_batches, make_model

ENTRIES = [{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0, "valid_acc": 0.5}]


def test_a_name_gives_the_value_of_each_entry() -> None:
    history = HistoryEntries(ENTRIES)
    assert history["loss"] == [2.0, 1.0]
    assert history["valid_acc"] == [None, 0.5]
    assert history[-1] == ENTRIES[-1]
    assert history[:1] == ENTRIES[:1]
    assert history == ENTRIES
    assert json.loads(json.dumps(history)) == ENTRIES


def test_a_name_that_no_entry_has() -> None:
    with pytest.raises(
        KeyError, match=r"no entry has 'los'; did you mean 'loss'\? names are: epoch"
    ):
        HistoryEntries(ENTRIES)["los"]
    with pytest.raises(KeyError, match="names are: -"):
        HistoryEntries()["loss"]


def test_fit_fills_it() -> None:
    run = fit_data(make_model(accuracy()), valid=make_batches())
    assert run.history["acc"] == [entry["acc"] for entry in run.history]
    assert len(run.history["valid_acc"]) == len(run.history)
