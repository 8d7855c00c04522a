"""The transforms that recipes use: closed forms, distributions, the same bits wherever they run."""

import math
from collections.abc import Callable
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.data.transforms import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    RandomAffine,
    RandomApply,
    RandomErasing,
    RandomGrayscale,
    RandomResizedCrop,
    RandomRotation,
    Rescale,
    Transform,
    TrivialAugment,
    apply,
    spec,
)
from halfstep.data.transforms.random_numbers import (
    beta_quantiles,
    exp,
    is_below,
    sin_cos,
    symmetric_beta,
    uniform,
)
from halfstep.data.transforms.trivial_augment import OPERATIONS
from tests.support.emulated_graphs import CPU, EmulatedGraphs

SAMPLE_COUNT = 20_000
FALSE_ALARM_RATE = 1e-6  # of each test of a distribution; the seed is fixed
NO_WORDS = torch.empty((0, 0), dtype=torch.int64)


def pixels(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def random_words(count: int, samples: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**32, (count, samples), generator=generator)


def run(
    chain: list[Transform], batch: Tensor, *, epoch: int = 0, samples: Tensor | None = None
) -> Tensor:
    samples = torch.arange(len(batch)) if samples is None else samples
    return apply(chain, batch, seed=7, epochs=torch.full_like(samples, epoch), samples=samples)


TRANSFORMS: dict[str, Callable[..., Transform]] = {
    "crop, larger": lambda **k: RandomResizedCrop((50, 41), **k),
    "crop, smaller": lambda **k: RandomResizedCrop((11, 13), **k),
    "crop, bicubic": lambda **k: RandomResizedCrop((30, 20), interpolation="bicubic", **k),
    "crop, nearest": lambda **k: RandomResizedCrop(24, interpolation="nearest", **k),
    "centre": lambda **k: CenterCrop((20, 40), **k),
    "rotation": lambda **k: RandomRotation(60, fill=1, **k),
    "rotation, bilinear": lambda **k: RandomRotation(60, "bilinear", fill=1, **k),
    "affine": lambda **k: RandomAffine(20, (0.2, 0.1), (0.8, 1.2), (-9, 9, -5, 5), **k),
    "jitter": lambda **k: ColorJitter(0.4, 0.4, 0.4, 0.1, **k),
    "jitter without hue": lambda **k: ColorJitter(0.4, 0.4, 0.4, **k),
    "erasing": lambda **k: RandomErasing(0.7, value=1, **k),
    "grey": lambda **k: RandomGrayscale(0.5, **k),
    "blur": lambda **k: GaussianBlur((5, 7), **k),
    "some rotated": lambda **k: RandomApply(RandomRotation(90, **k), 0.4),
    "trivial": lambda **k: TrivialAugment(fill=9, **k),
}


def batch_for(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    images = pixels(*shape)
    return images if dtype == torch.uint8 else (images / 255).to(dtype)


def cases() -> list[Any]:
    dtypes = (torch.uint8, torch.float16, torch.float32, torch.float64)
    return [
        (name, dtype)
        for name in TRANSFORMS
        for dtype in dtypes
        if name != "trivial" or dtype == torch.uint8
    ]


# --- the same bits wherever a sample is


@pytest.mark.parametrize(("name", "dtype"), cases())
def test_a_sample_does_not_depend_on_its_batch_or_layout(name: str, dtype: torch.dtype) -> None:
    transform = TRANSFORMS[name]()
    samples = torch.arange(40) * 7919
    chain: list[Transform] = [transform]
    for shape in ((40, 33, 29, 3), (40, 33, 29, 1), (40, 33, 29)):
        images = batch_for(name, dtype, *shape)
        expected = run(chain, images, samples=samples)
        assert expected.dtype == dtype
        assert spec(chain, images.shape, dtype) == (tuple(expected.shape), dtype)
        for size in (1, 7):
            parts = zip(images.split(size), samples.split(size), strict=True)
            parted = torch.cat([run(chain, part, samples=numbers) for part, numbers in parts])
            assert torch.equal(parted, expected)
        if len(shape) == 4:
            planes = images.permute(0, 3, 1, 2)
            for layout in (planes, planes.contiguous()):
                result = run([TRANSFORMS[name](layout="CHW")], layout, samples=samples)
                assert torch.equal(result.permute(0, 2, 3, 1), expected)
        assert not torch.equal(expected, run(chain, images, samples=samples + 1)) or name in (
            "centre",
            "grey",  # one channel stays
        )
    assert run(chain, images[:0]).shape[0] == 0


@pytest.mark.parametrize("name", TRANSFORMS)
def test_large_images_are_done_in_parts_with_the_same_bits(name: str) -> None:
    images = pixels(7, 300, 300, 3)  # 2 samples make a part
    transform = TRANSFORMS[name]()
    words = random_words(transform.draws, 7)
    alone = [transform(images[i : i + 1], words[:, i : i + 1]) for i in range(7)]
    assert torch.equal(transform(images, words), torch.cat(alone))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_captured_graph_gives_the_same_bits(name: str) -> None:
    """The graph is captured with other images, samples and passes than it is replayed with."""
    chain: list[Transform] = [TRANSFORMS[name]()]
    images = pixels(12, 33, 29, 3)
    samples = torch.arange(12)
    epochs = torch.zeros_like(samples)
    run(chain, images)  # constants are copied before a capture
    graphs = EmulatedGraphs(CPU)
    static = (torch.zeros_like(images), samples.clone(), epochs.clone())
    graph = graphs.capture(
        name, lambda: apply(chain, static[0], seed=7, epochs=static[1], samples=static[2])
    )
    for epoch in (0, 3):
        static[0].copy_(images)
        static[1].fill_(epoch)
        static[2].copy_(samples + 100)
        graph.replay()
        expected = run(chain, images, epoch=epoch, samples=samples + 100)
        assert torch.equal(graph.result, expected)


class OperationNames(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_is_read_back_and_the_input_is_left_alone(name: str) -> None:
    images = pixels(9, 33, 29, 3)
    copy = images.clone()
    chain: list[Transform] = [TRANSFORMS[name]()]
    run(chain, images)
    with OperationNames() as operations:
        run(chain, images)
    waits = {"aten::lift_fresh", "aten::_local_scalar_dense", "aten::nonzero", "aten::item"}
    assert operations.names.isdisjoint(waits)
    assert torch.equal(images, copy)


def test_compiled_whole() -> None:
    torch._dynamo.reset()
    chain = [make() for name, make in TRANSFORMS.items() if "bilinear" not in name]
    images = pixels(5, 33, 29, 3)
    samples = torch.arange(5)
    for transform in chain:

        def fresh(transform: Transform = transform) -> Tensor:
            return apply([transform], images, seed=3, epochs=samples, samples=samples)

        compiled = torch.compile(fresh, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(), fresh()), transform
        torch._dynamo.reset()


# --- random numbers


def assert_ks_uniform(values: Tensor) -> None:
    """Kolmogorov and Smirnov's distance from the uniform distribution on 0..1."""
    ordered = values.double().sort().values
    n = len(ordered)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max((steps[1:] - ordered).max().item(), (ordered - steps[:-1]).max().item())
    # P(√n D > x) ≈ 2 e^(−2x²)
    assert distance < math.sqrt(-math.log(FALSE_ALARM_RATE / 2) / (2 * n))


def assert_uniform_cells(values: Tensor, cells: int) -> None:
    """Pearson's chi-square over the cells."""
    seen = torch.bincount(values, minlength=cells).double()
    assert len(seen) == cells
    expected = len(values) / cells
    statistic = ((seen - expected) ** 2).sum() / expected
    chance = torch.special.gammaincc(
        torch.tensor((cells - 1) / 2, dtype=torch.float64), statistic / 2
    )
    assert chance > FALSE_ALARM_RATE


def test_exp_and_sin_and_cos_agree_with_torch() -> None:
    x = torch.linspace(-30, 30, 100_001, dtype=torch.float64)
    assert ((exp(x) - x.exp()) / x.exp()).abs().max() < 1e-12
    sine, cosine = sin_cos(x)
    assert (sine - x.sin()).abs().max() < 1e-12
    assert (cosine - x.cos()).abs().max() < 1e-12


def test_uniform_reaches_its_ends_and_probabilities_are_met() -> None:
    words = torch.tensor([0, 2**31, 2**32 - 1])
    assert uniform(words, -2.0, 6.0).tolist() == [-2.0, 2.0, 6.0 - 8 * 2**-32]
    assert is_below(words, 0.0).tolist() == [False] * 3
    assert is_below(words, 0.5).tolist() == [True, False, False]
    assert is_below(words, 1.0).tolist() == [True] * 3


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 8.0, 40.0])
def test_symmetric_beta_has_its_distribution(alpha: float) -> None:
    """By the moments, and by the integral of the density in between."""
    words = random_words(1, 200_000, seed=3)[0]
    values = symmetric_beta(words, alpha)
    assert ((values >= 0) & (values <= 1)).all()
    n = len(values)
    deviation = math.sqrt(1 / (4 * (2 * alpha + 1)))
    assert abs(values.mean().item() - 0.5) < 5 * deviation / math.sqrt(n)
    fourth = 3 / (16 * (2 * alpha + 1) * (2 * alpha + 3))  # central
    spread = math.sqrt((fourth - deviation**4) / n)
    assert abs(((values - 0.5) ** 2).mean().item() - deviation**2) < 5 * spread

    # The density integrated by Gauss and Legendre between 0.2 and 0.8, where it is smooth.
    nodes, weights = np.polynomial.legendre.leggauss(80)
    x = 0.5 + 0.3 * nodes
    log_beta = 2 * math.lgamma(alpha) - math.lgamma(2 * alpha)
    density = np.exp((alpha - 1) * np.log(x * (1 - x)) - log_beta)
    share = float((density * weights).sum() * 0.3)
    inside = ((values > 0.2) & (values < 0.8)).double().mean().item()
    assert abs(inside - share) < 5 * math.sqrt(share * (1 - share) / n) + 1e-9


def test_beta_quantiles_have_a_closed_form_for_one_half() -> None:
    """Beta(1/2, 1/2) is sin² of a uniform angle."""
    words = random_words(1, 10_000, seed=5)[0] & ~1  # the lower half
    probability = (words >> 1).double() * 2.0**-32 + 2.0**-33
    expected = (probability * math.pi / 2).sin() ** 2
    assert ((symmetric_beta(words, 0.5) - expected) / expected).abs().max() < 1e-5
    assert beta_quantiles(0.5)[-1] == pytest.approx(0.5, rel=1e-9)


# --- crops and erasing


def test_a_crop_of_everything_is_the_image_or_its_resize() -> None:
    images = pixels(6, 30, 20, 3)
    whole = {"scale": (1, 1), "ratio": (20 / 30, 20 / 30)}
    words = random_words(22, 6)
    for interpolation in ("nearest", "bilinear", "bicubic"):
        crop = RandomResizedCrop((30, 20), interpolation=interpolation, **whole)  # type: ignore[arg-type]
        assert torch.equal(crop(images, words), images)
    halved = RandomResizedCrop((15, 10), **whole)(images.double(), words)  # type: ignore[arg-type]
    expected = torch.nn.functional.interpolate(
        images.double().permute(0, 3, 1, 2), (15, 10), mode="bilinear", antialias=True
    )
    # float64 weights of another order of operations
    assert (halved.permute(0, 3, 1, 2) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(12, 9), (60, 71), (33, 7)])
