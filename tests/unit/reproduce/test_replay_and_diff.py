"""One step again, bit for bit, and where two runs part: the functions and the commands."""

import json
import shutil
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
from tests.support.user_module import write_user_module

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))


class Nudge(nn.Module):
    """Changes its input a little in one forward pass, so that two runs differ from there on."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.count += 1
        return torch.where(self.count == self.at, x * (1 + 2**-6), x)


def build(nudge: int = 0) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), Nudge(nudge), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, "O2", ema=0.9, fingerprint_every=1)
    data = hs.data.Dataset({"x": X, "y": Y}).shuffle().batch(8)
    return {"model": model, "data": data, "epochs": 3}


def build_without_epochs() -> tuple[Any, Any]:
    """Does not say for how many epochs; its schedule has no rate for more than three."""
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rates = [0.1 / (i + 1) for i in range(24)]
    model = Model(net, nn.CrossEntropyLoss(), optimizer, schedule=rates)
    return model, hs.data.Dataset((X, Y)).batch(8)


def save_every(folder: Path, steps: int) -> Checkpoint:
    return Checkpoint(folder, every_steps=steps, every_epochs=None, keep=100)


def train(folder: Path, *, nudge: int = 0) -> None:
    """A run of 24 steps with a log and a checkpoint every 6 steps."""
    parts = build(nudge)
    callbacks = [hs.JSONLLog(folder / "log.jsonl"), save_every(folder, 6)]
    parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)


def train_with_log(folder: Path, epochs: int, log: Callback, **options: Any) -> None:
    parts = build()
    callbacks = [log, save_every(folder, 6)]
    parts["model"].fit(epochs, parts["data"], callbacks=callbacks, **options)


class StepRecorder(Callback):
    """Records a step while the run is made for the first time."""

    exact = True

    def __init__(self, step: int) -> None:
        self.recorded_step = step
        self.row: Row | None = None
        self.output: Tensor | None = None
        self.run: Run | None = None

    def begin(self, run: Run) -> None:
        run.model.net.register_forward_hook(self.record_output)
        self.run = run

    def record_output(self, module: nn.Module, args: Any, output: Tensor) -> None:
        assert self.run is not None
        if self.run.position == self.recorded_step - 1:
            self.output = output.detach().clone()

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.recorded_step:
            self.row = row


# Replay


@pytest.mark.parametrize("step", [1, 2, 6, 7, 11, 24])
def test_a_replayed_step_is_that_very_step(tmp_path: Path, step: int) -> None:
    recorder = StepRecorder(step)
    parts = build()
    callbacks = [recorder, save_every(tmp_path, 6)]
    parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)

    result = replay(build, tmp_path, step)
    assert result.row == recorder.row
    assert torch.equal(result.outputs[""], recorder.output)  # dropout and precision included
    assert set(result.gradients) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert set(result.inputs) == {"", "0", "1", "2", "3", "4"}
    assert result.before["net.0.weight"] != result.after["net.0.weight"]
    origin = "the beginning" if step < 7 else f"step-{(step - 1) // 6 * 6:09d}"
    assert origin in result.origin


def test_gradients_of_a_replay_explain_its_update(tmp_path: Path) -> None:
    train(tmp_path)
    result = replay(build, tmp_path, 9)
    assert result.row is not None
    scale = result.row.scale
    norms = [gradient.double().norm() / scale for gradient in result.gradients.values()]
    # The step sums in float32.
    assert float(torch.stack(norms).norm()) == pytest.approx(result.row.grad_norm, rel=1e-6)


@pytest.mark.parametrize("step", [3, 6, 8])
def test_an_evaluation_after_the_step_is_not_taken_for_it(tmp_path: Path, step: int) -> None:
    def build_with_evaluation() -> dict[str, Any]:
        valid = hs.data.Dataset({"x": X[:5], "y": Y[:5]}).batch(5)
        return {**build(), "valid": valid, "valid_every_steps": 3}

    recorder = StepRecorder(step)
    arguments = build_with_evaluation()
    model = arguments.pop("model")
    checkpoints = Checkpoint(tmp_path, every_steps=4, every_epochs=None)
    model.fit(**arguments, callbacks=[recorder, checkpoints])

    result = replay(build_with_evaluation, tmp_path, step)
    assert recorder.output is not None
    assert torch.equal(result.outputs[""], recorder.output)
    assert result.batch[0].shape == (len(recorder.output), 6)


@pytest.mark.parametrize("step", [2, 9, 24])
def test_a_run_is_as_long_as_it_was_when_the_builder_does_not_say(
    tmp_path: Path, step: int
) -> None:
    recorder = StepRecorder(step)
    model, data = build_without_epochs()
    model.fit(3, data, callbacks=[recorder, Checkpoint(tmp_path)])
    assert replay(build_without_epochs, tmp_path, step).row == recorder.row
    builders = (build_without_epochs, build_without_epochs)
    assert [d.step for d in diff(tmp_path, tmp_path, build=builders)] == [None, None]


def test_a_step_has_the_epochs_of_the_fit_that_made_it(tmp_path: Path) -> None:
    """The second fit went on for longer. One callback needs no list."""
    epochs_of_replays: list[int] = []

    class RecordEpochs(Callback):
        def begin(self, run: Run) -> None:
            epochs_of_replays.append(run.epochs)

    def build_with_callback() -> dict[str, Any]:
        parts = {**build(), "callbacks": RecordEpochs()}
        del parts["epochs"]
        return parts

    for epochs in (1, 2):
        parts = build()
        parts["model"].fit(epochs, parts["data"], callbacks=[Checkpoint(tmp_path)], resume="auto")
    for step in (3, 8, 9, 16):
        replay(build_with_callback, tmp_path, step)
    assert epochs_of_replays == [1, 1, 2, 2]

    # Without the checkpoint of step 8, the next undamaged one tells.
    (tmp_path / checkpoint.name_of(8) / "tree.json").unlink()
    replay(build_with_callback, tmp_path, 3)
    assert epochs_of_replays[-1] == 2


# Diff


def test_equal_runs_have_no_difference(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    differences = diff(tmp_path / "a", tmp_path / "b", build=(build, build))
    assert [(d.by, d.step) for d in differences] == [
        ("by the logs", None),
        ("by the checkpoints", None),
        ("by replay", None),
    ]
    assert differences[0].equal_until == 24


PROGRAM = """
import random, sys
import torch
from torch import nn
import halfstep as hs

