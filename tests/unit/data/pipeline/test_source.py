"""What a user may pass to a Dataset, and how it comes out.

Dicts, tuples, lists, arrays of every kind, odd samples.
"""

import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from halfstep.data import Dataset, Flip, ImageFolder, Normalize, OneHot, PadCrop, Rescale, Resize


class FunctionDataset(TorchDataset[Any]):
    """Sample i is make_sample(i)."""

    def __init__(self, make_sample: Callable[[int], Any], size: int = 6) -> None:
        self.make_sample = make_sample
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        return self.make_sample(i)


# Samples read one by one


def sample_in_either_order(i: int) -> dict[str, int]:
    if i % 2:
        return {"image": i, "label": 100 + i}
    return {"label": 100 + i, "image": i}


def test_dicts_are_matched_by_key_whatever_their_order() -> None:
    (first,) = Dataset(FunctionDataset(sample_in_either_order)).batch(6).dicts()
    assert {name: column.tolist() for name, column in first.items()} == {
        "label": [100, 101, 102, 103, 104, 105],
        "image": [0, 1, 2, 3, 4, 5],
    }


def test_columns_select_from_dicts_by_name() -> None:
    data = Dataset(FunctionDataset(sample_in_either_order), ["image"])
    assert data.columns == ("image",)
    assert [int(i) for (i,) in data] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(
        ValueError, match=r"expected columns out of \['label', 'image'\], each once, got \['mask'\]"
    ):
        Dataset(FunctionDataset(sample_in_either_order), ["mask"])


ODD_ROWS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a key less": (
        lambda i: {"a": i, "b": i} if i < 3 else {"a": i},
        r"sample 3: expected the key 'b', got \['a",
    ),
    "no mapping": (
        lambda i: {"a": i} if i < 3 else i,
        "sample 3: expected a mapping like sample 0, got int",
    ),
    "a mapping": (
        lambda i: (i, i) if i < 3 else {"a": i, "b": i},
        r"sample 3: expected 2 parts \['x', 'y'\], got a m",
    ),
    "too many parts": (
        lambda i: (i,) * (2 if i < 3 else 3),
        r"sample 3: expected 2 parts \['x', 'y'\], got 3 parts",
    ),
}


@pytest.mark.parametrize("name", ODD_ROWS)
def test_a_sample_unlike_the_first_is_named(name: str) -> None:
    make_sample, message = ODD_ROWS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        list(Dataset(FunctionDataset(make_sample)).batch(2))


Point = namedtuple("Point", "image label weight")


def test_named_tuples_give_their_names() -> None:
    assert Dataset(FunctionDataset(lambda i: Point(i, i, 1.0))).columns == (
        "image",
        "label",
        "weight",
    )
    assert Dataset(Point(torch.zeros(3), torch.zeros(3), torch.ones(3))).columns == (
        "image",
        "label",
        "weight",
    )
    assert Dataset(FunctionDataset(lambda i: Point(i, i, 1.0)), ["a", "b", "c"]).columns == (
        "a",
        "b",
        "c",
    )


def test_a_tuple_is_columns_and_a_list_is_samples() -> None:
    columns = Dataset((np.zeros((3, 2)), [4, 5, 6]))
    assert (columns.size, columns.columns) == (3, ("x", "y"))
    assert [int(y) for _, y in columns] == [4, 5, 6]
    samples = Dataset([torch.full((2,), float(i)) for i in range(5)])
    assert (samples.size, samples.columns) == (5, ("x",))
    assert Dataset(torch.arange(3), "image").columns == ("image",)


def test_looking_at_a_sample_moves_no_generator() -> None:
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    Dataset(FunctionDataset(lambda i: torch.rand(1) + random.random()))
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()


# Samples of every kind, alone and in batches

# How sample i is made, what sample 0 is alone, and what samples 0 and 1 are as a batch.
KINDS: dict[str, tuple[Callable[[int], Any], Any, Any]] = {
    "strings": (lambda i: f"f{i}", "f0", ["f0", "f1"]),
    "tuples": (lambda i: (i, 10 + i), (0, 10), [torch.tensor([0, 1]), torch.tensor([10, 11])]),
    "dicts": (lambda i: {"a": i}, {"a": 0}, {"a": torch.tensor([0, 1])}),
    "floats": (lambda i: i / 2, 0.0, torch.tensor([0.0, 0.5], dtype=torch.float64)),
    "arrays": (lambda i: np.full(2, i), torch.tensor([0, 0]), torch.tensor([[0, 0], [1, 1]])),
}