def test_random_resized_crop_is_torchs_antialiased_resize_of_its_window(
    interpolation: Any, size: tuple[int, int]
) -> None:
    images = pixels(50, 3, 33, 29).double()
    crop = RandomResizedCrop(size, interpolation=interpolation)
    words = random_words(crop.draws, 50)
    windows = crop.windows(words, 33, 29)
    expected = []
    for image, (top, left, rows, columns) in zip(images, windows.tolist(), strict=True):
        window = image[None, :, top : top + rows, left : left + columns]
        resized = torch.nn.functional.interpolate(
            window, size, mode=interpolation, antialias=True, align_corners=False
        )
        expected.append(resized[0])
    assert (crop(images, words) - torch.stack(expected)).abs().max() < 1e-9
    # In float32 a weight is rounded once, then each product and sum: taps · 255 · 2^-24 twice.
    single = crop(images.float(), words)
    assert (single - torch.stack(expected)).abs().max() < 2 * 20 * 255 * 2**-24
    # uint8 is rounded to nearest, cut off where a cubic filter overshoots.
    exact = torch.stack(expected).clamp(0, 255)
    assert (crop(images.byte(), words) - exact).abs().max() <= 0.5 + 1e-3


def test_windows_have_their_areas_ratios_and_places() -> None:
    # Large images: rounding to whole pixels does not show.
    crop = RandomResizedCrop(8, scale=(0.1, 0.5), ratio=(0.5, 2.0))
    words = random_words(crop.draws, SAMPLE_COUNT)
    top, left, rows, columns = crop.windows(words, 100_000, 100_000).double().unbind(1)
    area = rows * columns / 1e10
    assert_ks_uniform((area - 0.1) / 0.4)
    # Every first try fits here, so it is taken; rounding moves an area by 1e-5 of the image.
    assert (area - uniform(words[0], 0.1, 0.5)).abs().max() < 2e-5
    assert_ks_uniform(((columns / rows).log() + math.log(2)) / (2 * math.log(2)))
    assert_ks_uniform(top / (100_000 - rows))
    assert_ks_uniform(left / (100_000 - columns))
    values = torch.stack([area, (columns / rows).log(), top / (100_000 - rows), left])
    correlations = torch.corrcoef(values).fill_diagonal_(0)[:3, :3]
    assert correlations.abs().max() < 5.5 / math.sqrt(SAMPLE_COUNT)


