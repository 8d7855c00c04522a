"""Photos as a new user has them: mixed sizes, no test folder, damaged files, rare classes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.data.readers.resize_crop import resize_and_crop
from halfstep.experiment.settings import Settings
from halfstep.experiment.training_run import read_run_file
from tests.support.command_line import CommandLine

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
COUNTS = {"cat": 12, "dog": 10, "owl": 3}

pytestmark = pytest.mark.filterwarnings("default::halfstep.errors.Notice")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """photos/ with three classes, each photo of another size, bright where its class is high."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    g = np.random.default_rng(0)
    for label, (name, count) in enumerate(COUNTS.items()):
        Path("photos", name).mkdir(parents=True)
        for i in range(count):
            height, width = (int(side) for side in g.integers(20, 90, 2))
            pixels = g.integers(80 * label, 80 * label + 60, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{i}.png")
    return tmp_path


@pytest.fixture
def run_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def first_json(output: str) -> Any:
    """The JSON that a command prints; notes follow it, from standard error."""
    value, _ = json.JSONDecoder().raw_decode(output)
    return value


def run_file(out: str) -> dict[str, object]:
    content: dict[str, object] = json.loads(Path(out, "run.json").read_text())
    return content


def test_a_new_user_gets_training_and_one_line_for_each_choice(run_line: CommandLine) -> None:
    code, output = run_line("train --data photos/ --epochs 8 --out r")
    assert code == 0, output
    assert (
        "note: data: photos/ has no test part: 20% of each class are test data, 20 photos to train "
        "and 5 to test. --test-share and --split-seed change that\n"
    ) in output
    assert "resized to cover 40 × 40 and cropped to the centre. --size 224 chooses" in output
    assert "note: net: the usual network, mlp. --net resnet18 chooses another\n" in output
    assert "10 samples of 'cat' and 2 of 'owl', 5 times as many. --class-weights" in output
    settings = read_run_file(Path("r"))
    assert settings is not None
    assert (settings.size, settings.test_share, settings.split_seed) == ("40", 0.2, 0)

    # Every other command uses the same split and size, and says nothing more.
    code, output = run_line("eval r --json")
    assert code == 0
    last = json.loads(Path("r/log.jsonl").read_text().splitlines()[-1])
    assert first_json(output)["scores"]["loss"] == pytest.approx(last["valid_loss"], rel=1e-12)
    code, output = run_line("predict r photos/owl/1.png --json")
    assert code == 0
    [row] = first_json(output)
    with Image.open("photos/owl/1.png") as image:
        pixels = resize_and_crop(np.array(image.convert("RGB")), (40, 40))
    model = hs.Model(hs.nets.mlp(inputs=40 * 40 * 3, classes=3))
    model.load("r/weights.safetensors")
    chances = model.predict(torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255).softmax(1)[0]
    assert row["class"] == list(COUNTS)[int(chances.argmax())]
    assert row["probability"] == pytest.approx(float(chances.max()), abs=1e-5)


def test_the_same_weights_as_a_plain_torch_loop(run_line: CommandLine) -> None:
    code, output = run_line(
        "train --data photos/ --size 16x24 --test-share 0.25 --split-seed 2 --batch 4 --epochs 2 "
        "--lr 0.01 --schedule constant --class-weights balanced --device cpu --out r"
    )
    assert code == 0, output

    # Pillow reads, numpy weighs, torch trains; only the split and the order are halfstep's.
    train, _ = hs.data.ImageFolder("photos").split(0.25, seed=2)
    images = []
    for path in train.files:
        with Image.open(path) as image:
            images.append(resize_and_crop(np.array(image.convert("RGB")), (16, 24)))
    x = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous().float()
    x = x * torch.tensor(1 / 255)
    y = torch.tensor(train.labels)
    counts = np.bincount(train.labels)
    weight = torch.from_numpy(len(y) / (len(counts) * counts)).float()
    torch.manual_seed(0)
    net = hs.nets.mlp(inputs=16 * 24 * 3, classes=3)
    loss_function = nn.CrossEntropyLoss(weight=weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    order = hs.data.Dataset({"i": torch.arange(len(y))}).shuffle(seed=0).batch(4)
    for _ in range(2):
        for (i,) in order:
            optimizer.zero_grad()
            loss_function(net(x[i]), y[i]).backward()
            optimizer.step()
    model = hs.Model(hs.nets.mlp(inputs=16 * 24 * 3, classes=3))
    model.load("r/weights.safetensors")
    for name, p in model.net.state_dict().items():
        assert torch.equal(p, net.state_dict()[name]), name


def test_a_resumed_run_is_the_run_that_was_not_stopped(run_line: CommandLine) -> None:
    line = "train --data photos/ --schedule constant"
    assert run_line(f"{line} --epochs 3 --out whole")[0] == 0
    assert run_line(f"{line} --epochs 1 --out r")[0] == 0
    assert run_line(f"{line} --epochs 3 --out r --resume auto")[0] == 0
    whole, resumed = (checkpoint.load(checkpoint.latest(out)).tree for out in ("whole", "r"))
    for name, value in whole["step"]["net"].items():
        assert torch.equal(value, resumed["step"]["net"][name])


def test_a_folder_that_changed_is_not_resumed(run_line: CommandLine) -> None:
    assert run_line("train --data photos/ --epochs 1 --out r")[0] == 0
    shutil.copy("photos/cat/1.png", "photos/cat/new.png")
    code, output = run_line("train --data photos/ --epochs 2 --out r --resume auto")
    assert code == 2
    assert "the data has changed since the run in r began: the number of test samples" in output


def test_damaged_files_are_named_and_can_be_left_out(run_line: CommandLine) -> None:
    Path("photos/cat/3.png").write_bytes(b"<html>404")
    content = Path("photos/dog/4.png").read_bytes()
    Path("photos/dog/4.png").write_bytes(content[: len(content) // 2])  # its head is whole
    code, output = run_line("train --data photos/ --epochs 1 --out r")
    assert code == 2
    assert "photos/cat/3.png" in output
    assert "--skip-damaged leaves such files out" in output
    Path("photos/cat/3.png").unlink()
    code, output = run_line("train --data photos/ --epochs 1 --out r")
    assert code == 2
    assert "photos/dog/4.png" in output
    assert "--skip-damaged leaves such files out" in output

    code, output = run_line("train --data photos/ --epochs 1 --skip-damaged --out r")
    assert code == 0, output
    assert "note: data: 1 damaged file left out: photos/dog/4.png" in output
    facts = run_file("r")["data"]
    assert isinstance(facts, dict)
    assert facts["train"] + facts["test"] == sum(COUNTS.values()) - 2
    assert run_line("eval r")[0] == 0


def test_other_data_is_evaluated_as_a_whole_if_it_has_the_same_classes(
    run_line: CommandLine,
) -> None:
    assert run_line("train --data photos/ --epochs 1 --out r")[0] == 0
    shutil.copytree("photos", "more")
    code, output = run_line("eval r --data more --json")
    assert code == 0
    model = hs.Model(
        hs.nets.mlp(inputs=40 * 40 * 3, classes=3),
        nn.CrossEntropyLoss(),
        metrics={"acc": hs.metrics.Accuracy()},
    )
    model.load("r/weights.safetensors")
    data = hs.data.Dataset(hs.data.ImageFolder("more", size=40), ["image", "label"])
    data = data.map([hs.data.ToCHW(), hs.data.Rescale(1 / 255)], "image").batch(25)
    assert first_json(output)["scores"] == pytest.approx(model.evaluate(data), rel=1e-6)
    shutil.move("more/owl", "more/bat")
    code, output = run_line("eval r --data more")
    assert code == 2
    assert "expected the run's classes, cat, dog, owl; the data has bat, cat, dog" in output


def test_photos_in_both_parts_are_told(run_line: CommandLine) -> None:
    for part in ("train", "Val"):
        shutil.copytree("photos", f"split/{part}")
    for name in COUNTS:
        for i in range(1, COUNTS[name]):
            Path(f"split/Val/{name}/{i}.png").unlink()
    code, output = run_line("train --data split --epochs 1 --out r")
    assert code == 0, output
    assert "3 test photos are among the training photos too, byte for byte" in output
    assert "Val/cat/0.png = train/cat/0.png" in output
    code, output = run_line("train --data split --test-share 0.5 --epochs 1 --out s")
    assert code == 2
    assert "split has train and Val already" in output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train --size 0", "--size: expected a whole number, 1 or more"),
        ("train --size big --data photos/", "--size: expected 224, or 224x160 (height x width)"),
        ("train --size 32", "--size: expected it with a folder of images, got data 'sample'"),
        ("train --test-share 0.5", "--test-share: expected it with data that is not split"),
        ("train --data photos/ --test-share 2", "--test-share: expected a share between 0 and 1"),
        ("train --class-weights equal", "--class-weights: expected one of 'balanced'"),
        ("train --data photos/ --target x", "--target: expected it with a table, csv:FILE"),
        ("train --data photos/cat", "photos/cat holds 12 images and no folders"),
    ],
)
def test_mistakes_are_answered(line: str, message: str, run_line: CommandLine) -> None:
    code, output = run_line(line)
    assert code == 2
    assert message in output


def test_compare_takes_the_same_folder(run_line: CommandLine) -> None:
    line = "compare --data photos/ --precisions fp32,O2 --seeds 1 --epochs 1 --device cpu --out c"
    code, output = run_line(line)
    assert code == 0, output
    spec = json.loads(Path("c/compare.json").read_text())["spec"]
    assert (spec["size"], spec["test_share"], spec["samples"]) == ("40", 0.2, 20)
    code, output = run_line(line)  # goes on, with nothing left to do
    assert code == 0, output


def test_settings_of_old_runs_are_those_of_new_ones() -> None:
    """What an older run.json does not name changes nothing."""
    names = ("size", "test_share", "split_seed", "skip_damaged", "class_weights", "target", "task")
    assert all(getattr(Settings(), name) is None for name in (*names, "drop"))


def test_photos_that_are_not_read_are_told(run_line: CommandLine) -> None:
    for i in range(3):
        Path(f"photos/cat/x{i}.HEIC").write_bytes(b"ftypheic")
    code, output = run_line("train --data photos/ --epochs 1 --out r")
    assert code == 0
    assert "note: data: 3 .heic left out: such files are not read" in output
    Path("photos/phone").mkdir()
    Path("photos/phone/1.heic").write_bytes(b"ftypheic")
    code, output = run_line("train --data photos/ --epochs 1 --out s")
    assert code == 2
    assert "photos/phone: expected images" in output
    assert "found 1 .heic alone, which are not read: convert them to JPEG" in output


def test_a_comparison_names_the_command_that_trains_the_same(run_line: CommandLine) -> None:
    line = "compare --data photos/ --size 24 --precisions fp32 --seeds 1 --epochs 1 --out c"
    assert run_line(line)[0] == 0
    _, output = run_line("eval c")
    assert "--data photos/ --size 24 --test-share 0.2 --split-seed 0 --epochs 1" in output


def test_predict_leaves_damaged_photos_out_on_request(run_line: CommandLine) -> None:
    assert run_line("train --data photos/ --epochs 1 --out r")[0] == 0
    Path("new").mkdir()
    for i in range(3):
        shutil.copy(f"photos/cat/{i}.png", f"new/{i}.png")
    Path("new/1.png").write_bytes(b"<html>404")
    code, output = run_line("predict r new --json")
    assert code == 2
    assert "new/1.png" in output
    assert "--skip-damaged leaves such files out" in output

    code, output = run_line("predict r new --skip-damaged --json")
    assert code == 0, output
    assert [row["input"] for row in first_json(output)] == ["new/0.png", "new/2.png"]
    assert "note: predict: 1 damaged file left out: new/1.png" in output

    code, output = run_line("predict r new/1.png --skip-damaged")
    assert code == 2
    assert "--skip-damaged: expected it with a folder of images, got new/1.png" in output
    for i in (0, 2):
        Path(f"new/{i}.png").write_bytes(b"<html>404")
    code, output = run_line("predict r new --skip-damaged")
    assert code == 2
    assert "expected an image that can be read, found none" in output


def test_eval_calls_only_a_test_part_test_data(run_line: CommandLine) -> None:
    assert run_line("train --data photos --epochs 1 --out r")[0] == 0
    code, own = run_line("eval r")
    assert code == 0
    assert ", test data: " in own
    # The same folder by another name is evaluated whole, training photos and all.
    code, whole = run_line("eval r --data photos/")
    assert code == 0
    assert ", the data given: " in whole
    Path("parts").mkdir()
    for part in ("train", "test"):
        shutil.copytree("photos", f"parts/{part}")
    code, split = run_line("eval r --data parts")
    assert code == 0, split
    assert ", test data: " in split
