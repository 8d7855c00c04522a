"""`train`, `eval`, `predict` and `replay` on runs that are really trained.

The bits are those of the library and of plain torch; folders and resumes are held to their words.
"""

import csv
import hashlib
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep import checkpoint
from halfstep.cli.main import app
from halfstep.experiment.output_folder import lock_output_folder
from tests.support.command_line import run_json
from tests.support.user_module import write_user_module

SMALL_RUN = ["--net", "mine:net", "--samples", "320", "--test-samples", "100"]
USER_MODULE = """
import torch
from torch import nn
import halfstep as hs

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def parts():
    torch.manual_seed(3)
    net = nn.Linear(6, 3)
    x = torch.randn(40, 6)
    y = x[:, :3].argmax(1)
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        "O2",
        metrics={"acc": hs.metrics.Accuracy()},
    )
    data = hs.data.Dataset((x, y)).shuffle().batch(8)
    valid = hs.data.Dataset((x[:13], y[:13])).batch(4)
    return model, data, valid

def two():
    return parts()[:2]

def proved():
    net = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, verify=2)
    return model, hs.data.Dataset((torch.randn(40, 6), torch.arange(40) % 3)).batch(8)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)
    return tmp_path


def train_small(out: str, *words: str) -> Any:
    """Trains a small network in the folder `out`. Returns the summary."""
    return run_json("train", *SMALL_RUN, "--device", "cpu", "--out", out, *words)


def small_net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def train_by_hand() -> nn.Module:
    """Two epochs of batch 64, momentum 0.9, a rate that falls by a tenth each step: plain torch."""
    images, labels = hs.data.sample()
    torch.manual_seed(5)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    order = hs.data.Dataset({"i": torch.arange(320)}).shuffle(seed=5).batch(64)
    step = 0
    for _ in range(2):
        for (indices,) in order:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 10)
            optimizer.zero_grad()
            x = images[:320][indices].float() * torch.tensor(1 / 255)
            nn.functional.cross_entropy(net(x), labels[:320][indices]).backward()
            optimizer.step()
            step += 1
    return net


def test_train_is_the_loop_one_would_write() -> None:
    train_small("r", "--epochs", "2", "--lr", "0.1", "--seed", "5")
    weights = load_file("r/weights.safetensors")
    for name, tensor in train_by_hand().state_dict().items():
        assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize(
    "options", [["--precision", "O2", "--ema", "0.9"], ["--accumulate", "3", "--clip-norm", "1"]]
)
def test_eval_gives_the_scores_of_training(options: list[str]) -> None:
    last = train_small("r", "--epochs", "2", *options)["history"][-1]
    for source in ("r", "r/step-000000010", "r/weights.safetensors"):
        scores = run_json("eval", source)["scores"]
        assert scores == {"loss": last["valid_loss"], "acc": last["valid_acc"]}
    assert run_json("eval", "r", "--split", "train")["scores"]["loss"] != last["valid_loss"]


@pytest.mark.parametrize("precision", ["fp64", "O1", "fp16+kahan"])
def test_the_same_weights_in_another_precision(precision: str) -> None:
    train_small("r", "--epochs", "1", "--precision", "O2", "--ema", "0.9")
    net = small_net()
    name, _, rounding = precision.partition("+")
    python_precision = hs.Precision(name, rounding=rounding) if rounding else hs.Precision(name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, python_precision)
    model.load("r/weights.safetensors")
    images, labels = (column[:100] for column in hs.data.sample(train=False))
    test_data = hs.data.Dataset({"x": images[:, None], "y": labels})
    test_data = test_data.map(hs.data.Rescale(1 / 255), "x").batch(500)
    scores = run_json("eval", "r", "--precision", precision)["scores"]
    assert scores["loss"] == model.evaluate(test_data)["loss"]


def test_the_average_is_what_ema_evaluates() -> None:
    """The checkpoint holds both; the weights file the averaged ones."""
    train_small("r", "--epochs", "1", "--ema", "0.9")
    saved = checkpoint.load("r/step-000000005").tree["step"]
    weights = load_file("r/weights.safetensors")
    assert torch.equal(weights["1.weight"], saved["state"]["ema"][0])
    assert not torch.equal(weights["1.weight"], saved["net"]["1.weight"])


def test_a_resumed_run_ends_at_the_same_bits() -> None:
    words = ["--schedule", "constant", "--precision", "O2", "--resume", "auto"]
    train_small("a", "--epochs", "2", *words)
    train_small("b", "--epochs", "1", *words)
    summary = train_small("b", "--epochs", "2", *words)
    assert summary["resumed"] == "b/step-000000005"
    weights_a = load_file("a/weights.safetensors")
    weights_b = load_file("b/weights.safetensors")
    assert all(torch.equal(weights_a[name], weights_b[name]) for name in weights_a)
    assert Path("a/log.jsonl").read_bytes() == Path("b/log.jsonl").read_bytes()
    assert CliRunner().invoke(app, ["diff", "a", "b"]).exit_code == 0


def file_contents(folder: str) -> dict[str, str]:
    """The hash of every file in a folder; the lock aside."""
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def modification_times(folder: str) -> dict[str, int]:
    return {path: Path(path).stat().st_mtime_ns for path in file_contents(folder)}


def train_output(*words: str) -> str:
    """What the command prints on standard output without --json."""
    result = CliRunner().invoke(
        app, ["train", *SMALL_RUN, "--device", "cpu", *words], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_that_has_its_epochs_is_left_as_it_is() -> None:
    first_summary = train_small("r", "--epochs", "2")
    contents = file_contents("r")
    times = modification_times("r")
    for epochs in ("2", "1"):
        output = train_output("--epochs", epochs, "--out", "r", "--resume", "auto")
        assert output == (
            f"r has 2 epochs already, up to step 10, and --epochs is {epochs}: nothing was done. "
            "To train further: --epochs 3, or more\n"
        )
        summary = train_small("r", "--epochs", epochs, "--resume", "auto")
        assert summary == first_summary | {"resumed": "r/step-000000010"}
        assert file_contents("r") == contents
        assert modification_times("r") == times

    Path("r/weights.safetensors").unlink()  # as after a kill before they were written
    train_output("--epochs", "2", "--out", "r", "--resume", "auto")
    assert file_contents("r") == contents


def test_a_resumed_run_says_so_before_its_first_epoch() -> None:
    words = ["--out", "r", "--schedule", "constant", "--resume", "auto"]
    assert train_output("--epochs", "1", *words).startswith("epoch 1/1 ")
    lines = train_output("--epochs", "2", *words).splitlines()
    assert lines[0] == "goes on after step 5, in epoch 2 of 2, from r/step-000000005"
    assert lines[1].startswith("epoch 2/2 ")


def test_what_stands_in_the_way_of_a_resume_comes_first() -> None:
    train_small("r", "--epochs", "1")
    message = (
        r"holds another run: lr was 0\.02 and is 1\.0\. Repeat .*\. "
        r"Allowed to differ: epochs was 1 and is 3\.$"
    )
    with pytest.raises(ValueError, match=message):
        train_small("r", "--epochs", "3", "--lr", "1", "--resume", "auto")


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_exits_with_143(project: Path) -> None:
    words = ["train", *SMALL_RUN, "--epochs", "100000", "--out", "r", "--schedule", "constant"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from halfstep.cli import main; main()", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        cwd=project,
    )
    deadline = time.monotonic() + 60
    while not checkpoint.listing("r") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors

    newest = checkpoint.latest("r")
    assert newest is not None
    step = checkpoint.step_of(newest)
    command = shlex.join(["halfstep", *words, "--resume", "auto"])
    assert errors.endswith(f"stopped after step {step}, kept in {newest}. Go on: {command}\n")
    assert "fit(resume=" not in errors  # the library's own line, which a script gets


def test_fresh_removes_a_runs_own_files_and_no_others() -> None:
    train_small("r", "--epochs", "2")
    Path("r/notes.txt").write_text("mine")
    train_small("r", "--epochs", "1", "--fresh")
    names = sorted(path.name for path in Path("r").iterdir() if not path.name.startswith("."))
    assert names == ["log.jsonl", "notes.txt", "run.json", "step-000000005", "weights.safetensors"]


# Builders.


def test_a_builder_trains_and_is_evaluated_on_its_validation_data() -> None:
    summary = run_json("train", "--build", "mine:parts", "--epochs", "2", "--out", "r")
    last = summary["history"][-1]
    scores = run_json("eval", "r")["scores"]
    assert scores == {"loss": last["valid_loss"], "acc": last["valid_acc"]}
    import mine  # type: ignore[import-not-found]

    model, data, _ = mine.parts()
    model.fit(2, data)
    assert torch.equal(load_file("r/weights.safetensors")["weight"], model.net.weight)
    with pytest.raises(ValueError, match=r"returns no validation data.*--split train"):
        run_json("eval", "r", "--build", "mine:two")


def test_options_that_a_builder_decides_are_refused() -> None:
    words = ["train", "--build", "mine:parts", "--epochs", "1"]
    with pytest.raises(ValueError, match="--lr, --net: expected no such option beside --build"):
        run_json(*words, "--lr", "0.1", "--net", "mlp")
    run_json(*words, "--out", "r", "--seed", "3", "--sink", "2")
    with pytest.raises(ValueError, match="eval: --precision beside a builder"):
        run_json("eval", "r", "--precision", "fp32")


def test_a_builder_with_verify_on_a_cpu_gets_a_note() -> None:
    words = ["train", "--build", "mine:proved", "--epochs", "1", "--out", "r"]
    errors = CliRunner().invoke(app, words).stderr
    assert errors == (
        "note: verify=2: there is nothing to verify on cpu, "
        "where no step is replayed from a graph\n"
    )


# Predictions.


CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def column(rows: list[dict[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def test_predictions_are_those_of_the_network() -> None:
    train_small("r", "--epochs", "1", "--precision", "O2")
    images, _ = hs.data.sample(train=False)
    floats = images[:7, None].float() / 255
    np.save("bytes.npy", images[:7].numpy())
    np.save("floats.npy", floats.numpy())
    model = hs.Model(small_net(), precision="O2")
    model.load("r/weights.safetensors")
    expected = model.predict(floats)

    # All outputs, as an array.
    for name in ("bytes", "floats"):
        words = ["predict", "r", f"{name}.npy", "--out", f"{name}-out.npy"]
        CliRunner().invoke(app, words, catch_exceptions=False)
        assert torch.equal(torch.from_numpy(np.load(f"{name}-out.npy")), expected)

    # The likeliest class of each.
    rows = run_json("predict", "r", "bytes.npy")
    assert column(rows, "label") == expected.argmax(1).tolist()
    probabilities = expected.double().softmax(1).amax(1).tolist()
    assert column(rows, "probability") == [round(p, 6) for p in probabilities]
    assert rows[0]["class"] == CLASS_NAMES[rows[0]["label"]]
    assert rows[0]["input"] == "bytes.npy[0]"

    # A data set by name: all of it, though the run was tested on 100 samples.
    sample_rows = run_json("predict", "r", "sample")
    assert column(sample_rows, "label")[:7] == column(rows, "label")
    assert len(sample_rows) == 2000
    assert sample_rows[0]["input"] == "sample[0]"


def test_every_prediction_has_every_column() -> None:
    """A builder's data has no names: the class is empty, not left out."""
    run_json("train", "--build", "mine:two", "--epochs", "1", "--out", "own")
    np.save("x.npy", torch.randn(2, 6).numpy())
    rows = run_json("predict", "own", "x.npy")
    assert [list(row) for row in rows] == [["input", "label", "class", "probability"]] * 2
    assert column(rows, "class") == [None, None]
    lines = CliRunner().invoke(app, ["predict", "own", "x.npy"]).stdout.splitlines()
    assert lines[0] == "input,label,class,probability"
    assert lines[1].split(",")[2] == ""


