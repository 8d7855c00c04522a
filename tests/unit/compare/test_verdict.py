"""The verdict against closed forms and numeric integration, and its error rates by simulation."""

import math
import re

import numpy as np
import pytest

from halfstep.compare import verdict
from halfstep.compare.verdict import ImageNoise, judge, noise_of_counts, student_quantile
from tools.verdict_rates import TRUTHS, Truth, rates, standard_error, verdict_kinds


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
    # 1.96 · √(0.1² + (1.96 · 100 / 10,000)²) = 0.1997
    result = judge([0.0], margin=0.5, images=ImageNoise(10_000, 0.1))
    assert (result.kind, result.interval) == ("unknown", None)
    assert result.text == (
        "cannot tell from one seed: +0.00 points (± 0.20 by the test images alone); give 3 or more"
    )
    assert judge([-30.0], margin=0.5).kind == "unknown"


def test_equal_scores_of_few_images_are_no_proof() -> None:
    """No disagreement among 200 images: by the score interval the rate may still be z² / 200.

    (Exactly, 1 − 0.025^(1/200) = 1.83 %: the score interval is a little wider.)
    """
    no_differences = [0.0, 0.0, 0.0]
    result = judge(no_differences, margin=0.5, images=ImageNoise(200, 0.0))
    assert result.interval == pytest.approx(100 * 1.959964**2 / 200, rel=1e-6)
    assert result.text == "cannot tell: 200 test images are too few, about 800 needed"
    assert judge(no_differences, margin=0.5, images=ImageNoise(800, 0.0)).kind == "same"


@pytest.mark.parametrize("images", [500, 2000, 60_000])
@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (7, 0), (5, 5), (12, 8), (90, 60)])
def test_the_interval_by_images_is_where_the_score_reaches_the_quantile(
    lost: int, gained: int, images: int
) -> None:
    """At its longer end, the estimate is 1.96 standard errors away: by the likelihood there.

    Rare changes are Poisson counts. Given a difference δ of their means, the likeliest sum s of
    these means solves lost / (s + δ) + gained / (s − δ) = 1, found here by bisection.
    """
    changed = lost + gained
    noise = ImageNoise(images, 100 * math.sqrt(changed) / images)
    half_width = noise.half_width(100 * (lost - gained) / images) * images / 100
    delta = lost - gained + half_width
    low = delta
    high = 10 * (changed + delta)
    for _ in range(200):
        middle = (low + high) / 2
        slope = -1.0
        if lost:
            slope += lost / (middle + delta)
        if gained:
            slope += gained / (middle - delta)
        if slope > 0:
            low = middle
        else:
            high = middle
    assert half_width == pytest.approx(1.959964 * math.sqrt(low), rel=1e-5)


def test_seeds_and_images_add_up() -> None:
    """Each of them alone would be 0.3 · 4.303 / √3 = 0.745 and 1.96 · 0.4 = 0.784."""
    noise = ImageNoise(10_000, standard_error=0.5, seed_part=0.3)
    assert noise.shared_error == pytest.approx(0.4)
    result = judge([-0.3, 0.0, 0.3], margin=2.0, images=noise)
    assert result.interval == pytest.approx(math.hypot(0.7452, 0.7840), rel=1e-3)
    own_images_only = ImageNoise(10_000, standard_error=0.3, seed_part=0.3)
    result = judge([-0.3, 0.0, 0.3], margin=2.0, images=own_images_only)
    assert result.interval == pytest.approx(0.7452, rel=1e-3)


# Seeds by tables: (2.365 + 0.896) · 0.4243 / √8 = 0.489, and with 7 (2.447 + 0.906) · 0.4243 / √7
# = 0.538.
SEEDS_NEEDED = 8


def test_the_reason_is_the_one_that_applies() -> None:
    """Half-widths at a target of 0.5.

    By the seeds Student's 12.7 · sd / √2; by the images 1.96 · error, and more for few changes.
    """
    wide = [0.3, -0.3]  # sd 0.42: 3.8
    too_few_seeds = judge(wide, margin=0.5, images=ImageNoise(10_000, 0.1))
    assert too_few_seeds.text == f"cannot tell: more seeds needed, about {SEEDS_NEEDED}"
    too_few_of_both = judge(wide, margin=0.5, images=ImageNoise(500, 0.1))
    # With b = 0.1² · 500: z² · (b + √(b² + 4 · 100² · 0.5²)) / (2 · 0.5²) = 808
    assert too_few_of_both.text == (
        "cannot tell: 2 seeds and 500 test images are too few, "
        f"about {SEEDS_NEEDED} seeds and 900 images needed"
    )
    # 0.98: (0.98 / 0.5)² times the images, and a few more
    too_few_images = judge([0.0, 0.0], margin=0.5, images=ImageNoise(10_000, 0.5))
    assert too_few_images.text == (
        "cannot tell: 10,000 test images are too few, about 38,500 needed"
    )
    hopeless = judge([9.0, -9.0], margin=0.5, images=ImageNoise(500, 0.1))
    assert hopeless.text == "cannot tell: more seeds needed, over 200"


