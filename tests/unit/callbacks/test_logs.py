"""CSV and JSONL logs: exact numbers, and after a resume the bytes of an uninterrupted run."""

import csv
import json
import math
import os
import re
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.callbacks import (
    Checkpoint,
    CSVLog,
    History,
    JSONLLog,
    Lambda,
    LRMonitor,
    ProgressLines,
    StepTimer,
    TimeMonitor,
)
from halfstep.engine import Row, Run
from halfstep.model import Model
from tests.unit.callbacks.test_monitors import (
    SINKS,
    data_with_inf,
    fit,
    make_model,
    make_samples,
    plain_losses,
)

STEP = (
    "kind,epoch,step,global_step,samples,loss,cycle_loss,lr,scale,skipped,grad_norm,updated,"
    "fingerprint"
)


def both_logs(folder: Path, **how: Any) -> list[Any]:
    return [CSVLog(folder / "log.csv", **how), JSONLLog(folder / "log.jsonl", **how)]


def log_bytes(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("log.csv", "log.jsonl")]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("sink", SINKS)
def test_lines_are_exact_and_the_same_for_every_sink(tmp_path: Path, sink: int | None) -> None:
    run = fit(
        2, *both_logs(tmp_path), sink=sink, valid=make_samples(30).batch(7), valid_every_steps=10
    )
    rows = read_csv(tmp_path / "log.csv")
    lines = read_jsonl(tmp_path / "log.jsonl")
    assert (tmp_path / "log.csv").read_text().splitlines()[0] == f"{STEP},acc,valid_loss,valid_acc"
    kinds = [(int(r["global_step"]), r["kind"]) for r in rows]
    steps = [(n, "step") for n in range(1, 27)]
    assert kinds == sorted(
        [*steps, *((n, "evaluation") for n in (10, 13, 20, 26))],
        key=lambda k: (k[0], k[1] != "step"),
    )
    assert kinds == [(o["global_step"], o["kind"]) for o in lines]
    assert [float(r["loss"]) for r in rows if r["kind"] == "step"] == plain_losses(2)
    assert [o["loss"] for o in lines if o["kind"] == "step"] == plain_losses(2)
    scores = [(e["valid_loss"], e["valid_acc"]) for e in run.history]
    assert [
        (float(r["valid_loss"]), float(r["valid_acc"])) for r in rows if r["kind"] == "evaluation"
    ] == scores
    assert [(o["valid_loss"], o["valid_acc"]) for o in lines if o["kind"] == "evaluation"] == scores
    assert {(r["lr"], r["skipped"], r["updated"]) for r in rows if r["kind"] == "step"} == {
        ("0.5", "0", "1")
    }
    assert {r["loss"] for r in rows if r["kind"] == "evaluation"} == {""}


def test_every_and_times(tmp_path: Path) -> None:
    before = time.time()
    fit(1, *both_logs(tmp_path, every=5, times=True))
    assert [r["global_step"] for r in read_csv(tmp_path / "log.csv")] == ["5", "10"]
    assert [o["global_step"] for o in read_jsonl(tmp_path / "log.jsonl")] == [5, 10]
    first, second = [float(r["time"]) for r in read_csv(tmp_path / "log.csv")]
    assert before <= first <= second <= time.time()


def test_numbers_that_are_none_and_several_groups(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    groups = [{"params": [net.weight], "lr": 0.1}, {"params": [net.bias], "lr": 1e-07}]
    trained = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(groups), nonfinite="skip")
    trained.fit(1, data_with_inf(6), callbacks=both_logs(tmp_path))
    row = read_csv(tmp_path / "log.csv")[5]
    line = read_jsonl(tmp_path / "log.jsonl")[5]
    assert math.isnan(float(row["loss"]))
    assert (row["lr_0"], row["lr_1"], row["skipped"], row["updated"]) == ("0.1", "1e-07", "1", "0")
    assert (line["loss"], line["lr"], line["skipped"]) == ("NaN", [0.1, 1e-07], True)
    assert math.isnan(float(line["loss"]))


