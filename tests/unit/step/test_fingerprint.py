"""Fingerprints: equal bits give equal numbers, any other bit or order gives another one.

This holds in every dtype and size.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import halfstep as hs
from halfstep.step.fingerprint import combine, fingerprint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
CHUNK = 1 << 20  # larger tensors are hashed in parts


def from_bytes(raw: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=dtype).clone().to(DEVICE)


def random_bytes(n: int, seed: int = 0) -> bytearray:
    return bytearray(np.random.default_rng(seed).bytes(n))


def mix(h: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, on unsigned integers, from its published constants."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def reference(bits: np.ndarray) -> int:
    """Returns the documented formula, written again in unsigned numpy.

    It is splitmix64(bits xor counter), summed mod 2**64.
    """
    splitmix64_step = np.uint64(0x9E3779B97F4A7C15)
    counter = np.arange(1, bits.size + 1, dtype=np.uint64) * splitmix64_step
    mixed = mix(bits.astype(np.int64).view(np.uint64) ^ counter)
    total = mixed.sum(dtype=np.uint64, keepdims=True)
    return int(mix(total + np.uint64(bits.size)).view(np.int64)[0])


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    size = dtype.itemsize * 3
    if dtype == torch.bool:
        # A bool has one bit in each byte.
        raw = bytearray([1, 0, 1])
        bits_per_byte = 1
    else:
        raw = random_bytes(size)
        bits_per_byte = 8
    fingerprints = {int(fingerprint(from_bytes(bytes(raw), dtype)))}
    for byte in range(size):
        for bit in range(bits_per_byte):
            raw[byte] ^= 1 << bit
            fingerprints.add(int(fingerprint(from_bytes(bytes(raw), dtype))))
            raw[byte] ^= 1 << bit
    assert len(fingerprints) == 1 + size * bits_per_byte, "all differ from one another, too"


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_an_int64_on_the_tensors_device_and_equal_bits_give_the_same(
    dtype: torch.dtype,
) -> None:
    raw = b"\1\0\0\1\1" if dtype == torch.bool else bytes(random_bytes(dtype.itemsize * 5))
    tensor = from_bytes(raw, dtype)
    first = fingerprint(tensor)
    assert (first.dtype, first.shape, first.device) == (torch.int64, (), tensor.device)
    assert torch.equal(first, fingerprint(tensor))
    assert torch.equal(first, fingerprint(tensor.clone()))
    assert torch.equal(first.cpu(), fingerprint(tensor.cpu())), "host and device agree"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
@settings(max_examples=50)
def test_it_is_the_documented_formula(values: list[int]) -> None:
    bits = np.array(values, dtype=np.int64)
    assert int(fingerprint(torch.from_numpy(bits).to(DEVICE))) == reference(bits)


@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_large_tensors_are_hashed_as_one(n: int) -> None:
    bits = np.random.default_rng(n).integers(-(2**15), 2**15, n, dtype=np.int16)
    tensor = torch.from_numpy(bits).to(DEVICE)
    original = fingerprint(tensor)
    assert int(original) == reference(bits)
    for index in {0, n // 2, CHUNK - 2, n - 1}:
        tensor[index] ^= 1
        assert not torch.equal(fingerprint(tensor), original)
        tensor[index] ^= 1
    # Two elements of different chunks change places.
    tensor[[0, n - 1]] = tensor[[n - 1, 0]]
    assert not torch.equal(fingerprint(tensor), original)


@given(st.permutations(range(6)))
@settings(max_examples=30)
def test_a_permutation_changes_it(order: list[int]) -> None:
    tensor = torch.arange(6, dtype=torch.float32, device=DEVICE)
    moved = tensor[torch.tensor(order, device=DEVICE)]
    assert torch.equal(fingerprint(moved), fingerprint(tensor)) == (order == sorted(order))


def test_values_that_compare_equal_but_differ_in_bits_differ() -> None:
    zero = torch.zeros(3, device=DEVICE)
    assert not torch.equal(fingerprint(zero), fingerprint(-zero))
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32, device=DEVICE)
    nans = bits.view(torch.float32)
    assert not torch.equal(fingerprint(nans[:1]), fingerprint(nans[1:])), "two NaNs"
    assert torch.equal(fingerprint(nans[:1]), fingerprint(nans[:1]))


def test_zeros_of_another_length_and_empty_tensors_differ() -> None:
    prints = {int(fingerprint(torch.zeros(n, device=DEVICE))) for n in range(5)}
    assert len(prints) == 5
    assert torch.equal(fingerprint(torch.zeros(0, 3)), fingerprint(torch.zeros(0)))


def test_memory_layout_does_not_matter() -> None:
    tensor = torch.randn(2, 3, 4, 5, device=DEVICE)
    expected = fingerprint(tensor)
    assert torch.equal(fingerprint(tensor.contiguous(memory_format=torch.channels_last)), expected)
    assert torch.equal(fingerprint(tensor.transpose(0, 3).contiguous().transpose(0, 3)), expected)
    assert not torch.equal(fingerprint(tensor.transpose(0, 3)), expected)
    assert torch.equal(
        fingerprint(torch.stack([tensor, tensor], -1)[..., 0].requires_grad_()), expected
    )


def test_lazily_conjugated_and_negated_tensors_count_by_their_values() -> None:
    z = torch.randn(3, dtype=torch.complex64, device=DEVICE)
    assert torch.equal(fingerprint(z.conj()), fingerprint(z.conj().resolve_conj()))
    assert torch.equal(fingerprint(z.conj().imag), fingerprint(z.conj().imag.clone()))
    assert not torch.equal(fingerprint(z.conj()), fingerprint(z))


# torch 2.11 gives this warning even with check_invariants=True.
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_sparse_tensors_count_by_indices_and_values() -> None:
    def sparse(indices: list[int], values: list[float]) -> Tensor:
        return torch.sparse_coo_tensor(
            torch.tensor([indices], dtype=torch.int64),
            torch.tensor(values),
            (9,),
            device=DEVICE,
            check_invariants=True,
        )

    expected = fingerprint(sparse([1, 4], [2.0, 3.0]))
    assert torch.equal(fingerprint(sparse([4, 1], [3.0, 2.0])), expected), (
        "the same tensor, not yet coalesced"
    )
    assert torch.equal(fingerprint(sparse([4, 1, 1], [3.0, 1.0, 1.0])), expected)
    for other in (
        sparse([1, 5], [2.0, 3.0]),
        sparse([1, 4], [2.0, -3.0]),
        sparse([1], [2.0]),
        sparse([], []),
    ):
        assert not torch.equal(fingerprint(other), expected)


def test_combine_depends_on_every_print_and_on_their_order() -> None:
    a, b, c = (fingerprint(torch.tensor([float(i)], device=DEVICE)) for i in range(3))
    sequences = ([a, b, c], [a, c, b], [a, b], [a], [a, a], [b, a])
    assert len({int(combine(sequence)) for sequence in sequences}) == 6
    assert torch.equal(combine(iter([a, b])), combine([a, b]))


def test_a_step_records_it_every_n_steps_and_two_runs_part_at_the_first_different_bit() -> None:
    def run(flip_at: int | None) -> tuple[list[int], dict[str, Tensor]]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(DEVICE)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        step = hs.TrainStep(
            net, nn.MSELoss(), optimizer, precision="O2", ema=0.9, fingerprint_every=2
        )
        prints = []
        for i in range(6):
            if i == flip_at:
                step.state.ema[1].view(torch.int32)[0] ^= 1  # the lowest bit of one average
            torch.manual_seed(i)
            x = torch.randn(4, 3).to(DEVICE)
            y = torch.randn(4, 2).to(DEVICE)
            prints.append(int(step(x, y).fingerprint))
        return prints, step.fingerprints()

    prints, names = run(None)
    assert [p != 0 for p in prints] == [False, True] * 3
    assert len({*prints}) == 4
    assert run(None)[0] == prints
    flipped, other = run(3)
    is_equal = [a == b for a, b in zip(prints, flipped, strict=True)]
    assert is_equal == [True, True, True, False, True, False]
    assert [name for name in names if not torch.equal(names[name], other[name])] == ["state.ema.1"]
