"""`train`, `eval`, `predict` and `replay` on runs that are really made: the bits of the library, folders, resumes."""

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
from halfstep.experiment.output_folder import held
from tests.support.user_module import work_beside

SMALL = ["--net", "mine:net", "--samples", "320", "--test-samples", "100"]
MINE = """
import torch
from torch import nn
import halfstep as hs

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, classes))

def parts():
    torch.manual_seed(3)
    made = nn.Linear(6, 3)
    x = torch.randn(40, 6)
    y = x[:, :3].argmax(1)
    metrics = {"acc": hs.metrics.Accuracy()}
    model = hs.Model(made, nn.CrossEntropyLoss(), torch.optim.SGD(made.parameters(), lr=0.1), "O2", metrics=metrics)
    return model, hs.data.Dataset((x, y)).shuffle().batch(8), hs.data.Dataset((x[:13], y[:13])).batch(4)

def two(): return parts()[:2]

def proved():
    made = nn.Linear(6, 3)
    model = hs.Model(made, nn.CrossEntropyLoss(), torch.optim.SGD(made.parameters(), lr=0.1), verify=2)
    return model, hs.data.Dataset((torch.randn(40, 6), torch.arange(40) % 3)).batch(8)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_beside(MINE, tmp_path, monkeypatch)
    return tmp_path


def told(*line: str) -> Any:
    result = CliRunner().invoke(app, [*line, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def trained(out: str, *more: str) -> Any:
    return told("train", *SMALL, "--device", "cpu", "--out", out, *more)


def by_hand() -> nn.Module:
    """Two epochs of batch 64, momentum 0.9, a rate that falls from 0.1 in steps of a tenth: plain torch."""
    images, labels = hs.data.sample()
    torch.manual_seed(5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    order = hs.data.Dataset({"i": torch.arange(320)}).shuffle(seed=5).batch(64)
    step = 0
    for _ in range(2):
        for (chosen,) in order:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 10)
            optimizer.zero_grad()
            x = images[:320][chosen].float() * torch.tensor(1 / 255)
            nn.functional.cross_entropy(net(x), labels[:320][chosen]).backward()
            optimizer.step()
            step += 1
    return net


def test_train_is_the_loop_one_would_write() -> None:
    trained("r", "--epochs", "2", "--lr", "0.1", "--seed", "5")
    weights = load_file("r/weights.safetensors")
    for name, tensor in by_hand().state_dict().items():
        assert torch.equal(weights[name], tensor)


@pytest.mark.parametrize(
    "options", [["--precision", "O2", "--ema", "0.9"], ["--accumulate", "3", "--clip-norm", "1"]]
)
def test_eval_gives_the_scores_of_training(options: list[str]) -> None:
    last = trained("r", "--epochs", "2", *options)["history"][-1]
    for source in ("r", "r/step-000000010", "r/weights.safetensors"):
        scores = told("eval", source)["scores"]
        assert scores == {"loss": last["valid_loss"], "acc": last["valid_acc"]}
    assert told("eval", "r", "--split", "train")["scores"]["loss"] != last["valid_loss"]


@pytest.mark.parametrize("precision", ["fp64", "O1", "fp16+kahan"])
def test_the_same_weights_in_another_precision(precision: str) -> None:
    trained("r", "--epochs", "1", "--precision", "O2", "--ema", "0.9")
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    rounding = {"rounding": "kahan"} if "+" in precision else {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(
        net, nn.CrossEntropyLoss(), optimizer, hs.Precision(precision.partition("+")[0], **rounding)
    )
    model.load("r/weights.safetensors")
    images, labels = (each[:100] for each in hs.data.sample(train=False))
    test = (
        hs.data.Dataset({"x": images[:, None], "y": labels})
        .map(hs.data.Rescale(1 / 255), "x")
        .batch(500)
    )
    assert (
        told("eval", "r", "--precision", precision)["scores"]["loss"]
        == model.evaluate(test)["loss"]
    )


def test_the_average_is_what_ema_evaluates() -> None:
    """The checkpoint holds both; the weights file the averaged ones."""
    trained("r", "--epochs", "1", "--ema", "0.9")
    saved = checkpoint.load("r/step-000000005").tree["step"]
    weights = load_file("r/weights.safetensors")
    assert torch.equal(weights["1.weight"], saved["state"]["ema"][0])
    assert not torch.equal(weights["1.weight"], saved["net"]["1.weight"])


def test_a_resumed_run_ends_at_the_same_bits() -> None:
    for out in ("a", "b"):
        steps = ["--schedule", "constant", "--precision", "O2"]
        for epochs in ("2",) if out == "a" else ("1", "2"):
            found = trained(out, "--epochs", epochs, *steps, "--resume", "auto")
    assert found["resumed"] == "b/step-000000005"
    a, b = load_file("a/weights.safetensors"), load_file("b/weights.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert Path("a/log.jsonl").read_bytes() == Path("b/log.jsonl").read_bytes()
    assert CliRunner().invoke(app, ["diff", "a", "b"]).exit_code == 0


def files(folder: str) -> dict[str, tuple[str, int]]:
    """Everything in a folder with its content and its time; the lock aside."""
    found = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in found
    }


def spoken(*line: str) -> str:
    result = CliRunner().invoke(
        app, ["train", *SMALL, "--device", "cpu", *line], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_run_that_has_its_epochs_is_left_as_it_is() -> None:
    first = trained("r", "--epochs", "2")
    before = files("r")
    for epochs in ("2", "1"):
        told = spoken("--epochs", epochs, "--out", "r", "--resume", "auto")
        has = f"r has 2 epochs already, up to step 10, and --epochs is {epochs}: nothing was done."
        assert told == f"{has} To train further: --epochs 3, or more\n"
        assert trained("r", "--epochs", epochs, "--resume", "auto") == first | {
            "resumed": "r/step-000000010"
        }
        assert files("r") == before
    Path("r/weights.safetensors").unlink()  # as after a kill before they were written
    spoken("--epochs", "2", "--out", "r", "--resume", "auto")
    assert {name: content for name, (content, _) in files("r").items()} == {
        name: c for name, (c, _) in before.items()
    }


def test_a_resumed_run_says_so_before_its_first_epoch() -> None:
    first = spoken("--epochs", "1", "--out", "r", "--schedule", "constant", "--resume", "auto")
    assert first.startswith("epoch 1/1 ")
    lines = spoken(
        "--epochs", "2", "--out", "r", "--schedule", "constant", "--resume", "auto"
    ).splitlines()
    assert lines[0] == "goes on after step 5, in epoch 2 of 2, from r/step-000000005"
    assert lines[1].startswith("epoch 2/2 ")


def test_what_stands_in_the_way_of_a_resume_comes_first() -> None:
    trained("r", "--epochs", "1")
    said = r"holds another run: lr was 0\.02 and is 1\.0\. Repeat .*\. Allowed to differ: epochs was 1 and is 3\.$"
    with pytest.raises(ValueError, match=said):
        trained("r", "--epochs", "3", "--lr", "1", "--resume", "auto")


@pytest.mark.slow
def test_sigterm_leaves_a_checkpoint_and_143(project: Path) -> None:
    line = ["train", *SMALL, "--epochs", "100000", "--out", "r", "--schedule", "constant"]
    command = [sys.executable, "-c", "from halfstep.cli import main; main()", *line]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=project
    )
    deadline = time.monotonic() + 60
    while not checkpoint.listing("r") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    kept = checkpoint.latest("r")
    assert kept is not None
    again = shlex.join(["halfstep", *line, "--resume", "auto"])
    assert said.endswith(
        f"stopped after step {checkpoint.step_of(kept)}, kept in {kept}. Go on: {again}\n"
    )
    assert "fit(resume=" not in said  # the library's own line, which a script gets


def test_fresh_removes_a_runs_own_files_and_no_others() -> None:
    trained("r", "--epochs", "2")
    Path("r/notes.txt").write_text("mine")
    trained("r", "--epochs", "1", "--fresh")
    left = sorted(path.name for path in Path("r").iterdir() if not path.name.startswith("."))
    assert left == ["log.jsonl", "notes.txt", "run.json", "step-000000005", "weights.safetensors"]


# builders


def test_a_builder_trains_and_is_evaluated_on_its_validation_data() -> None:
    line = ["train", "--build", "mine:parts", "--epochs", "2", "--out", "r"]
    last = told(*line)["history"][-1]
    assert told("eval", "r")["scores"] == {"loss": last["valid_loss"], "acc": last["valid_acc"]}
    import mine  # type: ignore[import-not-found]

    model, data, _ = mine.parts()
    model.fit(2, data)
    assert torch.equal(load_file("r/weights.safetensors")["weight"], model.net.weight)
    with pytest.raises(ValueError, match=r"returns no validation data.*--split train"):
        told("eval", "r", "--build", "mine:two")


def test_what_a_builder_decided_is_refused_beside_it() -> None:
    with pytest.raises(ValueError, match="--lr, --net: expected no such option beside --build"):
        told("train", "--build", "mine:parts", "--lr", "0.1", "--net", "mlp", "--epochs", "1")
    told(
        "train",
        "--build",
        "mine:parts",
        "--epochs",
        "1",
        "--out",
        "r",
        "--seed",
        "3",
        "--sink",
        "2",
    )
    with pytest.raises(ValueError, match="eval: --precision beside a builder"):
        told("eval", "r", "--precision", "fp32")


def test_a_builder_that_asks_for_proof_on_a_cpu_is_told() -> None:
    said = (
        CliRunner()
        .invoke(app, ["train", "--build", "mine:proved", "--epochs", "1", "--out", "r"])
        .stderr
    )
    assert (
        said
        == "note: verify=2: there is nothing to verify on cpu, where no step is replayed from a graph\n"
    )


# predictions


def test_predictions_are_the_networks_own() -> None:
    trained("r", "--epochs", "1", "--precision", "O2")
    images, _ = hs.data.sample(train=False)
    np.save("bytes.npy", images[:7].numpy())
    np.save("floats.npy", (images[:7, None].float() / 255).numpy())
    for name in ("bytes", "floats"):
        CliRunner().invoke(
            app, ["predict", "r", f"{name}.npy", "--out", f"{name}-out.npy"], catch_exceptions=False
        )
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    model = hs.Model(net, precision="O2")
    model.load("r/weights.safetensors")
    expected = model.predict(images[:7, None].float() / 255)
    for name in ("bytes", "floats"):
        assert torch.equal(torch.from_numpy(np.load(f"{name}-out.npy")), expected)
    rows = told("predict", "r", "bytes.npy")
    assert [row["label"] for row in rows] == expected.argmax(1).tolist()
    assert [row["probability"] for row in rows] == [
        round(p, 6) for p in expected.double().softmax(1).amax(1).tolist()
    ]
    assert rows[0]["class"] == ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker",
                                "Bag", "Ankle boot")[rows[0]["label"]]  # fmt: skip
    whole = told("predict", "r", "sample")
    assert [row["label"] for row in whole][:7] == [row["label"] for row in rows]
    assert len(whole) == 2000  # though the run was tested on 100
    assert [rows[0]["input"], whole[0]["input"]] == ["bytes.npy[0]", "sample[0]"]


def test_every_prediction_has_every_column() -> None:
    """A builder's data has no names: the class is empty, not left out. Gray floats without a channel are taken."""
    told("train", "--build", "mine:two", "--epochs", "1", "--out", "own")
    np.save("x.npy", torch.randn(2, 6).numpy())
    assert [list(row) for row in told("predict", "own", "x.npy")] == [
        ["input", "label", "class", "probability"]
    ] * 2
    assert [row["class"] for row in told("predict", "own", "x.npy")] == [None, None]
    page = CliRunner().invoke(app, ["predict", "own", "x.npy"]).stdout.splitlines()
    assert page[0] == "input,label,class,probability"
    assert page[1].split(",")[2] == ""
    trained("r", "--epochs", "1")
    images, _ = hs.data.sample(train=False)
    np.save("gray.npy", (images[:3] / 255).numpy())
    np.save("whole.npy", (images[:3, None] / 255).numpy())
    one, other = (told("predict", "r", name) for name in ("gray.npy", "whole.npy"))
    assert [row["probability"] for row in one] == [row["probability"] for row in other]
    with pytest.raises(
        FileNotFoundError, match=r"found nothing at 'sampel'\. Did you mean 'sample'"
    ):
        told("predict", "r", "sampel")


