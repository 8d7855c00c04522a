"""The transforms against torchvision's kernels, given the same random parameters.

Skipped where torchvision is not installed: halfstep does not need it. Nearest pixels, cuts, fills
and tables of levels have equal bits. Elsewhere torchvision fuses a product with a sum, or rounds
uint8 between its passes: the tolerances say by how much.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms import (
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    Grayscale,
    MixUp,
    RandomAffine,
    RandomErasing,
    RandomResizedCrop,
    RandomRotation,
    TrivialAugment,
)
from halfstep.data.transforms.random_numbers import uniform
from halfstep.data.transforms.trivial_augment import OPERATIONS

v2 = pytest.importorskip("torchvision.transforms.v2")
functional = pytest.importorskip("torchvision.transforms.v2.functional")

COUNT = 120
HEIGHT = 40
WIDTH = 36
DTYPES = [torch.uint8, torch.float32]
CHANNELS = [1, 3]


def images(dtype: torch.dtype, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(channels)
    pixels = torch.randint(
        0, 256, (COUNT, channels, HEIGHT, WIDTH), dtype=torch.uint8, generator=generator
    )
    return pixels if dtype == torch.uint8 else pixels / 255


def random_words(draws: int) -> Tensor:
    generator = torch.Generator().manual_seed(draws)
    return torch.randint(0, 2**32, (draws, COUNT), generator=generator)


def one_by_one(function: Callable[..., Tensor], batch: Tensor, *parameters: list[Any]) -> Tensor:
    rows = zip(batch, *parameters, strict=True)
    return torch.stack([function(*row) for row in rows])


def assert_close(result: Tensor, expected: Tensor, *, atol: float, share: float = 1.0) -> None:
    """No value is off by more than `atol`, and no more than this share of them is off at all."""
    difference = (result.double() - expected.double()).abs()
    assert difference.max() <= atol
    assert (difference > 0).double().mean() <= share


# float32: taps · eps of a few weights and sums. uint8: one level for each of its two passes.
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(20, 24), (64, 50), (36, 40)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_resized_crop(interpolation: Any, size: Any, dtype: torch.dtype) -> None:
    batch = images(dtype)
    crop = RandomResizedCrop(size, interpolation=interpolation)
    words = random_words(crop.draws)
    windows = crop.windows(words, HEIGHT, WIDTH).tolist()
    expected = one_by_one(
        lambda image, window: functional.resized_crop(
            image, *window, size=size, interpolation=interpolation, antialias=True
        ),
        batch,
        windows,
    )
    result = crop(batch, words)
    if interpolation == "nearest":
        assert torch.equal(result, expected)
    elif dtype == torch.float32:
        assert_close(result, expected, atol=1e-5)
    elif interpolation == "bilinear":
        assert_close(result, expected, atol=1)
    else:
        # Between its passes torchvision cuts uint8 off at 0 and 255 where the filter overshoots,
        # on noise by tens of levels: compare with its floats.
        exact = one_by_one(
            lambda image, window: functional.resized_crop(
                image, *window, size=size, interpolation=interpolation, antialias=True
            ),
            batch.double(),
            windows,
        )
        assert_close(result, exact.clamp(0, 255), atol=0.501)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_rotation_and_affine(interpolation: Any, dtype: torch.dtype, channels: int) -> None:
    batch = images(dtype, channels)
    rotation = RandomRotation(180, interpolation)
    words = random_words(6)
    angles = uniform(words[0], -180, 180).tolist()
    expected = one_by_one(
        lambda image, angle: functional.rotate(image, angle, interpolation=interpolation),
        batch,
        angles,
    )
    results = [(rotation(batch, words[:1]), expected)]

    affine = RandomAffine(50, (0.2, 0.1), (0.6, 1.4), (-20, 20, -10, 10), interpolation)
    parameters = [
        uniform(words[0], -50, 50),
        uniform(words[1], -7.2, 7.2).round(),
        uniform(words[2], -4, 4).round(),
        uniform(words[3], 0.6, 1.4),
        uniform(words[4], -20, 20),
        uniform(words[5], -10, 10),
    ]
    expected = one_by_one(
        lambda image, angle, dx, dy, scale, sx, sy: functional.affine(
            image, angle, [dx, dy], scale, [sx, sy], interpolation=interpolation
        ),
        batch,
        *[p.tolist() for p in parameters],
    )
    results.append((affine(batch, words), expected))
    for result, reference in results:
        if interpolation == "nearest":
            # A place in the middle between two pixels may go to either.
            assert_close(result, reference, atol=255, share=2e-5)
        elif dtype == torch.uint8:
            assert_close(result, reference, atol=1, share=1e-3)
        else:
            # A coordinate of float32 is off by 2^-19 of a pixel, and colours by up to 1 a pixel.
            assert_close(result, reference, atol=4e-5)


def test_nearest_rotation_with_a_fill() -> None:
    batch = images(torch.uint8)
    words = random_words(1)
    angles = uniform(words[0], -180, 180).tolist()
    expected = one_by_one(
        lambda image, angle: functional.rotate(image, angle, fill=[9]), batch, angles
    )
    assert_close(RandomRotation(180, fill=9)(batch, words), expected, atol=255, share=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_color_jitter(dtype: torch.dtype, channels: int) -> None:
    batch = images(dtype, channels)
    words = random_words(8)
    functions = [
        functional.adjust_brightness,
        functional.adjust_contrast,
        functional.adjust_saturation,
        functional.adjust_hue,
    ]

    def jittered(jitter: ColorJitter, kinds: list[int]) -> Tensor:
        factors = jitter.factors(words).t().tolist()
        orders = jitter.order(words).t().tolist()

        def one(image: Tensor, factor: list[float], order: list[int]) -> Tensor:
            for kind in sorted(kinds, key=lambda kind: order[kind]):
                image = functions[kind](image, factor[kind])
            return image

        return one_by_one(one, batch, factors, orders)

    names = ["brightness", "contrast", "saturation", "hue"]
    for kind, name in enumerate(names):
        jitter = ColorJitter(**{name: 0.4})
        atol = 1 if dtype == torch.uint8 else 3e-6
        share = 1e-3 if dtype == torch.uint8 else 1
        assert_close(jitter(batch, words), jittered(jitter, [kind]), atol=atol, share=share)
    together = ColorJitter(0.4, 0.4, 0.4, 0.2)
    # A level that was rounded the other way is amplified by what follows.
    atol = 6 if dtype == torch.uint8 else 1e-5
    share = 2e-3 if dtype == torch.uint8 else 1
    assert_close(together(batch, words), jittered(together, [0, 1, 2, 3]), atol=atol, share=share)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grey_blur_erasing_and_centre(dtype: torch.dtype) -> None:
    batch = images(dtype)
    words = random_words(23)
    is_float = dtype == torch.float32
    grey = functional.rgb_to_grayscale(batch)
    assert_close(Grayscale()(batch, words[:0]), grey, atol=2e-7 if is_float else 0)

    sigmas = uniform(words[0], 0.1, 2.0).tolist()
    for size in (3, (7, 5), 23):
        blur = GaussianBlur(size)
        expected = one_by_one(
            lambda image, sigma, size=blur.kernel_size: functional.gaussian_blur(
                image, list(size), [sigma, sigma]
            ),
            batch,
            sigmas,
        )
        share = 1 if is_float else 1e-3  # uint8: next to half a level
        assert_close(blur(batch, words[:1]), expected, atol=2e-6 if is_float else 1, share=share)

    for crop_size in ((20, 20), (50, 30), (41, 36), (60, 60), (39, 35)):
        expected = functional.center_crop(batch, list(crop_size))
        assert torch.equal(CenterCrop(crop_size)(batch, words[:0]), expected)

    erasing = RandomErasing(1.0, value=(1, 0, 1))
    value = torch.tensor([1, 0, 1], dtype=dtype).view(3, 1, 1)
    rectangles = erasing.rectangles(words, HEIGHT, WIDTH).tolist()
    expected = one_by_one(
        lambda image, rectangle: functional.erase(image, *rectangle, v=value), batch, rectangles
    )
    assert torch.equal(erasing(batch, words), expected)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_trivial_augment(name: str, channels: int) -> None:
    batch = images(torch.uint8, channels)
    batch[:10] = batch[:10] // 64 * 64  # few levels
    batch[10] = 7  # one level
    words = random_words(3)
    words[0] = (list(OPERATIONS).index(name) * 2**32 + 2**31) // len(OPERATIONS)

    reference = v2.TrivialAugmentWide()
    assert list(reference._AUGMENTATION_SPACE) == list(OPERATIONS)
    magnitudes_of, is_signed = reference._AUGMENTATION_SPACE[name]
    magnitudes = magnitudes_of(31, HEIGHT, WIDTH)
    strengths = []
    for step, sign in zip(below(words[1], 31).tolist(), words[2].tolist(), strict=True):
        strength = 0.0 if magnitudes is None else float(magnitudes[step])
        strengths.append(-strength if is_signed and sign < 2**31 else strength)
    expected = one_by_one(
        lambda image, strength: reference._apply_image_or_video_transform(
            image,
            name,
            strength,
            interpolation=v2.InterpolationMode.NEAREST,
            fill=reference._fill,
        ),
        batch,
        strengths,
    )
    result = TrivialAugment()(batch, words)
    if name in ("Color", "Sharpness"):
        assert_close(result, expected, atol=1, share=1e-3)
    else:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_mixup_and_cutmix(alpha: float) -> None:
    batch = images(torch.float32)
    labels = torch.arange(COUNT) % 7
    words = random_words(4)
    words[1] = 0  # MixUp: every sample is mixed

    mixup = MixUp(7, alpha)
    mixed, targets = mixup(batch, labels, words[:2])
    reference = v2.MixUp(num_classes=7)
    for i, share in enumerate(mixup.shares(words[:2]).tolist()):
        pair = torch.stack([batch[i - 1], batch[i]])
        classes = torch.stack([labels[i - 1], labels[i]])
        parameters = {"lam": share, "labels": classes, "batch_size": 2}
        assert torch.equal(mixed[i], reference.transform(pair, parameters)[1])
        assert torch.equal(targets[i], reference.transform(classes, parameters)[1])

    cutmix = CutMix(7, alpha)
    mixed, targets = cutmix(batch, labels, words)
    reference = v2.CutMix(num_classes=7)
    for i, (top, left, rows, columns) in enumerate(cutmix.rectangles(words, 40, 36).tolist()):
        pair = torch.stack([batch[i - 1], batch[i]])
        classes = torch.stack([labels[i - 1], labels[i]])
        parameters = {
            "box": (left, top, left + columns, top + rows),
            "lam_adjusted": 1.0 - rows * columns / (WIDTH * HEIGHT),
            "labels": classes,
            "batch_size": 2,
        }
        assert torch.equal(mixed[i], reference.transform(pair, parameters)[1])
        assert_close(targets[i], reference.transform(classes, parameters)[1], atol=1e-7)
