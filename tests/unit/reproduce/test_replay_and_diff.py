"""A step again, bit for bit, and where two runs part: the library and the command."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep import Notice, checkpoint
from halfstep.callbacks import Checkpoint
from halfstep.cli import main
from halfstep.cli.main import app
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model
from halfstep.reproduce import diff, replay

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))


class Nudge(nn.Module):
    """Changes its input a little at one forward: a run that parts from the other there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.where(self.count == self.at, x * (1 + 2**-6), x) if self.training else x


def build(nudge: int = 0, fingerprint_every: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), Nudge(nudge), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = Model(
        net, nn.CrossEntropyLoss(), optimizer, "O2", ema=0.9, fingerprint_every=fingerprint_every
    )
    return {
        "model": model,
        "data": hs.data.Dataset({"x": X, "y": Y}).shuffle().batch(8),
        "epochs": 3,
    }


def run(folder: Path, every: int = 6, **options: Any) -> Any:
    parts = build(**options)
    callbacks = [
        hs.JSONLLog(folder / "log.jsonl"),
        Checkpoint(folder, every_steps=every, every_epochs=None, keep=100),
    ]
    result = parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)
    return parts["model"], result


def pair() -> tuple[Any, Any]:
    """A builder that does not say for how many epochs, and a schedule that has no rate for more than three."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = Model(
        net, nn.CrossEntropyLoss(), optimizer, schedule=[0.1 / (i + 1) for i in range(24)]
    )
    return model, hs.data.Dataset((X, Y)).batch(8)


class Caught(Callback):
    """What a step looked like while the run was first made."""

    exact = True

    def __init__(self, at: int) -> None:
        self.at, self.row, self.output, self.weights = at, None, None, None

    def begin(self, run: Run) -> None:
        run.model.net.register_forward_hook(self.hook)
        self.run = run

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.run.position == self.at - 1:
            self.output = output.detach().clone()

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.at:
            self.row, self.weights = row, [p.detach().clone() for p in run.net.parameters()]


@pytest.mark.parametrize("step", [1, 2, 6, 7, 11, 24])
def test_a_replayed_step_is_that_very_step(tmp_path: Path, step: int) -> None:
    caught = Caught(step)
    parts = build()
    callbacks = [caught, Checkpoint(tmp_path, every_steps=6, every_epochs=None, keep=100)]
    parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)
    found = replay(build, tmp_path, step)
    assert found.row == caught.row
    assert torch.equal(found.outputs[""], caught.output)  # dropout and precision included
    assert set(found.gradients) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert set(found.inputs) == {"", "0", "1", "2", "3", "4"}
    moved = [name for name in found.before if found.before[name] != found.after[name]]
    assert "net.0.weight" in moved
    expected = "the beginning" if step < 7 else f"step-{(step - 1) // 6 * 6:09d}"
    assert expected in found.origin


def test_gradients_of_a_replay_explain_its_update(tmp_path: Path) -> None:
    run(tmp_path)
    found = replay(build, tmp_path, 9)
    assert found.row is not None
    norm = torch.stack(
        [g.double().norm() / found.row.scale for g in found.gradients.values()]
    ).norm()
    assert float(norm) == pytest.approx(found.row.grad_norm, rel=1e-6)  # float32 sums


def test_runs_that_are_equal_are_found_equal(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b", build=(build, build))
    assert [(d.by, d.step) for d in found] == [
        ("by the logs", None),
        ("by the checkpoints", None),
        ("by replay", None),
    ]
    assert found[0].equal_until == 24


@pytest.mark.parametrize("at", [1, 5, 14])
def test_the_first_differing_step_and_its_tensors_are_named(tmp_path: Path, at: int) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", nudge=at)
    logs, checkpoints, by_replay = diff(
        tmp_path / "a", tmp_path / "b", build=(build, lambda: build(nudge=at))
    )
    assert logs.step == at
    assert "fingerprint" in logs.names
    assert logs.equal_until == at - 1
    assert checkpoints.step == -(-at // 6) * 6
    assert by_replay.step == at
    assert "net.4.weight" in by_replay.names
    assert by_replay.equal_until == at - 1


def test_fingerprints_see_what_the_loss_does_not(tmp_path: Path) -> None:
    """The update of step 5 differs; its loss, computed before, may not: without fingerprints the logs are late."""
    run(tmp_path / "a")
    run(tmp_path / "b", nudge=5)
    logs = diff(tmp_path / "a", tmp_path / "b")[0]
    assert logs.step == 5
    assert "fingerprint" in logs.names


@pytest.mark.parametrize("step", [3, 6, 8])
def test_an_evaluation_after_the_step_is_not_taken_for_it(tmp_path: Path, step: int) -> None:
    def evaluated() -> dict[str, Any]:
        return {
            **build(),
            "valid": hs.data.Dataset({"x": X[:5], "y": Y[:5]}).batch(5),
            "valid_every_steps": 3,
        }

    caught = Caught(step)
    parts = evaluated()
    parts.pop("model").fit(
        **parts, callbacks=[caught, Checkpoint(tmp_path, every_steps=4, every_epochs=None)]
    )
    found = replay(evaluated, tmp_path, step)
    assert torch.equal(found.outputs[""], caught.output)
    assert found.batch[0].shape == (len(caught.output), 6)


@pytest.mark.parametrize("step", [2, 9, 24])
def test_a_run_is_as_long_as_it_was_when_the_builder_does_not_say(
    tmp_path: Path, step: int
) -> None:
    caught, (model, data) = Caught(step), pair()
    model.fit(3, data, callbacks=[caught, Checkpoint(tmp_path)])
    assert replay(pair, tmp_path, step).row == caught.row
    assert [d.step for d in diff(tmp_path, tmp_path, build=(pair, pair))] == [None, None]


def test_a_step_has_the_epochs_of_the_fit_that_made_it(tmp_path: Path) -> None:
    """The second fit went on for longer; one callback needs no list."""
    seen: list[int] = []

    class Seen(Callback):
        def begin(self, run: Run) -> None:
            seen.append(run.epochs)

    def short() -> dict[str, Any]:
        parts = {**build(), "callbacks": Seen()}
        del parts["epochs"]
        return parts

    for epochs in (1, 2):
        build()["model"].fit(
            epochs, build()["data"], callbacks=[Checkpoint(tmp_path)], resume="auto"
        )
    for step in (3, 8, 9, 16):
        replay(short, tmp_path, step)
    assert seen == [1, 1, 2, 2]
    (tmp_path / checkpoint.name_of(8) / "tree.json").unlink()
    replay(short, tmp_path, 3)
    assert seen[-1] == 2  # the next whole one


def fit(folder: Path, epochs: int, log: Callback, **options: Any) -> None:
    parts = build()
    saving = Checkpoint(folder, every_steps=6, every_epochs=None, keep=100)
    parts["model"].fit(epochs, parts["data"], callbacks=[log, saving], **options)


def test_clocks_files_and_lengths_are_no_difference(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    fit(a, 2, hs.JSONLLog(a / "log.jsonl", times=True))
    fit(b, 3, hs.JSONLLog(b / "log.jsonl", times=True, every=2))
    logs, checkpoints = diff(a, b)
    assert (logs.step, logs.equal_until) == (None, 16)
    assert (checkpoints.step, checkpoints.equal_until) == (None, 12)
    assert str(logs).endswith(f"{b} is recorded up to step 24, {a} up to step 16")
    assert "up to step 24" in diff(b, a)[1].note
    assert [d.note for d in diff(a, a)] == ["", ""]


def test_another_kind_of_log_is_no_difference(tmp_path: Path) -> None:
    fit(tmp_path / "a", 1, hs.JSONLLog(tmp_path / "a.jsonl"))
    fit(tmp_path / "b", 1, hs.CSVLog(tmp_path / "b.csv"))
    assert [(d.step, d.equal_until) for d in diff(tmp_path / "a", tmp_path / "b")] == [
        (None, 8)
    ]  # the last


def test_evaluations_are_compared_with_evaluations(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    fit(a, 1, hs.JSONLLog(a / "log.jsonl"))
    for folder, size in ((b, 5), (c, 7)):
        valid = hs.data.Dataset({"x": X[:size], "y": Y[:size]}).batch(5)
        fit(folder, 1, hs.JSONLLog(folder / "log.jsonl"), valid=valid, valid_every_steps=4)
    assert (diff(a, b)[0].step, diff(a, b)[0].equal_until) == (None, 8)
    logs = diff(b, c)[0]
    assert (logs.step, logs.names, logs.equal_until) == (4, ("valid_loss",), 3)


def test_an_unfinished_last_line_of_a_log_is_left_out(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    log = tmp_path / "b" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:20]) + '{"kind": "é'.encode()[:-1])  # killed inside a letter
    logs = diff(tmp_path / "a", tmp_path / "b")[0]
    assert (logs.step, logs.equal_until) == (None, 20)
    for bad in (b'{"kind": "st\n', b"3\n", b"\xff\n"):
        log.write_bytes(b"".join([*lines[:2], bad, *lines[2:]]))
        with pytest.raises(ValueError, match=r"b/log.jsonl, line 3: expected a JSON object, got"):
            diff(tmp_path / "a", tmp_path / "b")


def test_every_bit_of_a_tensor_is_compared_in_any_layout(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {
        "image": image,
        "nan": torch.tensor(torch.nan),
        "zero": torch.tensor(0.0),
        "empty": torch.empty(0, 3),
    }
    other = {**tree, "image": image.contiguous()}
    part = {
        **tree,
        "image": image.clone().index_fill_(3, torch.tensor(4), -0.0),
        "zero": torch.tensor(-0.0),
    }
    for name, each in {"a": tree, "b": other, "c": part}.items():
        checkpoint.save(tmp_path / name / checkpoint.name_of(3), each)
    assert [(d.step, d.equal_until) for d in diff(tmp_path / "a", tmp_path / "b")] == [(None, 3)]
    assert diff(tmp_path / "a", tmp_path / "c")[0].names == ("image", "zero")


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        for step in (1, 2):
            checkpoint.save(folder / checkpoint.name_of(step), {"x": torch.arange(step)})
    broken = tmp_path / "b" / checkpoint.name_of(1) / "tensors.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.warns(Notice, match=f"left out: .*{checkpoint.name_of(1)}"):
        assert [(d.step, d.equal_until) for d in diff(tmp_path / "a", tmp_path / "b")] == [
            (None, 2)
        ]
    (tmp_path / "a" / checkpoint.name_of(2) / "tree.json").unlink()
    with (
        pytest.warns(Notice),
        pytest.raises(ValueError, match="nor a checkpoint of the same step that is whole"),
    ):
        diff(tmp_path / "a", tmp_path / "b")


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (
        lambda p: replay(build, p / "none", 3),
        "expected a folder of checkpoints, found nothing",
    ),
    "step 0": (lambda p: replay(build, p, 0), "expected a step of 1 or more, got 0"),
    "beyond the end": (lambda p: replay(build, p, 99), "the run ended before step 99"),
    "no number of epochs": (lambda p: replay(pair, p, 1), 'no epochs. Return .*"epochs": …'),
    "a class for a callback": (
        lambda p: replay(lambda: {**build(), "callbacks": [Callback]}, p, 1),
        "Call it",
    ),
    "a builder of nothing": (
        lambda p: replay(lambda: 3, p, 1),
        "expected a function that returns .model, data.",
    ),
    "an unknown argument": (
        lambda p: replay(lambda: {**build(), "epoch": 3}, p, 1),
        "epoch is no argument of fit",
    ),
    "diff without a folder": (lambda p: diff(p, p / "none"), "expected the folder of a run"),
    "diff without anything": (lambda p: diff(p, p), "share neither a log.jsonl nor a checkpoint"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, tmp_path: Path) -> None:
    act, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        act(tmp_path)


# the command

BUILDER = """
import torch
from torch import nn
import halfstep as hs
from halfstep.model import Model

