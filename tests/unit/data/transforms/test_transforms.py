"""Transforms against numpy and float64, their draws against uniform ones, refusals by name."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.data import hashing
from halfstep.data.transforms import (
    Cast,
    Cutout,
    Flatten,
    Flip,
    Normalize,
    OneHot,
    PadCrop,
    Rescale,
    Resize,
    ToCHW,
    Transform,
    apply,
    spec,
)

NO_WORDS = torch.empty((0, 0), dtype=torch.int64)  # the words of a transform that draws none
SAMPLE_COUNT = 20_000
FALSE_ALARM_RATE = (
    1e-6  # each chi-square test raises a false alarm for one seed in a million; ours is fixed
)
AUGMENT: list[Transform] = [PadCrop(32, 4), Flip(), Cutout(8)]
TO_FLOATS: list[Transform] = [
    Rescale(1 / 255),
    Normalize([0.49, 0.48, 0.45], [0.2, 0.2, 0.21]),
    ToCHW(),
    Cast("float16"),
]


def pixels(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def random_words(count: int, samples: int) -> Tensor:
    return torch.randint(0, 2**32, (count, samples))


def run(
    chain: list[Transform],
    batch: Tensor,
    *,
    seed: int = 7,
    epoch: int = 0,
    samples: Tensor | None = None,
) -> Tensor:
    samples = torch.arange(len(batch)) if samples is None else samples
    return apply(chain, batch, seed=seed, epochs=torch.full_like(samples, epoch), samples=samples)


def assert_equals_numpy(result: Tensor, expected: np.ndarray) -> None:
    assert torch.equal(result, torch.from_numpy(np.ascontiguousarray(expected)))


# --- each transform against a reference


@pytest.mark.parametrize("padding", [0, 3, (1, 2, 0, 5), (0, 0, 4, 0)])
@pytest.mark.parametrize("fill", [0, 255])
def test_pad_crop_is_numpys_pad_and_slice(padding: Any, fill: int) -> None:
    images = pixels(50, 9, 11, 3)
    words = random_words(2, 50)
    left, top, right, bottom = (padding,) * 4 if isinstance(padding, int) else padding
    padded = np.pad(
        images.numpy(), ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill
    )
    rows = padded.shape[1] - 7 + 1
    columns = padded.shape[2] - 10 + 1
    expected = []
    for image, y, x in zip(padded, *words.tolist(), strict=True):
        row = y * rows // 2**32
        column = x * columns // 2**32
        expected.append(image[row : row + 7, column : column + 10])
    assert_equals_numpy(PadCrop((7, 10), padding, fill)(images, words), np.stack(expected))


def test_pad_crop_reaches_the_first_and_the_last_window() -> None:
    image = torch.arange(1, 10).view(1, 3, 3)
    ends = PadCrop(3, (1, 0, 0, 1))(
        image.expand(2, 3, 3), torch.tensor([[0, 2**32 - 1], [0, 2**32 - 1]])
    )
    assert ends.tolist() == [[[0, 1, 2], [0, 4, 5], [0, 7, 8]], [[4, 5, 6], [7, 8, 9], [0, 0, 0]]]


@pytest.mark.parametrize("p", [0.0, 2**-32, 0.1, 0.5, 1 - 2**-32, 1.0])
def test_flip_compares_the_word_with_p(p: float) -> None:
    edge = [w for w in range(int(p * 2**32) - 2, int(p * 2**32) + 3) if 0 <= w < 2**32]
    words = torch.cat([torch.tensor([[0, 2**32 - 1, *edge]]), random_words(1, 40)], dim=1)
    images = pixels(words.shape[1], 6, 5, 3)
    below = math.floor(Fraction(p) * 2**32 + Fraction(1, 2))
    pairs = zip(images.numpy(), words[0].tolist(), strict=True)
    assert_equals_numpy(
        Flip(p)(images, words),
        np.stack([image[:, ::-1] if w < below else image for image, w in pairs]),
    )


@pytest.mark.parametrize("size", [1, 4, 5, (2, 7), 30])
def test_cutout_fills_around_the_centre(size: Any) -> None:
    images = pixels(60, 8, 10, 3)
    words = random_words(2, 60)
    height, width = (size, size) if isinstance(size, int) else size
    expected = images.numpy().copy()
    for image, y, x in zip(expected, *words.tolist(), strict=True):
        top = y * 8 // 2**32 - height // 2
        left = x * 10 // 2**32 - width // 2
        image[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = 9
    assert_equals_numpy(Cutout(size, 9)(images, words), expected)


def filter_weights(source_size: int, output_size: int, antialias: bool) -> np.ndarray:
    """Weights [output, source] of a triangle in float64.

    Without antialias it is one pixel wide, and the edge repeats.
    """
    scale = source_size / output_size
    weights = np.zeros((output_size, source_size))
    support = max(scale, 1.0) if antialias else 1.0
    for i in range(output_size):
        centre = (i + 0.5) * scale - 0.5
        for j in range(math.floor(centre - support), math.ceil(centre + support) + 1):
            weight = max(0.0, 1 - abs(j - centre) / support)
            if 0 <= j < source_size or not antialias:
                weights[i, min(max(j, 0), source_size - 1)] += weight
    return weights / weights.sum(1, keepdims=True)


def coordinate_error(n: int, eps: float) -> float:
    """The error in levels: a coordinate of up to n comes from three roundings.

    What it is off by moves 255 levels along each of two axes.
    """
    return 2 * 255 * 3 * n * eps


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("size", [(48, 51), (13, 9), (24, 24), (7, 60), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_resize_is_bilinear_in_float64(
    size: tuple[int, int], antialias: bool, channels: int
) -> None:
    images = pixels(3, 32, 24, channels)
    resize = Resize(size, antialias)
    rows = filter_weights(32, size[0], antialias)
    columns = filter_weights(24, size[1], antialias)
    exact = torch.from_numpy(
        np.einsum("ih,jw,bhwc->bijc", rows, columns, images.numpy().astype(np.float64))
    )
    for dtype, eps in ((torch.float64, 2**-53), (torch.float32, 2**-24)):
        result = resize(images.to(dtype), NO_WORDS)
        assert result.dtype == dtype
        assert (result - exact).abs().max() <= coordinate_error(32, eps)
    result = resize(images, NO_WORDS)
    assert result.dtype == torch.uint8
    assert (result - exact).abs().max() <= 0.5 + coordinate_error(32, 2**-24)  # to nearest
    half = resize(images.half(), NO_WORDS)
    assert torch.equal(half, resize(images.float(), NO_WORDS).half())  # rounded once


def test_resize_breaks_ties_upwards_and_stays_in_range() -> None:
    doubled = Resize((1, 4))(
        torch.tensor([[[0, 2]], [[1, 3]], [[255, 255]]], dtype=torch.uint8), NO_WORDS
    )
    # 0.5 → 1, 1.5 → 2, 2.5 → 3
    assert doubled.tolist() == [
        [[0, 1, 2, 2]],
        [[1, 2, 3, 3]],
        [[255, 255, 255, 255]],
    ]


def test_antialiased_resize_is_pillows() -> None:
    image = pytest.importorskip("PIL.Image")
    images = pixels(8, 32, 24, 3)
    for height, width in [(13, 9), (16, 12), (48, 51), (5, 70)]:
        pillow = [
            image.fromarray(i).resize((width, height), image.Resampling.BILINEAR)
            for i in images.numpy()
        ]
        expected = torch.from_numpy(np.stack([np.asarray(i) for i in pillow])).int()
        # Pillow rounds after the rows and after the columns: 1 level from exact, ours 0.5, so
        # whole levels differ by 1.
        assert (
            Resize((height, width), antialias=True)(images, NO_WORDS).int() - expected
        ).abs().max() <= 1


# 6.67 → 7, 12.5 → 13, 7.2 → 7
@pytest.mark.parametrize(
    ("given", "size", "expected"),
    [
        ((32, 32), 224, (224, 224)),
        ((3, 4), 5, (5, 7)),
        ((4, 3), 5, (7, 5)),
        ((10, 25), 5, (5, 13)),
        ((10, 24), 3, (3, 7)),
    ],
)
def test_resize_by_the_shorter_edge(
    given: tuple[int, int], size: int, expected: tuple[int, int]
) -> None:
    assert Resize(size)(pixels(2, *given), NO_WORDS).shape == (2, *expected)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int64, torch.float16, torch.float32, torch.float64]
)
def test_rescale_is_a_product_then_a_sum(dtype: torch.dtype) -> None:
    x = (torch.rand(9, 17) * 255).to(dtype)
    wide = np.float64 if dtype == torch.float64 else np.float32
    expected = x.numpy().astype(wide) * wide(1 / 255) + wide(-0.1)
    assert_equals_numpy(Rescale(1 / 255, -0.1)(x, NO_WORDS), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_normalize_per_channel(dtype: torch.dtype) -> None:
    x = pixels(5, 6, 7, 3).to(dtype)
    mean = [125.3, 123.0, 113.9]
    std = [63.0, 62.1, 66.7]
    wide = np.float64 if dtype == torch.float64 else np.float32
    expected = (x.double().numpy().astype(wide) - np.asarray(mean, wide)) / np.asarray(std, wide)
    assert_equals_numpy(Normalize(mean, std)(x, NO_WORDS), expected)
    assert_equals_numpy(
        Normalize(mean, std)(x.permute(0, 3, 1, 2), NO_WORDS), expected.transpose(0, 3, 1, 2)
    )


def test_normalize_by_one_value_takes_any_shape() -> None:
    x = torch.randn(4, 10)
    expected = (x.numpy() - np.float32(0.2860)) / np.float32(0.3530)
    assert_equals_numpy(Normalize(0.2860, 0.3530)(x, NO_WORDS), expected)
    assert_equals_numpy(
        Normalize([0.2860], 0.3530)(x.view(4, 2, 5), NO_WORDS), expected.reshape(4, 2, 5)
    )
    three = torch.randn(2, 5, 5, 3)
    assert_equals_numpy(
        Normalize(0.5, [1, 2, 4])(three, NO_WORDS),
        (three.numpy() - np.float32(0.5)) / np.float32([1, 2, 4]),
    )


def test_to_chw() -> None:
    images = pixels(2, 5, 6, 3)
    plain = ToCHW()(images, NO_WORDS)
    strided = ToCHW(channels_last=True)(images, NO_WORDS)
    assert_equals_numpy(plain, images.numpy().transpose(0, 3, 1, 2))
    assert plain.is_contiguous()
    assert torch.equal(strided, plain)
    assert strided.is_contiguous(memory_format=torch.channels_last)
    assert strided.data_ptr() == images.data_ptr()  # a view
    assert torch.equal(ToCHW()(images[..., 0], NO_WORDS), images[..., 0].unsqueeze(1))
    assert torch.equal(ToCHW()(plain, NO_WORDS), plain)


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("float16", np.float16), (torch.float64, np.float64), ("int32", np.int32)]
)
def test_cast(dtype: Any, numpy: Any) -> None:
    x = torch.rand(1000) * 1000
    assert_equals_numpy(Cast(dtype)(x, NO_WORDS), x.numpy().astype(numpy))


def test_one_hot_and_smoothing() -> None:
    labels = torch.randint(0, 10, (50,))
    assert torch.equal(OneHot(10)(labels, NO_WORDS), F.one_hot(labels, 10).float())
    assert torch.equal(OneHot(10)(labels.to(torch.uint8), NO_WORDS), F.one_hot(labels, 10).float())
    smooth = OneHot(10, on=0.9, off=0.1 / 9, dtype="float64")(labels, NO_WORDS)
    assert_equals_numpy(smooth, np.where(labels.numpy()[:, None] == np.arange(10), 0.9, 0.1 / 9))
    assert OneHot(10)(labels[:0], NO_WORDS).shape == (0, 10)


def test_flatten_follows_dimensions_not_strides() -> None:
    images = ToCHW(channels_last=True)(pixels(3, 6, 5, 3), NO_WORDS)
    assert_equals_numpy(Flatten()(images, NO_WORDS), images.numpy().reshape(3, -1))


# --- layouts


IMAGE_TRANSFORMS: list[Callable[..., Transform]] = [
    lambda **k: PadCrop((3, 2), (0, 1, 2, 1), 5, **k),
    lambda **k: Flip(**k),
    lambda **k: Cutout((2, 3), 7, **k),
    lambda **k: Resize((5, 3), **k),
    lambda **k: Resize((2, 7), True, **k),
    lambda **k: Normalize(3.5, 2.0, **k),
]


@settings(max_examples=25)
@given(
    make=st.sampled_from(IMAGE_TRANSFORMS),
    size=st.tuples(*[st.integers(0, 4), st.integers(1, 9), st.integers(1, 9)]),
    channels=st.integers(1, 5),
)
def test_every_layout_gives_the_same_pixels(
    make: Callable[..., Transform], size: Any, channels: int
) -> None:
    images = pixels(*size, channels)
    words = random_words(make().draws, size[0])
    result = make(layout="HWC")(images, words)
    planes = make(layout="CHW")(images.permute(0, 3, 1, 2).contiguous(), words)
    assert torch.equal(planes.permute(0, 2, 3, 1), result)
    strided = make(layout="CHW")(images.permute(0, 3, 1, 2), words)
    assert torch.equal(strided, planes)
    for c in range(channels):
        assert torch.equal(make()(images[..., c].contiguous(), words), result[..., c])
    assert spec([make(layout="HWC")], images.shape, images.dtype) == (
        tuple(result.shape),
        result.dtype,
    )


@settings(max_examples=40)
@given(shape=st.tuples(*[st.integers(1, 6)] * 4))
def test_a_layout_is_found_only_where_there_is_no_doubt(shape: tuple[int, ...]) -> None:
    last = shape[3] in (1, 3, 4)
    second = shape[1] in (1, 3, 4)
    words = torch.zeros(1, shape[0], dtype=torch.int64)
    images = torch.arange(math.prod(shape)).view(shape)
    if last == second:
        with pytest.raises(
            ValueError, match=r"Flip: expected 1, 3 or 4 .* State layout='HWC' or layout='CHW'"
        ):
            Flip(1)(images, words)
    else:
        assert torch.equal(Flip(1)(images, words), images.flip(2 if last else 3))


# --- random numbers


@dataclass(frozen=True)
class Probe:
    """Hands out its words as the batch."""

    draws: int

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        assert words.shape == (self.draws, len(batch))
        return words.T if self.draws else batch


def test_each_place_owns_256_draws() -> None:
    samples = torch.tensor([5, 2**40, 0])
    epochs = torch.tensor([0, 3, 3])
    words = hashing.words(
        11, epochs, samples, torch.tensor([hashing.draw_key(n) for n in (0, 1, 512, 768, 769, 770)])
    )
    chains: list[tuple[list[Transform], list[int]]] = [
        ([Probe(2)], [0, 1]),
        ([Probe(2), Probe(0), Probe(1)], [2]),
        ([Probe(2), Probe(0), Probe(1), Probe(3), Flatten()], [3, 4, 5]),
    ]
    for chain, rows in chains:
        result = apply(chain, samples.view(3, 1), seed=11, epochs=epochs, samples=samples)
        assert torch.equal(result, words[rows].T)


def assert_uniform(values: Tensor, cells: int) -> None:
    """Pearson's chi-square over the cells."""
    seen = torch.bincount(values, minlength=cells).double()
    assert len(seen) == cells
    expected = len(values) / cells
    chance = torch.special.gammaincc(
        torch.tensor((cells - 1) / 2.0), ((seen - expected) ** 2).sum().float() / expected / 2
    )
    assert chance > FALSE_ALARM_RATE


