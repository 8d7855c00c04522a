"""`halfstep predict` prepares images and bytes as the run prepared its own.

Its probabilities are compared with those of model.predict in Python.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import halfstep as hs
from tests.support.command_line import run_json
from tests.support.user_module import write_user_module

USER_MODULE = """
import torch
from torch import nn
import halfstep as hs

IMAGES, LABELS = (column[:128] for column in hs.data.sample())

def build(data):
    torch.manual_seed(4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return {"model": model, "data": data.shuffle().batch(32), "epochs": 1}

def dataset(images):
    return hs.data.Dataset({"image": images, "label": LABELS})

def rescaled():
    return build(dataset(IMAGES).map(hs.data.Rescale(1 / 255), "image"))

def channel():
    transforms = [hs.data.ToCHW(), hs.data.Rescale(1 / 255)]
    return build(dataset(IMAGES[..., None]).map(transforms, "image"))

def first():
    return build(dataset(IMAGES[:, None]).map(hs.data.Rescale(1 / 255), "image"))

def normal():
    transforms = [hs.data.Flip(), hs.data.Rescale(1 / 255), hs.data.Normalize(0.3, 0.4)]
    return build(dataset(IMAGES).map(transforms, "image"))

def own():
    return build(dataset(IMAGES).map(lambda x: x.float() / 128 - 1, "image"))

def flat():
    transforms = [hs.data.Rescale(1 / 255), hs.data.Flatten()]
    return build(dataset(IMAGES).map(transforms, "image"))

def late():
    run = build(dataset(IMAGES))
    return {**run, "data": run["data"].map(lambda x: x.float() / 100, "image")}

def cropped():
    padded = torch.nn.functional.pad(IMAGES, (2, 2, 2, 2))
    return build(dataset(padded).map([hs.data.PadCrop(28), hs.data.Rescale(1 / 255)], "image"))

def sized():
    transforms = [hs.data.Resize(28), hs.data.Rescale(1 / 255)]
    return build(dataset(IMAGES[:, ::2, ::2]).map(transforms, "image"))

def recipe():
    transforms = [hs.data.RandomResizedCrop(28), hs.data.Flip(), hs.data.Rescale(1 / 255)]
    run = build(dataset(IMAGES).map(transforms, "image"))
    mixers = [hs.data.MixUp(10, 0.2), hs.data.CutMix(10)]
    return {**run, "data": run["data"].map(mixers, ["image", "label"])}

def floats():
    return build(dataset(IMAGES / 255))

def batches():
    run = build(dataset(IMAGES))
    return {**run, "data": [(IMAGES[:64] / 255, LABELS[:64])]}

def vectors():
    return build(dataset(IMAGES.flatten(1) / 255))

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))

def data():
    return (IMAGES, LABELS % 3), (IMAGES, LABELS % 3)