@pytest.mark.parametrize("error", [0.05, 0.2, 0.35])
@pytest.mark.parametrize("seed_part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("differences", [[0.2, -0.2, 0.1], [0.3, 0.1, 0.0], [0.0, 0.0, 0.0]])
def test_what_is_said_to_be_needed_is_enough(
    differences: list[float], seed_part: float, error: float
) -> None:
    """With so many seeds and images, and everything else as it was, the verdict is reached."""
    noise = ImageNoise(600, error, seed_part * error)
    result = judge(differences, margin=0.5, images=noise)
    if result.kind != "unknown":
        return
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", result.text)]
    seeds = len(differences)
    images = noise.count
    if "seeds needed" in result.text:
        seeds = numbers[-1]
    else:
        images = numbers[-1]
        if "seeds and" in result.text:
            seeds = numbers[-2]
    smaller = noise.with_seeds(seeds / 3).standard_error * math.sqrt(noise.count / images)
    smaller_part = noise.with_seeds(seeds / 3).seed_part * math.sqrt(noise.count / images)
    mean = np.mean(differences)
    spread = np.std(differences, ddof=1)
    more = mean + spread * np.resize([1.0, -1.0], seeds) * math.sqrt((seeds - 1) / seeds)
    more = more - (more.mean() - mean)
    settled = judge(more.tolist(), margin=0.5, images=ImageNoise(images, smaller, smaller_part))
    assert settled.kind != "unknown", (result.text, settled.text)


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
    expected_error = two_seeds.with_seeds(8).standard_error
    assert expected_error == pytest.approx(many_seeds.standard_error, rel=0.1)

    same_images = verdict.measure_image_noise([reference] * 2, [seeds[0]] * 2)
    assert same_images.seed_part == 0
    assert same_images.with_seeds(100).standard_error == same_images.standard_error

    # With five seeds in place of two, error² is 0.35² − 0.34² · 3 / 5 = 0.0531 and the half-width
    # 1.96 · √(0.0531 + (1.96 · 100 / 2000)²) = 0.491. With four it is 0.534.
    result = judge([0.0, 0.0], margin=0.5, images=ImageNoise(2000, 0.35, 0.34))
    assert result.text.endswith("more seeds needed, about 5")


def test_images_are_judged_by_their_means_over_seeds() -> None:
    """Seeds that are wrong on the same images: as large an error as one seed's."""
    reference = np.ones(100, bool)
    other = np.arange(100) >= 4
    one_seed = verdict.measure_image_noise([reference], [other])
    three_seeds = verdict.measure_image_noise([reference] * 3, [other] * 3)
    assert one_seed.standard_error == pytest.approx(100 * math.sqrt(0.04 * 0.96 / 100))
    assert three_seeds.count == one_seed.count
    assert three_seeds.standard_error == pytest.approx(one_seed.standard_error, rel=1e-14)

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


# Simulation, image by image: tools/verdict_rates.py, with fewer trials.

FAST_TRIALS = 2000
FULL_TRIALS = 20_000
NOMINAL_FALSE_SAME = 0.025
NOMINAL_FALSE_ALARMS = 0.05

# Where all seeds change the same images. Intervals of 1.96 standard errors give a false "same" in
# about 5 % of these.
SHARED = [Truth(3, shared=0.005), Truth(2, 4000, shared=0.005), Truth(10, shared=0.005)]


def upper_bound(nominal: float, trials: int) -> float:
    """What a rate as stated stays below, but for once in 700 times: 3 standard errors."""
    return nominal + 3 * standard_error(nominal, trials)


@pytest.mark.parametrize("truth", SHARED, ids=str)
def test_seeds_that_change_the_same_images_are_no_proof_of_equality(truth: Truth) -> None:
    at_margin = verdict_kinds(truth, -0.5, FAST_TRIALS, seed=0)
    assert at_margin["same"] <= upper_bound(NOMINAL_FALSE_SAME, FAST_TRIALS)


@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_the_noise_of_seeds_and_images_together_is_not_taken_for_either(seeds: int) -> None:
    """The wider of two intervals gave a false worse or better in 6 % to 7 % of these."""
    truth = Truth(seeds, 2000, own=0.01, shared=0.02, spread=0.3)
    no_difference = verdict_kinds(truth, 0.0, FAST_TRIALS, seed=0)
    false_alarms = no_difference["worse"] + no_difference["better"]
    assert false_alarms <= NOMINAL_FALSE_ALARMS


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TRUTHS)), ids=[str(truth) for truth in TRUTHS])
def test_false_verdicts_are_as_rare_as_the_docs_say(number: int) -> None:
    row = rates(TRUTHS[number], FULL_TRIALS, seed=1000 + 3 * number)
    assert row["true -0.5: same"] <= upper_bound(NOMINAL_FALSE_SAME, FULL_TRIALS)
    assert row["true 0: worse or better"] <= upper_bound(NOMINAL_FALSE_ALARMS, FULL_TRIALS)
    assert row["true -1: same"] <= 0.001


