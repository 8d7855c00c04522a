"""The fluent pipeline against lists.

Any chain, saved at any item and resumed in a fresh one, gives the same stream.
"""

import json
import pickle
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import Dataset as TorchDataset

import halfstep as hs
from halfstep.data import Dataset, Flip, Order, PadCrop, Rescale, ToCHW
from halfstep.data.hashing import draw_key, words

# A reference in plain Python. A chain is a list of (name, argument); a pass is a list of items.

Chain = list[tuple[str, Any]]


def reference(size: int, chain: Chain, epoch: int) -> list[Any]:
    """What pass `epoch` delivers: (sample, pass) pairs, or lists of them after "batch"."""
    if not chain:
        return [(i, epoch) for i in range(size)]
    *before, (name, argument) = chain
    if name == "repeat":
        return [
            item for r in range(argument) for item in reference(size, before, epoch * argument + r)
        ]
    items = reference(size, before, epoch)
    if name == "shuffle":
        return [
            items[i] for i in Order(len(items), argument).indices(epoch, 0, len(items)).tolist()
        ]
    return {
        "buffer_shuffle": buffer_shuffle,
        "batch": batch,
        "take": take,
        "skip": skip,
        "shard": shard,
    }[name](items, argument, epoch)


def buffer_shuffle(items: list[Any], argument: tuple[int, int], epoch: int) -> list[Any]:
    """The sliding shuffle, as it is described: fill, draw, emit, move the last in, refill."""
    size, seed = argument
    remaining = list(items)
    buffer: list[Any] = []
    emitted: list[Any] = []
    while remaining or buffer:
        while remaining and len(buffer) < size:
            buffer.append(remaining.pop(0))
        position = torch.tensor([len(emitted)])
        word = words(seed, torch.tensor([epoch]), position, torch.tensor([draw_key(0)])).item()
        slot = int(word) * len(buffer) // 2**32
        emitted.append(buffer[slot])
        buffer[slot] = buffer[-1]
        buffer.pop()
    return emitted


def batch(items: list[Any], argument: tuple[int, bool], epoch: int) -> list[Any]:
    batch_size, drop_remainder = argument
    batches = [items[i : i + batch_size] for i in range(0, len(items), batch_size)]
    return [items for items in batches if len(items) == batch_size or not drop_remainder]


def take(items: list[Any], count: int, epoch: int) -> list[Any]:
    return items[:count]


def skip(items: list[Any], count: int, epoch: int) -> list[Any]:
    return items[count:]