"""
RESCALE = torch.tensor(1 / 255)
TEST_IMAGES = hs.data.sample(train=False)[0][:3]

# One in the sixth place of a probability: Normalize is one product here.
PROBABILITY_TOLERANCE = 2e-6

# What each builder does to a byte, by hand.
PREPARE_BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
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
    write_user_module(USER_MODULE, tmp_path, monkeypatch)
    Path("photos").mkdir()
    np.save("u8.npy", TEST_IMAGES.numpy())
    for i, image in enumerate(TEST_IMAGES):
        Image.fromarray(image.numpy()).save(f"photos/{i}.png")


def train(builder: str) -> Any:
    """Trains a run in the folder r. Returns its model, loaded in Python."""
    import mine  # type: ignore[import-not-found]

    run_json("train", "--build", f"mine:{builder}", "--epochs", "1", "--out", "r")
    model = getattr(mine, builder)()["model"]
    model.load("r/weights.safetensors")
    return model


def probabilities(model: Any, inputs: Tensor) -> list[float]:
    """Of the likeliest class of each input, in six digits, as the command prints them."""
    chances = model.predict(inputs).double().softmax(1).amax(1)
    return [round(chance, 6) for chance in chances.tolist()]


def predicted_probabilities(source: str) -> list[float]:
    return [row["probability"] for row in run_json("predict", "r", source)]


@pytest.mark.parametrize("name", PREPARE_BY_HAND)
def test_gray_images_and_bytes_are_prepared_as_in_training(name: str) -> None:
    model = train(name)
    prepare = PREPARE_BY_HAND[name]
    is_exact = name != "normal"

    expected = probabilities(model, prepare(TEST_IMAGES))
    for source in ("u8.npy", "photos"):
        predicted = predicted_probabilities(source)
        assert predicted == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)
        assert not is_exact or predicted == expected

    # The same images with a channel, last or first.
    np.save("last.npy", TEST_IMAGES[..., None].numpy())
    np.save("chw.npy", TEST_IMAGES[:, None].numpy())
    for source in ("last.npy", "chw.npy"):
        assert predicted_probabilities(source) == predicted_probabilities("u8.npy")

    # One image by itself: products may round in another order.
    np.save("one.npy", TEST_IMAGES[1].numpy())
    predicted = predicted_probabilities("one.npy")
    expected = probabilities(model, prepare(TEST_IMAGES[1:2]))
    assert predicted == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)
    assert not is_exact or predicted == expected


def test_the_maps_of_a_run_that_resizes_are_applied() -> None:
    """A run on images of 14 × 14, brought to 28, takes images of both sizes."""
    model = train("sized")
    small = TEST_IMAGES[:, ::2, ::2].contiguous()
    np.save("small.npy", small.numpy())
    transforms = [hs.data.Resize(28), hs.data.Rescale(1 / 255)]
    (resized,) = next(iter(hs.data.Dataset((small,)).map(transforms).batch(3)))
    assert predicted_probabilities("small.npy") == probabilities(model, resized)
    for source in ("u8.npy", "photos"):
        expected = probabilities(model, TEST_IMAGES.float() * RESCALE)
        assert predicted_probabilities(source) == expected

    np.save("odd.npy", TEST_IMAGES[:, :9, :9].numpy())
    message = r"an array of \[samples, 14, 14\], as the network .* got \[3, 9, 9\]"
    with pytest.raises(ValueError, match=message):
        run_json("predict", "r", "odd.npy")


def test_random_crops_to_a_size_become_a_resize_and_its_centre() -> None:
    """Mixing and what else is random is left out."""
    model = train("recipe")
    transforms = [hs.data.Resize(32, antialias=True), hs.data.CenterCrop(28)]
    transforms.append(hs.data.Rescale(1 / 255))
    (prepared,) = next(iter(hs.data.Dataset((TEST_IMAGES,)).map(transforms).batch(3)))
    assert predicted_probabilities("u8.npy") == probabilities(model, prepared)


def test_another_size_is_resized_with_a_notice() -> None:
    train("rescaled")
    Image.fromarray(TEST_IMAGES[0].numpy()).resize((56, 40)).save("big.png")
    with pytest.warns(hs.Notice, match="images of 56 × 40 are resized to 28 × 28"):
        assert len(run_json("predict", "r", "big.png")) == 1


def test_a_network_that_takes_no_images_is_named() -> None:
    train("vectors")
    with pytest.raises(ValueError, match=r"takes inputs of \[784\], which no image has"):
        run_json("predict", "r", "photos")


def test_the_classes_of_a_data_function_are_its_numbers() -> None:
    words = ["--data", "mine:data", "--net", "mine:net", "--device", "cpu"]
    with pytest.warns(hs.Notice, match="without channels: taken as gray"):
        run_json("train", *words, "--epochs", "1", "--out", "r")
    with pytest.warns(hs.Notice, match="without channels: taken as gray"):
        rows = run_json("predict", "r", "u8.npy")
    assert [row["class"] for row in rows] == [str(row["label"]) for row in rows]
    assert {row["label"] for row in rows} <= {0, 1, 2}
