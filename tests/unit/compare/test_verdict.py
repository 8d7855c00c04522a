"""The verdict against closed forms and numeric integration, and its error rates by simulation."""

import math

import numpy as np
import pytest

from halfstep.compare import verdict
from halfstep.compare.verdict import ImageNoise, judge, student_quantile


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 9, 30, 199])
@pytest.mark.parametrize("p", [0.8, 0.975])
def test_quantile_cuts_the_density_where_it_says(p: float, dof: int) -> None:
    """Simpson's rule over Student's density from 0 to the quantile gives p − 1/2; its error here is below 1e-9."""
    t = np.linspace(0, student_quantile(p, dof), 4001)
    log_c = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    density = np.exp(log_c - (dof + 1) / 2 * np.log1p(t * t / dof))
    weights = np.where(np.arange(4001) % 2, 4, 2)
    weights[[0, -1]] = 1
    assert (t[1] * (density * weights).sum() / 3) == pytest.approx(p - 0.5, abs=1e-8)


def test_quantile_is_the_one_in_tables() -> None:
    assert [round(student_quantile(0.975, n - 1), 3) for n in (2, 3, 5, 10)] == [
        12.706,
        4.303,
        2.776,
        2.262,
    ]
    assert student_quantile(0.5, 3) == pytest.approx(0, abs=1e-15)
    with pytest.raises(ValueError, match=r"p from 0\.5"):
        student_quantile(0.3, 3)


def test_same_needs_the_whole_interval_within_the_margin() -> None:
    values = [0.1, -0.1, 0.0]  # sd 0.1: half-width 4.303 · 0.1 / √3 = 0.248
    found = judge(values, margin=0.5)
    assert (found.kind, found.text) == ("same", "same within 0.5 points")
    assert found.interval == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert judge(values, margin=0.24).kind == "unknown"
    assert (
        judge([v - 0.3 for v in values], margin=0.5).kind == "worse"
    )  # -0.55 … -0.05: neither within nor about 0


def test_a_difference_inside_the_margin_is_the_same_even_when_it_is_sure() -> None:
    assert judge([-0.2, -0.21, -0.19], margin=0.5).kind == "same"


def test_worse_and_better_name_the_size_and_the_half_width() -> None:
    assert judge([-2.0, -1.8, -1.7], margin=0.5).text == "worse by 1.8 ± 0.4"
    assert judge([2.0, 1.8, 1.7], margin=0.5).text == "better by 1.8 ± 0.4"


def test_one_seed_settles_nothing() -> None:
    found = judge([0.0], margin=0.5, images=ImageNoise(10_000, 0.1))
    assert (found.kind, found.interval) == ("unknown", None)
    assert (
        found.text
        == "cannot tell from one seed: +0.00 points (± 0.20 by the test images alone); give 3 or more"
    )
    assert judge([-30.0], margin=0.5).kind == "unknown"


def test_equal_scores_of_few_images_are_no_proof() -> None:
    """No disagreement among 200 images: the rate may be 1 − 0.025^(1/200) = 1.83 % still."""
    found = judge([0.0, 0.0, 0.0], margin=0.5, images=ImageNoise(200, 0.0))
    assert found.interval == pytest.approx(100 * (1 - 0.025 ** (1 / 200)), rel=0.01)  # 1 − e^-x ≈ x
    assert found.text == "cannot tell: 200 test images are too few, about 800 needed"
    assert judge([0.0, 0.0, 0.0], margin=0.5, images=ImageNoise(2000, 0.0)).kind == "same"


NEEDED = 8  # seeds: by tables (2.365 + 0.896) · 0.4243 / √8 = 0.489, and with 7 (2.447 + 0.906) · 0.4243 / √7 = 0.538


def test_the_reason_is_the_one_that_applies() -> None:
    """Half-widths at a target of 0.5: seeds by Student's 12.7 · sd / √2, images by 1.96 · error and 369 / N."""
    wide = [0.3, -0.3]  # sd 0.42: 3.8
    assert (
        judge(wide, margin=0.5, images=ImageNoise(10_000, 0.1)).text
        == f"cannot tell: more seeds needed, about {NEEDED}"
    )
    both = judge(wide, margin=0.5, images=ImageNoise(500, 0.1)).text
    assert (
        both
        == f"cannot tell: 2 seeds and 500 test images are too few, about {NEEDED} seeds and 800 images needed"
    )
    alike = judge(
        [0.0, 0.0], margin=0.5, images=ImageNoise(10_000, 0.5)
    ).text  # 0.98: (0.98 / 0.5)² times the images
    assert alike == "cannot tell: 10,000 test images are too few, about 38,500 needed"
    assert (
        judge([9.0, -9.0], margin=0.5, images=ImageNoise(500, 0.1)).text
        == "cannot tell: more seeds needed, over 200"
    )


