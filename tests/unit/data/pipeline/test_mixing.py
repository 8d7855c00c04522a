"""MixUp and CutMix in a pipeline and in a training: closed forms, and the same bits everywhere."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep as hs
from halfstep.data import CutMix, Dataset, MixUp, Rescale, ToCHW
from halfstep.data.transforms.crops import rectangle_mask
from halfstep.losses import CrossEntropy
from halfstep.metrics import Accuracy
from tests.support.emulated_graphs import sink_with_emulated_graphs

CLASSES = 5
COUNT = 43
GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randint(0, 256, (COUNT, 8, 6, 3), dtype=torch.uint8, generator=GENERATOR)
LABELS = torch.randint(0, CLASSES, (COUNT,), generator=GENERATOR)
MIXERS: list[Any] = [
    MixUp(CLASSES, 0.4),
    CutMix(CLASSES),
    MixUp(CLASSES, p=0.5),
    CutMix(CLASSES, p=0.5),
]


def pipeline(*mixers: Any, batch: int = 8, floats: bool = True) -> Dataset:
    data = Dataset({"image": IMAGES, "label": LABELS}, seed=5).shuffle().batch(batch)
    if floats:
        data = data.map([ToCHW(), Rescale(1 / 255)], "image")
    return data.map(list(mixers), ["image", "label"])


def batches(data: Dataset, epoch: int = 0) -> list[tuple[Tensor, Tensor]]:
    data.seek(epoch)
    return [(x.clone(), y.clone()) for x, y in data]


def assert_equal(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> None:
    assert len(a) == len(b)
    for (x, y), (other_x, other_y) in zip(a, b, strict=True):
        assert torch.equal(x, other_x)
        assert torch.equal(y, other_y)


def random_words(draws: int, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 2**32, (draws, samples), generator=generator)


# --- what they compute


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_mixup_by_hand(dtype: torch.dtype) -> None:
    images = IMAGES.to(dtype)
    mixup = MixUp(CLASSES, 0.3, p=0.6)
    words = random_words(2, COUNT)
    shares = mixup.shares(words)
    assert 0 < (shares == 1).sum() < COUNT
    mixed, targets = mixup(images, LABELS, words)
    assert mixed.dtype == dtype
    assert targets.dtype == torch.float32
    share = shares.view(-1, 1, 1, 1)
    exact = IMAGES.double() * share + IMAGES.roll(1, 0).double() * (1 - share)
    tolerance = {torch.uint8: 0.5 + 1e-4, torch.float32: 1e-4, torch.float64: 1e-4}[dtype]
    if dtype == torch.float64:
        tolerance = 1e-11
    assert (mixed.double() - exact).abs().max() <= tolerance
    hot = F.one_hot(LABELS, CLASSES).double()
    exact_targets = hot * shares[:, None] + hot.roll(1, 0) * (1 - shares[:, None])
    assert (targets - exact_targets).abs().max() < 1e-7
    assert torch.equal(mixed[shares == 1], images[shares == 1])


def test_cutmix_by_hand() -> None:
    cutmix = CutMix(CLASSES)
    words = random_words(4, COUNT)
    mixed, targets = cutmix(IMAGES, LABELS, words)
    rectangles = cutmix.rectangles(words, 8, 6)
    inside = rectangle_mask(rectangles, 8, 6)
    for i in range(COUNT):
        top, left, rows, columns = rectangles[i].tolist()
        expected = IMAGES[i].clone()
        expected[top : top + rows, left : left + columns] = IMAGES[i - 1][
            top : top + rows, left : left + columns
        ]
        assert torch.equal(mixed[i], expected)
        assert inside[i].sum() == rows * columns
        own = 1 - rows * columns / 48
        by_class = torch.zeros(CLASSES)
        by_class[LABELS[i]] += own
        by_class[LABELS[i - 1]] += 1 - own
        assert (targets[i] - by_class).abs().max() < 1e-6
    planes, same_targets = cutmix(IMAGES.permute(0, 3, 1, 2), LABELS, words)
    assert torch.equal(planes.permute(0, 2, 3, 1), mixed)
    assert torch.equal(same_targets, targets)


def test_pasted_areas_follow_one_minus_lambda() -> None:
    """Of a rectangle that the border does not cut off, the area is 1 − λ: uniform for alpha 1."""
    count = 20_000
    rectangles = CutMix(CLASSES).rectangles(random_words(4, count), 10_000, 10_000).double()
    top, left, rows, columns = rectangles.unbind(1)
    is_whole = (top > 0) & (left > 0) & (top + rows < 10_000) & (left + columns < 10_000)
    assert torch.equal(rows[is_whole], columns[is_whole])
    # A square of side s is whole with probability (1 − s)², which changes the distribution of its
    # area a = s² to a density in proportion to (1 − √a)²: F(a) = 6a − 8a^1.5 + 3a².
    area = (rows * columns / 1e8)[is_whole].sort().values
    n = len(area)
    expected = 6 * area - 8 * area**1.5 + 3 * area**2
    steps = torch.arange(1, n + 1, dtype=torch.float64) / n
    assert (steps - expected).abs().max() < math.sqrt(-math.log(1e-6 / 2) / (2 * n)) + 1 / n


def test_mixers_one_after_the_other_keep_probabilities() -> None:
    for x, y in pipeline(MixUp(CLASSES, 0.2), CutMix(CLASSES)):
        assert x.dtype == torch.float32
        assert y.shape == (len(x), CLASSES)
        assert (y.sum(1) - 1).abs().max() < 1e-6
        assert (y >= 0).all()


# --- the same bits


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_workers_a_device_and_a_resume_give_the_same_bits(mixer: Any) -> None:
    expected = batches(pipeline(mixer), 2)
    assert_equal(batches(pipeline(mixer).workers(2), 2), expected)
    assert_equal(batches(pipeline(mixer).to_device("cpu"), 2), expected)
    assert not torch.equal(batches(pipeline(mixer), 3)[0][0], expected[0][0])

    data = pipeline(mixer)
    data.seek(2)
    stream = iter(data)
    for _ in range(3):
        next(stream)
    again = pipeline(mixer)
    again.load_state_dict(data.state_dict())
    assert_equal(list(again), expected[3:])

    rows = [torch.cat([x for x, _ in batches(pipeline(mixer, batch=n), 2)]) for n in (8, COUNT)]
    # Another batch has other neighbours at its border only.
    same = (rows[0] == rows[1]).flatten(1).all(1)
    first_of_batch = torch.arange(COUNT) % 8 == 0
    assert same[~first_of_batch].all()


def test_a_mixers_numbers_are_its_own() -> None:
    """Those of two mixers differ, and those of the transforms before them stay."""
    plain = Dataset({"image": IMAGES, "label": LABELS}, seed=5).batch(COUNT)
    flipped = plain.map(hs.data.Flip(), "image")
    mixed = flipped.map(MixUp(CLASSES, p=0.0), ["image", "label"])
    assert torch.equal(next(iter(mixed))[0], next(iter(flipped))[0])
    twice = pipeline(CutMix(CLASSES), CutMix(CLASSES), batch=COUNT)
    first, second = twice.plan.maps[-2:]
    assert first.seed != second.seed  # type: ignore[union-attr]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(144, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.flatten(1))
        return out


def make_step(loss: nn.Module, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    return hs.TrainStep(net, loss, optimizer, decide="device", **options)


@pytest.mark.parametrize("mixer", MIXERS, ids=repr)
def test_captured_batches_have_the_same_bits(mixer: Any) -> None:
    """Resident data, gathered, transformed and mixed inside of the graphs, over two passes."""
    for _ in pipeline(mixer).take(1):
        pass  # constants are copied before a capture
    eager = make_step(nn.CrossEntropyLoss())
    losses = []
    for epoch in (0, 1):
        losses += [eager(*batch).loss.item() for batch in batches(pipeline(mixer), epoch)]

    captured = make_step(nn.CrossEntropyLoss())
    data = pipeline(mixer).to_device("cpu")
    records: list[float] = []
    for _ in (0, 1):
        sink = sink_with_emulated_graphs(captured, data, every=3)
        for record in sink:
            records += record.loss.tolist()
    assert records == losses
    for name, value in eager.net.state_dict().items():
        assert torch.equal(captured.net.state_dict()[name], value)


# --- losses and metrics


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "bf16"])
@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(label_smoothing=0.1), CrossEntropy(0.1), CrossEntropy()], ids=repr
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_training_takes_the_probabilities(
    precision: str, loss: nn.Module, accumulate: int
) -> None:
    torch.manual_seed(0)
    net = Net()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = hs.Model(
        net,
        loss,
        optimizer,
        precision=precision,  # type: ignore[arg-type]
        metrics={"acc": Accuracy()},
        accumulate=accumulate,
    )
    run = model.fit(1, pipeline(MixUp(CLASSES, 0.2)))
    first = run.history[0]["loss"]

    if precision == "fp32" and accumulate == 1:
        # Plain torch.
        plain = Net()
        plain.load_state_dict(start)
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        for x, y in pipeline(MixUp(CLASSES, 0.2)):
            sgd.zero_grad()
            value = loss(plain(x), y)
            value.backward()
            sgd.step()
        for name, weight in plain.state_dict().items():
            assert torch.equal(net.state_dict()[name], weight)
    assert math.isfinite(first)
    # The hard label of a mixture is the class of its larger share.
    scores = model.evaluate(pipeline(MixUp(CLASSES, 0.2)))
    correct = total = 0
    for x, y in batches(pipeline(MixUp(CLASSES, 0.2))):
        correct += (model.predict([x]).argmax(1) == y.argmax(1)).sum().item()
        total += len(x)
    assert scores["acc"] == pytest.approx(correct / total, abs=0.05)


# --- refusals


def test_where_a_mixer_does_not_belong() -> None:
    data = Dataset({"image": IMAGES, "label": LABELS})
    with pytest.raises(ValueError, match=r"MixUp mixes the samples .* call map after batch\(n\)"):
        data.map(MixUp(5), ["image", "label"])
    with pytest.raises(ValueError, match=r"expected two columns for CutMix, the images and the"):
        data.batch(4).map(CutMix(5), "image")
    with pytest.raises(ValueError, match="expected the columns that the transform is for"):
        data.batch(4).map(CutMix(5))
    with pytest.raises(ValueError, match=r"expected labels as class numbers \[2\], or prob"):
        data.batch(4).map(MixUp(5), ["label", "image"])
    for wrong in (lambda: MixUp(0), lambda: CutMix(3, 0), lambda: MixUp(3, p=2)):
        with pytest.raises(ValueError, match="expected"):
            wrong()
    with pytest.raises(ValueError, match=r"expected labels in 0\.\.2"):
        next(iter(data.batch(43).map(MixUp(3), ["image", "label"])))
    uneven = Dataset([(IMAGES[0], 1), (IMAGES[1, :4], 2)], ["image", "label"]).batch(2)
    with pytest.raises(ValueError, match=r"column 'image': expected samples of one shape"):
        next(iter(uneven.map(MixUp(5), ["image", "label"])))


def test_a_mixed_pipeline_describes_itself() -> None:
    text = repr(pipeline(MixUp(5, 0.2)))
    assert "map(MixUp(classes=5, alpha=0.2, p=1.0) on image, label)" in text
    other = pipeline(MixUp(5, 0.3))
    with pytest.raises(ValueError, match=r"alpha=0\.2"):
        other.load_state_dict(pipeline(MixUp(5, 0.2)).state_dict())
