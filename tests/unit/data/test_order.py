"""Order: a true permutation of every length, seekable, mixed like randperm, the same from any place."""

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
    """The chance of a chi-square at least this large: the upper incomplete gamma function, from torch."""
    half = torch.tensor([freedom / 2, chi_square / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def uniform(counts: Tensor) -> float:
    """p-value of equal cells; all tests here reject below 1e-6, so that a seed in a million fails by chance."""
    expected = counts.sum().item() / counts.numel()
    return p_value(float(((counts.double() - expected) ** 2 / expected).sum()), counts.numel() - 1)


@pytest.mark.parametrize(
    "size", [*range(1, 130), 255, 256, 257, 1000, 4095, 4096, 4097, 60_000, 65_537]
)
def test_every_length_gives_a_permutation(size: int) -> None:
    for epoch in (0, 1, 12345):
        found = Order(size, seed=size).indices(epoch, 0, size)
        assert torch.equal(found.sort().values, torch.arange(size))


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
    order, places = Order(size, seed), torch.tensor([n % size for n in numbers] + [0, size - 1])
    found = order.at(epoch, places)
    assert bool(((found >= 0) & (found < size)).all())
    assert torch.equal(order.position_of(epoch, found), places)
    assert torch.equal(order.at(epoch, order.position_of(epoch, places)), places)


@given(st.integers(1, 5000), st.integers(0, 2**32), st.data())
def test_any_stretch_is_that_stretch_of_the_whole(
    size: int, seed: int, data: st.DataObject
) -> None:
    order = Order(size, seed)
    start = data.draw(st.integers(0, size))
    count = data.draw(st.integers(0, size - start))
    assert torch.equal(
        order.indices(3, start, count), order.indices(3, 0, size)[start : start + count]
    )


def test_a_tensor_of_epochs_gives_each_place_its_own_pass() -> None:
    order = Order(1000, seed=4)
    epochs, places = torch.randint(0, 50, (300,)), torch.randint(0, 1000, (300,))
    one_by_one = [int(order.at(int(e), p[None])) for e, p in zip(epochs, places, strict=True)]
    assert order.at(epochs, places).tolist() == one_by_one
    assert torch.equal(order.position_of(epochs, order.at(epochs, places)), places)


def test_long_stretches_are_cut_for_the_cache_and_nothing_changes() -> None:
    order, places = Order(BILLION, seed=1), torch.arange(70_000).view(7, -1)
    pieces = [order.at(torch.tensor(2), part) for part in places.flatten().split(999)]
    assert torch.equal(order.at(torch.full_like(places, 2), places).flatten(), torch.cat(pieces))


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [
        Order(1000, seed).indices(epoch, 0, 1000) for seed in range(10) for epoch in range(10)
    ]
    same = [float((a == b).double().mean()) for i, a in enumerate(orders) for b in orders[:i]]
    # two random permutations share a place with chance 1/1000: 4,950 pairs, so at most about 8 shared of 1,000
    assert max(same) < 0.012
    assert abs(sum(same) / len(same) - 1e-3) < 1e-4  # standard error 1.4e-5


def test_it_is_fixed_for_good() -> None:
    """A resumed run must find the order it left, in a later version too."""
    assert Order(10, seed=0).indices(0, 0, 10).tolist() == [5, 6, 3, 0, 4, 7, 2, 8, 1, 9]
    assert Order(BILLION, seed=7).indices(3, 999_999_990, 4).tolist() == [
        165327460,
        105789291,
        343555820,
        321843109,
    ]


# against randperm


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_small_lengths_take_all_their_permutations_equally_often(size: int) -> None:
    cells = math.factorial(size)
    count = 60 * cells
    epochs = torch.arange(count).unsqueeze(1)
    found = Order(size, seed=7).at(epochs, torch.arange(size).expand(count, size))
    codes = (found * size ** torch.arange(size)).sum(1)
    counts = torch.unique(codes, return_counts=True)[1]
    assert len(counts) == cells
    assert uniform(counts) > 1e-6


@pytest.mark.parametrize("size", [9, 16, 33, 64, 100, 255, 256, 300])
def test_neighbours_go_to_every_pair_of_places_equally_often(size: int) -> None:
    count = (20 if size < 200 else 5) * size * (size - 1)  # chi-square wants about 5 a cell
    for first, second in ((0, 1), (0, size // 2), (size - 2, size - 1)):
        places = torch.tensor([first, second]).expand(count, 2)
        found = Order(size, seed=11).at(torch.arange(count).unsqueeze(1), places)
        pairs = torch.bincount(found[:, 0] * size + found[:, 1], minlength=size * size).view(
            size, size
        )
        assert int(pairs.diagonal().sum()) == 0
        assert uniform(pairs[~torch.eye(size, dtype=torch.bool)]) > 1e-6


STATISTICS = {
    "fixed points": lambda p: (p == torch.arange(p.shape[1])).sum(1),
    "ascents": lambda p: (p[:, 1:] > p[:, :-1]).sum(1),
    "displacement": lambda p: (p - torch.arange(p.shape[1])).abs().sum(1),
    "neighbours kept": lambda p: ((p[:, 1:] - p[:, :-1]).abs() == 1).sum(1),
    "correlation of the halves": lambda p: p.unflatten(1, (2, -1)).prod(1).sum(1),
    "first quarter into first quarter": lambda p: (p[:, : p.shape[1] // 4] < p.shape[1] // 4).sum(1),
    "lag of the table's width": lambda p: (p[:, 32:] > p[:, :-32]).sum(1),
    "serial products": lambda p: (p[:, 1:] * p[:, :-1]).sum(1),
}  # fmt: skip


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_agree_with_randperm(name: str) -> None:
    """Means and spreads over 2,000 orders of 1,000 samples, ours against randperm's: within 5 standard errors."""
    runs, size = 2000, 1000
    ours = Order(size, seed=5).at(
        torch.arange(runs).unsqueeze(1), torch.arange(size).expand(runs, size)
    )
    theirs = torch.stack([torch.randperm(size) for _ in range(runs)])
    a, b = (STATISTICS[name](p).double() for p in (ours, theirs))
    error = math.sqrt((a.var() + b.var()).item() / runs)
    assert abs(a.mean() - b.mean()) <= 5 * error
    assert (
        0.8 < (a.std() / b.std()).item() < 1.25
    )  # the ratio's own standard error is 1/sqrt(2000), here 11 of them


def test_batches_of_a_large_set_hold_samples_from_everywhere() -> None:
    """Sixteen bins over 10^9 samples, a million positions from three places: each bin equally full."""
    for start in (0, BILLION // 2, BILLION - 300_000):
        found = Order(BILLION, seed=2).indices(1, start, 300_000)
        assert uniform(torch.bincount(found * 16 // BILLION, minlength=16)) > 1e-6
        assert uniform(torch.bincount(found % 16, minlength=16)) > 1e-6
        assert len(torch.unique(found)) == 300_000


def test_a_billion_samples_cost_no_table() -> None:
    """Seeking to the far end takes what seeking to the start takes; the order of a table of 10^9 would take minutes."""
    order = Order(BILLION, seed=3)
    order.indices(0, 0, 64)
    start = time.perf_counter()
    order.indices(5, BILLION - 64, 64)
    assert time.perf_counter() - start < 0.25  # here 1 ms; a busy machine is not a failure


# mistakes


@pytest.mark.parametrize("size", [0, -1, 2**62, 2.0, None])
def test_a_bad_size_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="expected a size of 1 to 2\\^62 samples"):
        Order(size)  # type: ignore[arg-type]


def test_numpys_integers_do() -> None:
    big = np.uint64(2**63 + 5)
    assert torch.equal(
        Order(np.int32(50), seed=big).indices(0, 0, 50), Order(50, seed=2**63 + 5).indices(0, 0, 50)
    )


def test_a_bad_seed_is_refused() -> None:
    with pytest.raises(TypeError, match=r"seed: expected a whole number, received 0\.5"):
        Order(3, seed=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 11), (10, 1), (5, -1)])
def test_a_stretch_outside_the_epoch_is_refused(start: int, count: int) -> None:
    with pytest.raises(IndexError, match=r"expected positions within 0\.\.10"):
        Order(10).indices(0, start, count)