def test_gray_floats_without_a_channel_are_taken() -> None:
    train_small("r", "--epochs", "1")
    images, _ = hs.data.sample(train=False)
    np.save("gray.npy", (images[:3] / 255).numpy())
    np.save("channel.npy", (images[:3, None] / 255).numpy())
    gray_rows = run_json("predict", "r", "gray.npy")
    channel_rows = run_json("predict", "r", "channel.npy")
    assert column(gray_rows, "probability") == column(channel_rows, "probability")
    message = r"found nothing at 'sampel'\. Did you mean 'sample'"
    with pytest.raises(FileNotFoundError, match=message):
        run_json("predict", "r", "sampel")


def test_images_are_predicted_as_their_pixels_are() -> None:
    train_small("r", "--epochs", "1")
    images, _ = hs.data.sample(train=False)
    Path("photos").mkdir()
    for i in range(3):
        Image.fromarray(images[i].numpy()).save(f"photos/{i}.png")
    np.save("x.npy", images[:3].numpy())
    CliRunner().invoke(app, ["predict", "r", "photos", "--out", "p.csv"], catch_exceptions=False)
    csv_rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert column(csv_rows, "input") == [f"photos/{i}.png" for i in range(3)]
    csv_probabilities = [float(row["probability"]) for row in csv_rows]
    assert csv_probabilities == column(run_json("predict", "r", "x.npy"), "probability")
    Image.fromarray(images[0].numpy()).resize((56, 40)).save("big.png")
    with pytest.warns(hs.Notice, match="images of 56 × 40 are resized to 28 × 28"):
        assert len(run_json("predict", "r", "big.png")) == 1