def test_images_are_predicted_as_their_pixels_are() -> None:
    trained("r", "--epochs", "1")
    images, _ = hs.data.sample(train=False)
    Path("photos").mkdir()
    for i in range(3):
        Image.fromarray(images[i].numpy()).save(f"photos/{i}.png")
    np.save("x.npy", images[:3].numpy())
    CliRunner().invoke(app, ["predict", "r", "photos", "--out", "p.csv"], catch_exceptions=False)
    rows = list(csv.DictReader(Path("p.csv").read_text().splitlines()))
    assert [row["input"] for row in rows] == [f"photos/{i}.png" for i in range(3)]
    assert [float(row["probability"]) for row in rows] == [
        row["probability"] for row in told("predict", "r", "x.npy")
    ]
    Image.fromarray(images[0].numpy()).resize((56, 40)).save("big.png")
    with pytest.warns(hs.Notice, match="images of 56 × 40 are resized to 28 × 28"):
        assert len(told("predict", "r", "big.png")) == 1


# replay


def test_replay_of_a_run_by_flags_needs_no_builder_and_labels_the_scale() -> None:
    trained("r", "--epochs", "1", "--precision", "O2")
    found = told("replay", "r", "--step", "3")
    logged = [json.loads(line) for line in Path("r/log.jsonl").read_text().splitlines()]
    assert found["loss"] == next(
        row["loss"] for row in logged if row["kind"] == "step" and row["global_step"] == 3
    )
    shown = (
        CliRunner().invoke(app, ["replay", "r", "--step", "3", "--save", "s.safetensors"]).output
    )
    assert "grad …: times the loss scale, 65536; divide by it for the gradient." in shown
    gradients = [
        t / 65536 for name, t in load_file("s.safetensors").items() if name.startswith("gradient.")
    ]
    norm = torch.stack([g.double().norm() for g in gradients]).norm()
    assert float(norm) == pytest.approx(found["grad_norm"], rel=1e-6)  # float32 sums