class Confusion:
    def update(self, outputs: Tensor, labels: Tensor) -> None: ...

    def compute(self) -> Tensor:
        return torch.tensor([[1.0, math.inf], [0.0, 2.0]])

    def reset(self) -> None: ...


def test_scores_that_are_tables(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    trained = Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters()),
        metrics={"table": Confusion()},
        train_metrics=False,
    )
    fit(1, *both_logs(tmp_path), of=trained, valid=make_samples(6).batch(6))
    expected = [[1.0, "Infinity"], [0.0, 2.0]]
    assert json.loads(read_csv(tmp_path / "log.csv")[-1]["valid_table"]) == expected
    assert read_jsonl(tmp_path / "log.jsonl")[-1]["valid_table"] == expected


def test_a_cell_of_ones_own_is_logged(tmp_path: Path) -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}])
    own = Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        step=lambda x, y: nn.functional.cross_entropy(net(x), y),
    )
    fit(1, *both_logs(tmp_path), of=own)
    assert [len(read_csv(tmp_path / "log.csv")), len(read_jsonl(tmp_path / "log.jsonl"))] == [
        13,
        13,
    ]


# stop and resume

EVALUATION: dict[str, Any] = {"valid_every_steps": 4}


def train_logged(folder: Path, *more: Any, sink: int | None = 7, **how: Any) -> Run:
    """Two epochs of 13 steps; a checkpoint at every fifth step, and none when it fails."""
    saved = Checkpoint(folder / "run", every_steps=5, every_epochs=None, on_error=False)
    trained = make_model(precision="O2", accumulate=4)
    valid = make_samples(30).batch(7)
    return fit(
        2,
        *both_logs(folder, overwrite=True),
        *more,
        saved,
        of=trained,
        sink=sink,
        valid=valid,
        **{**EVALUATION, **how},
    )


