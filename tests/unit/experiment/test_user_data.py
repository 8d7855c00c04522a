"""Folders and functions of the user's, read one way by `data check`, `train` and `compare`, or refused with advice."""

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
from halfstep.experiment import build as recipe
from halfstep.experiment.datasets import material
from tests.support.user_module import work_beside

MINE = """
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
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_beside(MINE, tmp_path, monkeypatch)


def photos(root: str, *folders: str, size: tuple[int, int] = (8, 6)) -> str:
    for i, name in enumerate(folders):
        place = Path(root, name)
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (40 * i, 0, 51)).save(place / f"{size[0]}.png")
    return root


def refused(name: str) -> str:
    with pytest.raises(ValueError, match=r"^data: ") as error:
        material(Settings(data=name))
    return str(error.value)


def checked(name: str) -> Any:
    told = CliRunner().invoke(app, ["data", "check", name, "--json"], catch_exceptions=False)
    return json.loads(told.stdout)


# folders


@pytest.mark.parametrize("other", ["test", "val", "valid"])
def test_split_images_are_read_by_both(other: str) -> None:
    name = photos("p", "train/cat", "train/dog", f"{other}/cat", f"{other}/dog")
    found = checked(name)
    assert [part["name"] for part in found["parts"]] == ["train", other]
    assert found["notes"] == []
    given = material(Settings(data=name))
    assert (given.train.size, given.test.size, given.classes, given.shape) == (2, 2, 2, (3, 6, 8))


def test_files_of_known_sets_are_read_by_both() -> None:
    found = checked(str(SAMPLE))
    given = material(Settings(data=str(SAMPLE)))
    assert (
        [part["samples"] for part in found["parts"]]
        == [given.train.size, given.test.size]
        == [11_000, 2_000]
    )


def test_classes_alone_can_be_looked_at_and_both_say_how_to_split_them() -> None:
    name = photos("p", "cat", "dog")
    [note] = checked(name)["notes"]
    assert note.endswith("move its classes below p/train and p/test")
    assert refused(name).endswith("Move those of its classes below p/train and p/test.")
    for part in ("train", "test"):  # the advice, followed
        photos(f"p/{part}", "cat", "dog")
    assert material(Settings(data=name)).classes == 2


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (["train/cat"], "p has train/ and no test/"),
        (["test/cat"], "p has test/ and no train/"),
        ([], "holds none of"),
    ],
)
def test_what_a_folder_lacks_is_told_alike(folders: list[str], said: str) -> None:
    Path("p").mkdir()
    photos("p", *folders)
    assert said in refused("p")
    with pytest.raises(ValueError, match=said):
        checked("p")


def test_classes_that_differ_would_be_other_labels() -> None:
    """bird and cat in test are 0 and 1; cat and dog in train are 0 and 1 as well."""
    name = photos("p", "train/cat", "train/dog", "test/bird", "test/cat")
    said = "p: expected the same classes in train and test, found train/dog, test/bird in one only"
    assert refused(name) == f"data: {said}"
    assert checked(name)["parts"][1]["damage"] == [said]


def test_several_sizes_are_noted_and_refused_as_the_datas_fault() -> None:
    name = photos("p", "train/cat", "test/cat")
    photos(name, "train/cat", size=(9, 6))
    assert checked(name)["notes"] == ["images of different sizes: halfstep train and compare take one size. "
                                      "Resize the files first."]  # fmt: skip
    settings = Settings(data=name)
    with pytest.raises(
        ValueError, match=r"^data: p: column 'image': expected samples of one shape"
    ):
        recipe.check(settings, material(settings))


def test_the_words_of_the_help_are_what_is_read() -> None:
    shown = " ".join(CliRunner().invoke(app, ["data", "check", "--help"]).output.split())
    assert layout.READ in shown


# functions


@pytest.mark.parametrize("name", ["gray", "dataset"])
def test_gray_images_get_their_channel_and_a_notice(name: str) -> None:
    said = f"data: mine:{name} gives images of 28 × 28 without channels: taken as gray, 1 × 28 × 28"
    with pytest.warns(hs.Notice, match=said):
        given = material(Settings(data=f"mine:{name}"))
    first = next(iter(given.train.batch(40)))[0]
    assert torch.equal(first, hs.data.sample()[0][:40, None].float() * torch.tensor(1 / 255))
    assert given.shape == (1, 28, 28)


@pytest.mark.filterwarnings("ignore::halfstep.Notice")
@pytest.mark.parametrize("net", ["mlp", "lenet5", "resnet18"])
def test_every_network_takes_them(net: str) -> None:
    settings = Settings(data="mine:gray", net=net)
    recipe.check(settings, material(settings))


def test_bytes_that_are_no_images_are_refused_with_the_line_to_write() -> None:
    assert refused("mine:flat").endswith("got uint8 [784] from mine:flat. Return x / 255, or the images before they "
                                         "were flattened.")  # fmt: skip


def test_floats_without_a_channel_are_refused_where_one_is_needed() -> None:
    settings = Settings(data="mine:floats", net="resnet18")
    with pytest.raises(
        ValueError,
        match=r"Give the images of mine:floats their channel: x\[:, None\] is \[N, 1, 28, 28\]",
    ):
        recipe.check(settings, material(settings))
    settings = Settings(data="mine:floats")
    recipe.check(settings, material(settings))  # an MLP flattens


def test_classes_are_counted_by_the_labels() -> None:
    settings = Settings(data="mine:many")
    given = material(settings)
    train = hs.data.sample()[1][:40] + 13
    assert given.classes == int(train.max()) + 1
    assert recipe.network(settings, given, 0)(torch.zeros(1, 1, 28, 28)).shape == (1, given.classes)
    assert (
        material(Settings(data="mine:channels")).classes
        == int(np.max(hs.data.sample()[1][:40].numpy())) + 1
    )
