"""Passes over a pipeline: several at once, left early, failed, copied, saved.

Each is compared with the plain stream.
"""

import copy
import functools
import json
import pickle
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from halfstep.data import Dataset, Flip, PadCrop
from halfstep.data.pipeline import stream
from halfstep.errors import Notice
from halfstep.utils import rng


class Numbers(TorchDataset[Tensor]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Tensor:
        return torch.tensor(i)


def data(size: int = 24) -> Dataset:
    return Dataset({"i": torch.arange(size)}).shuffle(seed=1).batch(4)


def numbers(batches: Any) -> list[list[int]]:
    return [item.tolist() for (item,) in batches]


def passes(count: int) -> list[list[list[int]]]:
    plain = data()
    return [numbers(plain) for _ in range(count)]


# Several passes at once


@pytest.mark.parametrize("workers", [0, 1])
def test_two_passes_at_once_do_not_meet(workers: int) -> None:
    both = data().workers(workers)
    pairs = [(a.tolist(), b.tolist()) for (a,), (b,) in zip(both, both, strict=True)]
    assert pairs == list(zip(*passes(2), strict=True))
    assert numbers(both) == passes(3)[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_within_a_loop(workers: int) -> None:
    nested = data().workers(workers)
    expected = passes(7)
    seen = []
    for step, (item,) in enumerate(nested):
        seen.append(item.tolist())
        assert numbers(islice(nested, 2)) == expected[1 + step][:2]
    assert seen == expected[0]


def test_each_pass_has_a_state_of_its_own_and_the_data_sets_is_the_newest_ones() -> None:
    both = data()
    outer = iter(both)
    inner = both.dicts()
    for _ in range(3):
        next(outer)
    next(inner)
    states = [json.loads(json.dumps(source.state_dict())) for source in (outer, inner, both)]
    assert [(state["epoch"], state["step"]) for state in states] == [(0, 3), (1, 1), (1, 1)]
    resumed = data()
    resumed.load_state_dict(states[0])
    assert numbers(resumed) == numbers(outer)


# Passes left early


@pytest.mark.parametrize("workers", [0, 1])
def test_after_a_break_the_next_for_is_the_next_pass(workers: int) -> None:
    dataset = data().workers(workers)
    for expected in passes(3):
        for (item,) in dataset:
            assert item.tolist() == expected[0]
            break


def test_a_break_frees_the_workers_for_the_next_pass() -> None:
    dataset = data().workers(1)
    for _ in dataset:
        break
    assert dataset._workers.busy is False
    stream = iter(dataset)
    next(stream)
    assert dataset._workers.busy is True
    workers = dataset._workers
    del stream
    assert numbers(dataset) == passes(3)[2]
    assert dataset._workers is workers


class FakeCuda:
    """What a stream needs of CUDA, without a GPU. Threads and queues are the real ones."""

    def __init__(self, *args: Any) -> None: ...
    def record(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *args: Any) -> None: ...


@pytest.fixture
def stream_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The names of the threads that stream now. Batches are streamed as to CUDA."""
    for name in ("Event", "Stream", "stream", "current_stream"):
        monkeypatch.setattr(stream.torch.cuda, name, FakeCuda)
    monkeypatch.setattr(
        "halfstep.data.pipeline.iterate.prefetch_to_device", stream._prefetch_in_thread
    )
    monkeypatch.setattr(Tensor, "record_stream", lambda *args: None)
    return lambda: [
        thread.name for thread in threading.enumerate() if thread.name == "halfstep-stream"
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_break_ends_the_thread_that_streams(
    stream_threads: Callable[[], list[str]], workers: int
) -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = data().workers(workers).to_device("cpu", budget=0)
    for _ in streamed:
        assert stream_threads() == ["halfstep-stream"]
        break
    assert stream_threads() == []
    assert numbers(streamed) == passes(2)[1]
    assert stream_threads() == []


# Fetches that failed


class Flaky:
    """Fails the second time it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("for once")
        return x


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_failed_is_fetched_again(workers: int) -> None:
    broken = data().map(Flaky(), "i").workers(workers)
    stream = iter(broken)
    seen = [next(stream)[0].tolist()]
    with pytest.raises(RuntimeError, match="for once"):
        next(stream)
    assert broken.state_dict()["step"] == 1
    assert seen + numbers(stream) == passes(1)[0]
    assert broken.state_dict()["epoch"] == 1


# Copies and moves


def test_copies_of_a_data_set_with_a_pass_under_way() -> None:
    first = data().workers(1)
    first_stream = iter(first)
    next(first_stream)
    for duplicate in (pickle.loads(pickle.dumps(first)), copy.deepcopy(first), copy.copy(first)):
        assert numbers(duplicate) == passes(2)[1]
    assert len(numbers(first_stream)) == 5


MOVES: dict[str, Callable[[Dataset], Dataset]] = {
    "workers": lambda data: data.workers(1),
    "to_device": lambda data: data.to_device("cpu"),
    "load": lambda data: data.load(),
    "all": lambda data: data.load().to_device("cpu").workers(0),
}


@pytest.mark.parametrize("name", MOVES)
def test_where_it_runs_changes_no_position(name: str) -> None:
    def build() -> Dataset:
        return Dataset(Numbers()).shuffle(seed=1).shard(2, 0).batch(4)

    first = build()
    stream = iter(first)
    next(stream)
    with pytest.warns(Notice) if name == "to_device" else nullcontext():
        second = build()
        second.load_state_dict(first.state_dict())
        moved = MOVES[name](second)
    assert moved.state_dict() == first.state_dict()
    assert numbers(moved) == numbers(stream)


def test_a_state_goes_from_the_data_set_to_what_was_loaded_from_it_and_back() -> None:
    def build() -> Dataset:
        return Dataset(Numbers()).batch(4)

    for first, second in ((build(), build().load()), (build().load(), build())):
        stream = iter(first)
        next(stream)
        second.load_state_dict(first.state_dict())
        assert numbers(second) == numbers(stream)


def test_load_after_a_stream_places_the_data_anew() -> None:
    with pytest.warns(Notice, match="not resident"):
        streamed = Dataset(Numbers()).batch(4).to_device("cpu", budget="1MB")
    loaded = streamed.load()
    assert loaded.placement.kind == "resident"
    assert numbers(loaded) == numbers(streamed)


# States


def saved_state() -> dict[str, Any]:
    """Saved after one batch."""
    dataset = data()
    list(islice(dataset, 1))
    return dataset.state_dict()


BAD_STATES: dict[str, tuple[dict[str, Any], str]] = {
    "step beyond": ({"step": 7}, "expected a step of 0 to 6 in the position, got 7"),
    "negative": ({"epoch": -1}, "expected a whole number for epoch in the position, got -1"),
    "a half": ({"step": 1.5}, "expected a whole number for step in the position, got 1.5"),
    "shards": ({"shards": 2}, r"one of 2 shards, after 0 items.* Add \.shard\(1, 0\)"),
    "start": ({"start": 4}, r"one of 1 shards, after 4 items.* Add \.shard\(1, 0\)"),
}


@pytest.mark.parametrize("name", BAD_STATES)
def test_a_bad_state_is_refused(name: str) -> None:
    change, message = BAD_STATES[name]
    with pytest.raises(ValueError, match=message):
        data().load_state_dict(saved_state() | change)


@pytest.mark.parametrize("key", ["epoch", "step", "shards", "start", "start_epoch", "pipeline"])
def test_a_state_with_something_missing_is_refused(key: str) -> None:
    with pytest.raises(
        ValueError, match=rf"expected the state of a hs\.data\.Dataset, but \['{key}'\] are missing"
    ):
        data().load_state_dict(
            {name: value for name, value in saved_state().items() if name != key}
        )


def double(x: Tensor) -> Tensor:
    return x * 2


class NoOp:
    """A transform without a repr of its own."""

    draws = 0

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch


def base() -> Dataset:
    return Dataset({"i": torch.arange(12)})


OTHERS: dict[str, tuple[Dataset, Dataset, str]] = {
    "shard moved": (
        base().shard(2, 0).repeat(2),
        base().repeat(2).shard(2, 0),
        "it had \"shard.*has 'repeat",
    ),
    "inner shard": (
        base().shard(2, 0).shard(2, 0),
        base().shard(3, 0).shard(2, 0),
        r"shard\(2, 0.*shard\(3, 0",
    ),
    "uneven": (
        base().shard(5, 0),
        base().shard(5, 0, uneven="drop"),
        "uneven='keep'.*uneven='drop'",
    ),
    "per batch": (
        base().map(double).batch(4),
        base().batch(4).map(double),
        "double on i, per sample.*per batch",
    ),
    "output": (
        base().map(double, "i", output="a"),
        base().map(double, "i", output="b"),
        "on i to a.*on i to b",
    ),
    "partial": (
        base().map(functools.partial(torch.add, other=1)),
        base().map(functools.partial(torch.add, other=2)),
        r"partial\(.*add, other=1\).*other=2",
    ),
    "part": (base().take(5), base().skip(7), r"take\(5\).*skip\(7\)"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_pipelines_that_deliver_something_else_are_told_apart(name: str) -> None:
    first, second, message = OTHERS[name]
    with pytest.raises(ValueError, match=message):
        second.load_state_dict(first.state_dict())


def test_a_description_holds_no_memory_address() -> None:
    datasets = [
        base().map(operation)
        for operation in (NoOp(), lambda x: x, functools.partial(double), double)
    ]
    assert [dataset.plan.describe()[1] for dataset in datasets] == [
        "map(NoOp on i)",
        "map(test_a_description_holds_no_memory_address.<locals>.<lambda> on i, per sample)",
        "map(partial(double) on i, per sample)",
        "map(double on i, per sample)",
    ]


def test_the_state_of_an_unsharded_pipeline_goes_to_shards() -> None:
    unsharded = base().batch(2)
    seen = [i for (item,) in islice(unsharded, 2) for i in item.tolist()]
    for rank in range(3):
        shard = base().shard(3, rank).batch(2)
        shard.load_state_dict(unsharded.state_dict())
        seen += [i for batch in numbers(shard) for i in batch]
    assert sorted(seen) == list(range(12))


def test_a_shard_that_ran_out_first_waits_for_the_others() -> None:
    """Five samples on two ranks, both after two steps: rank 1 has no more, rank 0 has one."""
    ranks = [Dataset({"i": torch.arange(5)}).shard(2, rank).batch(1) for rank in range(2)]
    streams = [iter(rank) for rank in ranks]
    for rank_stream in (*streams, *streams):
        next(rank_stream)
    for saved in (rank.state_dict() for rank in ranks):
        assert (saved["epoch"], saved["step"]) == (0, 2)
        single = Dataset({"i": torch.arange(5)}).shard(1, 0).batch(1)
        single.load_state_dict(saved)
        assert numbers(single) == [[4]]
        for rank, expected in enumerate(([[4]], [])):
            resumed = Dataset({"i": torch.arange(5)}).shard(2, rank).batch(1)
            resumed.load_state_dict(saved)
            assert numbers(resumed) == expected
            assert resumed.state_dict()["epoch"] == 1
    assert next(streams[1], None) is None
    assert ranks[1].state_dict()["epoch"] == 1


def test_transforms_draw_the_same_random_numbers_in_workers() -> None:
    images = torch.randint(0, 256, (24, 8, 8, 3), dtype=torch.uint8)
    dataset = Dataset({"image": images}, seed=2).map([PadCrop(8, 2), Flip()]).shuffle().batch(4)
    for (on_host,), (in_worker,) in zip(dataset, dataset.workers(1), strict=True):
        assert torch.equal(on_host, in_worker)


# Random states


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes")
@pytest.mark.parametrize("workers", [0, 1, 4])
def test_fetching_leaves_the_random_states_of_the_process_alone(workers: int) -> None:
    """However many processes fetch, and in the passes after the first one too."""
    pipeline = data().map(lambda i: i + torch.rand(()), "i").workers(workers)
    before = rng.host_states()
    for _ in range(2):
        numbers(pipeline)
    numbers(islice(pipeline, 2))
    assert rng.equal_host_states(before, rng.host_states())


def test_a_change_of_any_host_state_is_seen() -> None:
    draws: list[Callable[[], Any]] = [
        random.random,
        np.random.rand,
        np.random.randn,
        lambda: torch.rand(()),
    ]
    for draw in draws:
        before = rng.host_states()
        assert rng.equal_host_states(before, rng.host_states())
        draw()
        assert not rng.equal_host_states(before, rng.host_states())