@pytest.fixture(scope="module")
def uninterrupted_logs(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("whole")
    train_logged(folder)
    return log_bytes(folder)


def stop_at(n: int) -> Lambda:
    def step(run: Run, row: Row) -> None:
        if row.global_step == n:
            raise KeyboardInterrupt

    return Lambda(step=step)


@pytest.mark.parametrize(
    ("n", "sink"), [(1, 7), (5, 1), (6, 7), (13, 7), (14, 1), (16, 7), (21, None), (26, 1)]
)
def test_a_run_stopped_at_step_n_and_resumed_has_the_same_bytes(
    tmp_path: Path, uninterrupted_logs: list[bytes], n: int, sink: int | None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_logged(tmp_path, stop_at(n), sink=sink)
    train_logged(tmp_path, sink=sink, resume="auto")
    assert log_bytes(tmp_path) == uninterrupted_logs


def test_a_signal_before_an_evaluation_loses_no_line(
    tmp_path: Path, uninterrupted_logs: list[bytes]
) -> None:
    """SIGTERM at step 16, whose evaluation is then left for the resumed run."""
    send_signal = Lambda(
        step=lambda run, row: row.global_step == 16 and os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(SystemExit):
        train_logged(tmp_path, send_signal, sink=1)
    assert read_jsonl(tmp_path / "log.jsonl")[-1]["kind"] == "step"
    train_logged(tmp_path, resume="auto")
    assert log_bytes(tmp_path) == uninterrupted_logs


def test_what_callbacks_know_goes_on_over_a_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def watchers() -> list[Any]:
        return [
            History(),
            LRMonitor(3),
            StepTimer(warmup=2, show=False),
            TimeMonitor(),
            ProgressLines(4, start=0),
        ]

    train_logged(tmp_path / "whole", *(full := watchers()))
    lines = re.findall(r"^(?:loss: |epoch: ).*", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(KeyboardInterrupt):
        train_logged(tmp_path, *watchers(), stop_at(8), sink=1)
    first = re.findall(r"^(?:loss: |epoch: ).*", capsys.readouterr().out, re.MULTILINE)
    train_logged(tmp_path, *(again := watchers()), resume="auto")
    second = re.findall(r"^(?:loss: |epoch: ).*", capsys.readouterr().out, re.MULTILINE)
    assert (again[0].rows, again[0].epochs) == (full[0].rows, full[0].epochs)
    assert (again[1].steps, again[1].rates) == (full[1].steps, full[1].rates)
    # Steps 3 to 5 of the first process; of the second all but its first visit, 6 to 8.
    assert again[2].times().steps == 3 + 18
    assert first == lines[:4]  # 1, 3, 5, 6: the last one again after the resume
    assert second == lines[3:]


def test_a_log_that_does_not_fit_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train_logged(tmp_path, stop_at(12))
    log = tmp_path / "log.csv"
    content = log.read_bytes()
    log.write_bytes(content[:300])
    with pytest.raises(
        ValueError,
        match=r"CSVLog: expected the log .*log\.csv, with \d+ bytes or more, found one of 300",
    ):
        train_logged(tmp_path, resume="auto")
    assert log.stat().st_size == 300  # nothing is cut before all is known to fit
    log.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"found no file\. Put the file back, resume from an older checkpoint",
    ):
        train_logged(tmp_path, resume="auto")
    log.write_bytes(content.replace(b"valid_acc", b"valid_top", 1))
    with pytest.raises(
        ValueError, match=r"has the columns kind.*valid_top, this run has kind.*valid_acc"
    ):
        train_logged(tmp_path, resume="auto")
    log.write_bytes(content)
    train_logged(tmp_path, resume="auto")


def test_a_new_run_leaves_an_old_log_alone(tmp_path: Path) -> None:
    fit(1, *both_logs(tmp_path / "new folder"))
    before = log_bytes(tmp_path / "new folder")
    for log in both_logs(tmp_path / "new folder"):
        with pytest.raises(
            FileExistsError, match=r"exists, and this run starts anew.*or throw .* overwrite=True"
        ):
            fit(1, log)
    assert log_bytes(tmp_path / "new folder") == before
    fit(1, *both_logs(tmp_path / "new folder", overwrite=True))
    assert log_bytes(tmp_path / "new folder") == before
    (tmp_path / "empty.csv").touch()
    fit(1, CSVLog(tmp_path / "empty.csv"))
    assert (tmp_path / "empty.csv").read_bytes() == before[0]


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_notice_and_no_line_is_lost(tmp_path: Path) -> None:
    fit(2, CSVLog(tmp_path / "whole.csv"), sink=1)
    log = CSVLog(tmp_path / "log.csv")
    full = limit_file_size(1000)
    saved: list[dict[str, Any]] = []

    def visit(run: Run) -> None:
        if run.position == 2:
            full.__enter__()
        if run.position == 13:
            full.__exit__(None, None, None)
            saved.append(log.state_dict())

    with pytest.warns(
        hs.Notice, match=r"log\.csv cannot be written \(File too large\); its lines wait"
    ) as caught:
        fit(2, Lambda(visit=visit), log, sink=1)
    assert len(caught) == 1
    assert csv_bytes(tmp_path) == (tmp_path / "whole.csv").read_bytes()
    # state_dict was called before the log's own visit, and wrote what waited.
    offset = saved[0]["offset"]
    assert csv_bytes(tmp_path)[:offset].count(b"\n") == 1 + 13
    assert saved[0]["waiting"] == []


def csv_bytes(folder: Path) -> bytes:
    return (folder / "log.csv").read_bytes()


def test_lines_that_wait_are_in_the_checkpoint(tmp_path: Path) -> None:
    fit(1, CSVLog(tmp_path / "whole.csv"), sink=1)
    log = CSVLog(tmp_path / "log.csv")
    states = []

    def visit(run: Run) -> None:
        states.append(log.state_dict())

    with (
        limit_file_size(600),
        pytest.warns(hs.Notice, match="cannot be written"),
        pytest.warns(
            hs.Notice, match=r"the last \d+ lines could not be .* Nothing else of the run"
        ),
    ):
        fit(1, log, Lambda(visit=visit), sink=1)
    state = states[9]
    assert 0 < len(state["waiting"]) < 10
    again = CSVLog(tmp_path / "log.csv")
    again.load_state_dict(state)
    run = Run(make_model(), 1, 13, train_metrics=("acc",))
    again.begin(run)
    again.end(run)
    expected = (tmp_path / "whole.csv").read_bytes().splitlines()[:11]
    assert csv_bytes(tmp_path).splitlines() == expected


# files of another version


def without_field(path: Path, name: str) -> None:
    """The CSV file of a version that had no such field."""
    rows = list(csv.reader(path.read_text().splitlines()))
    column = rows[0].index(name)
    lines = [",".join(cell for i, cell in enumerate(row) if i != column) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def resume_csv(folder: Path, size_before: int) -> None:
    """Goes on with log.csv from its present length, as from a checkpoint, for a step."""
    log = CSVLog(folder / "log.csv")
    log.load_state_dict({"offset": size_before, "waiting": []})
    trained = make_model()
    run = Run(trained, 1, 13, train_metrics=("acc",))
    log.begin(run)
    log.step(run, Row(3, 1, 27, 8, 0.5, 0.5, 0.1, 1.0, False, 1.0, True, 7))
    log.visit(run)
    log.end(run)


def test_a_csv_file_without_a_new_field_goes_on_without_it(tmp_path: Path) -> None:
    fit(1, CSVLog(tmp_path / "log.csv"))
    without_field(tmp_path / "log.csv", "fingerprint")
    before = (tmp_path / "log.csv").read_text()
    with pytest.warns(
        hs.Notice,
        match=r"written by another version .* has no column for fingerprint, which is left out",
    ):
        resume_csv(tmp_path, len(before))
    after = (tmp_path / "log.csv").read_text()
    assert after == before + "step,3,1,27,8,0.5,0.5,0.1,1.0,0,1.0,1,,,\n"


def test_a_csv_file_from_before_training_metrics_goes_on_without_them(tmp_path: Path) -> None:
    fit(1, CSVLog(tmp_path / "log.csv"))
    without_field(tmp_path / "log.csv", "acc")
    before = (tmp_path / "log.csv").read_text()
    with pytest.warns(hs.Notice, match=r"has no column for acc, which is left out"):
        resume_csv(tmp_path, len(before))
    after = (tmp_path / "log.csv").read_text()
    assert after == before + "step,3,1,27,8,0.5,0.5,0.1,1.0,0,1.0,1,7,,\n"


def test_a_csv_file_with_a_field_that_is_gone_goes_on_with_an_empty_one(tmp_path: Path) -> None:
    fit(1, CSVLog(tmp_path / "log.csv"))
    content = (tmp_path / "log.csv").read_text().replace("fingerprint", "entropy", 1)
    (tmp_path / "log.csv").write_text(content)
    words = r"has no column for fingerprint, .* and has entropy, which stays empty"
    with pytest.warns(hs.Notice, match=words):
        resume_csv(tmp_path, len(content))
    assert read_csv(tmp_path / "log.csv")[-1]["entropy"] == ""


@pytest.mark.parametrize("column", ["lr", "valid_acc", "valid_loss", "kind"])
def test_a_csv_file_of_another_run_is_refused(column: str, tmp_path: Path) -> None:
    fit(1, CSVLog(tmp_path / "log.csv"))
    without_field(tmp_path / "log.csv", column)
    content = (tmp_path / "log.csv").read_bytes()
    with pytest.raises(ValueError, match="Resume with the metrics, parameter groups and times="):
        resume_csv(tmp_path, len(content))
    assert (tmp_path / "log.csv").read_bytes() == content


def test_a_history_without_a_new_field_goes_on(tmp_path: Path) -> None:
    history = History()
    fit(1, history)
    state = history.state_dict()
    del state["rows"]["fingerprint"]
    again = History()
    again.load_state_dict(state)
    assert again.rows["fingerprint"] == [0] * 13
    assert again.rows["loss"] == history.rows["loss"]
    again.state_dict()