def numbered_pixels(rows: int, columns: int) -> Tensor:
    return torch.arange(rows * columns).view(1, rows, columns).expand(SAMPLE_COUNT, rows, columns)


@pytest.mark.parametrize("epoch", [0, 1])
def test_crop_windows_are_uniform(epoch: int) -> None:
    assert_uniform(run([PadCrop(1)], numbered_pixels(9, 9), epoch=epoch).flatten(), 81)
    # 25 windows, each with other zeros
    ends = run([PadCrop((4, 4), 2)], numbered_pixels(4, 4) + 1, epoch=epoch)
    assert_uniform(torch.unique(ends.flatten(1), dim=0, return_inverse=True)[1], 25)


@pytest.mark.parametrize("seed", [0, 1])
def test_cutout_centres_are_uniform(seed: int) -> None:
    holes = run([Cutout(1, -1)], numbered_pixels(8, 7), seed=seed).flatten(1)
    assert torch.equal((holes == -1).sum(1), torch.ones(SAMPLE_COUNT, dtype=torch.int64))
    assert_uniform((holes == -1).int().argmax(1), 56)


@pytest.mark.parametrize("p", [0.5, 0.1, 0.93])
def test_flips_come_at_the_stated_rate(p: float) -> None:
    flips = run([Flip(p)], numbered_pixels(1, 2))[:, 0, 0].sum().item()
    # 4.9 σ: a false alarm in a million
    assert abs(flips - p * SAMPLE_COUNT) < 4.9 * math.sqrt(SAMPLE_COUNT * p * (1 - p))