# Replay.


def test_replay_of_a_run_by_options_needs_no_builder_and_names_the_scale() -> None:
    train_small("r", "--epochs", "1", "--precision", "O2")
    summary = run_json("replay", "r", "--step", "3")
    log = [json.loads(line) for line in Path("r/log.jsonl").read_text().splitlines()]
    (logged,) = [row for row in log if row["kind"] == "step" and row["global_step"] == 3]
    assert summary["loss"] == logged["loss"]

    words = ["replay", "r", "--step", "3", "--save", "s.safetensors"]
    output = CliRunner().invoke(app, words).output
    assert "grad …: times the loss scale, 65536; divide by it for the gradient." in output
    norms = [
        (tensor / 65536).double().norm()
        for name, tensor in load_file("s.safetensors").items()
        if name.startswith("gradient.")
    ]
    norm = torch.stack(norms).norm()
    assert float(norm) == pytest.approx(summary["grad_norm"], rel=1e-6)  # float32 sums


# Mistakes.


def test_mistakes_about_folders_are_explained() -> None:
    train_small("r", "--epochs", "1")
    message = r"r holds a run already, up to step-000000005\. Go on with --resume auto"
    with pytest.raises(ValueError, match=message):
        train_small("r", "--epochs", "1")
    message = r"holds another run: lr was 0\.02 and is 1\.0\. Repeat the command"
    with pytest.raises(ValueError, match=message):
        train_small("r", "--epochs", "1", "--lr", "1", "--resume", "auto")
    message = "resume: expected auto, a checkpoint or the folder of a run"
    with pytest.raises(FileNotFoundError, match=message):
        train_small("new", "--epochs", "1", "--resume", "nothing")
    with lock_output_folder(Path("busy")), pytest.raises(ValueError, match="out: busy is in use"):
        train_small("busy", "--epochs", "1")
    message = "eval: expected a run, a checkpoint or a file of weights"
    with pytest.raises(FileNotFoundError, match=message):
        run_json("eval", "nothing")

    Path("r/run.json").write_text("{}")
    with pytest.raises(ValueError, match="expected what this version of halfstep train writes"):
        run_json("eval", "r")
    Path("r/run.json").unlink()
    with pytest.raises(ValueError, match="r does not say how it was built"):
        run_json("eval", "r")
    result = run_json("eval", "r", "--net", "mine:net", "--test-samples", "100")
    assert result["scores"]["acc"] >= 0


