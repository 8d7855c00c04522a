"""The fluent pipeline against lists: any chain, saved at any item and resumed in a fresh one, gives the same stream."""

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
    return {"window": window, "batch": batch, "take": take, "skip": skip, "shard": shard}[name](
        items, argument, epoch
    )


def window(items: list[Any], argument: tuple[int, int], epoch: int) -> list[Any]:
    """The seed's sliding shuffle, written down as it is described: fill, draw, emit, move the last in, refill."""
    size, seed = argument
    coming, buffer, out = list(items), [], []
    while coming or buffer:
        while coming and len(buffer) < size:
            buffer.append(coming.pop(0))
        draw = words(
            seed, torch.tensor([epoch]), torch.tensor([len(out)]), torch.tensor([draw_key(0)])
        ).item()
        slot = int(draw) * len(buffer) // 2**32
        out.append(buffer[slot])
        buffer[slot] = buffer[-1]
        buffer.pop()
    return out


def batch(items: list[Any], argument: tuple[int, bool], epoch: int) -> list[Any]:
    n, drop = argument
    parts = [items[i : i + n] for i in range(0, len(items), n)]
    return [part for part in parts if len(part) == n or not drop]


def take(items: list[Any], count: int, epoch: int) -> list[Any]:
    return items[:count]


def skip(items: list[Any], count: int, epoch: int) -> list[Any]:
    return items[count:]