def is_same_value(a: Any, b: Any) -> bool:
    if isinstance(b, Tensor):
        return isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same_value(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_same_value, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_sample_is_itself_and_a_batch_is_torchs(name: str, workers: int) -> None:
    make_sample, expected_sample, expected_batch = KINDS[name]
    data = Dataset(FunctionDataset(lambda i: (i, make_sample(i)), 2), ["i", "thing"])
    assert is_same_value(next(iter(data.workers(workers)))[1], expected_sample)
    assert is_same_value(next(iter(data.batch(2).workers(workers)))[1], expected_batch)


@pytest.mark.parametrize("thing", [None, Image.new("RGB", (4, 4))], ids=["None", "PIL"])
def test_a_column_that_makes_no_batch_is_named_and_the_advice_works(thing: Any) -> None:
    data = Dataset(FunctionDataset(lambda i: (i, thing)), ["i", "thing"])
    with pytest.raises(
        TypeError,
        match=r"column 'thing': expected samples that make a batch.*map\(function, 'thing'\)",
    ):
        next(iter(data.batch(2)))
    assert next(iter(data.select("i").batch(2)))[0].tolist() == [0, 1]
    mapped = data.map(lambda part: np.zeros(3) if part is None else np.asarray(part), "thing")
    assert len(next(iter(mapped.batch(2)))[1]) == 2
    assert next(iter(data))[1] is thing


def test_arrays_of_several_shapes_are_resized_as_the_message_says() -> None:
    data = Dataset(
        FunctionDataset(lambda i: (np.full((5 + i, 9, 3), i, np.uint8), i)), ["image", "label"]
    )
    with pytest.raises(
        ValueError,
        match=r"column 'image': expected samples of one shape .*Resize\(\(224, 224\)\), 'image",
    ):
        next(iter(data.batch(2)))
    image, _ = next(iter(data.map(Resize((8, 8)), "image").batch(6)))
    assert image.shape == (6, 8, 8, 3)
    assert image.float().mean((1, 2, 3)).tolist() == [0, 1, 2, 3, 4, 5]
    assert next(iter(data))[0].shape == (5, 9, 3)


def test_a_list_that_a_batch_function_returns_is_a_list() -> None:
    data = (
        Dataset({"x": torch.arange(4)}).batch(2).map(lambda x: [f"n{i}" for i in x.tolist()], "x")
    )
    assert [item for (item,) in data] == [["n0", "n1"], ["n2", "n3"]]


# numpy

READ_ONLY = np.arange(6, dtype=np.float32)
READ_ONLY.setflags(write=False)
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "big endian": np.arange(6, dtype=">i4"),
    "backwards": np.arange(6)[::-1],
    "read-only": READ_ONLY,
    **{
        kind: np.array([0, 1, 2, 3, 4, np.iinfo(kind).max], dtype=kind)
        for kind in ("uint16", "uint32", "uint64")
    },
    **{kind: np.arange(6).astype(kind) for kind in ("bool", "float16", "complex64")},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_every_kind_come_out_as_they_went_in(name: str) -> None:
    array = ARRAYS[name]
    for data in (Dataset(array), Dataset(FunctionDataset(lambda i: array[i : i + 1]))):
        delivered = torch.cat([x for (x,) in data.batch(4)]).numpy()
        assert delivered.dtype == array.dtype.newbyteorder("=")
        assert np.array_equal(delivered.ravel(), array)


def test_arrays_are_not_copied() -> None:
    array = np.zeros(3)
    data = Dataset(array)
    array[:] = 7
    assert [float(x) for (x,) in data] == [7, 7, 7]


def test_numpys_numbers_are_accepted_like_pythons() -> None:
    by_numpy = Dataset({"x": torch.arange(10)}, seed=np.int64(3)).shuffle()
    by_numpy = by_numpy.batch(np.int32(4)).take(np.int64(2))
    by_python = Dataset({"x": torch.arange(10)}, seed=3).shuffle().batch(4).take(2)
    assert by_numpy.plan.describe() == by_python.plan.describe()
    half = np.float32(0.5)
    assert Normalize(half, np.array([0.5, 0.25])) == Normalize(0.5, (0.5, 0.25))
    assert repr(Rescale(half, half)) == repr(Rescale(0.5, 0.5))


# Maps and columns


def test_a_transform_needs_the_name_of_its_column_among_several() -> None:
    data = Dataset({"image": torch.zeros(4, 2, 2, 1), "label": torch.arange(4)})
    with pytest.raises(
        ValueError,
        match=r"expected the columns that the transform is for, out of \['image', 'label'\]",
    ):
        data.map(Rescale(1 / 255))
    assert Dataset({"image": torch.full((4, 2), 255)}).map(Rescale(1 / 255)).columns == ("image",)
    mapped = data.map(lambda image, label: (image, label + 1))
    assert [int(label) for _, label in mapped] == [1, 2, 3, 4]


def test_select_is_a_step_of_the_chain() -> None:
    data = Dataset({"x": torch.arange(3), "y": torch.arange(3) * 10})
    mapped = data.select("x").map(lambda x: (x, x + 1), "x", output=["x", "z"])
    assert mapped.columns == ("x", "z")
    assert [(int(x), int(z)) for x, z in mapped] == [(0, 1), (1, 2), (2, 3)]
    assert data.select(["y", "x"]).columns == ("y", "x")


@pytest.mark.parametrize(
    ("dtype", "classes"), [(torch.uint8, 300), (torch.int8, 200), (torch.int16, 40_000)]
)
def test_labels_of_few_bits_and_many_classes(dtype: torch.dtype, classes: int) -> None:
    labels = torch.tensor([5, torch.iinfo(dtype).max], dtype=dtype)
    (one_hot,) = next(iter(Dataset({"y": labels}).map(OneHot(classes), "y").batch(2)))
    assert torch.equal(one_hot, torch.nn.functional.one_hot(labels.long(), classes).float())
    with pytest.raises(ValueError, match=rf"OneHot: expected labels in 0\.\.{classes - 1}, got -1"):
        OneHot(classes)(torch.tensor([-1, 5]), torch.empty(0))


def test_a_batch_far_larger_than_the_set_is_the_set() -> None:
    for batch_size in (12, 13, 2**60):
        batches = Dataset(torch.arange(12)).batch(batch_size)
        assert [x.tolist() for (x,) in batches] == [list(range(12))]
    assert Dataset(torch.arange(12)).batch(5, True).size == 2


# Loading into memory


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(3):
            Image.new("RGB", (10 + i, 12), (20 * i, 0, 0)).save(tmp_path / label / f"{i}.png")
    return ImageFolder(tmp_path)


def test_an_image_folder_is_loaded_by_the_resize_that_comes_first(folder: ImageFolder) -> None:
    chain = [Resize((8, 8)), PadCrop(8, 2), Flip(), Rescale(1 / 255)]
    data = Dataset(folder, ["image", "label"], seed=3).map(chain, "image").shuffle().batch(4)
    loaded = data.load()
    assert loaded.plan.source.tensors["image"].shape == (6, 8, 8, 3)
    assert loaded.plan.source.tensors["image"].dtype == torch.uint8
    for _ in range(2):
        for (image, label), (loaded_image, loaded_label) in zip(data, loaded, strict=True):
            assert torch.equal(image, loaded_image)
            assert torch.equal(label, loaded_label)
    loaded.load_state_dict(data.state_dict())
    with pytest.raises(
        ValueError,
        match=r"got others in \['image'\]\. Make them equal with a transform that comes first",
    ):
        Dataset(folder, ["image", "label"]).load()


def test_load_takes_the_smallest_that_the_first_transforms_make(folder: ImageFolder) -> None:
    rows = FunctionDataset(lambda i: torch.full((6, 6, 3), i, dtype=torch.uint8))
    grown = Dataset(rows).map([Resize((16, 16)), Rescale(1 / 255)]).load()
    assert grown.plan.source.tensors["x"].shape == (6, 6, 6, 3)
    assert next(iter(grown.batch(2)))[0].shape == (2, 16, 16, 3)
    shrunk = Dataset(rows).map([Resize((2, 2)), Rescale(1 / 255)]).load()
    assert shrunk.plan.source.tensors["x"].shape == (6, 2, 2, 3)


def test_samples_that_differ_late_are_loaded_too() -> None:
    rows = FunctionDataset(lambda i: torch.full((6 + i // 90, 6, 3), i, dtype=torch.uint8), 100)
    (image,) = next(iter(Dataset(rows).map(Resize((16, 16))).load().batch(100)))
    assert image.float().mean((1, 2, 3)).tolist() == list(range(100))


def test_class_names_come_with_the_data(folder: ImageFolder) -> None:
    assert Dataset(folder).classes == ("a", "b")
    assert Dataset(folder, classes=["x", "y"]).classes == ("x", "y")
    assert Dataset({"classes": torch.zeros(3)}).classes == ()
