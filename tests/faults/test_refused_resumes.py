"""A resume that is refused after its checkpoint was checked leaves everything as it was, too.

By code of the user's that fails while it loads, by the begin of a callback, by a schedule.
"""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks import Checkpoint, CSVLog, EarlyStopping, JSONLLog
from halfstep.engine import Callback, Run
from tests.faults.test_mutated_checkpoints import (
    RUNS,
    SAVED_STEP,
    Counted,
    Parts,
    everything,
    hs_seed,
    make_dataset,
    same_everything,
    saved_run,
)

ADAM = "fp32, Adam, schedule, CSVLog"
MOMENTUM = "O2, SGD with momentum, inside a cycle"
CELL = "a cell of the user's own"


def trained_parts(name: str, folder: Path) -> Parts:
    """A run with a state to lose, and the logs of the saved one."""
    for log in saved_run(name)[1].glob("log.*"):
        shutil.copy(log, folder)
    hs_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = RUNS[name](folder)
        parts.model.fit(1, list(make_dataset())[:2])
    return parts


def save_tree(name: str, folder: Path) -> Path:
    return checkpoint.save(folder / checkpoint.name_of(SAVED_STEP), saved_run(name)[0])


class FailsToLoad(Counted):
    """Fails after it has changed itself."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        raise LookupError("of the user")


FailsToLoad.__name__ = "Counted"  # the name of its state in the checkpoint


class FailsToBegin(Callback):
    writes = True

    def begin(self, run: Run) -> None:
        with torch.no_grad():
            run.net.first.weight.zero_()
        raise LookupError("of the user")


def fail_in_callback(parts: Parts, folder: Path) -> None:
    parts.callbacks = [c for c in parts.callbacks if not isinstance(c, Counted)]
    counted = FailsToLoad()
    counted.steps = 77
    counted.by_epoch = {1: 77}
    parts.callbacks.append(counted)


def fail_in_optimizer(parts: Parts, folder: Path) -> None:
    def hook(optimizer: torch.optim.Optimizer) -> None:
        raise LookupError("of the user")

    parts.model.optimizer.register_load_state_dict_post_hook(hook)


def fail_in_network(parts: Parts, folder: Path) -> None:
    """The last layer refuses, when the others have been loaded."""

    def hook(*_: Any) -> None:
        raise LookupError("of the user")

    parts.model.net.last.register_load_state_dict_pre_hook(hook)


def fail_in_cell(parts: Parts, folder: Path) -> None:
    cell = parts.model.step.step
    load = cell.load_state_dict

    def load_and_fail(saved: dict[str, Any]) -> None:
        load(saved)
        if saved["calls"] == SAVED_STEP:
            raise LookupError("of the user")

    cell.load_state_dict = load_and_fail


def fail_in_begin(parts: Parts, folder: Path) -> None:
    parts.callbacks.append(FailsToBegin())


def later_checkpoints(parts: Parts, folder: Path) -> None:
    parts.callbacks.append(Checkpoint(folder / "run"))
    checkpoint.save(folder / "run" / checkpoint.name_of(SAVED_STEP + 2), {"a": 1})


def plateau_beside_schedule(parts: Parts, folder: Path) -> None:
    parts.callbacks.append(hs.ReduceLROnPlateau())
    parts.callbacks[-1].writes = True


def unknown_score(parts: Parts, folder: Path) -> None:
    parts.callbacks.append(EarlyStopping("acc"))
    parts.callbacks[-1].writes = True


def short_schedule(parts: Parts, folder: Path) -> None:
    parts.options["steps_per_epoch"] = 15


def missing_csv(parts: Parts, folder: Path) -> None:
    (folder / "log.csv").write_text("kind,epoch\n")


def short_jsonl(parts: Parts, folder: Path) -> None:
    (folder / "log.jsonl").write_text("{}\n")


def other_columns(parts: Parts, folder: Path) -> None:
    log = folder / "log.csv"
    log.write_bytes(log.read_bytes().replace(b"valid_loss", b"valid_best", 1))


REFUSALS: dict[str, tuple[str, Callable[[Parts, Path], None], str]] = {
    "a callback that fails to load": (ADAM, fail_in_callback, r"callbacks\.Counted: .*of the user"),
    "an optimizer's hook": (ADAM, fail_in_optimizer, "load_state_dict of Adam failed: Lookup"),
    "an optimizer's hook, O2": (MOMENTUM, fail_in_optimizer, "load_state_dict of SGD failed"),
    "a module's hook": (MOMENTUM, fail_in_network, "load_state_dict of Network failed: Lookup"),
    "a cell": (CELL, fail_in_cell, r"step\.own: Cell\.load_state_dict failed: LookupError"),
    "a callback's begin": (ADAM, fail_in_begin, "of the user"),
    "a callback's begin, with a cell": (CELL, fail_in_begin, "of the user"),
    "later checkpoints": (ADAM, later_checkpoints, "holds checkpoints of later steps"),
    "a schedule and ReduceLROnPlateau": (ADAM, plateau_beside_schedule, "has a schedule"),
    "a score that is not computed": (MOMENTUM, unknown_score, "expected metric as one of"),
    "a schedule that is too short": (ADAM, short_schedule, "expected rates for 30 updates"),
    "a log cut short": (ADAM, missing_csv, r"expected the log .*log\.csv.* found one of 11 bytes"),
    "a log cut short, JSONL": (MOMENTUM, short_jsonl, "found one of 3 bytes"),
    "a log with other columns": (ADAM, other_columns, "Resume with the metrics"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_late_is_taken_back(name: str, tmp_path: Path) -> None:
    run_name, make_refused, words = REFUSALS[name]
    parts = trained_parts(run_name, tmp_path)
    make_refused(parts, tmp_path)
    before = everything(parts, tmp_path)
    saved = save_tree(run_name, tmp_path / "saved")
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises((ValueError, OSError, LookupError), match=words),
    ):
        parts.model.fit(2, parts.data, callbacks=parts.callbacks, resume=saved, **parts.options)
    assert same_everything(before, everything(parts, tmp_path)) == []


def test_a_missing_log_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    """With resume="auto": the log and the checkpoints are those of one run."""

    def build() -> Parts:
        return trained_parts(MOMENTUM, tmp_path)

    parts = build()
    saver = Checkpoint(tmp_path / "run")
    with warnings.catch_warnings(action="ignore"):
        (tmp_path / "log.jsonl").unlink()
        parts.model.fit(1, parts.data, callbacks=[*parts.callbacks, saver])
        parts = build()
    (tmp_path / "log.jsonl").unlink()
    before = everything(parts, tmp_path)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(FileNotFoundError, match=r"found no file\. Put the file back"),
    ):
        parts.model.fit(
            2, parts.data, callbacks=[*parts.callbacks, Checkpoint(tmp_path / "run")], resume="auto"
        )
    assert same_everything(before, everything(parts, tmp_path)) == []
    assert not (tmp_path / "log.jsonl").exists()


def test_a_new_run_that_is_refused_leaves_the_log_of_the_old_one(tmp_path: Path) -> None:
    """overwrite=True means it when the run begins, not when another callback refuses it."""
    parts = trained_parts(MOMENTUM, tmp_path)
    content = (tmp_path / "log.jsonl").read_bytes()
    checkpoint.save(tmp_path / "run" / checkpoint.name_of(3), {"a": 1})
    logs = [JSONLLog(tmp_path / "log.jsonl", overwrite=True), CSVLog(tmp_path / "new.csv")]
    with pytest.raises(FileExistsError, match="checkpoints of another run"):
        parts.model.fit(1, parts.data, callbacks=[*logs, Checkpoint(tmp_path / "run")])
    assert (tmp_path / "log.jsonl").read_bytes() == content
    assert not (tmp_path / "new.csv").exists()
    shutil.rmtree(tmp_path / "run")
    with warnings.catch_warnings(action="ignore"):
        parts.model.fit(1, parts.data, callbacks=[*logs, Checkpoint(tmp_path / "run")])
    assert (tmp_path / "log.jsonl").read_bytes() != content
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 7


@pytest.mark.parametrize("precision", ["fp32", "O2", "fp16"])
def test_a_step_takes_back_a_load_that_fails(precision: str) -> None:
    """TrainStep.load_state_dict outside of fit, with a hook that fails at its end."""

    def build(seed: int) -> hs.TrainStep:
        torch.manual_seed(seed)
        net = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, ema=0.9)
        step(torch.randn(5, 4), torch.randn(5, 3))
        return step

    def hook(optimizer: torch.optim.Optimizer) -> None:
        raise LookupError("of the user")

    step = build(0)
    saved = build(1).state_dict()
    before = {name: value.clone() for name, value in step.fingerprints().items()}
    buffers = [value["momentum_buffer"] for value in step.optimizer.state.values()]
    handle = step.optimizer.register_load_state_dict_post_hook(hook)
    with pytest.raises(ValueError, match="load_state_dict of SGD failed: LookupError: of the user"):
        step.load_state_dict(saved)
    after = step.fingerprints()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert next(v["momentum_buffer"] for v in step.optimizer.state.values()) is buffers[0]
    handle.remove()
    step.load_state_dict(saved)
    assert torch.equal(step.net.weight, build(1).net.weight)
