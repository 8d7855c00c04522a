"""Data of the user's: `data check`, `train` and `compare` read it the same way or refuse it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from halfstep.compare import Settings
from halfstep.data.download.find import SAMPLE
from halfstep.data.readers import split_folder as layout
from halfstep.experiment.build import build_network, check_one_batch
from halfstep.experiment.datasets import load_train_test_data
from tests.support.user_module import write_user_module

USER_MODULE = """
import halfstep as hs

def part(train, change):
    images, labels = hs.data.sample(train)
    return change(images[:40]), labels[:40]

def gray(): return part(True, lambda x: x), part(False, lambda x: x)
def dataset(): return tuple(hs.data.Dataset(each) for each in gray())
def channels(): return part(True, lambda x: x[:, None]), part(False, lambda x: x[:, None])
def flat(): return part(True, lambda x: x.flatten(1)), part(False, lambda x: x.flatten(1))
def floats(): return part(True, lambda x: x / 255), part(False, lambda x: x / 255)
def many():
    (x, y), test = channels()
    return (x, y + 13), test
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)


def write_images(root: str, *folders: str, size: tuple[int, int] = (8, 6)) -> str:
    """Writes one image into each of the folders below `root`. Returns `root`."""
    for i, name in enumerate(folders):
        folder = Path(root, name)
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (40 * i, 0, 51)).save(folder / f"{size[0]}.png")
    return root


def refusal_of(name: str) -> str:
    """The error of a run with this data."""
    with pytest.raises(ValueError, match=r"^data: ") as error:
        load_train_test_data(Settings(data=name))
    return str(error.value)


def data_check(name: str) -> Any:
    """What `halfstep data check NAME --json` prints."""
    command = ["data", "check", name, "--json"]
    return json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)


# Folders


@pytest.mark.parametrize("test_part", ["test", "val", "valid"])
def test_split_images_are_read_by_both(test_part: str) -> None:
    name = write_images("p", "train/cat", "train/dog", f"{test_part}/cat", f"{test_part}/dog")
    shown = data_check(name)
    assert [part["name"] for part in shown["parts"]] == ["train", test_part]
    assert shown["notes"] == []
    data = load_train_test_data(Settings(data=name))
    assert (data.train.size, data.test.size) == (2, 2)
    assert data.classes == 2
    assert data.shape == (3, 6, 8)


def test_files_of_known_sets_are_read_by_both() -> None:
    shown = data_check(str(SAMPLE))
    data = load_train_test_data(Settings(data=str(SAMPLE)))
    assert [data.train.size, data.test.size] == [11_000, 2_000]
    assert [part["samples"] for part in shown["parts"]] == [11_000, 2_000]


def test_classes_without_a_split_are_read_by_both() -> None:
    name = write_images("p", "cat", "dog")
    for width in (9, 10, 11, 12):
        write_images("p", "cat", "dog", size=(width, 6))
    shown = data_check(name)
    assert [part["name"] for part in shown["parts"]] == ["all"]
    assert shown["notes"][0].startswith("no test part: halfstep train and compare take 20% of each")
    data = load_train_test_data(Settings(data=name))
    assert (data.train.size, data.test.size, data.classes) == (8, 2, 2)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train/cat"], "p/train holds one class, cat"),
        (["p/cat", "p/dog"], "Perhaps they are the classes: say p/p"),
        (["test/cat"], "p has test/ and no train/"),
        ([], "holds none of"),
    ],
)
def test_both_say_what_a_folder_lacks(folders: list[str], message: str) -> None:
    Path("p").mkdir()
    write_images("p", *folders)
    assert message in refusal_of("p")
    with pytest.raises(ValueError, match=message):
        data_check("p")


def test_classes_that_differ_between_parts_are_refused() -> None:
    """bird and cat in test are 0 and 1; cat and dog in train are 0 and 1 as well."""
    name = write_images("p", "train/cat", "train/dog", "test/bird", "test/cat")
    message = (
        "p: expected the same classes in train and test, found train/dog, test/bird in one only"
    )
    assert refusal_of(name) == f"data: {message}"
    assert data_check(name)["parts"][1]["damage"] == [message]


def test_several_image_sizes_are_noted_and_brought_to_one() -> None:
    name = write_images("p", "train/cat", "test/cat")
    write_images(name, "train/cat", size=(9, 6))
    [note] = [note for note in data_check(name)["notes"] if "test photo" not in note]
    assert note == (
        "images of 8 × 6, 9 × 6: halfstep train and compare resize the shorter side and crop the "
        "centre; --size 224 says to which size"
    )
    data = load_train_test_data(Settings(data=name))
    assert data.shape == (3, 6, 6)  # no larger than the photos are
    check_one_batch(Settings(data=name), data)
    assert data.chosen == {"size": "6"}


def test_the_help_says_what_is_read() -> None:
    shown = CliRunner().invoke(app, ["data", "check", "--help"]).output
    assert layout.READABLE_FOLDERS in " ".join(shown.split())


# Functions


@pytest.mark.parametrize("name", ["gray", "dataset"])
def test_gray_images_get_a_channel_and_a_notice(name: str) -> None:
    message = (
        f"data: mine:{name} gives images of 28 × 28 without channels: taken as gray, 1 × 28 × 28"
    )
    with pytest.warns(hs.Notice, match=message):
        data = load_train_test_data(Settings(data=f"mine:{name}"))
    inputs = next(iter(data.train.batch(40)))[0]
    images = hs.data.sample()[0][:40, None]
    assert torch.equal(inputs, images.float() * torch.tensor(1 / 255))
    assert data.shape == (1, 28, 28)


@pytest.mark.filterwarnings("ignore::halfstep.Notice")
@pytest.mark.parametrize("net", ["mlp", "lenet5", "resnet18"])
def test_every_network_takes_gray_images(net: str) -> None:
    settings = Settings(data="mine:gray", net=net)
    check_one_batch(settings, load_train_test_data(settings))


def test_uint8_that_is_no_image_is_refused_with_advice() -> None:
    assert refusal_of("mine:flat").endswith(
        "got uint8 [784] from mine:flat. Return x / 255, or the images before they were flattened."
    )


def test_floats_without_a_channel_are_refused_where_one_is_needed() -> None:
    settings = Settings(data="mine:floats", net="resnet18")
    data = load_train_test_data(settings)
    message = r"Give the images of mine:floats their channel: x\[:, None\] is \[N, 1, 28, 28\]"
    with pytest.raises(ValueError, match=message):
        check_one_batch(settings, data)
    settings = Settings(data="mine:floats")
    check_one_batch(settings, load_train_test_data(settings))  # an MLP flattens


def test_classes_are_counted_by_the_labels() -> None:
    settings = Settings(data="mine:many")
    data = load_train_test_data(settings)
    labels = hs.data.sample()[1][:40]
    assert data.classes == int((labels + 13).max()) + 1
    outputs = build_network(settings, data, 0)(torch.zeros(1, 1, 28, 28))
    assert outputs.shape == (1, data.classes)
    classes = load_train_test_data(Settings(data="mine:channels")).classes
    assert classes == int(np.max(labels.numpy())) + 1
