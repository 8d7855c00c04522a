"""A resident batch by one kernel: the bits of torch's indexing. Without a GPU, Triton interprets it on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured import gather as gather_module
from halfstep.engine.captured.gather import gather_samples, word_bytes
from halfstep.engine.captured.inputs import Resident
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.feed import Feed
from tests.support.triton_interpreter import INTERPRETED, inside, interpret, outside

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SAMPLES, STEPS, SIZE = 40, 5, 13

# Shapes of a row and dtypes; rows of 784 and 6 bytes, 1 and more than 256 words, words of each width
CASES: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {
    "mnist": [((1, 28, 28), torch.uint8), ((), torch.int64)],
    "floats": [((28, 28), torch.float32), ((), torch.int32), ((3,), torch.float64)],
    "narrow": [
        ((3,), torch.uint8),
        ((), torch.bool),
        ((5,), torch.bfloat16),
        ((2, 3), torch.float16),
    ],
    "rare": [
        ((3,), torch.complex64),
        ((), torch.uint16),
        ((1,), torch.complex128),
        ((7,), torch.uint64),
    ],
    "one": [((11, 7), torch.int8)],
}


def bits(t: Tensor) -> Tensor:
    """As bytes: a NaN is what it is."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaNs with payloads among them."""
    g, size = torch.Generator().manual_seed(seed), torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, size), dtype=torch.uint8, generator=g)
    return raw.view(-1).view(dtype).view(shape).to(DEVICE)


def tables() -> tuple[Tensor, Tensor, Tensor]:
    """Sample numbers, first and last and one twice among them, passes, and a place between the ends."""
    g = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, SAMPLES, (STEPS, SIZE), generator=g)
    numbers[3, :4] = torch.tensor([0, SAMPLES - 1, 7, 7])
    passes = torch.randint(0, 2**40, (STEPS, SIZE), generator=g)
    return numbers.to(DEVICE), passes.to(DEVICE), torch.tensor([3], device=DEVICE)


def equal_to_indexing(case: str) -> None:
    columns = {
        f"c{k}": noise((SAMPLES, *shape), dtype, k) for k, (shape, dtype) in enumerate(CASES[case])
    }
    numbers, passes, at = tables()
    for n, told in ((SIZE, ()), (5, (numbers, passes)), (1, (passes,))):
        found = gather_samples(columns, numbers, at, n, told)
        assert found is not None
        batch, rows = found
        assert list(batch) == list(columns)
        for name, column in columns.items():
            expected = torch.stack([column.cpu()[i] for i in numbers[3, :n].tolist()])
            got = batch[name]
            assert (got.dtype, got.shape, got.device) == (column.dtype, expected.shape, DEVICE)
            assert got.is_contiguous()
            assert torch.equal(bits(got).cpu(), bits(expected)), name
        assert [r.tolist() for r in rows] == [t[3, :n].tolist() for t in told]


@inside
@pytest.mark.parametrize("case", CASES)
def test_equal_to_indexing(case: str) -> None:
    equal_to_indexing(case)


def many_blocks() -> None:
    """Columns of more than one program each, in both orders."""
    numbers, passes = (
        torch.randint(0, SAMPLES, (2, 700)).to(DEVICE),
        torch.arange(1400).view(2, 700).to(DEVICE),
    )
    at = torch.tensor([1], device=DEVICE)
    large, small = noise((SAMPLES, 9), torch.int64, 1), noise((SAMPLES,), torch.int64, 2)
    for columns in ({"a": large, "b": small}, {"b": small, "a": large}):
        found = gather_samples(columns, numbers, at, 699, (passes,))
        assert found is not None
        for name, column in columns.items():
            assert torch.equal(found[0][name], column[numbers[1, :699]])
        assert torch.equal(found[1][0], passes[1, :699])


def several_rows() -> None:
    """From a row on over the next ones, to the end of the table's last, or to the middle of one."""
    numbers, passes, at = tables()
    at.fill_(1)
    columns = {
        "x": noise((SAMPLES, 1, 28, 28), torch.uint8, 1),
        "y": noise((SAMPLES,), torch.int64, 2),
    }
    for n, told in ((4 * SIZE, ()), (3 * SIZE, (numbers, passes)), (2 * SIZE + 5, (passes,))):
        found = gather_samples(columns, numbers, at, n, told)
        assert found is not None
        for name, column in columns.items():
            expected = torch.stack(
                [column.cpu()[i] for row in numbers[1:].tolist() for i in row][:n]
            )
            assert torch.equal(found[0][name].cpu(), expected), name
        assert [r.tolist() for r in found[1]] == [t[1:].flatten()[:n].tolist() for t in told]


def views_are_read_where_they_begin() -> None:
    """A column in the middle of another tensor, at an address that its widest word does not divide."""
    numbers, _, at = tables()
    whole = noise((SAMPLES * 8 + 1,), torch.uint8, 3)
    for first, wide in ((0, 8), (1, 1)):
        column = whole[first : first + SAMPLES * 8].view(SAMPLES, 8)
        assert word_bytes(column) == wide
        found = gather_samples({"a": column}, numbers, at, SIZE)
        assert found is not None
        assert torch.equal(found[0]["a"], column[numbers[3]])


class Mine(Tensor):
    pass