def test_every_window_fits_and_the_last_resort_is_the_centre() -> None:
    for height, width in ((40, 36), (7, 90), (90, 7), (1, 1), (3, 2)):
        crop = RandomResizedCrop(8)
        top, left, rows, columns = crop.windows(random_words(22, 3000), height, width).unbind(1)
        assert ((rows >= 1) & (columns >= 1) & (top >= 0) & (left >= 0)).all()
        assert ((top + rows <= height) & (left + columns <= width)).all()
    # A ratio of 2 never fits the whole of a square: the largest window of that ratio.
    stuck = RandomResizedCrop(8, scale=(1, 1), ratio=(2, 2)).windows(random_words(22, 5), 40, 40)
    assert stuck.tolist() == [[10, 0, 20, 40]] * 5


def test_erased_rectangles_have_their_areas_ratios_and_rate() -> None:
    erasing = RandomErasing(0.25, scale=(0.02, 0.2), ratio=(0.5, 2.0))
    words = random_words(erasing.draws, 4 * SAMPLE_COUNT)
    rectangles = erasing.rectangles(words, 100_000, 100_000).double()
    erased = rectangles[rectangles[:, 2] > 0]
    share = len(erased) / len(rectangles)
    assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / len(rectangles))
    top, left, rows, columns = erased.unbind(1)
    assert_ks_uniform((rows * columns / 1e10 - 0.02) / 0.18)
    assert_ks_uniform(((rows / columns).log() + math.log(2)) / (2 * math.log(2)))
    assert_ks_uniform(top / (100_000 - rows))
    assert_ks_uniform(left / (100_000 - columns))