def shard(items: list[Any], argument: tuple[int, int, str], epoch: int) -> list[Any]:
    count, index, uneven = argument
    own_items = items[index::count]
    if uneven == "drop":
        return own_items[: len(items) // count]
    if uneven == "pad" and len(own_items) < -(-len(items) // count):
        padding = items[(index + len(own_items) * count) % len(items)]
        return [*own_items, padding]
    return own_items


METHODS: dict[str, Callable[[Dataset, Any], Dataset]] = {
    "shuffle": lambda data, seed: data.shuffle(seed=seed),
    "buffer_shuffle": lambda data, argument: data.shuffle(argument[0], seed=argument[1]),
    "batch": lambda data, argument: data.batch(argument[0], drop_remainder=argument[1]),
    "repeat": lambda data, times: data.repeat(times),
    "take": lambda data, count: data.take(count),
    "skip": lambda data, count: data.skip(count),
    "shard": lambda data, argument: data.shard(argument[0], argument[1], uneven=argument[2]),
}


def build_dataset(size: int, chain: Chain) -> Dataset:
    data = Dataset({"i": torch.arange(size)})
    for name, argument in chain:
        data = METHODS[name](data, argument)
    return data


@st.composite
def chains(draw: st.DrawFn) -> tuple[int, Chain]:
    size = draw(st.integers(1, 60))
    chain: Chain = []
    batched = False
    for _ in range(draw(st.integers(0, 5))):
        item_count = len(reference(size, chain, 0))
        name = draw(st.sampled_from([n for n in METHODS if not (n == "batch" and batched)]))
        batched |= name == "batch"
        seeds = st.integers(0, 2**32)
        count = draw(st.integers(1, min(4, item_count)))
        argument: Any = {
            "shuffle": draw(seeds),
            "buffer_shuffle": (draw(st.integers(2, 12)), draw(seeds)),
            "repeat": draw(st.integers(1, 3)),
            "take": draw(st.integers(1, item_count + 3)),
            "skip": draw(st.integers(0, item_count - 1)),
            "shard": (
                count,
                draw(st.integers(0, count - 1)),
                draw(st.sampled_from(["keep", "drop", "pad"])),
            ),
        }.get(name)
        if name == "batch":
            drop_remainder = draw(st.booleans())
            largest = item_count if drop_remainder else item_count + 3
            argument = (draw(st.integers(1, largest)), drop_remainder)
        chain.append((name, argument))
        # A shard of fewer items than shards may be empty: nothing can be build_dataset on it.
        if not reference(size, chain, 0):
            chain.pop()
    return size, chain


def numbers(data: Dataset) -> list[Any]:
    return [item.tolist() for (item,) in data]


def sample_numbers(items: list[Any]) -> list[Any]:
    """The items of the reference without their passes."""
    return [[sample for sample, _ in item] if isinstance(item, list) else item[0] for item in items]


@given(chains(), st.integers(0, 3))
def test_any_chain_delivers_what_the_lists_do(case: tuple[int, Chain], epoch: int) -> None:
    size, chain = case
    data = build_dataset(size, chain)
    data.seek(epoch)
    expected = sample_numbers(reference(size, chain, epoch))
    assert data.size == len(data) == len(expected)
    assert numbers(data) == expected
    # The next `for` is the next pass.
    assert numbers(data) == sample_numbers(reference(size, chain, epoch + 1))


def others_have_more(size: int, chain: Chain, stop: int) -> bool:
    """Whether another shard of the pass is longer: until it is done, the pass is over for none."""
    for i in range(max(0, len(chain) - 2), len(chain)):
        name, argument = chain[i]
        if name == "shard" and all(later == "batch" for later, _ in chain[i + 1 :]):
            longest_shard = (name, (argument[0], 0, argument[2]))
            return build_dataset(size, [*chain[:i], longest_shard, *chain[i + 1 :]]).size > stop
    return False


def test_a_short_shard_waits_for_the_others_before_the_next_pass() -> None:
    data = build_dataset(3, [("shard", (2, 1, "keep"))])
    assert [item.tolist() for (item,) in islice(iter(data), 1)] == [1]
    resumed = build_dataset(3, [("shard", (2, 1, "keep"))])
    resumed.load_state_dict(data.state_dict())
    assert numbers(resumed) == []  # shard 0 has sample 2 to deliver yet
    assert numbers(resumed) == [1]


@given(chains(), st.data())
def test_saved_at_any_item_it_goes_on_elsewhere_with_the_same_stream(
    case: tuple[int, Chain], data: st.DataObject
) -> None:
    size, chain = case
    epoch = data.draw(st.integers(0, 2))
    passes = [sample_numbers(reference(size, chain, e)) for e in (epoch, epoch + 1)]
    both_passes = [*passes[0], *passes[1]]

    first = build_dataset(size, chain)
    first.seek(epoch)
    stop = data.draw(st.integers(0, first.size))
    before_save = [item.tolist() for (item,) in islice(iter(first), stop)]
    saved = json.loads(json.dumps(first.state_dict()))

    second = build_dataset(size, chain)
    second.load_state_dict(saved)
    after_load = numbers(second)
    pass_was_over = stop == first.size and not others_have_more(size, chain, stop)
    if pass_was_over:
        assert before_save + after_load == both_passes
    else:
        assert before_save + after_load + numbers(second) == both_passes


@given(chains())
def test_sample_indices_name_the_pass_of_each_sample(case: tuple[int, Chain]) -> None:
    size, chain = case
    plan = build_dataset(size, chain).plan
    indices = plan.sample_indices(1, 0, plan.size)
    pairs = []
    for i in range(len(indices)):
        samples, epochs = indices[i]
        pairs.append(list(zip(samples.tolist(), epochs.tolist(), strict=True)))
    expected = [item if isinstance(item, list) else [item] for item in reference(size, chain, 1)]
    assert pairs == expected


# Shards


@given(st.integers(1, 80), st.integers(1, 7), st.integers(0, 2**32))
def test_shards_visit_each_sample_once(size: int, count: int, seed: int) -> None:
    count = min(count, size)
    parts = [
        numbers(Dataset({"i": torch.arange(size)}).shuffle(seed=seed).shard(count, r))
        for r in range(count)
    ]
    assert sorted(i for part in parts for i in part) == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    st.integers(6, 80),
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(1, 5),
    st.data(),
)
def test_another_number_of_ranks_in_mid_epoch_visits_each_sample_once(
    size: int, ranks: list[int], batch: int, data: st.DataObject
) -> None:
    """Ranks m → n → …; every rank stops after the same number of steps, as in training."""

    def rank(count: int, index: int) -> Dataset:
        return Dataset({"i": torch.arange(size)}).shuffle(seed=9).shard(count, index).batch(batch)

    seen: list[int] = []
    state = None
    for leg, count in enumerate(ranks):
        datasets = [rank(count, index) for index in range(count)]
        for dataset in datasets:
            if state is not None:
                dataset.load_state_dict(state)
        lengths = [dataset.pass_size for dataset in datasets]
        is_last_leg = leg == len(ranks) - 1
        steps = max(lengths) if is_last_leg else data.draw(st.integers(0, min(lengths)))
        if datasets[0].state_dict()["epoch"] == 1:  # the pass ended with an earlier leg
            break
        for dataset in datasets:
            seen += [i for (item,) in islice(iter(dataset), steps) for i in item.tolist()]
        state = json.loads(json.dumps(data.draw(st.sampled_from(datasets)).state_dict()))
    assert sorted(seen) == list(range(size))


def test_a_pass_that_other_shards_began_is_shorter_and_the_next_one_is_not() -> None:
    first = Dataset({"i": torch.arange(12)}).shard(2, 0).batch(2)
    list(islice(iter(first), 2))  # 8 of 12 samples on two ranks
    resumed = Dataset({"i": torch.arange(12)}).shard(4, 0).batch(2)
    resumed.load_state_dict(first.state_dict())
    assert (resumed.pass_size, resumed.size) == (1, 2)
    stream = iter(resumed)
    assert resumed.pass_size == 1
    assert [item.tolist() for (item,) in stream] == [[8]]
    assert resumed.pass_size == 2


def test_even_shards_by_dropping_and_by_padding() -> None:
    data = Dataset({"i": torch.arange(10)})
    assert [numbers(data.shard(4, r, uneven="drop")) for r in range(4)] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]
    assert [numbers(data.shard(4, r, uneven="pad")) for r in range(4)] == [
        [0, 4, 8],
        [1, 5, 9],
        [2, 6, 0],
        [3, 7, 1],
    ]