def shard(items: list[Any], argument: tuple[int, int, str], epoch: int) -> list[Any]:
    count, index, uneven = argument
    mine = items[index::count]
    if uneven == "drop":
        return mine[: len(items) // count]
    if uneven == "pad" and len(mine) < -(-len(items) // count):
        return [*mine, items[(index + len(mine) * count) % len(items)]]
    return mine


METHODS: dict[str, Callable[[Dataset, Any], Dataset]] = {
    "shuffle": lambda d, a: d.shuffle(seed=a),
    "window": lambda d, a: d.shuffle(a[0], seed=a[1]),
    "batch": lambda d, a: d.batch(a[0], drop_remainder=a[1]),
    "repeat": lambda d, a: d.repeat(a),
    "take": lambda d, a: d.take(a),
    "skip": lambda d, a: d.skip(a),
    "shard": lambda d, a: d.shard(a[0], a[1], uneven=a[2]),
}


def built(size: int, chain: Chain) -> Dataset:
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
        now = len(reference(size, chain, 0))
        name = draw(st.sampled_from([n for n in METHODS if not (n == "batch" and batched)]))
        batched |= name == "batch"
        seeds = st.integers(0, 2**32)
        count = draw(st.integers(1, min(4, now)))
        argument: Any = {
            "shuffle": draw(seeds),
            "window": (draw(st.integers(2, 12)), draw(seeds)),
            "repeat": draw(st.integers(1, 3)),
            "take": draw(st.integers(1, now + 3)),
            "skip": draw(st.integers(0, now - 1)),
            "shard": (
                count,
                draw(st.integers(0, count - 1)),
                draw(st.sampled_from(["keep", "drop", "pad"])),
            ),
        }.get(name)
        if name == "batch":
            drop = draw(st.booleans())
            argument = (draw(st.integers(1, now if drop else now + 3)), drop)
        chain.append((name, argument))
        if not reference(
            size, chain, 0
        ):  # a shard of fewer items than shards: nothing left to build on
            chain.pop()
    return size, chain


def numbers(data: Dataset) -> list[Any]:
    return [item.tolist() for (item,) in data]


def flat(items: list[Any]) -> list[Any]:
    return [[s for s, _ in item] if isinstance(item, list) else item[0] for item in items]


@given(chains(), st.integers(0, 3))
def test_any_chain_delivers_what_the_lists_do(case: tuple[int, Chain], epoch: int) -> None:
    size, chain = case
    data = built(size, chain)
    data.seek(epoch)
    expected = flat(reference(size, chain, epoch))
    assert data.size == len(data) == len(expected)
    assert numbers(data) == expected
    assert numbers(data) == flat(
        reference(size, chain, epoch + 1)
    )  # the next `for` is the next pass


def others_have_more(size: int, chain: Chain, stop: int) -> bool:
    """Shards of the same pass may be longer by an item: until it is delivered, the pass is not over for any."""
    for place in range(max(0, len(chain) - 2), len(chain)):
        name, argument = chain[place]
        if name == "shard" and all(later == "batch" for later, _ in chain[place + 1 :]):
            first_of_them = (name, (argument[0], 0, argument[2]))
            return built(size, [*chain[:place], first_of_them, *chain[place + 1 :]]).size > stop
    return False


def test_a_short_shard_waits_for_the_others_before_the_next_pass() -> None:
    data = built(3, [("shard", (2, 1, "keep"))])
    assert [item.tolist() for (item,) in islice(iter(data), 1)] == [1]
    again = built(3, [("shard", (2, 1, "keep"))])
    again.load_state_dict(data.state_dict())
    assert numbers(again) == []  # shard 0 has sample 2 to deliver yet
    assert numbers(again) == [1]


@given(chains(), st.data())
def test_saved_at_any_item_it_goes_on_elsewhere_with_the_same_stream(
    case: tuple[int, Chain], data: st.DataObject
) -> None:
    size, chain = case
    epoch = data.draw(st.integers(0, 2))
    whole = [item for e in (epoch, epoch + 1) for item in flat(reference(size, chain, e))]
    first = built(size, chain)
    first.seek(epoch)
    stop = data.draw(st.integers(0, first.size))
    head = [item.tolist() for (item,) in islice(iter(first), stop)]
    saved = json.loads(json.dumps(first.state_dict()))
    second = built(size, chain)
    second.load_state_dict(saved)
    rest = numbers(second)
    if stop == first.size and not others_have_more(
        size, chain, stop
    ):  # the pass was over: the rest is the next one
        assert head + rest == whole
    else:
        assert head + rest + numbers(second) == whole


@given(chains())
def test_tokens_say_of_which_pass_each_sample_is(case: tuple[int, Chain]) -> None:
    size, chain = case
    plan = built(size, chain).plan
    tokens = plan.tokens(1, 0, plan.size)
    found = [
        list(zip(*(part.tolist() for part in tokens[i]), strict=True)) for i in range(len(tokens))
    ]
    expected = [item if isinstance(item, list) else [item] for item in reference(size, chain, 1)]
    assert found == expected


# shards


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
    """Ranks m → n → …, each leg stopped after the same number of steps on every rank, as training is."""

    def rank(count: int, index: int) -> Dataset:
        return Dataset({"i": torch.arange(size)}).shuffle(seed=9).shard(count, index).batch(batch)

    seen: list[int] = []
    state = None
    for leg, count in enumerate(ranks):
        sets = [rank(count, index) for index in range(count)]
        for each in sets:
            if state is not None:
                each.load_state_dict(state)
        lengths = [s._next_position.plan.size for s in sets]
        last = leg == len(ranks) - 1
        steps = max(lengths) if last else data.draw(st.integers(0, min(lengths)))
        if sets[0]._next_position.epoch == 1:  # the pass ended with an earlier leg
            break
        for each in sets:
            seen += [i for (item,) in islice(iter(each), steps) for i in item.tolist()]
        state = json.loads(json.dumps(data.draw(st.sampled_from(sets)).state_dict()))
    assert sorted(seen) == list(range(size))


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


# columns, maps, kinds of items


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
    assert {k: v.tolist() for k, v in first.items()} == {
        "b": [0, -9],
        "c": [0, 100],
        "sum": [0, 11],
    }


def test_transforms_join_into_one_chain_however_they_are_mapped() -> None:
    images = torch.randint(0, 256, (40, 12, 12, 3), dtype=torch.uint8)
    parts = [PadCrop(12, 2), Flip(), ToCHW(), Rescale(1 / 255, 0.0)]
    one = Dataset({"image": images}, seed=5).map(parts, "image").batch(8)
    two = Dataset({"image": images}, seed=5)
    for part in parts:
        two = two.map(part, "image")
    assert all(torch.equal(a, b) for (a,), (b,) in zip(one, two.batch(8), strict=True))


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
    (image, mask), (again, _) = next(iter(data)), next(iter(data))
    assert torch.equal(image, mask)
    assert not torch.equal(image, again)


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
    (made,) = next(iter(data.map(PadCrop(10, 0), "image").batch(6)))
    assert made.shape == (6, 10, 10, 3)
    assert made.float().mean((1, 2, 3)).tolist() == [0, 1, 2, 3, 4, 5]


class Squares(TorchDataset[tuple[Tensor, int]]):
    """A user's data set, counting how it is read."""

    def __init__(self, size: int = 10, random: bool = False) -> None:
        self.size, self.random = size, random

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.rand(()) + random.random() + np.random.rand() if self.random else 0.0  # noqa: NPY002
        return torch.full((2,), float(i * i)) + noise, i


class Many(Squares):
    asked: list[list[int]]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, int]]:
        self.asked.append(numbers)
        return [self[i] for i in numbers]