def test_erasing_fills_its_rectangle_and_nothing_else() -> None:
    images = pixels(60, 20, 24, 3)
    for value in (7, (1, 2, 3)):
        erasing = RandomErasing(0.8, value=value)
        words = random_words(erasing.draws, 60)
        expected = images.clone()
        rectangles = erasing.rectangles(words, 20, 24).tolist()
        for image, (top, left, rows, columns) in zip(expected, rectangles, strict=True):
            image[top : top + rows, left : left + columns] = torch.tensor(value, dtype=torch.uint8)
        assert torch.equal(erasing(images, words), expected)
        assert any(rows == 0 for _, _, rows, _ in rectangles)


def test_center_crop_cuts_and_pads() -> None:
    image = torch.arange(1, 26).view(1, 5, 5)
    assert torch.equal(CenterCrop(3)(image, NO_WORDS), image[:, 1:4, 1:4])
    assert torch.equal(CenterCrop((1, 5))(image, NO_WORDS), image[:, 2:3])
    padded = CenterCrop((5, 8))(image, NO_WORDS)
    assert padded.shape == (1, 5, 8)
    assert torch.equal(padded[:, :, 1:6], image)
    assert padded.sum() == image.sum()


# --- places


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear"])
def test_quarter_turns_are_rot90(interpolation: Any) -> None:
    for height, width in ((9, 9), (12, 12)):
        images = pixels(4, height, width, 3)
        for quarters in range(-3, 5):
            rotation = RandomRotation((90 * quarters, 90 * quarters), interpolation)
            expected = torch.rot90(images, quarters, (1, 2))
            assert torch.equal(rotation(images, random_words(1, 4)), expected)