# Columns, maps, kinds of items


def test_columns_by_name_as_tuples_and_dicts() -> None:
    data = Dataset({"image": torch.arange(12).view(6, 2), "label": np.arange(6)}).batch(4)
    assert data.columns == ("image", "label")
    image, label = next(iter(data))
    assert image.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert label.tolist() == [0, 1, 2, 3]
    assert [list(item) for item in data.dicts()] == [["image", "label"]] * 2
    (only,) = next(iter(data.select("label")))
    assert torch.equal(only, label)


def test_unbatched_items_are_single_samples() -> None:
    data = Dataset((torch.arange(12).view(6, 2), torch.arange(6)))
    assert data.columns == ("x", "y")
    items = list(data)
    assert len(items) == data.size == 6
    assert torch.equal(items[4][0], torch.tensor([8, 9]))
    assert int(items[4][1]) == 4


def test_a_function_sees_samples_before_batch_and_batches_after_it() -> None:
    shapes: list[tuple[int, ...]] = []

    def see(x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return x * 2

    data = Dataset({"x": torch.arange(6.0).view(3, 2)}).map(see, "x").batch(3).map(see, "x")
    (x,) = next(iter(data))
    assert torch.equal(x, torch.arange(6.0).view(3, 2) * 4)
    assert shapes == [(2,)] * 3 + [(3, 2)]


def test_a_function_may_make_other_columns() -> None:
    data = Dataset({"a": torch.arange(4), "b": torch.arange(4) * 10, "c": torch.arange(4) * 100})
    data = data.map(lambda a, b: (a + b, a - b), ["a", "b"], output=["sum", "b"]).batch(2)
    assert data.columns == ("b", "c", "sum")
    first = next(iter(data.dicts()))
    assert {name: column.tolist() for name, column in first.items()} == {
        "b": [0, -9],
        "c": [0, 100],
        "sum": [0, 11],
    }


def test_transforms_join_into_one_chain_however_they_are_mapped() -> None:
    images = torch.randint(0, 256, (40, 12, 12, 3), dtype=torch.uint8)
    transforms = [PadCrop(12, 2), Flip(), ToCHW(), Rescale(1 / 255, 0.0)]
    at_once = Dataset({"image": images}, seed=5).map(transforms, "image").batch(8)
    one_by_one = Dataset({"image": images}, seed=5)
    for transform in transforms:
        one_by_one = one_by_one.map(transform, "image")
    assert all(torch.equal(a, b) for (a,), (b,) in zip(at_once, one_by_one.batch(8), strict=True))


@given(st.integers(1, 40), st.integers(1, 40))
def test_augmentation_does_not_depend_on_the_batch(a: int, b: int) -> None:
    data = Dataset({"image": torch.arange(40 * 64, dtype=torch.uint8).view(40, 8, 8, 1)}, seed=2)
    data = data.map([PadCrop(8, 3), Flip()], "image").shuffle()
    streams = [torch.cat([item for (item,) in data.batch(n)]) for n in (a, b)]
    assert torch.equal(*streams)


def test_epochs_augment_anew_and_image_and_mask_stay_together() -> None:
    images = torch.arange(20 * 64, dtype=torch.int32).view(20, 8, 8, 1).to(torch.uint8)
    data = (
        Dataset({"image": images, "mask": images.clone()})
        .map([PadCrop(8, 2), Flip()], ["image", "mask"])
        .batch(20)
    )
    image, mask = next(iter(data))
    next_epochs_image, _ = next(iter(data))
    assert torch.equal(image, mask)
    assert not torch.equal(image, next_epochs_image)


def test_samples_of_different_sizes_are_transformed_one_by_one() -> None:
    class Ragged(TorchDataset[Tensor]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> Tensor:
            return torch.full((10 + i, 12, 3), i, dtype=torch.uint8)

    data = Dataset(Ragged(), ["image"])
    with pytest.raises(
        ValueError, match=r"column 'image': expected samples of one shape in a batch.*Resize"
    ):
        next(iter(data.batch(3)))
    (cropped,) = next(iter(data.map(PadCrop(10, 0), "image").batch(6)))
    assert cropped.shape == (6, 10, 10, 3)
    assert cropped.float().mean((1, 2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


class Squares(TorchDataset[tuple[Tensor, int]]):
    """A user's data set: squares, with noise of all three host generators where it is random."""

    def __init__(self, size: int = 10, random: bool = False) -> None:
        self.size = size
        self.random = random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        square = torch.full((2,), float(i * i))
        if self.random:
            square = square + (torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002
        return square, i


class SquaresByList(Squares):
    """A data set that is read by lists of numbers, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        self.requests.append(indices)
        return [self[i] for i in indices]


def test_a_torch_dataset_is_read_by_index_or_by_list() -> None:
    x, y = next(iter(Dataset(Squares(), ["x", "n"]).shuffle(seed=1).batch(4)))
    assert torch.equal(x[:, 0], y.float() ** 2)
    by_list = SquaresByList()
    list(Dataset(by_list).batch(4))
    assert by_list.requests == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_dataset_of_dicts_keeps_its_names() -> None:
    rows = [{"input_ids": torch.arange(3) + i, "labels": i} for i in range(4)]
    data = Dataset(rows).batch(2)
    assert data.columns == ("input_ids", "labels")
    assert next(iter(data.dicts()))["input_ids"].tolist() == [[0, 1, 2], [1, 2, 3]]


def test_load_reads_everything_once() -> None:
    data = Dataset(Squares(7)).shuffle(seed=3).batch(3)
    for (a, b), (c, d) in zip(data, data.load(), strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


# The user's own random code, and workers


def streams(data: Dataset, passes: int = 2) -> list[Tensor]:
    return [torch.cat([x for x, _ in data]) for _ in range(passes)]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_deliver_the_same_stream_with_the_users_own_random_numbers_too(
    workers: int,
) -> None:
    def data() -> Dataset:
        return (
            Dataset(Squares(50, random=True))
            .map(lambda x: x + torch.rand(()), "x")
            .shuffle()
            .batch(7)
        )

    on_host = streams(data())
    in_workers = streams(data().workers(workers))
    assert torch.equal(on_host[0], in_workers[0])
    assert torch.equal(on_host[1], in_workers[1])
    assert not torch.equal(on_host[0], on_host[1])


@pytest.mark.parametrize("normals", [0, 1])
def test_the_users_random_code_does_not_disturb_the_hosts_generators(normals: int) -> None:
    np.random.seed(1)  # noqa: NPY002
    # Normal numbers come in pairs: after one, the other waits in the state.
    np.random.standard_normal(normals)  # noqa: NPY002
    data = Dataset(Squares(20, random=True)).batch(5)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    numpy_state = pickle.dumps(np.random.get_state())  # noqa: NPY002
    list(data)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert numpy_state == pickle.dumps(np.random.get_state())  # noqa: NPY002


def test_the_position_is_what_workers_delivered_not_what_they_fetched() -> None:
    def data() -> Dataset:
        return Dataset({"i": torch.arange(100)}).shuffle(8).batch(4)

    in_workers = data().workers(2, ahead=3)
    stream = iter(in_workers)
    before_save = [next(stream)[0].tolist() for _ in range(5)]
    resumed = data()
    resumed.load_state_dict(in_workers.state_dict())
    assert before_save + numbers(resumed) == numbers(data())


def test_an_abandoned_pass_of_workers_leaves_nothing_in_the_next() -> None:
    data = Dataset({"i": torch.arange(60)}).shuffle(seed=1).batch(4)
    in_workers = data.workers(2)
    next(iter(in_workers))
    data.seek(1)
    assert numbers(in_workers) == numbers(data)


def test_a_worker_that_fails_says_why() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("sample is unreadable")

    with pytest.raises(RuntimeError, match="sample is unreadable"):
        list(Dataset({"x": torch.arange(4)}).map(broken, "x").batch(2).workers(1))


# Positions


def test_each_for_is_the_next_pass_and_seek_goes_anywhere() -> None:
    data = Dataset({"i": torch.arange(30)}).shuffle().batch(4)
    passes = [numbers(data) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    data.seek(1, step=5)
    assert numbers(data) == passes[1][5:]
    assert numbers(data) == passes[2]


def test_methods_leave_the_original_alone() -> None:
    data = Dataset({"i": torch.arange(6)})
    list(data)
    data.shuffle().batch(2)
    assert data.state_dict()["epoch"] == 1
    assert data.size == 6
    assert data.batch(2).state_dict()["epoch"] == 0


def test_a_position_of_another_pipeline_is_refused_by_its_first_difference() -> None:
    state = Dataset({"i": torch.arange(10)}).shuffle().batch(4).state_dict()
    other = Dataset({"i": torch.arange(10)}).shuffle().batch(5)
    with pytest.raises(
        ValueError, match=r"it had 'batch\(4, .*' where this one has 'batch\(5, .*Build the same"
    ):
        other.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"it had '10 samples of i .* where this one has '11 samples"
    ):
        Dataset({"i": torch.arange(11)}).shuffle().batch(4).load_state_dict(state)
    with pytest.raises(ValueError, match="expected a position of version 1, got None"):
        other.load_state_dict({})


def test_resharding_needs_shards_last() -> None:
    of_two = Dataset({"i": torch.arange(10)}).shard(2, 0).shuffle().batch(2)
    of_five = Dataset({"i": torch.arange(10)}).shard(5, 0).shuffle().batch(2)
    state = of_two.state_dict() | {"pipeline": list(of_five.plan.describe())}
    with pytest.raises(
        ValueError, match=r"only where \.shard\(\.\.\.\) is the last stage before \.batch"
    ):
        of_five.load_state_dict(state)
    unsharded = Dataset({"i": torch.arange(10)}).batch(2)
    shard_state = Dataset({"i": torch.arange(10)}).shard(2, 0).batch(2).state_dict()
    with pytest.raises(ValueError, match=r"Add \.shard\(1, 0, uneven='keep'\)"):
        unsharded.load_state_dict(shard_state)


# Mistakes


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


MISTAKES: dict[str, tuple[Callable[[Dataset], Any], str]] = {
    "batch twice": (
        lambda d: d.batch(2).batch(2),
        "expected samples, got batches of 2. Call batch once",
    ),
    "batch of none": (lambda d: d.batch(0), "batch: expected 1 to 10 samples, got 0"),
    "batch drops all": (
        lambda d: d.batch(11, drop_remainder=True),
        "batch: expected 1 to 10 samples, got 11",
    ),
    "small buffer": (lambda d: d.shuffle(1), "expected a buffer of at least 2 items, got 1"),
    "no repeats": (lambda d: d.repeat(0), "repeat: expected 1 or more passes, got 0"),
    "take none": (
        lambda d: d.take(0),
        "take: expected a whole number of items, 1 or more, received 0",
    ),
    "skip all": (lambda d: d.skip(10), "skip: expected 0 to 9 of 10 items, got 10"),
    "shard index": (
        lambda d: d.shard(2, 2),
        "expected 0 <= index < count <= 10, got index 2, count 2",
    ),
    "shard too fine": (lambda d: d.shard(11, 0), "expected 0 <= index < count <= 10"),
    "shard uneven": (
        lambda d: d.shard(2, 0, uneven="no"),
        "expected uneven='keep', 'drop' or 'pad', got 'no'",
    ),
    "unknown column": (
        lambda d: d.map(abs, "y"),
        r"expected columns out of \['x'\], each once, got \['y'\]",
    ),
    "select nothing": (
        lambda d: d.select(),
        r"expected columns out of \['x'\], each once, got \[\]",
    ),
    "map a number": (lambda d: d.map(3, "x"), "map: expected a transform or a function, got int 3"),
    "transform renames": (
        lambda d: d.map(Rescale(1.0, 0.0), "x", output="z"),
        "so output= is of no use",
    ),
    "too few results": (
        lambda d: list(d.map(abs, "x", output=["a", "b"])),
        "to return 2 values for .*, got 1",
    ),
    "batch of a half": (lambda d: d.batch(2.5), "batch: expected a whole number, received 2.5"),
    "batch of True": (lambda d: d.batch(True), "batch: expected a whole number, received True"),
    "take a half": (
        lambda d: d.take(2.5),
        "take: expected a whole number of items, 1 or more, received 2.5",
    ),
    "skip a half": (lambda d: d.skip(1.5), "skip: expected a whole number, received 1.5"),
    "repeat a half": (lambda d: d.repeat(1.5), "repeat: expected a whole number, received 1.5"),
    "shuffle by a half": (
        lambda d: d.shuffle(2.5),
        "shuffle: expected a whole number, received 2.5",
    ),
    "shuffle by text": (
        lambda d: d.shuffle(seed="a"),
        "shuffle: seed: expected a whole number, received 'a'",
    ),
    "shard a half": (
        lambda d: d.shard(2, 0.5),
        "shard: index: expected a whole number, received 0.5",
    ),
    "workers by halves": (
        lambda d: d.workers(0.5),
        "workers: count: expected a whole number, 0 or more, received 0.5",
    ),
    "seek a half": (
        lambda d: d.seek(0.5),
        "seek: epoch: expected a whole number, 0 or more, received 0.5",
    ),
    "select twice": (lambda d: d.select("x", "x"), r"out of \['x'\], each once, got \['x', 'x'\]"),
    "output twice": (
        lambda d: d.map(abs, "x", output=["a", "a"]),
        r"different names in output=, got \['a', 'a'\]",
    ),
    "an index": (
        lambda d: d[0],
        r"no index: iterate over it, or take item n by next\(iter\(data.skip\(n\)\)\)",
    ),
    "a DataLoader": (lambda d: next(iter(DataLoader(d))), r"It needs no DataLoader: \.shuffle\(\)"),
    "workers": (
        lambda d: d.workers(-1),
        "workers: count: expected a whole number, 0 or more, received -1",
    ),
    "seek": (
        lambda d: d.seek(0, 11),
        "seek: expected a step of 0 to 10, got 11",
    ),
    "chain does not fit": (
        lambda d: d.map(PadCrop(4, 1), "x"),
        r"transform 0, PadCrop\(.*does not take a batch int64",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_when_they_are_made(name: str) -> None:
    make_mistake, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make_mistake(Dataset({"x": torch.arange(10)}))


BAD_DATA: dict[str, tuple[Any, Any, str]] = {
    "lengths differ": (
        {"a": torch.zeros(3), "b": torch.zeros(4)},
        None,
        "columns of one length, got {'a': 3, 'b': 4}",
    ),
    "no columns": ({}, None, "expected columns of one length, got {}"),
    "scalar": ({"a": torch.tensor(3)}, None, "expected columns of one length"),
    "empty": ({"a": torch.zeros(0, 3)}, None, "expected at least one sample"),
    "strings": (
        {"a": ["x", "y"]},
        None,
        "column 'a': expected a tensor or an array of numbers, got list.*sample by sample: Dataset",
    ),
    "an iterable data set": (Endless(), None, r"Hand it over as it is: hs\.data\.Loader"),
    "a loader": (DataLoader(Squares()), None, r"hs\.data\.Loader"),
    "a generator": ((i for i in range(3)), None, "expected tensors or arrays .* got generator"),
    "an empty data set": (Squares(0), None, "expected at least one sample, got an empty Squares"),
    "names": (Squares(), ["a"], "expected 2 different column names, one per part of a sample, got"),
    "names twice": (Squares(), ["a", "a"], "expected 2 different column names"),
    "one name for two": (
        Squares(),
        "xy",
        r"expected 2 different column names, one per part of a sample, got \['xy'\]",
    ),
    "names that are one": (
        {1: torch.zeros(3), "1": torch.zeros(3)},
        None,
        "some are equal as text",
    ),
    "two devices": (
        {"a": torch.zeros(3), "b": torch.zeros(3, device="meta")},
        None,
        "expected columns on one device",
    ),
    "a list of nothing": ([], None, "expected at least one sample, got an empty list"),
    "unknown names": (
        {"a": torch.zeros(3)},
        ["b"],
        r"expected columns out of \['a'\], each once, got \['b'\]",
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_a_data_set_is_refused(name: str) -> None:
    data, columns, message = BAD_DATA[name]
    with pytest.raises((ValueError, TypeError), match=message):
        Dataset(data, columns)


def test_a_bad_seed_is_refused() -> None:
    with pytest.raises(TypeError, match="seed: expected a whole number, received 'x'"):
        hs.data.Dataset({"a": torch.zeros(3)}, seed="x")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["split", "random_split", "train_test_split"])
def test_a_split_is_answered_with_lines_that_work(name: str) -> None:
    x = torch.arange(50)
    data = hs.data.Dataset((x, x % 2))
    with pytest.raises(AttributeError, match=rf"^Dataset\.{name}: take and skip") as caught:
        getattr(data, name)(0.2)
    line = str(caught.value).rpartition("; write ")[2]
    scope = {"data": data}
    exec(line, scope)
    valid, train = (scope[part].shuffle().batch(10) for part in ("valid", "train"))
    assert sorted(i for batch in valid for i in batch[0].tolist()) == list(range(10))
    assert sorted(i for batch in train for i in batch[0].tolist()) == list(range(10, 50))


def test_other_names_that_a_dataset_has_not_are_pythons_own_error() -> None:
    data = hs.data.Dataset((torch.arange(4),))
    with pytest.raises(AttributeError, match=r"^'Dataset' object has no attribute 'splitt'$"):
        data.splitt  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(data, "__array__")
    assert len(pickle.loads(pickle.dumps(data))) == 4