folder, draws, last_step = sys.argv[1], sys.argv[2] == "draws", int(sys.argv[3])
torch.manual_seed(0)
net = nn.Linear(6, 3)
model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
x = torch.randn(64, 6)
data = hs.data.Dataset((x, x[:, :3].argmax(1))).batch(8)
if draws:
    net.register_forward_pre_hook(lambda module, args: args if random.random() < 2 else None)
saver = hs.Checkpoint(folder, every_steps=4, every_epochs=None, keep=100)
model.fit(1, data, callbacks=[saver], progress=False, limit_batches=last_step)
"""


def train_unseeded(folder: Path, draws: str, last_step: int) -> None:
    """A run in a process of its own, whose Python and numpy generators nobody has seeded."""
    words = [sys.executable, "-c", PROGRAM, str(folder), draws, str(last_step)]
    subprocess.run(words, check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("last_step", [4, 8])
def test_generators_that_nothing_drew_from_are_no_difference(
    last_step: int, tmp_path: Path
) -> None:
    """With one checkpoint in each run, and with two."""
    for name in ("a", "b"):
        train_unseeded(tmp_path / name, "no draws", last_step)
    states = [checkpoint.load(checkpoint.latest(tmp_path / name)).tree["rng"] for name in "ab"]
    assert not torch.equal(states[0]["python"][1], states[1]["python"][1])
    [difference] = diff(tmp_path / "a", tmp_path / "b")
    assert (difference.step, difference.equal_until) == (None, last_step)
    assert difference.note == (
        "random generators that nothing drew from are in other states (Python's; numpy's)"
    )


def test_generators_that_were_drawn_from_are_a_difference(tmp_path: Path) -> None:
    """The weights are equal up to here, and the next step may use what is drawn."""
    for name in ("a", "b"):
        train_unseeded(tmp_path / name, "draws", 8)
    [difference] = diff(tmp_path / "a", tmp_path / "b")
    assert difference.step == 4
    assert "rng.python.1" in difference.names
    assert not any(name.startswith("rng.numpy") for name in difference.names)


@pytest.mark.parametrize("step", [1, 5, 14])
def test_the_first_differing_step_and_its_tensors_are_named(tmp_path: Path, step: int) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", nudge=step)
    builders = (build, lambda: build(nudge=step))
    by_logs, by_checkpoints, by_replay = diff(tmp_path / "a", tmp_path / "b", build=builders)
    assert by_logs.step == step
    assert "fingerprint" in by_logs.names
    assert by_logs.equal_until == step - 1
    assert by_checkpoints.step == -(-step // 6) * 6
    assert by_replay.step == step
    assert "net.4.weight" in by_replay.names
    assert by_replay.equal_until == step - 1


def test_fingerprints_see_what_the_loss_does_not(tmp_path: Path) -> None:
    """The update of step 5 differs; its loss, computed before, may not."""
    train(tmp_path / "a")
    train(tmp_path / "b", nudge=5)
    by_logs = diff(tmp_path / "a", tmp_path / "b")[0]
    assert by_logs.step == 5
    assert "fingerprint" in by_logs.names


def test_clocks_files_and_lengths_are_no_difference(tmp_path: Path) -> None:
    a = tmp_path / "a"
    b = tmp_path / "b"
    train_with_log(a, 2, hs.JSONLLog(a / "log.jsonl", times=True))
    train_with_log(b, 3, hs.JSONLLog(b / "log.jsonl", times=True, every=2))
    by_logs, by_checkpoints = diff(a, b)
    assert (by_logs.step, by_logs.equal_until) == (None, 16)
    assert (by_checkpoints.step, by_checkpoints.equal_until) == (None, 12)
    assert str(by_logs).endswith(f"{b} is recorded up to step 24, {a} up to step 16")
    assert "up to step 24" in diff(b, a)[1].note
    assert [d.note for d in diff(a, a)] == ["", ""]


def test_another_kind_of_log_is_no_difference(tmp_path: Path) -> None:
    train_with_log(tmp_path / "a", 1, hs.JSONLLog(tmp_path / "a.jsonl"))
    train_with_log(tmp_path / "b", 1, hs.CSVLog(tmp_path / "b.csv"))
    differences = diff(tmp_path / "a", tmp_path / "b")
    assert [(d.step, d.equal_until) for d in differences] == [(None, 8)]  # the last step


def test_evaluations_are_compared_with_evaluations(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    train_with_log(plain, 1, hs.JSONLLog(plain / "log.jsonl"))
    for size in (5, 7):
        folder = tmp_path / f"valid{size}"
        log = hs.JSONLLog(folder / "log.jsonl")
        valid = hs.data.Dataset({"x": X[:size], "y": Y[:size]}).batch(5)
        train_with_log(folder, 1, log, valid=valid, valid_every_steps=4)

    with_and_without = diff(plain, tmp_path / "valid5")[0]
    assert (with_and_without.step, with_and_without.equal_until) == (None, 8)
    by_logs = diff(tmp_path / "valid5", tmp_path / "valid7")[0]
    assert (by_logs.step, by_logs.names, by_logs.equal_until) == (4, ("valid_loss",), 3)


def test_an_unfinished_last_line_of_a_log_is_left_out(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    log = tmp_path / "b" / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    unfinished = '{"kind": "é'.encode()[:-1]  # killed inside a letter
    log.write_bytes(b"".join(lines[:20]) + unfinished)
    by_logs = diff(tmp_path / "a", tmp_path / "b")[0]
    assert (by_logs.step, by_logs.equal_until) == (None, 20)
    for bad_line in (b'{"kind": "st\n', b"3\n", b"\xff\n", b"[" * 100_000 + b"\n"):
        log.write_bytes(b"".join([*lines[:2], bad_line, *lines[2:]]))
        with pytest.raises(ValueError, match=r"b/log.jsonl, line 3: expected a JSON object, got"):
            diff(tmp_path / "a", tmp_path / "b")


def test_every_bit_of_a_tensor_is_compared_in_any_memory_format(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tree = {
        "image": image,
        "nan": torch.tensor(torch.nan),
        "zero": torch.tensor(0.0),
        "empty": torch.empty(0, 3),
    }
    equal_tree = {**tree, "image": image.contiguous()}
    other_tree = {
        **tree,
        "image": image.clone().index_fill_(3, torch.tensor(4), -0.0),
        "zero": torch.tensor(-0.0),
    }
    for name, content in {"a": tree, "b": equal_tree, "c": other_tree}.items():
        checkpoint.save(tmp_path / name / checkpoint.name_of(3), content)
    differences = diff(tmp_path / "a", tmp_path / "b")
    assert [(d.step, d.equal_until) for d in differences] == [(None, 3)]
    assert diff(tmp_path / "a", tmp_path / "c")[0].names == ("image", "zero")


def test_a_broken_checkpoint_is_passed_over(tmp_path: Path) -> None:
    a = tmp_path / "a"
    b = tmp_path / "b"
    for folder in (a, b):
        for step in (1, 2):
            checkpoint.save(folder / checkpoint.name_of(step), {"x": torch.arange(step)})
    broken = b / checkpoint.name_of(1) / "tensors.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    with pytest.warns(Notice, match=f"left out: .*{checkpoint.name_of(1)}"):
        assert [(d.step, d.equal_until) for d in diff(a, b)] == [(None, 2)]

    (a / checkpoint.name_of(2) / "tree.json").unlink()
    message = "nor a checkpoint of the same step that is whole"
    with pytest.warns(Notice), pytest.raises(ValueError, match=message):
        diff(a, b)


# A replay that is not the run


def build_with_other_dropout() -> dict[str, Any]:
    """The builder after somebody has changed a number in it that no checkpoint knows."""
    parts = build()
    parts["model"].net[3].p = 0.3
    return parts


def change_checkpoint(path: Path) -> None:
    """Writes one of its weights anew, one unit in the last place higher."""
    tree = checkpoint.load(path).tree
    weight = tree["step"]["net"]["0.weight"]
    weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf))
    shutil.rmtree(path)
    checkpoint.save(path, tree)


def test_a_checkpoint_that_replay_does_not_give_is_said_to_differ_for_another_reason(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        train(tmp_path / name)
        (tmp_path / name / "log.jsonl").unlink()
    change_checkpoint(tmp_path / "b" / checkpoint.name_of(12))
    by_checkpoints, by_replay = diff(tmp_path / "a", tmp_path / "b", build=(build, build))
    assert (by_checkpoints.step, by_checkpoints.equal_until) == (12, 6)
    assert (by_replay.step, by_replay.equal_until) == (None, 12)
    expected = (
        f"replay does not give what {tmp_path / 'b'} has recorded of step 12 "
        "(step.net.0.weight), so the runs differ for another reason than what was replayed: "
    )
    assert by_replay.note.startswith(expected)
    assert str(by_replay).startswith(f"no difference up to step 12 (by replay); {expected}")


def test_a_builder_without_what_made_the_runs_differ_is_noticed(tmp_path: Path) -> None:
    """The second run had a nudge at step 14, and its builder has none."""
    train(tmp_path / "a")
    train(tmp_path / "b", nudge=14)
    for name in ("a", "b"):
        (tmp_path / name / "log.jsonl").unlink()
    by_checkpoints, by_replay = diff(tmp_path / "a", tmp_path / "b", build=(build, build))
    assert (by_checkpoints.step, by_replay.step) == (18, None)
    assert f"what {tmp_path / 'b'} has recorded of step 18 (step." in by_replay.note
    assert f"what {tmp_path / 'a'} has" not in by_replay.note


def test_a_builder_that_is_not_the_runs_is_noticed_by_their_logs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(tmp_path / name)
        for path in checkpoint.listing(tmp_path / name):
            shutil.rmtree(path)
    builders = (build, build_with_other_dropout)
    by_logs, by_replay = diff(tmp_path / "a", tmp_path / "b", build=builders)
    assert (by_logs.step, by_replay.step) == (None, 1)
    assert f"what {tmp_path / 'b'} has recorded of step 1 (loss, " in by_replay.note
    assert f"what {tmp_path / 'a'} has" not in by_replay.note
    assert ", so what was replayed is not what the run did: other code" in by_replay.note


@pytest.mark.parametrize("step", [1, 5, 14])
def test_replays_that_are_the_runs_get_no_note(tmp_path: Path, step: int) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b", nudge=step)
    builders = (build, lambda: build(nudge=step))
    by_replay = diff(tmp_path / "a", tmp_path / "b", build=builders)[-1]
    assert (by_replay.step, by_replay.note) == (step, "")


@pytest.mark.parametrize("step", [5, 12])
def test_a_replayed_step_that_is_not_the_runs_says_so(tmp_path: Path, step: int) -> None:
    train(tmp_path)
    assert replay(build, tmp_path, step).unreproduced == []
    other = replay(build_with_other_dropout, tmp_path, step).unreproduced
    assert "fingerprint" in other
    assert ("step.net.0.weight" in other) == (step == 12), "there is a checkpoint of step 12"
    if step == 12:
        (tmp_path / "log.jsonl").unlink()
        assert replay(build, tmp_path, step).unreproduced == []
        change_checkpoint(tmp_path / checkpoint.name_of(12))
        assert replay(build, tmp_path, step).unreproduced == ["step.net.0.weight"]


# Mistakes

MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (
        lambda p: replay(build, p / "none", 3),
        "expected a folder of checkpoints, found nothing",
    ),
    "step 0": (lambda p: replay(build, p, 0), "expected a step of 1 or more, got 0"),
    "beyond the end": (lambda p: replay(build, p, 99), "the run ended before step 99"),
    "no number of epochs": (
        lambda p: replay(build_without_epochs, p, 1),
        'no epochs. Return .*"epochs": …',
    ),
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
def test_a_mistake_is_explained(name: str, tmp_path: Path) -> None:
    make_mistake, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        make_mistake(tmp_path)


# The commands

BUILDER = """
import torch
from torch import nn
import halfstep as hs
from halfstep.model import Model