def test_shifts_shear_and_scale_move_pixels_where_they_should() -> None:
    images = pixels(200, 20, 24, 1)
    shift = RandomAffine(0, (0.25, 0.5), fill=7)
    words = random_words(6, 200)
    across = uniform(words[1], -6, 6).round().int().tolist()
    down = uniform(words[2], -10, 10).round().int().tolist()
    expected = torch.full_like(images, 7)
    for image, moved, dx, dy in zip(images, expected, across, down, strict=True):
        source = image[max(0, -dy) : 20 - max(0, dy), max(0, -dx) : 24 - max(0, dx)]
        moved[max(0, dy) : 20 - max(0, -dy), max(0, dx) : 24 - max(0, -dx)] = source
    assert torch.equal(shift(images, words), expected)

    doubled = RandomAffine(0, scale=(2, 2))(images, words)
    numbers = torch.arange(24)
    columns = ((numbers - 11.5) / 2 + 11.5).round().long()
    rows = ((numbers[:20] - 9.5) / 2 + 9.5).round().long()
    assert torch.equal(doubled, images[:, rows][:, :, columns])

    # A shear by 45° moves each row by its distance from the middle.
    sheared = RandomAffine(0, shear=(45, 45), fill=0)(pixels(1, 21, 21), words[:, :1])
    original = pixels(1, 21, 21)
    for row in range(21):
        offset = row - 10
        for column in range(21):
            source = column + offset
            value = original[0, row, source] if 0 <= source < 21 else 0
            assert sheared[0, row, column] == value


def test_angles_shifts_and_factors_are_uniform() -> None:
    words = random_words(6, SAMPLE_COUNT)
    affine = RandomAffine((-30, 60), (0.5, 0.25), (0.5, 2.0), (-10, 20, -5, 5))
    matrices = affine.matrices(words, 1000, 2000)
    forward = torch.linalg.inv(matrices[:, :, :2])
    scale = forward.det().sqrt()
    assert_ks_uniform((scale - 0.5) / 1.5)
    shifts = -(forward @ matrices[:, :, 2:])[:, :, 0]
    assert_ks_uniform(((shifts[:, 0] + 1000) / 2000).clamp(0, 1))
    assert_ks_uniform(((shifts[:, 1] + 250) / 500).clamp(0, 1))
    # A place on the y axis is not moved by the shear along y: only turned and sheared along x.
    turn_only = RandomAffine((-30, 60)).matrices(words, 10, 10)
    angle = torch.atan2(-turn_only[:, 0, 1], turn_only[:, 0, 0]).rad2deg()
    assert_ks_uniform((-angle + 30) / 90)


def test_bilinear_borders_mix_with_the_fill() -> None:
    """Half a pixel to the left: each pixel is the mean of two, the last one with the fill."""
    images = torch.tensor([[[1.0, 3.0, 5.0]]])
    from halfstep.data.transforms.affine import transform_images

    half = torch.tensor([[[1.0, 0.0, 0.5], [0.0, 1.0, 0.0]]], dtype=torch.float64)
    moved = transform_images("test", images, half, "bilinear", 9.0, None)
    assert torch.allclose(moved, torch.tensor([[[2.0, 4.0, 7.0]]]), atol=1e-5)


# --- colours


def luma(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, -1)
    return red * 0.2989 + green * 0.587 + blue * 0.114


def exact_jitter(kind: int, images: Tensor, factor: Tensor) -> Tensor:
    """One operation on floats 0..1 [B, H, W, 3], in float64."""
    import colorsys

    factor = factor.view(-1, 1, 1, 1)
    if kind == 3:
        turned = torch.empty_like(images)
        for image, result, shift in zip(images, turned, factor.flatten().tolist(), strict=True):
            for pixel, changed in zip(image.view(-1, 3), result.view(-1, 3), strict=True):
                hue, saturation, value = colorsys.rgb_to_hsv(*pixel.tolist())
                colour = colorsys.hsv_to_rgb((hue + shift) % 1, saturation, value)
                changed.copy_(torch.tensor(colour, dtype=torch.float64))
        return turned
    others = [
        torch.zeros_like(images),
        luma(images).mean((1, 2, 3), keepdim=True),
        luma(images),
    ]
    return (images * factor + others[kind] * (1 - factor)).clamp(0, 1)


