"""Order: a true permutation of every length, seekable, mixed like randperm."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.data import Order

BILLION = 10**9


def p_value(chi_square: float, freedom: int) -> float:
    """The chance of a chi-square at least this large: the upper incomplete gamma function."""
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value_of_equal_counts(counts: Tensor) -> float:
    """The p-value for cells that are equally likely.

    All tests of this file reject below 1e-6: one seed in a million fails by chance.
    """
    expected = counts.sum().item() / counts.numel()
    return p_value(float(((counts.double() - expected) ** 2 / expected).sum()), counts.numel() - 1)


@pytest.mark.parametrize(
    "size", [*range(1, 130), 255, 256, 257, 1000, 4095, 4096, 4097, 60_000, 65_537]
)
def test_every_length_gives_a_permutation(size: int) -> None:
    for epoch in (0, 1, 12345):
        samples = Order(size, seed=size).indices(epoch, 0, size)
        assert torch.equal(samples.sort().values, torch.arange(size))


@given(
    st.integers(1, 2**62 - 1),
    st.integers(0, 2**64),
    st.integers(0, 2**40),
    st.lists(st.integers(0, 2**62), max_size=20),
)
def test_position_of_undoes_at_for_any_size(
    size: int, seed: int, epoch: int, numbers: list[int]
) -> None:
    """An inverse on both sides is a proof of a permutation where no table of it fits in memory."""
    order = Order(size, seed)
    positions = torch.tensor([number % size for number in numbers] + [0, size - 1])
    samples = order.at(epoch, positions)
    assert bool(((samples >= 0) & (samples < size)).all())
    assert torch.equal(order.position_of(epoch, samples), positions)
    assert torch.equal(order.at(epoch, order.position_of(epoch, positions)), positions)


@given(st.integers(1, 5000), st.integers(0, 2**32), st.data())
def test_any_range_is_that_range_of_the_full_order(
    size: int, seed: int, data: st.DataObject
) -> None:
    order = Order(size, seed)
    start = data.draw(st.integers(0, size))
    count = data.draw(st.integers(0, size - start))
    assert torch.equal(
        order.indices(3, start, count), order.indices(3, 0, size)[start : start + count]
    )


def test_a_tensor_of_epochs_gives_each_position_its_own_epoch() -> None:
    order = Order(1000, seed=4)
    epochs = torch.randint(0, 50, (300,))
    positions = torch.randint(0, 1000, (300,))
    pairs = zip(epochs, positions, strict=True)
    one_by_one = [int(order.at(int(epoch), position[None])) for epoch, position in pairs]
    assert order.at(epochs, positions).tolist() == one_by_one
    assert torch.equal(order.position_of(epochs, order.at(epochs, positions)), positions)


def test_chunks_that_fit_the_cache_change_nothing() -> None:
    order = Order(BILLION, seed=1)
    positions = torch.arange(70_000).view(7, -1)
    pieces = [order.at(torch.tensor(2), part) for part in positions.flatten().split(999)]
    assert torch.equal(
        order.at(torch.full_like(positions, 2), positions).flatten(), torch.cat(pieces)
    )


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [
        Order(1000, seed).indices(epoch, 0, 1000) for seed in range(10) for epoch in range(10)
    ]
    same = [float((a == b).double().mean()) for i, a in enumerate(orders) for b in orders[:i]]
    # Two random permutations agree at a position with chance 1/1000. Of 4,950 pairs, the largest
    # agreement is about 8 of 1,000.
    assert max(same) < 0.012
    assert abs(sum(same) / len(same) - 1e-3) < 1e-4  # standard error 1.4e-5


def test_the_order_is_the_same_in_every_version() -> None:
    """A run that is resumed by a later version goes on in the same order."""
    assert Order(10, seed=0).indices(0, 0, 10).tolist() == [5, 6, 3, 0, 4, 7, 2, 8, 1, 9]
    far_samples = Order(BILLION, seed=7).indices(3, 999_999_990, 4).tolist()
    assert far_samples == [165327460, 105789291, 343555820, 321843109]


# Against randperm


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_small_lengths_take_all_their_permutations_equally_often(size: int) -> None:
    cells = math.factorial(size)
    count = 60 * cells
    epochs = torch.arange(count).unsqueeze(1)
    samples = Order(size, seed=7).at(epochs, torch.arange(size).expand(count, size))
    codes = (samples * size ** torch.arange(size)).sum(1)
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == cells
    assert p_value_of_equal_counts(counts) > 1e-6


@pytest.mark.parametrize("size", [9, 16, 33, 64, 100, 255, 256, 300])
def test_neighbours_go_to_every_pair_of_positions_equally_often(size: int) -> None:
    count = (20 if size < 200 else 5) * size * (size - 1)  # chi-square wants about 5 a cell
    for first, second in ((0, 1), (0, size // 2), (size - 2, size - 1)):
        positions = torch.tensor([first, second]).expand(count, 2)
        samples = Order(size, seed=11).at(torch.arange(count).unsqueeze(1), positions)
        codes = samples[:, 0] * size + samples[:, 1]
        pairs = torch.bincount(codes, minlength=size * size).view(size, size)
        assert int(pairs.diagonal().sum()) == 0
        assert p_value_of_equal_counts(pairs[~torch.eye(size, dtype=torch.bool)]) > 1e-6


STATISTICS = {
    "fixed points": lambda p: (p == torch.arange(p.shape[1])).sum(1),
    "ascents": lambda p: (p[:, 1:] > p[:, :-1]).sum(1),
    "displacement": lambda p: (p - torch.arange(p.shape[1])).abs().sum(1),
    "neighbours kept": lambda p: ((p[:, 1:] - p[:, :-1]).abs() == 1).sum(1),
    "correlation of the halves": lambda p: p.unflatten(1, (2, -1)).prod(1).sum(1),
    "first quarter into first quarter": lambda p: (p[:, : p.shape[1] // 4] < p.shape[1] // 4).sum(
        1
    ),
    "lag of the table's width": lambda p: (p[:, 32:] > p[:, :-32]).sum(1),
    "serial products": lambda p: (p[:, 1:] * p[:, :-1]).sum(1),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_agree_with_randperm(name: str) -> None:
    """Means and spreads over 2,000 orders of 1,000 samples, against those of randperm.

    They agree within 5 standard errors.
    """
    runs = 2000
    size = 1000
    ours = Order(size, seed=5).at(
        torch.arange(runs).unsqueeze(1), torch.arange(size).expand(runs, size)
    )
    theirs = torch.stack([torch.randperm(size) for _ in range(runs)])
    statistic = STATISTICS[name]
    our_values = statistic(ours).double()
    their_values = statistic(theirs).double()
    standard_error = math.sqrt((our_values.var() + their_values.var()).item() / runs)
    assert abs(our_values.mean() - their_values.mean()) <= 5 * standard_error
    # The standard error of this ratio is 1/sqrt(2000): the bounds are 11 of them.
    assert 0.8 < (our_values.std() / their_values.std()).item() < 1.25


def test_batches_of_a_large_set_hold_samples_from_everywhere() -> None:
    """Sixteen bins over 10^9 samples are equally full, wherever 300,000 positions start."""
    for start in (0, BILLION // 2, BILLION - 300_000):
        samples = Order(BILLION, seed=2).indices(1, start, 300_000)
        assert p_value_of_equal_counts(torch.bincount(samples * 16 // BILLION, minlength=16)) > 1e-6
        assert p_value_of_equal_counts(torch.bincount(samples % 16, minlength=16)) > 1e-6
        assert len(torch.unique(samples)) == 300_000


def test_a_billion_samples_cost_no_table() -> None:
    """Seeking to the far end takes no longer than to the start. A table would take minutes."""
    order = Order(BILLION, seed=3)
    order.indices(0, 0, 64)
    start = time.perf_counter()
    order.indices(5, BILLION - 64, 64)
    assert time.perf_counter() - start < 0.25  # usually 1 ms; a busy machine is not a failure


# Mistakes


@pytest.mark.parametrize("size", [0, -1, 2**62, 2.0, None])
def test_a_bad_size_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="expected a size of 1 to 2\\^62 samples"):
        Order(size)  # type: ignore[arg-type]


def test_numpys_integers_are_accepted() -> None:
    by_numpy = Order(np.int32(50), seed=np.uint64(2**63 + 5))
    by_python = Order(50, seed=2**63 + 5)
    assert torch.equal(by_numpy.indices(0, 0, 50), by_python.indices(0, 0, 50))


def test_a_bad_seed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"seed: expected a whole number, received 0\.5"):
        Order(3, seed=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 11), (10, 1), (5, -1)])
def test_a_range_outside_the_epoch_is_refused(start: int, count: int) -> None:
    with pytest.raises(IndexError, match=r"expected positions within 0\.\.10"):
        Order(10).indices(0, start, count)
