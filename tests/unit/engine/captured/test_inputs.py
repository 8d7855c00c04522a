"""A resident batch by one kernel: the bits of torch's indexing.

Without a GPU, Triton interprets the kernel on the CPU.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.captured import gather as gather_module
from halfstep.engine.captured.gather import gather_samples, word_bytes
from halfstep.engine.captured.inputs import ResidentInputs
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.feed import Feed
from tests.support.triton_interpreter import INTERPRETED, inside, interpret, outside

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() and not INTERPRETED else "cpu")
SAMPLES = 40
STEPS = 5
SIZE = 13  # samples in a batch

# Shapes of a row and dtypes: rows of 784 and 6 bytes, 1 and more than 256 words, words of each
# width.
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


def as_bytes(t: Tensor) -> Tensor:
    """The memory of a tensor, so that NaNs compare by their bits."""
    return t.contiguous().reshape(-1).view(torch.uint8)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaNs with payloads among them."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    memory_shape = (*shape, dtype.itemsize)
    raw = torch.randint(0, limit, memory_shape, dtype=torch.uint8, generator=generator)
    return raw.view(-1).view(dtype).view(shape).to(DEVICE)


def make_tables() -> tuple[Tensor, Tensor, Tensor]:
    """Sample numbers, passes, and a row between the first and the last.

    That row has the first sample, the last one, and one sample twice.
    """
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randint(0, SAMPLES, (STEPS, SIZE), generator=generator)
    numbers[3, :4] = torch.tensor([0, SAMPLES - 1, 7, 7])
    passes = torch.randint(0, 2**40, (STEPS, SIZE), generator=generator)
    return numbers.to(DEVICE), passes.to(DEVICE), torch.tensor([3], device=DEVICE)


def equal_to_indexing(case: str) -> None:
    columns = {}
    for k, (shape, dtype) in enumerate(CASES[case]):
        columns[f"c{k}"] = random_bits((SAMPLES, *shape), dtype, k)
    numbers, passes, row = make_tables()
    for count, tables in ((SIZE, ()), (5, (numbers, passes)), (1, (passes,))):
        result = gather_samples(columns, numbers, row, count, tables)
        assert result is not None
        batch, copies = result
        assert list(batch) == list(columns)
        for name, column in columns.items():
            expected = torch.stack([column.cpu()[i] for i in numbers[3, :count].tolist()])
            values = batch[name]
            assert values.dtype == column.dtype
            assert values.shape == expected.shape
            assert values.device == DEVICE
            assert values.is_contiguous()
            assert torch.equal(as_bytes(values).cpu(), as_bytes(expected)), name
        assert [t.tolist() for t in copies] == [t[3, :count].tolist() for t in tables]


@inside
@pytest.mark.parametrize("case", CASES)
def test_equal_to_indexing(case: str) -> None:
    equal_to_indexing(case)


def many_blocks() -> None:
    """Columns of more than one program each, in both orders."""
    numbers = torch.randint(0, SAMPLES, (2, 700)).to(DEVICE)
    passes = torch.arange(1400).view(2, 700).to(DEVICE)
    row = torch.tensor([1], device=DEVICE)
    large = random_bits((SAMPLES, 9), torch.int64, 1)
    small = random_bits((SAMPLES,), torch.int64, 2)
    for columns in ({"a": large, "b": small}, {"b": small, "a": large}):
        result = gather_samples(columns, numbers, row, 699, (passes,))
        assert result is not None
        batch, copies = result
        for name, column in columns.items():
            assert torch.equal(batch[name], column[numbers[1, :699]])
        assert torch.equal(copies[0], passes[1, :699])


def several_rows() -> None:
    """From a row on over the next ones, to the end of the table's last, or to the middle of one."""
    numbers, passes, row = make_tables()
    row.fill_(1)
    columns = {
        "x": random_bits((SAMPLES, 1, 28, 28), torch.uint8, 1),
        "y": random_bits((SAMPLES,), torch.int64, 2),
    }
    cases = ((4 * SIZE, ()), (3 * SIZE, (numbers, passes)), (2 * SIZE + 5, (passes,)))
    for count, tables in cases:
        result = gather_samples(columns, numbers, row, count, tables)
        assert result is not None
        batch, copies = result
        samples = numbers[1:].flatten()[:count].tolist()
        for name, column in columns.items():
            expected = torch.stack([column.cpu()[i] for i in samples])
            assert torch.equal(batch[name].cpu(), expected), name
        expected_copies = [t[1:].flatten()[:count].tolist() for t in tables]
        assert [t.tolist() for t in copies] == expected_copies


def views_are_read_where_they_begin() -> None:
    """A column inside another tensor, at an address that its widest word does not divide."""
    numbers, _, row = make_tables()
    memory = random_bits((SAMPLES * 8 + 1,), torch.uint8, 3)
    for start, expected_bytes in ((0, 8), (1, 1)):
        column = memory[start : start + SAMPLES * 8].view(SAMPLES, 8)
        assert word_bytes(column) == expected_bytes
        result = gather_samples({"a": column}, numbers, row, SIZE)
        assert result is not None
        assert torch.equal(result[0]["a"], column[numbers[3]])


class TensorSubclass(Tensor):
    pass