def test_jitter_is_its_operations_in_its_order() -> None:
    images = pixels(24, 5, 4, 3).double() / 255
    jitter = ColorJitter(0.5, 0.6, 0.7, 0.3)
    words = random_words(8, 24)
    factors = jitter.factors(words)
    order = jitter.order(words)
    expected = []
    for i in range(24):
        image = images[i : i + 1]
        for place in range(4):
            kind = order[:, i].tolist().index(place)
            image = exact_jitter(kind, image, factors[kind, i : i + 1])
        expected.append(image)
    assert (jitter(images, words) - torch.cat(expected)).abs().max() < 1e-9
    # Seven roundings of float32 and a few times as many in the hue.
    assert (jitter(images.float(), words) - torch.cat(expected)).abs().max() < 1e-5


def test_orders_and_factors_of_a_jitter_are_uniform() -> None:
    jitter = ColorJitter(0.4, (0.2, 3.0), (0.5, 0.6), 0.25)
    words = random_words(8, SAMPLE_COUNT)
    limits = [(0.6, 1.4), (0.2, 3.0), (0.5, 0.6), (-0.25, 0.25)]
    for factor, (low, high) in zip(jitter.factors(words), limits, strict=True):
        assert_ks_uniform((factor - low) / (high - low))
    numbers = {order: i for i, order in enumerate(permutations(range(4)))}
    orders = [numbers[tuple(order)] for order in jitter.order(words).t().tolist()]
    assert_uniform_cells(torch.tensor(orders), 24)
    # Equal words are a permutation too.
    assert sorted(jitter.order(torch.zeros(8, 1, dtype=torch.int64)).flatten().tolist()) == [
        0,
        1,
        2,
        3,
    ]


def test_a_third_of_the_circle_exchanges_the_colours() -> None:
    images = pixels(30, 6, 5, 3)
    third = ColorJitter(hue=(1 / 3, 1 / 3))(images, random_words(8, 30))
    assert (third.int() - images.roll(1, 3).int()).abs().max() <= 1  # rounded down
    same = ColorJitter(hue=(0.0, 0.0))(images, random_words(8, 30))
    assert torch.equal(same, images)
    whole = ColorJitter(hue=(-0.5, -0.5))(images, random_words(8, 30))
    again = ColorJitter(hue=(0.5, 0.5))(whole, random_words(8, 30))
    assert (again.int() - images.int()).abs().max() <= 2


def test_grey_is_the_luma_rounded_down() -> None:
    images = pixels(10, 6, 5, 3)
    exact = luma(images.double())
    grey = Grayscale()(images, NO_WORDS)
    assert grey.shape == (10, 6, 5, 1)
    assert torch.equal(grey, exact.floor().byte())
    assert torch.equal(Grayscale(3)(images, NO_WORDS), grey.expand(-1, -1, -1, 3))
    assert torch.equal(Grayscale()(images[..., 0], NO_WORDS), images[..., 0])
    some = RandomGrayscale(0.3)(images, torch.tensor([[0] * 5 + [2**32 - 1] * 5]))
    assert torch.equal(some[:5], grey[:5].expand(-1, -1, -1, 3))
    assert torch.equal(some[5:], images[5:])


def test_blur_is_a_gauss_filter_with_mirrored_borders() -> None:
    images = pixels(8, 9, 11, 3).double()
    blur = GaussianBlur((7, 5), (0.3, 1.5))
    words = random_words(1, 8)
    sigmas = uniform(words[0], 0.3, 1.5).tolist()
    result = blur(images, words)
    for image, blurred, sigma in zip(images.numpy(), result.numpy(), sigmas, strict=True):
        padded = np.pad(image, ((2, 2), (3, 3), (0, 0)), mode="reflect")
        weights_across = np.exp(-(np.arange(-3, 4) ** 2) / (2 * sigma**2))
        weights_down = np.exp(-(np.arange(-2, 3) ** 2) / (2 * sigma**2))
        kernel = np.outer(weights_down / weights_down.sum(), weights_across / weights_across.sum())
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 7), (0, 1))
        expected = np.einsum("hwcij,ij->hwc", windows, kernel)
        assert np.abs(blurred - expected).max() < 1e-9