def test_a_torch_dataset_is_read_by_index_or_by_list() -> None:
    x, y = next(iter(Dataset(Squares(), ["x", "n"]).shuffle(seed=1).batch(4)))
    assert torch.equal(x[:, 0], y.float() ** 2)
    many = Many()
    many.asked = []
    list(Dataset(many).batch(4))
    assert many.asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


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


# the user's own random code, and workers


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

    alone, together = streams(data()), streams(data().workers(workers))
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])
    assert not torch.equal(alone[0], alone[1])


@pytest.mark.parametrize("normals", [0, 1])
def test_the_users_random_code_does_not_disturb_the_hosts_generators(normals: int) -> None:
    np.random.seed(1)  # noqa: NPY002
    np.random.standard_normal(normals)  # noqa: NPY002 - they come in pairs: after one, the other waits in the state
    data = Dataset(Squares(20, random=True)).batch(5)
    states = torch.get_rng_state(), random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002
    list(data)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == pickle.dumps(np.random.get_state())  # noqa: NPY002


def test_the_position_is_what_workers_delivered_not_what_they_fetched() -> None:
    def data() -> Dataset:
        return Dataset({"i": torch.arange(100)}).shuffle(8).batch(4)

    ahead = data().workers(2, ahead=3)
    stream = iter(ahead)
    head = [next(stream)[0].tolist() for _ in range(5)]
    resumed = data()
    resumed.load_state_dict(ahead.state_dict())
    assert head + numbers(resumed) == numbers(data())


def test_an_abandoned_pass_of_workers_leaves_nothing_in_the_next() -> None:
    data = Dataset({"i": torch.arange(60)}).shuffle(seed=1).batch(4)
    working = data.workers(2)
    next(iter(working))
    data.seek(1)
    assert numbers(working) == numbers(data)


def test_a_worker_that_fails_says_why() -> None:
    def broken(x: Tensor) -> Tensor:
        raise RuntimeError("sample is unreadable")

    with pytest.raises(RuntimeError, match="sample is unreadable"):
        list(Dataset({"x": torch.arange(4)}).map(broken, "x").batch(2).workers(1))


# positions


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
    one = Dataset({"i": torch.arange(10)}).shard(2, 0).shuffle().batch(2)
    two = Dataset({"i": torch.arange(10)}).shard(5, 0).shuffle().batch(2)
    with pytest.raises(
        ValueError, match=r"only where \.shard\(\.\.\.\) is the last stage before \.batch"
    ):
        two.load_state_dict(one.state_dict() | {"pipeline": list(two.plan.describe())})
    whole = Dataset({"i": torch.arange(10)}).batch(2)
    with pytest.raises(ValueError, match=r"Add \.shard\(1, 0, uneven='keep'\)"):
        whole.load_state_dict(Dataset({"i": torch.arange(10)}).shard(2, 0).batch(2).state_dict())


# mistakes


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
def test_a_mistake_is_told_when_it_is_made(name: str) -> None:
    act, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=message):
        act(Dataset({"x": torch.arange(10)}))


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