@pytest.mark.parametrize(
    ("truth", "points", "kind", "least"),
    [
        (Truth(3, own=0.005), 0.0, "same", 0.64),
        (Truth(10, own=0.01, spread=0.1), 0.0, "same", 0.98),
        (Truth(3, 4000, shared=0.005), 0.0, "same", 0.93),
        (Truth(3, own=0.025, spread=0.1), -2.0, "worse", 0.9),
        (Truth(3, own=0.025, spread=0.1), 2.0, "better", 0.9),
    ],
    ids=str,
)
def test_verdicts_are_reached(truth: Truth, points: float, kind: str, least: float) -> None:
    """Power. Without it low error rates would say nothing."""
    assert verdict_kinds(truth, points, FAST_TRIALS, seed=0)[kind] > least


@pytest.mark.parametrize(
    "truth", [Truth(3, 300, own=0.05), Truth(2, 300, shared=0.1), Truth(4, 300, fragile=0.1)]
)
def test_the_simulation_and_a_comparison_compute_the_same_noise(truth: Truth) -> None:
    """From the bits of every run, as a comparison has them; from sums; and by numpy's variances."""
    changes = truth.simulate(np.random.default_rng(0), -0.5, trials=1)[0].astype(int)
    reference = [change <= 0 for change in changes]
    other = []
    for is_correct, change in zip(reference, changes, strict=True):
        other.append((is_correct + change).astype(bool))
    noise = verdict.measure_image_noise(reference, other)
    sums = changes.sum(axis=0)
    assert noise == noise_of_counts(
        300,
        truth.seeds,
        total=int(sums.sum()),
        squared_image_sums=int((sums**2).sum()),
        changed=int((changes != 0).sum()),
    )
    error = 100 * np.std(changes.mean(axis=0)) / math.sqrt(300)
    assert noise.standard_error == pytest.approx(error, rel=1e-12)
    seed_variance = np.mean(np.var(changes, axis=0, ddof=1))
    seed_part = 100 * math.sqrt(seed_variance / truth.seeds / 300)
    # An estimate by chance larger than the whole is taken for the whole.
    assert noise.seed_part == pytest.approx(min(error, seed_part), rel=1e-12)


def test_a_network_that_draws_its_answers_is_at_chance_level() -> None:
    """Answers that know nothing of the labels pass for learned in at most 2.5 % of 400 tries.

    Two standard errors of that rate are 1.6 points.
    """
    g = np.random.default_rng(0)
    passed = {"drawn": 0, "constant": 0, "a little better": 0}
    tries = 400
    for _ in range(tries):
        labels = g.choice(4, 600, p=(0.4, 0.3, 0.2, 0.1))
        most_frequent = labels == np.bincount(labels).argmax()
        drawn = [labels == g.choice(4, 600, p=(0.97, 0.01, 0.01, 0.01)) for _ in range(3)]
        better = [b | (g.random(600) < 0.2) for b in [most_frequent] * 3]
        answers = {"drawn": drawn, "constant": [most_frequent] * 3, "a little better": better}
        for name, runs in answers.items():
            passed[name] += verdict.is_above_chance(runs, [most_frequent] * 3)
    assert passed["constant"] == 0
    assert passed["drawn"] <= (0.025 + 0.016) * tries
    assert passed["a little better"] == tries