def test_some_samples_are_changed_at_the_stated_rate() -> None:
    images = pixels(1, 4, 4).expand(SAMPLE_COUNT, 4, 4)
    some = run([RandomApply(RandomRotation((90, 90)), 0.3)], images)
    turned = (some == torch.rot90(images, 1, (1, 2))).flatten(1).all(1)
    left = (some == images).flatten(1).all(1)
    assert (turned | left).all()
    count = turned.sum().item()
    assert abs(count - 0.3 * SAMPLE_COUNT) < 5 * math.sqrt(SAMPLE_COUNT * 0.3 * 0.7)


# --- TrivialAugment


def test_operations_strengths_and_signs_are_equally_likely() -> None:
    words = random_words(3, 4 * SAMPLE_COUNT)
    operation, strength = TrivialAugment().choose(words)
    assert_uniform_cells(operation, 14)
    rotate = list(OPERATIONS).index("Rotate")
    angles = strength[operation == rotate]
    steps = (angles.abs() / 135 * 30).round().long()
    assert_uniform_cells(steps, 31)
    moving = angles[steps > 0]
    assert abs((moving < 0).double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(len(moving))
    solarize = list(OPERATIONS).index("Solarize")
    assert (strength[operation == solarize] >= 0).all()


def only(operation: str, samples: int, bins: int = 31) -> Tensor:
    """Words that choose this operation, and each step and sign in turn."""
    number = list(OPERATIONS).index(operation)
    words = torch.zeros(3, samples, dtype=torch.int64)
    words[0] = (number * 2**32 + 2**31) // 14
    words[1] = (torch.arange(samples) % bins * 2**32 + 2**31) // bins
    words[2] = torch.where(torch.arange(samples) // bins % 2 == 0, 2**32 - 1, 0)
    return words


@pytest.mark.parametrize("channels", [1, 3])
def test_point_operations_by_hand(channels: int) -> None:
    images = pixels(62, 8, 7, channels)
    augment = TrivialAugment()
    steps = torch.arange(62) % 31
    sign = torch.where(torch.arange(62) < 31, 1.0, -1.0).double()
    assert torch.equal(augment(images, only("Identity", 62)), images)

    strength = torch.linspace(0, 0.99, 31).double()[steps] * sign
    bright = (images.double() * (1 + strength).view(-1, 1, 1, 1)).clamp(0, 255)
    result = augment(images, only("Brightness", 62))
    assert (result.double() - bright.floor()).abs().max() <= 1  # next to a whole level
    assert (result.double() != bright.floor()).double().mean() < 0.01

    threshold = 255 * torch.linspace(1, 0, 31).double()[steps].float()
    inverted = torch.where(images >= threshold.view(-1, 1, 1, 1), 255 - images, images)
    assert torch.equal(augment(images, only("Solarize", 62)), inverted)

    kept = (8 - torch.arange(31) / 5).round().int()[steps]
    step = (2 ** (8 - kept)).view(-1, 1, 1, 1)
    assert torch.equal(augment(images, only("Posterize", 62)), (images // step * step).byte())


@pytest.mark.parametrize("operation", ["AutoContrast", "Equalize"])
@pytest.mark.parametrize("channels", [1, 3])
def test_histogram_operations_are_pillows(operation: str, channels: int) -> None:
    image_module = pytest.importorskip("PIL.Image")
    ops = pytest.importorskip("PIL.ImageOps")
    images = pixels(40, 21, 33, channels)
    images[:10] = images[:10] // 8 + 60  # few levels
    images[10] = 7  # one level
    function = ops.autocontrast if operation == "AutoContrast" else ops.equalize
    result = TrivialAugment()(images, only(operation, 40))
    for image, changed in zip(images.squeeze(-1).numpy(), result.squeeze(-1).numpy(), strict=True):
        expected = np.asarray(function(image_module.fromarray(image)))
        # Pillow rounds the stretched levels in another way.
        tolerance = 1 if operation == "AutoContrast" else 0
        assert np.abs(changed.astype(int) - expected.astype(int)).max() <= tolerance


# --- refusals


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RandomResizedCrop(0), r"RandomResizedCrop: expected size"),
        (lambda: RandomResizedCrop(8, (0.5, 0.1)), r"scale as two numbers, .*\(0\.5, 0\.1\)"),
        (lambda: RandomResizedCrop(8, (0, 1.5)), r"scale as two numbers"),
        (lambda: RandomResizedCrop(8, ratio=(0, 1)), r"ratio as two numbers"),
        (lambda: RandomResizedCrop(8, interpolation="cubic"), r"did you mean 'bicubic'"),  # type: ignore[arg-type]
        (lambda: RandomRotation(-5), r"RandomRotation: expected degrees .* received -5"),
        (lambda: RandomRotation(5, "bicubic"), r"interpolation 'nearest', 'bilinear'"),
        (lambda: RandomAffine(5, (2, 0)), r"translate as two shares in 0\.\.1"),
        (lambda: RandomAffine(5, scale=(0, 1)), r"RandomAffine: expected scale"),
        (lambda: RandomAffine(5, shear=90), r"RandomAffine: expected shear"),
        (lambda: ColorJitter(-0.1), r"ColorJitter: expected brightness .* received -0\.1"),
        (lambda: ColorJitter(hue=0.6), r"ColorJitter: expected hue .* in -0\.5\.\.0\.5"),
        (lambda: ColorJitter(contrast=(2, 1)), r"contrast"),
        (lambda: RandomErasing(1.5), r"RandomErasing: expected a probability p in 0\.\.1"),
        (lambda: RandomErasing(value="random"), r"RandomErasing: expected value"),  # type: ignore[arg-type]
        (lambda: Grayscale(2), r"Grayscale: expected channels 1 or 3, received 2"),  # type: ignore[arg-type]
        (lambda: GaussianBlur(4), r"kernel_size as an odd number"),
        (lambda: GaussianBlur(3, 0), r"GaussianBlur: expected sigma"),
        (lambda: TrivialAugment(1), r"TrivialAugment: expected bins of at least 2"),
        (lambda: TrivialAugment(fill=300), r"TrivialAugment: expected fill"),
        (lambda: RandomApply(RandomRotation(5), 2), r"RandomApply: expected a probability"),
        (lambda: RandomRotation(5, layout="hwc"), r"RandomRotation: expected layout"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_is_refused(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("transform", "shape", "dtype", "match"),
    [
        (ColorJitter(0.5), (2, 8, 8, 4), torch.uint8, "ColorJitter: expected 1 or 3 channels"),
        (ColorJitter(0.5), (2, 8, 8, 3), torch.int64, "ColorJitter: expected a uint8 or floating"),
        (TrivialAugment(), (2, 8, 8, 3), torch.float32, "Put it before Rescale"),
        (GaussianBlur(13), (2, 6, 8, 3), torch.uint8, "smaller kernel_size"),
        (RandomErasing(value=(1, 2)), (2, 8, 8, 3), torch.uint8, "one value or 3, one per channel"),
        (RandomErasing(value=0.5), (2, 8, 8, 3), torch.uint8, "fill a whole number"),
        (RandomRotation(5, fill=-1), (2, 8, 8, 3), torch.uint8, "RandomRotation: expected fill"),
        (Grayscale(3), (2, 8, 8), torch.uint8, "Put a ToCHW before it"),
        (RandomApply(CenterCrop(4)), (2, 8, 8, 3), torch.uint8, "keeps shape and dtype"),
        (RandomApply(Rescale(2.0)), (2, 8, 8, 3), torch.uint8, "keeps shape and dtype"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    transform: Transform, shape: Any, dtype: torch.dtype, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        spec([transform], shape, dtype)


def test_transforms_are_values() -> None:
    pairs: list[tuple[Any, Any]] = [
        (RandomResizedCrop(8), RandomResizedCrop((8, 8), (0.08, 1), [3 / 4, 4 / 3])),  # type: ignore[arg-type]
        (RandomRotation(10), RandomRotation((-10, 10))),
        (ColorJitter(0.2), ColorJitter((0.8, 1.2), 0, 0, 0)),
        (RandomAffine(1, shear=3), RandomAffine((-1, 1), shear=(-3, 3, 0, 0))),
        (GaussianBlur(3, 1), GaussianBlur((3, 3), (1.0, 1.0))),
        (RandomApply(RandomRotation(3)), RandomApply(RandomRotation((-3, 3)), 0.5)),
    ]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)
        assert repr(one) == repr(other)
