"""Splits of data that nobody has split: shares, classes, and what stays when data is added."""

from pathlib import Path

import pytest

from halfstep.data import ImageFolder
from halfstep.data.splits import split_rank, stratified_split

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


def names_and_labels(counts: list[int]) -> tuple[list[str], list[int]]:
    names = [f"{label}/{i}.jpg" for label, count in enumerate(counts) for i in range(count)]
    return names, [int(name.partition("/")[0]) for name in names]


def split_names(names: list[str], labels: list[int], share: float, seed: int) -> set[str]:
    _, test = stratified_split([split_rank(name, seed) for name in names], labels, share)
    return {names[i] for i in test}


def test_each_class_has_its_share_and_every_sample_is_on_one_side() -> None:
    names, labels = names_and_labels([100, 10, 3, 2, 1])
    train, test = stratified_split([split_rank(name, 0) for name in names], labels, 0.2)
    assert sorted(train + test) == list(range(len(names)))
    assert train == sorted(train)
    counts = [sum(labels[i] == label for i in test) for label in range(5)]
    assert counts == [20, 2, 1, 1, 0]  # one at least, and never all


def test_the_seed_chooses_and_the_order_does_not_matter() -> None:
    names, labels = names_and_labels([50, 50])
    first = split_names(names, labels, 0.3, 0)
    assert first == split_names(names[::-1], labels[::-1], 0.3, 0)
    other = split_names(names, labels, 0.3, 1)
    assert len(other) == len(first) == 30
    assert first != other


def test_one_file_more_moves_at_most_one_other() -> None:
    names, labels = names_and_labels([60])
    before = split_names(names, labels, 0.25, 0)
    for i in range(40):
        after = split_names([*names, f"0/new{i}.jpg"], [*labels, 0], 0.25, 0)
        after.discard(f"0/new{i}.jpg")
        assert len(before ^ after) <= 1


def test_a_folder_that_was_moved_has_the_same_split(tmp_path: Path) -> None:
    for root in ("one", "elsewhere/two"):
        for name in ("cat", "dog"):
            (tmp_path / root / name).mkdir(parents=True)
            for i in range(10):
                Image.new("L", (2, 2)).save(tmp_path / root / name / f"{i}.png")
    parts = []
    for root in ("one", "elsewhere/two"):
        train, test = ImageFolder(tmp_path / root).split(0.3, seed=4)
        assert (len(train), len(test)) == (14, 6)
        assert train.classes == test.classes == ["cat", "dog"]
        assert test.labels == [0, 0, 0, 1, 1, 1]
        parts.append([Path(path).relative_to(tmp_path / root) for path in test.files])
    assert parts[0] == parts[1]


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, True, "0.2"])
def test_what_is_no_share_is_refused(tmp_path: Path, share: float) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (2, 2)).save(tmp_path / "a" / "x.png")
    with pytest.raises(ValueError, match="test_share: expected a share between 0 and 1"):
        ImageFolder(tmp_path).split(share)


def test_one_image_of_each_class_cannot_be_split(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / name / "x.png")
    with pytest.raises(ValueError, match="expected two images of a class or more"):
        ImageFolder(tmp_path).split()