def test_more_seeds_help_where_each_stumbles_over_measure_image_noise_its_own() -> None:
    """Two seeds that disagree with the reference on images of their own: with n of them the error is √(2 / n) of it."""
    rng = np.random.default_rng(0)
    right = np.ones(100_000, bool)
    draw = [rng.random(100_000) >= 0.04 for _ in range(16)]
    two, many = verdict.measure_image_noise([right] * 2, draw[:2]), verdict.measure_image_noise([right] * 16, draw)
    assert two.error_with_seeds(8) == pytest.approx(
        many.standard_error, rel=0.1
    )  # so many images leave the chance of some 3 %
    same = verdict.measure_image_noise([right] * 2, [draw[0]] * 2)
    assert (same.seed_part, same.error_with_seeds(100)) == (0, same.standard_error)
    # twice the seeds: 1.96 · √(0.35² − 0.34² / 2) = 0.4984, and with three instead of two 0.5673
    assert judge([0.0, 0.0], margin=0.5, images=ImageNoise(2000, 0.35, 0.34)).text.endswith(
        "more seeds needed, about 4"
    )


def test_images_are_judged_by_their_means_over_seeds() -> None:
    """Seeds that stumble over the same images: as large an error as one seed's, not a third of its square."""
    a, b = np.ones(100, bool), np.arange(100) >= 4
    once, thrice = verdict.measure_image_noise([a], [b]), verdict.measure_image_noise([a] * 3, [b] * 3)
    assert once.standard_error == pytest.approx(100 * math.sqrt(0.04 * 0.96 / 100))
    assert (thrice.count, thrice.standard_error) == (once.count, once.standard_error)
    spread = verdict.measure_image_noise([a] * 3, [np.roll(b, 10 * i) for i in range(3)])
    assert spread.standard_error == pytest.approx(100 * math.sqrt((12 / 9 / 100 - 0.04**2) / 100))


def test_bits_survive_packing() -> None:
    bits = np.random.default_rng(0).random(1003) < 0.5
    assert np.array_equal(verdict.unpack_bits(verdict.pack_bits(bits), 1003), bits)


def test_the_number_of_seeds_is_enough_four_times_in_five() -> None:
    """Of comparisons without a difference at the number that was named, 80 % come out as the same, by design."""
    n = verdict.seeds_needed(0.6, 0.5)
    assert n is not None
    rng = np.random.default_rng(1)
    found = [judge(rng.normal(0, 0.6, n).tolist(), margin=0.5).kind == "same" for _ in range(2000)]
    assert 0.55 < np.mean(found) < 0.9  # the mean itself scatters too, which the design leaves out
    assert verdict.seeds_needed(0.6, 0.5) > verdict.seeds_needed(0.3, 0.5)  # type: ignore[operator]
    assert verdict.seeds_needed(100, 0.5) is None


# simulation: seeds differ by N(delta, tau), and each disagrees with the reference on a share of 2,000 images

CASES = [
    (n, tau, share) for n in (3, 5, 10) for tau, share in ((0.0, 0.005), (0.1, 0.01), (0.3, 0.03))
]


def rates(
    n: int, tau: float, share: float, delta: float, trials: int = 400, count: int = 2000
) -> dict[str, float]:
    """How often each kind comes out, image by image; `delta` and `tau` in points."""
    rng = np.random.default_rng(n * 1000 + int(1000 * tau) + int(100 * delta))
    kinds = dict.fromkeys(("same", "worse", "better", "unknown"), 0)
    for _ in range(trials):
        true = rng.normal(delta, tau, n) / 100
        low = np.clip((share - true) / 2, 0, 1)  # right before, wrong now
        high = np.clip((share + true) / 2, 0, 1)
        counts = np.stack(
            [rng.multinomial(count, (a, b, 1 - a - b)) for a, b in zip(low, high, strict=True)]
        )
        differences = 100 * (counts[:, 1] - counts[:, 0]) / count
        error = 100 * math.sqrt(counts[:, :2].sum()) / n / count  # independent images for each seed
        kinds[judge(differences.tolist(), margin=0.5, images=ImageNoise(count, error)).kind] += 1
    return {kind: number / trials for kind, number in kinds.items()}


@pytest.mark.parametrize(("n", "tau", "share"), CASES)
def test_false_verdicts_are_rare(n: int, tau: float, share: float) -> None:
    """Nominal: 5 % false worse or better, 2.5 % false same at the margin. Bounds: 3 standard errors of 400 above."""
    none = rates(n, tau, share, 0.0)
    assert none["worse"] + none["better"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    share = max(share, 0.012)  # a difference of a point needs that many disagreements
    assert rates(n, tau, share, -0.5)["same"] <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / 400)
    assert rates(n, tau, share, -1.0)["same"] <= 0.005
    assert rates(n, tau, share, -1.0)["better"] <= 0.005


def test_verdicts_are_reached() -> None:
    """Power, without which the rates above would be empty: close runs are the same, a loss of 2 points is seen."""
    assert rates(3, 0.0, 0.005, 0.0)["same"] > 0.6
    assert rates(10, 0.1, 0.01, 0.0)["same"] > 0.9
    assert rates(3, 0.1, 0.025, -2.0)["worse"] > 0.9