def test_draws_are_independent_of_each_other() -> None:
    """Every draw of a chain, for a sample, in its next epoch, for its neighbours.

    No two of them go together.
    """

    def drawn(epoch: int, shift: int) -> list[Tensor]:
        samples = torch.arange(SAMPLE_COUNT) + shift
        chains: list[list[Transform]] = [
            [Probe(0)] * place + [Probe(count)] for place, count in enumerate((2, 1, 1, 2))
        ]
        outs = [run(chain, samples.unsqueeze(1), epoch=epoch, samples=samples) for chain in chains]
        return [column.double() for out in outs for column in out.T]

    rows = torch.stack(
        [v for epoch, shift in ((0, 0), (1, 0), (0, 1), (0, 32)) for v in drawn(epoch, shift)]
    )
    for values in (rows, (rows >= 2**31).double()):
        correlations = torch.corrcoef(values).fill_diagonal_(0)
        # 276 pairs at 5.5 σ: a false alarm for one seed in 100,000
        assert correlations.abs().max() < 5.5 / math.sqrt(SAMPLE_COUNT)


def test_seeds_epochs_samples_and_places_all_matter() -> None:
    batch = pixels(64, 32, 32, 3)
    later = [Rescale(1), *AUGMENT, Cast("uint8")]
    outs = [
        run(AUGMENT, batch),
        run(AUGMENT, batch, seed=8),
        run(AUGMENT, batch, epoch=1),
        run(later, batch),
    ]
    outs.append(run(AUGMENT, batch, samples=torch.arange(64) + 1))
    assert all(not torch.equal(a, b) for i, a in enumerate(outs) for b in outs[:i])