# --- limits of a run ---


def test_a_call_that_is_out_of_time_says_how_to_go_on_and_exits_with_124() -> None:
    words = ["train", *SMALL_RUN, "--epochs", "100000", "--out", "r", "--schedule", "constant"]
    result = CliRunner().invoke(app, [*words, "--max-time", "0.5s"])
    assert result.exit_code == 124
    newest = checkpoint.latest("r")
    assert newest is not None
    step = checkpoint.step_of(newest)
    assert step is not None
    assert f"max_time: 0.5s were over after step {step}" in result.stderr
    assert f"halfstep: stopped after step {step}, kept in {newest}. Go on: " in result.stderr
    assert not Path("r/weights.safetensors").exists()

    result = CliRunner().invoke(app, [*words, "--max-time", "0.5", "--resume", "auto"])
    assert result.exit_code == 124
    later = checkpoint.latest("r")
    assert later is not None
    assert checkpoint.step_of(later) > step  # type: ignore[operator]

    result = CliRunner().invoke(app, [*words, "--max-time", "soon", "--fresh"])
    assert "--max-time: expected seconds as a number, a text such as '1h30m'" in str(
        result.exception
    )
    assert checkpoint.latest("r") == later


@pytest.mark.slow
def test_calls_of_limited_time_end_with_the_weights_of_one_call(project: Path) -> None:
    """As a job script repeats the command until it is done, in processes of its own."""
    words = ["train", *SMALL_RUN, "--epochs", "40", "--schedule", "linear", "--device", "cpu"]
    command = [sys.executable, "-c", "from halfstep.cli import main; main()", *words]
    again = [*command, "--out", "r", "--resume", "auto", "--max-time", "0.2s"]
    codes = []
    while codes == [] or codes[-1] == 124:
        call = subprocess.run(again, cwd=project, capture_output=True, check=False)
        codes.append(call.returncode)
    assert codes[-1] == 0
    assert len(codes) > 1
    subprocess.run([*command, "--out", "whole"], cwd=project, capture_output=True, check=True)
    weights = load_file("r/weights.safetensors")
    for name, whole in load_file("whole/weights.safetensors").items():
        assert torch.equal(weights[name], whole)


