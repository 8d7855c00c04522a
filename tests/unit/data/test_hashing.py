"""The hash behind orders and transforms: known values, uniform, independent.

Ints and tensors give the same.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.data import hashing

# SplitMix64 from state 0: its increment, and the first three outputs of the published generator
# (Steele, Lea, Flood 2014).
GOLDEN = 0x9E3779B97F4A7C15
SPLITMIX = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)

# Samples in a statistical test.
N = 200_000


def test_mix_is_splitmix() -> None:
    assert tuple(hashing.mix(GOLDEN * k) for k in (1, 2, 3)) == SPLITMIX


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_tensors_and_ints_mix_alike(values: list[int]) -> None:
    mixed = hashing.mix_tensor(torch.tensor([hashing.signed(v) for v in values]))
    assert mixed.tolist() == [hashing.signed(hashing.mix(v)) for v in values]


@given(
    st.lists(st.integers(-(2**70), 2**70), max_size=4),
    st.lists(st.integers(-(2**70), 2**70), max_size=4),
)
def test_keys_are_of_the_parts_in_order(a: list[int], b: list[int]) -> None:
    same = [x & (2**64 - 1) for x in a] == [x & (2**64 - 1) for x in b]
    assert (hashing.key(*a) == hashing.key(*b)) == same


def draw_keys(count: int) -> Tensor:
    return torch.tensor([hashing.draw_key(i) for i in range(count)])


def words_of_all_samples(count: int = 2, epochs: int = 1, seed: int = 1) -> Tensor:
    samples = torch.arange(N // epochs).repeat(epochs)
    epochs_of_samples = torch.arange(epochs).repeat_interleave(N // epochs)
    return hashing.words(seed, epochs_of_samples, samples, draw_keys(count))


def test_a_word_depends_on_its_own_sample_only() -> None:
    together = hashing.words(3, torch.full((100,), 7), torch.arange(100), draw_keys(4))
    for i in (0, 41, 99):
        alone = hashing.words(3, torch.tensor([7]), torch.tensor([i]), draw_keys(4))
        assert torch.equal(alone[:, 0], together[:, i])


def test_words_are_uniform_in_every_bit_and_byte() -> None:
    for row in (*words_of_all_samples(), *words_of_all_samples(epochs=1000)):
        assert 0 <= int(row.min()) <= int(row.max()) < 2**32
        bits = (row.unsqueeze(1) >> torch.arange(32)) & 1
        # N coin tosses: standard deviation sqrt(N)/2 = 224; 6 of them.
        assert (bits.sum(0) - N / 2).abs().max() < 6 * 224
        for byte in range(4):
            counts = torch.bincount((row >> (8 * byte)) & 255, minlength=256).double()
            chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
            assert chi_square < 255 + 6 * (2 * 255) ** 0.5  # mean and six standard deviations


def test_neighbouring_samples_epochs_draws_and_seeds_do_not_correlate() -> None:
    first = words_of_all_samples(count=3)
    second_epoch = hashing.words(1, torch.ones(N).long(), torch.arange(N), draw_keys(1))[0]
    pairs = {
        "samples": (first[0, 1:], first[0, :-1]),
        "draws": (first[0], first[1]),
        "draws, shifted": (first[0, 1:], first[2, :-1]),
        "seeds": (first[0], words_of_all_samples(seed=2)[0]),
        "epochs": (second_epoch, first[0]),
    }
    for name, (a, b) in pairs.items():
        x = hashing.unit(a).double() - 0.5
        y = hashing.unit(b).double() - 0.5
        correlation = float((x * y).mean() * 12)
        assert abs(correlation) < 6 / len(x) ** 0.5, name  # six standard errors


def test_below_reaches_every_number_equally_often() -> None:
    for n in (1, 2, 3, 9, 100):
        counts = torch.bincount(hashing.below(words_of_all_samples()[0], n), minlength=n).double()
        assert len(counts) == n
        assert float(((counts - N / n) ** 2 / (N / n)).sum()) < n + 6 * (2 * n) ** 0.5 + 1e-9


def test_unit_is_exact_and_below_one() -> None:
    values = hashing.unit(torch.tensor([0, 255, 256, 2**31, 2**32 - 1]))
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.0, 2**-24, 0.5, 1 - 2**-24]
