"""torchvision's transforms in a pipeline: each sample by itself, the same wherever it is computed.

torchvision's own run where it is installed. A stand-in of its kind, a class of a module of that
name, runs everywhere.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.callbacks import Checkpoint
from halfstep.data import Dataset, hashing
from halfstep.data.pipeline.torchvision_maps import is_torchvision
from halfstep.engine import Callback, Run
from halfstep.errors import Notice

COUNT = 29
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (COUNT, 12, 10, 3), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.arange(COUNT) % 5

pytestmark = pytest.mark.filterwarnings("ignore:map. .* is torchvision's:halfstep.errors.Notice")


class StandIn:
    """Draws from all three generators of the host, as torchvision's transforms draw from torch's.

    It takes [C, H, W], like those.
    """

    def __call__(self, image: Tensor) -> Tensor:
        assert image.shape == (3, 12, 10)
        shift = int(torch.randint(0, 10, ())) + random.randrange(10)
        factor = np.random.rand()  # noqa: NPY002
        return (image.roll(shift, 2).float() * factor).to(torch.uint8)

    def __repr__(self) -> str:
        return "StandIn(\n  two lines)"


StandIn.__module__ = "torchvision.transforms.stand_in"


def torchvision_chain() -> Any:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    return v2.Compose(
        [
            v2.RandomCrop((12, 10), padding=4),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomResizedCrop((12, 10)),
            v2.RandomErasing(0.5),
        ]
    )


def first_version() -> Any:
    v1 = pytest.importorskip("torchvision.transforms")
    return v1.Compose([v1.RandomCrop((12, 10), padding=4), v1.RandomHorizontalFlip()])


MAKERS: dict[str, Callable[[], Any]] = {
    "a stand-in": StandIn,
    "v2": torchvision_chain,
    "v1": first_version,
}


def pipeline(transform: Any, batch: int = 8, *, before: bool = False) -> Dataset:
    data = Dataset({"image": IMAGES, "label": LABELS}, seed=3).shuffle()
    if before:
        return data.map(transform, "image").batch(batch)
    return data.batch(batch).map(transform, "image")


def delivered(data: Dataset, epoch: int = 1) -> Tensor:
    data.seek(epoch)
    return torch.cat([image for image, _ in data])


@pytest.mark.parametrize("name", MAKERS)
def test_a_sample_is_the_same_in_any_batch_worker_and_resumed_run(name: str) -> None:
    transform = MAKERS[name]()
    expected = delivered(pipeline(transform))
    assert expected.shape == (COUNT, 3, 12, 10)
    assert expected.dtype == torch.uint8
    others = {
        "before batch": pipeline(transform, before=True),
        "batches of 5": pipeline(transform, 5),
        "one batch": pipeline(transform, COUNT),
        "workers": pipeline(transform).workers(2),
        "a worker, before batch": pipeline(transform, 7, before=True).workers(1),
    }
    for what, data in others.items():
        assert torch.equal(delivered(data), expected), what
    assert not torch.equal(delivered(pipeline(transform), epoch=2), expected)

    data = pipeline(transform)
    data.seek(1)
    stream = iter(data)
    for _ in range(2):
        next(stream)
    again = pipeline(transform, 8)
    again.load_state_dict(data.state_dict())
    assert torch.equal(torch.cat([image for image, _ in again]), expected[16:])


def test_each_sample_is_seeded_by_its_own_hash() -> None:
    data = Dataset({"image": IMAGES, "label": LABELS}, seed=3).batch(8).map(StandIn(), "image")
    seed = data.plan.maps[0].seed  # type: ignore[union-attr]
    result = delivered(data, epoch=4)
    for i in range(COUNT):
        key = hashing.key(seed, 4, i)
        torch.manual_seed(key)
        random.seed(key)
        np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
        assert torch.equal(result[i], StandIn()(IMAGES[i].permute(2, 0, 1)))


def test_the_generators_are_left_as_they_were() -> None:
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002
    delivered(pipeline(StandIn()))
    drawn = (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002
    torch.manual_seed(5)
    random.seed(6)
    np.random.seed(7)  # noqa: NPY002
    assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())  # noqa: NPY002


def noise(image: Tensor) -> Tensor:
    return image + torch.rand(())


def test_a_function_behind_it_draws_the_same_in_workers() -> None:
    def build() -> Dataset:
        return pipeline(StandIn()).map(noise, "image")

    expected = delivered(build())
    assert torch.equal(delivered(build().workers(2)), expected)
    # Each batch draws anew.
    without = delivered(pipeline(StandIn())).float()
    added = (expected - without).flatten(1).mean(1)
    assert len((added[::8] * 1000).round().unique()) == 4


def test_where_it_runs_is_said() -> None:
    data = Dataset({"image": IMAGES, "label": LABELS}).batch(8)
    with pytest.warns(Notice, match="StandIn is torchvision's. It runs on the host, one image at"):
        mapped = data.map(StandIn(), "image")
    assert "map(StandIn( two lines) on image, per sample, torchvision)" in repr(mapped)
    with pytest.warns(Notice, match=r"streaming to cpu, not resident: .* is torchvision's, on sin"):
        mapped.to_device("cpu")
    assert not is_torchvision(noise)
    assert not is_torchvision(hs.data.Flip())
    assert not is_torchvision(torch.nn.Flatten())
    assert is_torchvision(StandIn())


class TakesAnything:
    def __call__(self, *values: Any) -> Any:
        shapes.append([getattr(value, "shape", type(value)) for value in values])
        return values if len(values) > 1 else values[0]


TakesAnything.__module__ = "torchvision.stand_in"
shapes: list[list[Any]] = []


@pytest.mark.parametrize(
    ("shape", "seen", "result"),
    [
        ((12, 10, 3), (3, 12, 10), (3, 12, 10)),
        ((3, 12, 10), (3, 12, 10), (3, 12, 10)),
        ((12, 10), (1, 12, 10), (12, 10)),
        ((12, 10, 2), (12, 10, 2), (12, 10, 2)),  # the shape does not say
        ((7,), (7,), (7,)),
    ],
)
def test_images_are_handed_over_as_torchvision_takes_them(
    shape: Any, seen: Any, result: Any
) -> None:
    shapes.clear()
    data = Dataset({"image": torch.zeros(4, *shape), "label": torch.arange(4)}).batch(4)
    ((image, label),) = list(data.map(TakesAnything(), ["image", "label"]))
    assert shapes == [[seen, ()]] * 4
    assert image.shape == (4, *result)
    assert torch.equal(label, torch.arange(4))


# --- what only torchvision itself can show


def test_a_flip_flips_the_columns_of_any_layout() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    flip = v2.RandomHorizontalFlip(1.0)
    planes = IMAGES.permute(0, 3, 1, 2)
    for images, expected in (
        (IMAGES, planes.flip(3)),
        (planes, planes.flip(3)),
        (IMAGES[..., 0], IMAGES[..., 0].flip(2)),
    ):
        data = Dataset({"image": images, "label": LABELS}).batch(8).map(flip, "image")
        assert torch.equal(delivered(data), expected)


def test_to_image_and_normalize_give_plain_floats() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    chain = [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.2] * 3),
    ]
    result = delivered(pipeline(chain))
    assert type(result) is Tensor
    expected = (delivered(pipeline(hs.data.ToCHW())) * (1 / 255) - 0.5) / 0.2
    assert (result - expected).abs().max() < 1e-6


def test_pil_images_of_a_data_set() -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    image_module = pytest.importorskip("PIL.Image")
    rows = [(image_module.fromarray(image), i) for i, image in enumerate(IMAGES.numpy())]
    chain = v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()])
    data = Dataset(rows, ["image", "label"], seed=3)
    first = delivered(data.map(chain, "image").batch(8))
    assert torch.equal(delivered(data.map(chain, "image").batch(5).workers(2)), first)
    tensors = Dataset({"image": IMAGES, "label": LABELS}, seed=3).batch(8).map(chain, "image")
    assert torch.equal(delivered(tensors), first)


def test_a_to_tensor_that_is_not_needed_is_explained() -> None:
    v1 = pytest.importorskip("torchvision.transforms")
    with pytest.raises(TypeError, match=r"are tensors already: leave ToTensor .* out, and put hs"):
        delivered(pipeline(v1.ToTensor()))


@pytest.mark.parametrize("mixer", ["MixUp", "CutMix", "RandomChoice"])
def test_mixers_take_whole_batches(mixer: str) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    both = [v2.MixUp(num_classes=5), v2.CutMix(num_classes=5)]
    transform = (
        v2.RandomChoice(both) if mixer == "RandomChoice" else getattr(v2, mixer)(num_classes=5)
    )

    def build() -> Dataset:
        data = Dataset({"image": IMAGES, "label": LABELS}, seed=3).shuffle().batch(8)
        return data.map(hs.data.Rescale(1 / 255), "image").map(transform, ["image", "label"])

    batches = list(build())
    for image, label in batches:
        assert image.shape[1:] == (3, 12, 10)
        assert (label.sum(1) - 1).abs().max() < 1e-6
    for others in (list(build().workers(2)), list(build())):
        for (x, y), (other_x, other_y) in zip(batches, others, strict=True):
            assert torch.equal(x, other_x)
            assert torch.equal(y, other_y)
    with pytest.raises(ValueError, match=r"mixes the samples of a batch; call map after batch"):
        Dataset({"image": IMAGES, "label": LABELS}).map(transform, ["image", "label"])


class StopAt(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def visit(self, run: Run) -> None:
        if run.position == self.at:
            run.stop("the test")


def test_a_training_with_torchvisions_augmentation_resumes_exactly(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    chain = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])

    def build(folder: Path) -> tuple[hs.Model, Checkpoint]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(360, 5))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = hs.Model(net, torch.nn.CrossEntropyLoss(), optimizer, precision="fp32")
        return model, Checkpoint(folder, every_steps=1)

    whole, checkpoint = build(tmp_path / "whole")
    whole.fit(2, pipeline(chain), callbacks=[checkpoint])
    stopped, checkpoint = build(tmp_path / "stopped")
    stopped.fit(2, pipeline(chain), callbacks=[checkpoint, StopAt(5)])
    resumed, checkpoint = build(tmp_path / "stopped")
    resumed.fit(2, pipeline(chain), callbacks=[checkpoint], resume=tmp_path / "stopped")
    for a, b in zip(whole.net.parameters(), resumed.net.parameters(), strict=True):
        assert torch.equal(a, b)
