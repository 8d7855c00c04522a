"""The verdict against closed forms and numeric integration, and its error rates by simulation."""

import math

import numpy as np
import pytest

from halfstep.compare import verdict
from halfstep.compare.verdict import ImageNoise, judge, student_quantile


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 9, 30, 199])
@pytest.mark.parametrize("p", [0.8, 0.975])
def test_the_density_up_to_the_quantile_has_the_area_p(p: float, dof: int) -> None:
    """Simpson's rule over Student's density from 0 to the quantile gives p − 1/2.

    Its error is below 1e-9 in these cases.
    """
    points = 4001
    t = np.linspace(0, student_quantile(p, dof), points)
    log_factor = math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2) - 0.5 * math.log(dof * math.pi)
    density = np.exp(log_factor - (dof + 1) / 2 * np.log1p(t * t / dof))
    weights = np.where(np.arange(points) % 2, 4, 2)
    weights[[0, -1]] = 1
    area = t[1] * (density * weights).sum() / 3
    assert area == pytest.approx(p - 0.5, abs=1e-8)


def test_quantile_is_the_one_in_tables() -> None:
    quantiles = [round(student_quantile(0.975, n - 1), 3) for n in (2, 3, 5, 10)]
    assert quantiles == [12.706, 4.303, 2.776, 2.262]
    assert student_quantile(0.5, 3) == pytest.approx(0, abs=1e-15)
    with pytest.raises(ValueError, match=r"p from 0\.5"):
        student_quantile(0.3, 3)


def test_same_needs_the_complete_interval_within_the_margin() -> None:
    differences = [0.1, -0.1, 0.0]  # sd 0.1: half-width 4.303 · 0.1 / √3 = 0.248
    result = judge(differences, margin=0.5)
    assert (result.kind, result.text) == ("same", "same within 0.5 points")
    assert result.interval == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert judge(differences, margin=0.24).kind == "unknown"
    # -0.55 … -0.05: neither within the margin nor about 0
    assert judge([d - 0.3 for d in differences], margin=0.5).kind == "worse"


def test_a_sure_difference_inside_the_margin_is_the_same() -> None:
    assert judge([-0.2, -0.21, -0.19], margin=0.5).kind == "same"


def test_worse_and_better_name_the_size_and_the_half_width() -> None:
    assert judge([-2.0, -1.8, -1.7], margin=0.5).text == "worse by 1.8 ± 0.4"
    assert judge([2.0, 1.8, 1.7], margin=0.5).text == "better by 1.8 ± 0.4"


def test_one_seed_settles_nothing() -> None:
    result = judge([0.0], margin=0.5, images=ImageNoise(10_000, 0.1))
    assert (result.kind, result.interval) == ("unknown", None)
    assert result.text == (
        "cannot tell from one seed: +0.00 points (± 0.20 by the test images alone); give 3 or more"
    )
    assert judge([-30.0], margin=0.5).kind == "unknown"


def test_equal_scores_of_few_images_are_no_proof() -> None:
    """No disagreement among 200 images: the rate may be 1 − 0.025^(1/200) = 1.83 % still."""
    no_differences = [0.0, 0.0, 0.0]
    result = judge(no_differences, margin=0.5, images=ImageNoise(200, 0.0))
    # 1 − e^-x ≈ x
    assert result.interval == pytest.approx(100 * (1 - 0.025 ** (1 / 200)), rel=0.01)
    assert result.text == "cannot tell: 200 test images are too few, about 800 needed"
    assert judge(no_differences, margin=0.5, images=ImageNoise(2000, 0.0)).kind == "same"


# Seeds by tables: (2.365 + 0.896) · 0.4243 / √8 = 0.489, and with 7 (2.447 + 0.906) · 0.4243 / √7
# = 0.538.
SEEDS_NEEDED = 8


def test_the_reason_is_the_one_that_applies() -> None:
    """Half-widths at a target of 0.5.

    By the seeds Student's 12.7 · sd / √2, by the images 1.96 · error and 369 / N.
    """
    wide = [0.3, -0.3]  # sd 0.42: 3.8
    too_few_seeds = judge(wide, margin=0.5, images=ImageNoise(10_000, 0.1))
    assert too_few_seeds.text == f"cannot tell: more seeds needed, about {SEEDS_NEEDED}"
    too_few_of_both = judge(wide, margin=0.5, images=ImageNoise(500, 0.1))
    assert too_few_of_both.text == (
        "cannot tell: 2 seeds and 500 test images are too few, "
        f"about {SEEDS_NEEDED} seeds and 800 images needed"
    )
    # 0.98: (0.98 / 0.5)² times the images
    too_few_images = judge([0.0, 0.0], margin=0.5, images=ImageNoise(10_000, 0.5))
    assert too_few_images.text == (
        "cannot tell: 10,000 test images are too few, about 38,500 needed"
    )
    hopeless = judge([9.0, -9.0], margin=0.5, images=ImageNoise(500, 0.1))
    assert hopeless.text == "cannot tell: more seeds needed, over 200"