def build():
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    x = torch.randn(40, 6)
    y = torch.randint(0, 3, (40,))
    model = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return {"model": model, "data": hs.data.Dataset((x, y)).batch(8), "epochs": 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a builder and two runs of it, a and b."""
    write_user_module(BUILDER, tmp_path, monkeypatch, name="my_build")
    import my_build  # type: ignore[import-not-found]

    for name in ("a", "b"):
        parts = my_build.build()
        parts["model"].fit(parts["epochs"], parts["data"], callbacks=[Checkpoint(tmp_path / name)])
    return tmp_path


def test_replay_and_diff_as_commands(project: Path) -> None:
    runner = CliRunner()
    words = ["replay", "a", "--step", "7", "--build", "my_build:build", "--save", "s.safetensors"]
    replayed = runner.invoke(app, words)
    assert replayed.exit_code == 0, replayed.output
    assert "step 7, from" in replayed.output
    assert "grad weight" in replayed.output
    assert (project / "s.safetensors").is_file()

    equal = runner.invoke(app, ["diff", "a", "b", "--json"])
    assert equal.exit_code == 0
    assert json.loads(equal.output) == [
        {"by": "by the checkpoints", "step": None, "names": [], "equal_until": 10, "note": ""}
    ]
    with_build = runner.invoke(app, ["diff", "a", "b", "--build", "my_build:build"])
    assert with_build.exit_code == 0
    assert "nothing was replayed: the checkpoints are equal up to the last step, 10" in (
        with_build.output
    )


def test_the_installed_command_explains_mistakes_without_a_traceback(project: Path) -> None:
    program = "from halfstep.cli import main; main()"
    command = [sys.executable, "-c", program, "replay", "a", "--step", "7"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 2
    assert (
        "halfstep: replay: say how the run was built: --build package.module:function"
        in process.stderr
    )
    assert "Traceback" not in process.stderr


FAILING_MODULE = """
import sys

def attribute(): return None.shape
def silent(): raise AssertionError
def ended(): raise EOFError("Ran out of input")
def value(): raise ValueError("expected another")
def leaves(): sys.exit(7)
"""


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[Any, str]:
    """Runs the command in this process. Returns its exit code and what it wrote to stderr."""
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
    write_user_module(FAILING_MODULE, tmp_path, monkeypatch, name="failing_build")
    words = ["replay", str(tmp_path), "--step", "1", "--build"]
    exit_code, errors = run_command(monkeypatch, capsys, *words, f"failing_build:{name}")
    assert exit_code == 2
    assert FAILURES[name] in errors
    assert "Traceback" not in errors

    debug_words = [*words, f"failing_build:{name}", "--debug"]
    exit_code, errors = run_command(monkeypatch, capsys, *debug_words)
    assert exit_code == 2
    assert f"in {name}\n" in errors

    # A builder that ends the process keeps its own exit code.
    exit_code, _ = run_command(monkeypatch, capsys, *words, "failing_build:leaves")
    assert exit_code == 7


def test_exit_code_1_means_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("a", 1), ("b", 2)):
        checkpoint.save(tmp_path / name / checkpoint.name_of(1), {"x": value})
    a = str(tmp_path / "a")
    b = str(tmp_path / "b")
    assert run_command(monkeypatch, capsys, "diff", a, b)[0] == 1
    assert run_command(monkeypatch, capsys, "diff", a, a)[0] == 0
    assert run_command(monkeypatch, capsys, "diff", a)[0] == 2
    exit_code, errors = run_command(
        monkeypatch, capsys, "diff", a, b, "--build-b", "my_build:build"
    )
    assert exit_code == 2
    assert "--build-b: expected --build too" in errors