def build():
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    x = torch.randn(40, 6); y = torch.randint(0, 3, (40,))
    model = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return {"model": model, "data": hs.data.Dataset((x, y)).batch(8), "epochs": 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a builder and a run of it."""
    (tmp_path / "my_build.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_build", raising=False)
    import my_build  # type: ignore[import-not-found]

    for name in ("a", "b"):
        parts = my_build.build()
        parts["model"].fit(parts["epochs"], parts["data"], callbacks=[Checkpoint(tmp_path / name)])
    return tmp_path


def test_the_commands(project: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(
        app, ["replay", "a", "--step", "7", "--build", "my_build:build", "--save", "s.safetensors"]
    )
    assert shown.exit_code == 0, shown.output
    assert "step 7, from" in shown.output
    assert "grad weight" in shown.output
    assert (project / "s.safetensors").is_file()
    same = runner.invoke(app, ["diff", "a", "b", "--json"])
    assert same.exit_code == 0
    assert json.loads(same.output) == [
        {"by": "by the checkpoints", "step": None, "names": [], "equal_until": 10, "note": ""}
    ]


def test_the_installed_command_tells_mistakes_without_a_traceback(project: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from halfstep.cli import main; main()",
        "replay",
        "a",
        "--step",
        "7",
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 2
    assert (
        "halfstep: replay: say how the run was built: --build package.module:function"
        in told.stderr
    )
    assert "Traceback" not in told.stderr


FAILING = """
import sys

def attribute(): return None.shape
def silent(): raise AssertionError
def ended(): raise EOFError("Ran out of input")
def value(): raise ValueError("expected another")
def leaves(): sys.exit(7)
"""


def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["halfstep", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr().err


FAILURES = {
    "attribute": "halfstep: AttributeError: 'NoneType' object has no attribute 'shape'\n",
    "silent": "halfstep: AssertionError\n",
    "ended": "halfstep: EOFError: Ran out of input\n",
    "value": "halfstep: expected another\n",
}


@pytest.mark.parametrize("name", FAILURES)
def test_whatever_fails_ends_the_command_with_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "failing_build.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_build", raising=False)
    words = ["replay", str(tmp_path), "--step", "1", "--build", f"failing_build:{name}"]
    code, told = command(monkeypatch, capsys, *words)
    assert code == 2
    assert FAILURES[name] in told
    assert "Traceback" not in told
    code, told = command(monkeypatch, capsys, *words, "--debug")
    assert code == 2
    assert f"in {name}\n" in told
    assert command(monkeypatch, capsys, *words[:-1], "failing_build:leaves")[0] == 7


def test_one_means_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 1), ("b", 2)):
        checkpoint.save(tmp_path / name / checkpoint.name_of(1), {"x": value})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert command(monkeypatch, capsys, "diff", a, b)[0] == 1
    assert command(monkeypatch, capsys, "diff", a, a)[0] == 0
    assert command(monkeypatch, capsys, "diff", a)[0] == 2
    code, told = command(monkeypatch, capsys, "diff", a, b, "--build-b", "my_build:build")
    assert code == 2
    assert "--build-b: expected --build too" in told