@pytest.mark.parametrize("shape", [(40, 32, 32, 3), (40, 3, 32, 32), (40, 32, 32)])
def test_a_sample_does_not_depend_on_its_batch(shape: tuple[int, ...]) -> None:
    batch = pixels(*shape)
    samples = torch.randint(0, 50_000, (40,))
    chain = [
        *AUGMENT,
        Resize(48),
        Resize((20, 21), antialias=True),
        Rescale(1 / 255),
        Normalize(0.4, 0.2),
        ToCHW(),
    ]
    expected = run(chain, batch, samples=samples)
    for size in (1, 7):
        parts = zip(batch.split(size), samples.split(size), strict=True)
        assert torch.equal(torch.cat([run(chain, b, samples=s) for b, s in parts]), expected)
    order = torch.randperm(40)
    assert torch.equal(run(chain, batch[order], samples=samples[order]), expected[order])


# --- inside a step


class OperationNames(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_nothing_is_read_back_and_constants_are_made_once() -> None:
    batch = pixels(16, 32, 32, 3)
    chain = [*AUGMENT, Resize(40), *TO_FLOATS, Normalize(0.123, 0.456), Flatten()]
    with OperationNames() as first:
        before = run(chain, batch)
    with OperationNames() as second:
        after = run(chain, batch)
    assert torch.equal(before, after)
    assert "aten::lift_fresh" in first.names  # how torch.tensor shows
    assert second.names.isdisjoint(
        {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::nonzero", "aten::item"}
    )


def test_the_input_is_left_alone() -> None:
    batch = pixels(16, 32, 32, 3)
    copy = batch.clone()
    run([*AUGMENT, *TO_FLOATS], batch)
    assert torch.equal(batch, copy)


def test_constants_of_an_inference_pass_serve_training() -> None:
    normalize = Normalize([1.5, 2.5, 3.5], [0.5, 0.25, 0.125])  # values that no other test uses
    x = torch.randn(2, 5, 5, 3, requires_grad=True)
    with torch.inference_mode():
        normalize(x.detach(), NO_WORDS)
    normalize(x, NO_WORDS).sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 8.0]).expand_as(x))