def what_the_kernel_cannot_do_is_left_to_torch() -> None:
    numbers, passes, row = make_tables()
    fine = torch.zeros(SAMPLES, 4, 6, device=DEVICE)

    def fits(
        *columns: Tensor,
        table: Tensor = numbers,
        copied: tuple[Tensor, ...] = (),
        count: int = SIZE,
    ) -> bool:
        named_columns = {str(i): column for i, column in enumerate(columns)}
        return gather_samples(named_columns, table, row, count, copied) is not None

    assert fits(fine, copied=(numbers, passes))
    assert fits(*[fine] * gather_module.MAX_COLUMNS)
    assert not fits(*[fine] * (gather_module.MAX_COLUMNS + 1))
    assert not fits()
    assert not fits(fine, count=0)
    assert not fits(fine, fine.transpose(1, 2))
    assert not fits(fine, fine[:, :2])
    assert not fits(fine[::2])
    assert not fits(torch.zeros(SAMPLES, 0, device=DEVICE))
    assert not fits(fine.to_sparse())
    assert not fits(fine.as_subclass(TensorSubclass))
    assert not fits(nn.Parameter(fine))
    assert not fits(fine.clone().requires_grad_())
    assert not fits(torch.zeros(SAMPLES, 2, dtype=torch.complex64, device=DEVICE).conj())
    assert not fits(fine.to("meta"))
    assert not fits(torch.zeros(1, device=DEVICE).expand(SAMPLES, 4))
    # 13 · 2^27 bytes: the kernel counts in int32.
    assert not fits(torch.zeros(1, 2**27, dtype=torch.int8, device=DEVICE))
    assert not fits(fine, table=numbers.int())
    assert not fits(fine, table=numbers.t().contiguous().t())
    assert not fits(fine, copied=(passes[:, :5].contiguous(),))


def make_data(*, random: bool, named: bool = False) -> tuple[hs.data.Dataset, Feed]:
    """Two batches and a short one, with transforms; `random`: some draw random numbers."""
    columns = {
        "x": random_bits((SAMPLES, 6, 6, 3), torch.uint8, 5),
        "extra": random_bits((SAMPLES, 2), torch.float32, 6),
        "y": torch.arange(SAMPLES, device=DEVICE),
    }
    transforms: list[Any] = [hs.data.Rescale(1 / 255)]
    if random:
        transforms += [hs.data.PadCrop(6, 2), hs.data.Flip()]
    dataset = hs.data.Dataset(columns, seed=4).shuffle().map(transforms, "x").batch(16)
    dataset = dataset.select("y", "x")
    return dataset, Feed(dataset, named=named, device=DEVICE)


def resident_batches(feed: Feed, *, use_kernels: bool) -> list[Any]:
    """The batches of two passes of a Resident; the third batch of each is short."""
    records = RecordBuffer(64, DEVICE)
    assert isinstance(feed.data, hs.data.Dataset)
    inputs = ResidentInputs(feed, records, feed.data)
    records.use_kernels = use_kernels
    batches = []
    for _ in range(2):
        inputs.start()
        while inputs.next() is not None:
            batches.append(inputs.batch())
            records.next_row.add_(1)
    return batches


def resident_batches_are_the_datasets() -> None:
    for random in (True, False):
        dataset, feed = make_data(random=random)
        kernels_before = len(gather_module._kernel_works)
        batches = resident_batches(feed, use_kernels=True)
        kernels = len(gather_module._kernel_works)
        assert kernels == kernels_before + 1, "one kernel, for the short batch too"
        assert all(gather_module._kernel_works.values())
        assert [len(batch[0]) for batch in batches] == [16, 16, 8] * 2
        expected_batches = [*dataset, *dataset]
        for batch, expected in zip(batches, expected_batches, strict=True):
            assert len(batch) == len(expected) == 2
            for column, expected_column in zip(batch, expected, strict=True):
                assert column.dtype == expected_column.dtype
                assert torch.equal(column, expected_column)


CHECKS = [
    many_blocks,
    several_rows,
    views_are_read_where_they_begin,
    what_the_kernel_cannot_do_is_left_to_torch,
    resident_batches_are_the_datasets,
]


@inside
@pytest.mark.parametrize("check", CHECKS)
def test_checks(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.skipif(
    INTERPRETED or DEVICE.type == "cuda", reason="the path without kernels is a plain CPU's"
)
def test_without_triton_torch_does_it(use_kernels: bool) -> None:
    dataset, feed = make_data(random=True, named=True)
    batches = resident_batches(feed, use_kernels=use_kernels)
    expected_batches = [*dataset.dicts(), *dataset.dicts()]
    for (batch,), expected in zip(batches, expected_batches, strict=True):
        assert list(batch) == list(expected) == ["y", "x"]
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    assert not gather_module._kernel_works
    numbers, _, row = make_tables()
    assert gather_samples({"y": torch.zeros(SAMPLES)}, numbers, row, 1) is None


@pytest.mark.parametrize(
    ("shape", "dtype", "bytes"),
    [
        ((28, 28), torch.uint8, 8),
        ((), torch.int64, 8),
        ((), torch.int32, 4),
        ((3,), torch.float32, 4),
        ((3,), torch.uint8, 1),
        ((6,), torch.uint8, 2),
        ((5,), torch.bfloat16, 2),
        ((), torch.bool, 1),
        ((1,), torch.complex128, 8),
        ((150528,), torch.uint8, 8),
    ],
)
def test_the_widest_word(shape: tuple[int, ...], dtype: torch.dtype, bytes: int) -> None:
    assert word_bytes(torch.zeros(3, *shape, dtype=dtype)) == bytes


def test_a_word_begins_where_the_column_does() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    columns = [memory[start : start + 16].view(2, 8) for start in (0, 1, 2, 4, 8)]
    assert [word_bytes(column) for column in columns] == [8, 1, 2, 4, 8]


@outside
def test_the_interpreted_kernel() -> None:
    interpret(__file__, len(CASES) + len(CHECKS), "equal or checks")