def refused() -> None:
    """What the kernel cannot do is left to torch."""
    numbers, passes, at = tables()
    fine = torch.zeros(SAMPLES, 4, 6, device=DEVICE)

    def fits(
        *columns: Tensor, table: Tensor = numbers, told: tuple[Tensor, ...] = (), n: int = SIZE
    ) -> bool:
        return gather_samples(dict(enumerate(columns)), table, at, n, told) is not None  # type: ignore[arg-type]

    assert fits(fine, told=(numbers, passes))
    assert fits(*[fine] * gather_module.MAX_COLUMNS)
    assert not fits(*[fine] * (gather_module.MAX_COLUMNS + 1))
    assert not fits()
    assert not fits(fine, n=0)
    assert not fits(fine, fine.transpose(1, 2))
    assert not fits(fine, fine[:, :2])
    assert not fits(fine[::2])
    assert not fits(torch.zeros(SAMPLES, 0, device=DEVICE))
    assert not fits(fine.to_sparse())
    assert not fits(fine.as_subclass(Mine))
    assert not fits(nn.Parameter(fine))
    assert not fits(fine.clone().requires_grad_())
    assert not fits(torch.zeros(SAMPLES, 2, dtype=torch.complex64, device=DEVICE).conj())
    assert not fits(fine.to("meta"))
    assert not fits(torch.zeros(1, device=DEVICE).expand(SAMPLES, 4))
    assert not fits(
        torch.zeros(1, 2**27, dtype=torch.int8, device=DEVICE)
    )  # 13 · 2^27 bytes: places are int32
    assert not fits(fine, table=numbers.int())
    assert not fits(fine, table=numbers.t().contiguous().t())
    assert not fits(fine, told=(passes[:, :5].contiguous(),))


def data(*, random: bool, named: bool = False) -> tuple[hs.data.Dataset, Feed]:
    """Two batches and a short one, with transforms; `random`: the last needs numbers and passes."""
    x, y = noise((SAMPLES, 6, 6, 3), torch.uint8, 5), torch.arange(SAMPLES, device=DEVICE)
    extra = noise((SAMPLES, 2), torch.float32, 6)
    chain = [hs.data.Rescale(1 / 255), *([hs.data.PadCrop(6, 2), hs.data.Flip()] if random else [])]
    made = (
        hs.data.Dataset({"x": x, "extra": extra, "y": y}, seed=4)
        .shuffle()
        .map(chain, "x")
        .batch(16)
    )
    made = made.select("y", "x")
    return made, Feed(made, named=named, device=DEVICE)


def passes(feed: Feed, *, quick: bool) -> list[Any]:
    """Two passes of a Resident; a third batch of each is short."""
    ring, batches = RecordBuffer(64, DEVICE), []
    assert isinstance(feed.data, hs.data.Dataset)
    inputs = Resident(feed, ring, feed.data)
    ring.use_kernels = quick
    for _ in range(2):
        inputs.start()
        while inputs.next() is not None:
            batches.append(inputs.batch())
            ring.next_row.add_(1)
    return batches


def resident_batches_are_the_datasets() -> None:
    for random in (True, False):
        plain, feed = data(random=random)
        before = len(gather_module._kernel_works)
        got, expected = passes(feed, quick=True), [batch for _ in range(2) for batch in plain]
        assert len(gather_module._kernel_works) == before + 1, "one kernel, for the short batch too"
        assert all(gather_module._kernel_works.values())
        assert [len(batch[0]) for batch in got] == [16, 16, 8] * 2
        for a, b in zip(got, expected, strict=True):
            assert len(a) == len(b) == 2
            assert all(torch.equal(i, j) and i.dtype == j.dtype for i, j in zip(a, b, strict=True))


RESTS = [
    many_blocks,
    several_rows,
    views_are_read_where_they_begin,
    refused,
    resident_batches_are_the_datasets,
]


@inside
@pytest.mark.parametrize("check", RESTS)
def test_the_rest(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.skipif(
    INTERPRETED or DEVICE.type == "cuda", reason="the path without kernels is a plain CPU's"
)
def test_without_triton_torch_does_it(quick: bool) -> None:
    plain, feed = data(random=True, named=True)
    expected = [batch for _ in range(2) for batch in plain.dicts()]
    for (a,), b in zip(passes(feed, quick=quick), expected, strict=True):
        assert list(a) == list(b) == ["y", "x"]
        assert all(torch.equal(a[name], b[name]) for name in b)
    assert not gather_module._kernel_works
    numbers, _, at = tables()
    assert gather_samples({"y": torch.zeros(SAMPLES)}, numbers, at, 1) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "bytes"),
    [
        ((28, 28), torch.uint8, 8), ((), torch.int64, 8), ((), torch.int32, 4), ((3,), torch.float32, 4),
        ((3,), torch.uint8, 1), ((6,), torch.uint8, 2), ((5,), torch.bfloat16, 2), ((), torch.bool, 1),
        ((1,), torch.complex128, 8), ((150528,), torch.uint8, 8),
    ],
)  # fmt: skip
def test_the_widest_word(shape: tuple[int, ...], dtype: torch.dtype, bytes: int) -> None:
    assert word_bytes(torch.zeros(3, *shape, dtype=dtype)) == bytes


def test_a_word_begins_where_the_column_does() -> None:
    held = torch.zeros(64, dtype=torch.uint8)
    assert [word_bytes(held[k : k + 16].view(2, 8)) for k in (0, 1, 2, 4, 8)] == [8, 1, 2, 4, 8]


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, len(CASES) + len(RESTS), "equal or rest")