# mistakes


def test_mistakes_about_folders_are_told() -> None:
    trained("r", "--epochs", "1")
    with pytest.raises(
        ValueError, match=r"r holds a run already, up to step-000000005\. Go on with --resume auto"
    ):
        trained("r", "--epochs", "1")
    with pytest.raises(
        ValueError, match=r"holds another run: lr was 0\.02 and is 1\.0\. Repeat the command"
    ):
        trained("r", "--epochs", "1", "--lr", "1", "--resume", "auto")
    with pytest.raises(
        FileNotFoundError, match="resume: expected auto, a checkpoint or the folder of a run"
    ):
        trained("new", "--epochs", "1", "--resume", "nothing")
    with held(Path("busy")), pytest.raises(ValueError, match="out: busy is in use"):
        trained("busy", "--epochs", "1")
    with pytest.raises(
        FileNotFoundError, match="eval: expected a run, a checkpoint or a safetensors file"
    ):
        told("eval", "nothing")
    Path("r/run.json").write_text("{}")
    with pytest.raises(ValueError, match="expected what this version of halfstep train writes"):
        told("eval", "r")
    Path("r/run.json").unlink()
    with pytest.raises(ValueError, match="r does not say how it was built"):
        told("eval", "r")
    assert told("eval", "r", "--net", "mine:net", "--test-samples", "100")["scores"]["acc"] >= 0
