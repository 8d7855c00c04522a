"""`halfstep predict` does to images and bytes what the run did to its own: compared with model.predict in Python."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from tests.support.user_module import work_beside

MINE = """
import torch
from torch import nn
import halfstep as hs

IMAGES, LABELS = (part[:128] for part in hs.data.sample())

def made(data):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return {"model": model, "data": data.shuffle().batch(32), "epochs": 1}

def columns(images): return hs.data.Dataset({"image": images, "label": LABELS})
def rescaled(): return made(columns(IMAGES).map(hs.data.Rescale(1 / 255), "image"))
def channel(): return made(columns(IMAGES[..., None]).map([hs.data.ToCHW(), hs.data.Rescale(1 / 255)], "image"))
def first(): return made(columns(IMAGES[:, None]).map(hs.data.Rescale(1 / 255), "image"))
def normal():
    steps = [hs.data.Flip(), hs.data.Rescale(1 / 255), hs.data.Normalize(0.3, 0.4)]
    return made(columns(IMAGES).map(steps, "image"))
def own(): return made(columns(IMAGES).map(lambda x: x.float() / 128 - 1, "image"))
def flat(): return made(columns(IMAGES).map([hs.data.Rescale(1 / 255), hs.data.Flatten()], "image"))
def late():
    built = made(columns(IMAGES))
    return {**built, "data": built["data"].map(lambda x: x.float() / 100, "image")}
def cropped(): return made(columns(torch.nn.functional.pad(IMAGES, (2, 2, 2, 2))).map(
    [hs.data.PadCrop(28), hs.data.Rescale(1 / 255)], "image"))
def sized(): return made(columns(IMAGES[:, ::2, ::2]).map([hs.data.Resize(28), hs.data.Rescale(1 / 255)], "image"))
def floats(): return made(columns(IMAGES / 255))
def batches():
    built = made(columns(IMAGES))
    return {**built, "data": [(IMAGES[:64] / 255, LABELS[:64])]}
def vectors(): return made(columns(IMAGES.flatten(1) / 255))

def net(inputs=784, classes=10): return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))
def data(): return (IMAGES, LABELS % 3), (IMAGES, LABELS % 3)
"""
RESCALE = torch.tensor(1 / 255)
TEST = hs.data.sample(train=False)[0][:3]
# what each does to a byte, by hand
WAYS: dict[str, Any] = {
    "rescaled": lambda x: x.float() * RESCALE,
    "channel": lambda x: x.float() * RESCALE,
    "first": lambda x: x.float() * RESCALE,
    "normal": lambda x: (x.float() / 255 - 0.3) / 0.4,
    "own": lambda x: x.float() / 128 - 1,
    "flat": lambda x: x.float() * RESCALE,
    "late": lambda x: x.float() / 100,
    "cropped": lambda x: x.float() * RESCALE,
    "floats": lambda x: x.float() / 255,
    "batches": lambda x: x.float() / 255,
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_beside(MINE, tmp_path, monkeypatch)
    Path("photos").mkdir()
    np.save("u8.npy", TEST.numpy())
    for i, image in enumerate(TEST):
        Image.fromarray(image.numpy()).save(f"photos/{i}.png")


def told(*line: str) -> Any:
    result = CliRunner().invoke(app, [*line, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def train(name: str) -> Any:
    """The run, and its model in Python."""
    import mine  # type: ignore[import-not-found]

    told("train", "--build", f"mine:{name}", "--epochs", "1", "--out", "r")
    model = getattr(mine, name)()["model"]
    model.load("r/weights.safetensors")
    return model


def chances(model: Any, x: Tensor) -> list[float]:
    return [round(p, 6) for p in model.predict(x).double().softmax(1).amax(1).tolist()]


@pytest.mark.parametrize("name", WAYS)
def test_gray_images_and_bytes_are_prepared_as_in_training(name: str) -> None:
    model = train(name)
    expected = chances(model, WAYS[name](TEST))
    for source in ("u8.npy", "photos"):
        found = [row["probability"] for row in told("predict", "r", source)]
        assert found == pytest.approx(
            expected, abs=2e-6
        )  # one in the sixth place: Normalize is one product here
        assert name == "normal" or found == expected
    np.save("one.npy", TEST[1].numpy())
    np.save("last.npy", TEST[..., None].numpy())
    np.save("chw.npy", TEST[:, None].numpy())
    rows, [one] = told("predict", "r", "u8.npy"), told("predict", "r", "one.npy")
    for source in ("last.npy", "chw.npy"):
        assert [row["probability"] for row in told("predict", "r", source)] == [
            row["probability"] for row in rows
        ]
    alone = chances(
        model, WAYS[name](TEST[1:2])
    )  # one row by itself: products may round in another order
    assert [one["probability"]] == pytest.approx(alone, abs=2e-6)
    assert name == "normal" or [one["probability"]] == alone


def test_a_run_that_resizes_does_so_here() -> None:
    """Training images of 14 × 14, brought to 28: what is of that size goes through the same, and so does 28 × 28."""
    model = train("sized")
    small = TEST[:, ::2, ::2].contiguous()
    np.save("small.npy", small.numpy())
    grown = next(
        iter(hs.data.Dataset((small,)).map([hs.data.Resize(28), hs.data.Rescale(1 / 255)]).batch(3))
    )[0]
    assert [row["probability"] for row in told("predict", "r", "small.npy")] == chances(
        model, grown
    )
    for source in ("u8.npy", "photos"):
        assert [row["probability"] for row in told("predict", "r", source)] == chances(
            model, TEST.float() * RESCALE
        )
    np.save("odd.npy", TEST[:, :9, :9].numpy())
    with pytest.raises(
        ValueError, match=r"an array of \[samples, 14, 14\], as the network .* got \[3, 9, 9\]"
    ):
        told("predict", "r", "odd.npy")


def test_another_size_is_resized_and_told() -> None:
    train("rescaled")
    Image.fromarray(TEST[0].numpy()).resize((56, 40)).save("big.png")
    with pytest.warns(hs.Notice, match="images of 56 × 40 are resized to 28 × 28"):
        assert len(told("predict", "r", "big.png")) == 1


def test_what_is_no_image_is_told() -> None:
    train("vectors")
    with pytest.raises(ValueError, match=r"takes inputs of \[784\], which no image has"):
        told("predict", "r", "photos")


def test_the_classes_of_a_data_function_are_its_numbers() -> None:
    with pytest.warns(hs.Notice, match="without channels: taken as gray"):
        told(
            "train",
            "--data",
            "mine:data",
            "--net",
            "mine:net",
            "--device",
            "cpu",
            "--epochs",
            "1",
            "--out",
            "r",
        )
    with pytest.warns(hs.Notice, match="without channels: taken as gray"):
        rows = told("predict", "r", "u8.npy")
    assert [row["class"] for row in rows] == [str(row["label"]) for row in rows]
    assert {row["label"] for row in rows} <= {0, 1, 2}