def test_compiled_whole() -> None:
    torch._dynamo.reset()
    chain = [*AUGMENT, *TO_FLOATS, Flatten()]
    samples = torch.arange(10)
    batch = pixels(10, 32, 32, 3)

    def fresh(seed: int) -> Tensor:
        return apply(chain, batch, seed=seed, epochs=samples + 3, samples=samples)

    compiled = torch.compile(fresh, fullgraph=True, backend="aot_eager")
    for seed in (1, -(2**70)):  # a second seed must not become a symbolic one
        assert torch.equal(compiled(seed), fresh(seed))


AFFINE_CHAINS = [
    [Rescale(1 / 255, 0.1), Normalize((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))],
    [Normalize(0.5, (0.2, 0.25, 0.3)), Rescale(2.0, -1.0), Normalize((1, 2, 3), 2.0)],
    [Rescale(1 / 255), Rescale(3.0, 0.5)],
]


@pytest.mark.parametrize("chain", AFFINE_CHAINS)
@pytest.mark.parametrize("layout", ["HWC", "CHW"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_neighbouring_rescale_and_normalize_are_one_multiplication_and_one_addition(
    chain: list[Any], layout: str, dtype: torch.dtype
) -> None:
    """Against the transforms one by one in float64.

    Constants and both operations round, 2^-24 each of the largest term.
    """
    batch = pixels(4, 6, 7, 3).to(dtype)
    batch = batch if layout == "HWC" else batch.permute(0, 3, 1, 2)
    result = run(chain, batch)
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = batch.double()
    for part in chain:
        expected = part(expected, NO_WORDS)
    bound = 2**-50 if dtype == torch.float64 else 2**-21
    assert (result - expected).abs().max() <= bound * max(1.0, expected.abs().max().item()) * 8


def test_affine_rounds_after_the_product_and_after_the_sum() -> None:
    batch = pixels(2, 6, 7, 3)
    mean = np.array([0.5, 0.4, 0.3])
    std = np.array([0.2, 0.25, 0.3])
    a = (1 / 255 / std).astype(np.float32)
    b = ((0.1 - mean) / std).astype(np.float32)
    by_hand = batch.numpy().astype(np.float32) * a + b
    result = run([Rescale(1 / 255, 0.1), Normalize(tuple(mean), tuple(std))], batch)
    # a and b themselves may differ in the last place: 1/255/0.2 and 1/255 · (1/0.2) round once more
    assert np.abs(result.numpy() - by_hand).max() <= 4 * np.spacing(np.float32(8))


class Brighter(Normalize):
    """A user's own, made from one of ours."""

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return super().__call__(batch, words) + 1


def test_a_class_made_from_normalize_keeps_its_own_arithmetic() -> None:
    batch = pixels(2, 6, 7, 3)
    brighter = Brighter(0.5, 0.25)
    expected = brighter(Rescale(1 / 255)(batch, NO_WORDS), NO_WORDS)
    assert torch.equal(run([Rescale(1 / 255), brighter], batch), expected)


def test_compiled_resize_and_labels() -> None:
    torch._dynamo.reset()
    resize = Resize((48, 20))
    one_hot = OneHot(3)  # made outside: torch 2.11 cannot trace their checks
    compiled = torch.compile(lambda b: resize(b, NO_WORDS), fullgraph=True, backend="aot_eager")
    images = pixels(4, 32, 32, 3)
    assert (
        compiled(images).int() - resize(images, NO_WORDS).int()
    ).abs().max() <= 1  # next to a tie
    hot = torch.compile(lambda b: one_hot(b, NO_WORDS), fullgraph=True, backend="eager")
    # as on a device: all off
    assert hot(torch.tensor([2, 3, -1])).tolist() == [
        [0, 0, 1],
        [0, 0, 0],
        [0, 0, 0],
    ]


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    chain = [*AUGMENT, *TO_FLOATS[:-1]]
    batch = pixels(10, 32, 32, 3)
    samples = torch.arange(10)
    # x/255 up to 1 in a fused multiply-add: 2^-23 / std, twice
    for links, atol in (
        (AUGMENT, 0.0),
        (chain, 1.5e-6),
    ):
        compiled = torch.compile(
            lambda b, s, c=links: apply(c, b, seed=1, epochs=s, samples=s), fullgraph=True
        )
        expected = apply(links, batch, seed=1, epochs=samples, samples=samples)
        torch.testing.assert_close(compiled(batch, samples), expected, rtol=0, atol=atol)


# --- chains before they run


def test_spec_of_the_cifar_chain() -> None:
    chain = [PadCrop(32, (4, 4, 4, 4)), Flip(), Resize((224, 224)), *TO_FLOATS[:-1]]
    assert spec(chain, (32, 32, 32, 3), torch.uint8) == ((32, 3, 224, 224), torch.float32)
    assert spec([OneHot(10, dtype="float16")], (8,), torch.int64) == ((8, 10), torch.float16)
    assert spec([], (8, 2), torch.bool) == ((8, 2), torch.bool)
    links = [*AUGMENT, Resize(7), *TO_FLOATS, Flatten()]
    for some in (0, 5):
        out = run(links, pixels(some, 32, 32, 3))
        assert spec(links, (some, 32, 32, 3), torch.uint8) == (tuple(out.shape), out.dtype)


@pytest.mark.parametrize(
    ("chain", "shape", "dtype", "match"),
    [
        (
            [Flip(), PadCrop(40, 3)],
            (2, 32, 32, 3),
            torch.uint8,
            r"transform 1, PadCrop\(.*\[2, 32, 32, 3\]: PadCrop: "
            r"expected an image that a window of 40×40 fits into, got 32×32, padded to 38×38\. "
            r"Pad more or crop less",
        ),
        (
            [PadCrop(4, fill=0.5)],
            (2, 8, 8, 3),
            torch.uint8,
            r"fill a whole number in 0\.\.255 .*uint8 batch, received 0\.5",
        ),
        ([Cutout(4, 256)], (2, 8, 8, 3), torch.uint8, r"Cutout: expected fill .*received 256"),
        (
            [Cutout(4, 1e6)],
            (2, 8, 8, 3),
            torch.float16,
            r"Cutout: expected fill within ±6\.55e\+04 .*received 1000000\.0",
        ),
        (
            [Flatten(), Flip()],
            (2, 8, 8, 3),
            torch.uint8,
            r"transform 1, Flip.*uint8 \[2, 192\]: .*got shape \(2, 192",
        ),
        (
            [Flip(layout="HWC")],
            (2, 8, 8),
            torch.uint8,
            r"a batch \[B, H, W, C\], .*leave layout= out for gray",
        ),
        (
            [Flip()],
            (2, 8, 8, 2),
            torch.uint8,
            r"\(2, 8, 8, 2\), where neither would do\. State layout=",
        ),
        (
            [Flip()],
            (2, 3, 8, 3),
            torch.uint8,
            r"\(2, 3, 8, 3\), where both would do\. State layout=",
        ),
        (
            [Resize(4)],
            (2, 8, 8, 3),
            torch.int64,
            r"Resize: expected a uint8 or floating batch, got torch\.int64.*Cast",
        ),
        (
            [Normalize([0, 0], [1, 1])],
            (2, 8, 8, 3),
            torch.uint8,
            r"Normalize: expected 1 mean and std or 3, .*got 2",
        ),
        (
            [Normalize([0, 0, 0], 1)],
            (2, 8, 8),
            torch.uint8,
            r"expected 1 mean and std or 1, .*got 3",
        ),
        ([OneHot(3)], (2,), torch.float32, r"OneHot: expected integer labels, got torch\.float32"),
        (
            [Flatten()],
            (2,),
            torch.float32,
            r"Flatten: expected a batch of 2 dimensions or more, got shape \(2,\)",
        ),
        (
            [Flip()],
            (),
            torch.uint8,
            r"spec: expected the shape of a batch, samples first, got \(\)",
        ),
    ],
)
def test_a_chain_that_cannot_work_is_refused(
    chain: Any, shape: Any, dtype: torch.dtype, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        spec(chain, shape, dtype)


@dataclass(frozen=True)
class Halve:
    draws: int = 0

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch[::2]


def test_what_is_no_transform_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"transform 0, Halve.*as many samples as before, got 4 samples as shape \(2, 5\)",
    ):
        spec([Halve()], (4, 5), torch.uint8)
    for wrong in (torch.relu, Halve(draws=257), Halve(draws=-1), 3):
        with pytest.raises(
            TypeError,
            match=r"transform 1: expected a transform: callable.* draws in 0\.\.256, received",
        ):
            spec([Flatten(), wrong], (4, 5), torch.uint8)
        with pytest.raises(TypeError, match="transform 0: expected a transform"):
            run([wrong], pixels(4, 5))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: PadCrop(0),
            r"PadCrop: expected size as a positive integer or \(height, width\), received 0",
        ),
        (lambda: PadCrop((4, 4, 4)), r"received \(4, 4, 4\)"),
        (lambda: PadCrop(2.5), r"received 2\.5"),
        (
            lambda: PadCrop(4, -1),
            r"padding as an integer of at least 0 or \(left, top, right, bottom\), received -1",
        ),
        (lambda: PadCrop(4, (1, 1)), r"padding as .*received \(1, 1\)"),
        (lambda: Flip(1.01), r"Flip: expected a probability p in 0\.\.1, received 1\.01"),
        (lambda: Flip(math.nan), r"received nan"),
        (lambda: Cutout(-3), r"Cutout: expected size"),
        (lambda: Resize((0, 4)), r"Resize: expected size"),
        (lambda: Flip(layout="hwc"), r"Flip: expected layout 'HWC', 'CHW' or None, received 'hwc'"),
        (lambda: Rescale(math.inf), r"Rescale: expected finite"),
        (
            lambda: Normalize(0, 0),
            r"Normalize: expected every std above 0 in float32, received 0\. A constant channel: 1",
        ),
        (lambda: Normalize(0, [1, 1e-50]), r"every std above 0"),
        (lambda: Normalize([0, 0], [1, 1, 1]), r"expected as many means as stds, received 2 and 3"),
        (lambda: Normalize([], 1), r"mean as a finite number or one per channel, received \[\]"),
        (lambda: Normalize(0, "1"), r"std as a finite number"),
        (
            lambda: Cast("float33"),
            r"Cast: expected a torch dtype or its name, for instance 'float32', received 'float33'",
        ),
        (lambda: Cast("nn"), r"received 'nn'"),
        (lambda: OneHot(0), r"OneHot: expected classes of at least 1, received 0"),
        (
            lambda: OneHot(3)(torch.tensor([0, 3, -1]), NO_WORDS),
            r"labels in 0\.\.2, got 3 \(2 of 3 are outside\)",
        ),
    ],
)
def test_a_wrong_value_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