@pytest.mark.parametrize(("limit", "steps"), [("2", 2), ("0.4", 2), ("40%", 2), ("1.0", 5)])
def test_limited_batches_are_those_of_the_library(limit: str, steps: int) -> None:
    """Five batches an epoch; the schedule ends with the last update of the limited run."""
    summary = train_small("r", "--epochs", "2", "--limit-batches", limit)
    assert summary["steps"] == 2 * steps
    rows = [json.loads(line) for line in Path("r/log.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    expected = hs.schedules.linear(rates[0], 2 * steps)
    assert rates == expected.table(2 * steps).tolist()
    asked = json.loads(Path("r/run.json").read_text())["asked"]
    assert asked["limit_batches"] == (steps if limit == "2" else float(steps / 5))

    # It is part of what the run is: the replay has it, and a resume must say it again.
    if steps == 2:
        replayed = run_json("replay", "r", "--step", "3")
        assert replayed["step"] == 3
        with pytest.raises(ValueError, match=r"limit_batches was .* and is None"):
            train_small("r", "--epochs", "3", "--resume", "auto")


def test_a_builder_may_be_tried_on_a_few_batches() -> None:
    summary = run_json(
        "train", "--build", "mine:two", "--epochs", "2", "--limit-batches", "3", "--out", "b"
    )
    assert summary["steps"] == 6


@pytest.mark.parametrize("limit", ["0", "-2", "1.5", "many", "0%", "nan"])
def test_limits_that_leave_nothing_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=r"--limit-batches: expected a number of batches, 1 or"):
        train_small("r", "--limit-batches", limit)
    assert not Path("r").exists()