def test_more_seeds_help_where_each_is_wrong_on_images_of_its_own() -> None:
    """Seeds that disagree with the reference on different images.

    The error of n seeds is √(2 / n) of the error of two.
    """
    rng = np.random.default_rng(0)
    reference = np.ones(100_000, bool)
    seeds = [rng.random(100_000) >= 0.04 for _ in range(16)]
    two_seeds = verdict.measure_image_noise([reference] * 2, seeds[:2])
    many_seeds = verdict.measure_image_noise([reference] * 16, seeds)
    # So many images leave a chance error of some 3 %.
    assert two_seeds.error_with_seeds(8) == pytest.approx(many_seeds.standard_error, rel=0.1)

    same_images = verdict.measure_image_noise([reference] * 2, [seeds[0]] * 2)
    assert same_images.seed_part == 0
    assert same_images.error_with_seeds(100) == same_images.standard_error

    # Twice the seeds: 1.96 · √(0.35² − 0.34² / 2) = 0.4984, and with three instead of two 0.5673.
    result = judge([0.0, 0.0], margin=0.5, images=ImageNoise(2000, 0.35, 0.34))
    assert result.text.endswith("more seeds needed, about 4")


def test_images_are_judged_by_their_means_over_seeds() -> None:
    """Seeds that are wrong on the same images: as large an error as one seed's."""
    reference = np.ones(100, bool)
    other = np.arange(100) >= 4
    one_seed = verdict.measure_image_noise([reference], [other])
    three_seeds = verdict.measure_image_noise([reference] * 3, [other] * 3)
    assert one_seed.standard_error == pytest.approx(100 * math.sqrt(0.04 * 0.96 / 100))
    assert three_seeds.count == one_seed.count
    assert three_seeds.standard_error == one_seed.standard_error

    shifted = [np.roll(other, 10 * i) for i in range(3)]
    different_images = verdict.measure_image_noise([reference] * 3, shifted)
    variance = 12 / 9 / 100 - 0.04**2
    assert different_images.standard_error == pytest.approx(100 * math.sqrt(variance / 100))


def test_bits_survive_packing() -> None:
    bits = np.random.default_rng(0).random(1003) < 0.5
    assert np.array_equal(verdict.unpack_bits(verdict.pack_bits(bits), 1003), bits)


def test_the_number_of_seeds_is_enough_four_times_in_five() -> None:
    """Comparisons without a difference, with the number of seeds that was proposed.

    80 % come out as the same, by design.
    """
    n = verdict.seeds_needed(0.6, 0.5)
    assert n is not None
    rng = np.random.default_rng(1)
    is_same = [
        judge(rng.normal(0, 0.6, n).tolist(), margin=0.5).kind == "same" for _ in range(2000)
    ]
    assert 0.55 < np.mean(is_same) < 0.9  # the mean itself scatters too, which is left out
    assert verdict.seeds_needed(0.6, 0.5) > verdict.seeds_needed(0.3, 0.5)  # type: ignore[operator]
    assert verdict.seeds_needed(100, 0.5) is None


# Simulation: seeds differ by N(delta, spread), and each disagrees with the reference on a share of
# 2,000 images.

CASES = [
    (n, spread, share)
    for n in (3, 5, 10)
    for spread, share in ((0.0, 0.005), (0.1, 0.01), (0.3, 0.03))
]
TRIALS = 400
IMAGES = 2000


def simulate_rates(n: int, spread: float, share: float, delta: float) -> dict[str, float]:
    """How often each kind comes out, image by image; `delta` and `spread` in points."""
    rng = np.random.default_rng(n * 1000 + int(1000 * spread) + int(100 * delta))
    counts_by_kind = dict.fromkeys(("same", "worse", "better", "unknown"), 0)
    for _ in range(TRIALS):
        true_differences = rng.normal(delta, spread, n) / 100
        lost_rates = np.clip((share - true_differences) / 2, 0, 1)  # right before, wrong now
        gained_rates = np.clip((share + true_differences) / 2, 0, 1)
        counts = np.stack(
            [
                rng.multinomial(IMAGES, (lost, gained, 1 - lost - gained))
                for lost, gained in zip(lost_rates, gained_rates, strict=True)
            ]
        )
        differences = 100 * (counts[:, 1] - counts[:, 0]) / IMAGES
        error = 100 * math.sqrt(counts[:, :2].sum()) / n / IMAGES  # other images for each seed
        result = judge(differences.tolist(), margin=0.5, images=ImageNoise(IMAGES, error))
        counts_by_kind[result.kind] += 1
    return {kind: count / TRIALS for kind, count in counts_by_kind.items()}


@pytest.mark.parametrize(("n", "spread", "share"), CASES)
def test_false_verdicts_are_rare(n: int, spread: float, share: float) -> None:
    """Nominal: 5 % false worse or better, 2.5 % false same at the margin.

    The bounds are 3 standard errors of 400 trials above.
    """
    no_difference = simulate_rates(n, spread, share, 0.0)
    false_alarms = no_difference["worse"] + no_difference["better"]
    assert false_alarms <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / TRIALS)

    share = max(share, 0.012)  # a difference of a point needs that many disagreements
    at_margin = simulate_rates(n, spread, share, -0.5)
    assert at_margin["same"] <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / TRIALS)
    one_point_worse = simulate_rates(n, spread, share, -1.0)
    assert one_point_worse["same"] <= 0.005
    assert one_point_worse["better"] <= 0.005


def test_verdicts_are_reached() -> None:
    """Power: close runs are the same, a loss of 2 points is seen.

    Without it the low error rates above would say nothing.
    """
    assert simulate_rates(3, 0.0, 0.005, 0.0)["same"] > 0.6
    assert simulate_rates(10, 0.1, 0.01, 0.0)["same"] > 0.9
    assert simulate_rates(3, 0.1, 0.025, -2.0)["worse"] > 0.9