def test_samples_and_epochs_must_fit_the_batch() -> None:
    batch = pixels(4, 8, 8, 3)
    good = torch.arange(4)
    for wrong in (good[:3], good.int(), good.view(4, 1), good.to("meta")):
        received = re.escape(f"{wrong.dtype} {list(wrong.shape)} on {wrong.device}")
        with pytest.raises(
            ValueError, match=rf"apply: expected samples as int64 \[4\] on cpu, got {received}"
        ):
            apply([Flip()], batch, seed=0, epochs=good, samples=wrong)
        with pytest.raises(ValueError, match="apply: expected epochs as int64"):
            apply([Flip()], batch, seed=0, epochs=wrong, samples=good)
    with pytest.raises(TypeError, match="integer"):
        apply([Flip()], batch, seed=0.5, epochs=good, samples=good)  # type: ignore[arg-type]


def test_transforms_are_values() -> None:
    transforms = [
        PadCrop([3, 4], [0, 1, 2, 3]),
        Normalize([1, 2, 3], [4, 5, 6]),
        Cast("half"),
        Resize([2, 3]),
        OneHot(3),
    ]
    again = [
        PadCrop((3, 4), (0, 1, 2, 3)),
        Normalize((1, 2, 3), (4, 5, 6)),
        Cast(torch.float16),
        Resize((2, 3)),
        OneHot(3, dtype="float32"),
    ]
    assert transforms == again
    assert len({*transforms, *again}) == 5
    assert all(a != b for a, b in pairwise(transforms))
