"""Other people's loaders: passes, resume by their own state or by replay, the same batches after either."""

import random
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from halfstep.data import Loader
from halfstep.errors import Notice

DATA = TensorDataset(torch.arange(23), torch.arange(23) * 2)


def shuffled(workers: int = 0) -> DataLoader[Any]:
    """Decided by torch's own random state, as most users' loaders are."""
    return DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)


def own_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)


def own_sampler() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(6))
    return DataLoader(DATA, batch_size=4, sampler=sampler)


class Stateful:
    """A loader that can seek, with the protocol of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at, self.read = 0, list[int]()

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 6:
            self.at += 1
            self.read.append(self.at)
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def seen(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize("make", [shuffled, own_generator, own_sampler])
@pytest.mark.parametrize("stop", [0, 1, 5, 6])
def test_a_loader_that_cannot_seek_is_replayed_to_the_same_batches(make: Any, stop: int) -> None:
    torch.manual_seed(1)
    first = Loader(make())
    list(first)  # a whole pass before, so that generators have moved
    stream = iter(first)
    head = seen(islice(stream, stop))
    torch.rand(3)  # the training between the batches draws too
    state, at = first.state_dict(), torch.get_rng_state()
    whole = head + seen(stream)
    after = seen(first) if make is not shuffled else None

    torch.manual_seed(99)
    second = Loader(make())
    announced = pytest.warns(
        Notice, match=f"DataLoader cannot seek: its first {stop} batches are fetched again"
    )
    with announced if stop else nullcontext():
        second.load_state_dict(state)
    torch.set_rng_state(at)  # as a checkpoint does
    assert head + seen(second) == whole
    assert after is None or seen(second) == after
    assert second.epoch == (3 if after else 2)


def test_a_replay_leaves_torchs_random_state_as_it_found_it() -> None:
    first = Loader(shuffled())
    next(iter(first))
    second = Loader(shuffled())
    with pytest.warns(Notice):
        second.load_state_dict(first.state_dict())
    before = torch.get_rng_state()
    next(iter(second))
    assert torch.equal(before, torch.get_rng_state())


def test_workers_replay_too() -> None:
    first = Loader(shuffled(workers=1))
    stream = iter(first)
    head = seen(islice(stream, 2))
    state = first.state_dict()
    rest = seen(stream)
    second = Loader(shuffled(workers=1))
    with pytest.warns(Notice):
        second.load_state_dict(state)
    assert seen(second) == rest
    assert len(head) == 2


def test_a_loader_with_a_state_of_its_own_seeks() -> None:
    first = Loader(Stateful())
    head = [int(batch) for batch in islice(iter(first), 4)]
    other = Stateful()
    second = Loader(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is replayed, so nothing is announced
        second.load_state_dict(first.state_dict())
    assert head + [int(batch) for batch in second] == [1, 2, 3, 4, 5, 6]
    assert other.read == [5, 6]


def test_distributed_samplers_are_told_the_epoch() -> None:
    def loader() -> Loader:
        sampler: DistributedSampler[Any] = DistributedSampler(
            DATA, num_replicas=2, rank=1, shuffle=True, seed=3
        )
        return Loader(DataLoader(DATA, batch_size=4, sampler=sampler))

    ours = loader()
    passes = [seen(ours), seen(ours)]
    assert passes[0] != passes[1]
    again = loader()
    again.load_state_dict({**ours.state_dict(), "epoch": 1, "step": 0})
    assert seen(again) == passes[1]


def test_sizes() -> None:
    assert Loader(shuffled()).size == len(Loader(shuffled())) == 6
    assert Loader([1, 2]).size == 2
    assert Loader(Stateful()).size is None
    with pytest.raises(TypeError, match="Stateful does not know how many batches it has"):
        len(Loader(Stateful()))


@pytest.mark.parametrize("make", [shuffled, own_generator, own_sampler])
def test_between_passes_the_random_states_are_saved_and_set(make: Any) -> None:
    """Only the loader's own state goes from one run to the other."""
    torch.manual_seed(1)
    first = Loader(make())
    old = seen(first)
    state = first.state_dict()
    expected = [seen(first), seen(first)]
    torch.manual_seed(1)
    second = Loader(make())
    second.load_state_dict(state)
    assert (second.epoch, second.step) == (1, 0)
    assert [seen(second), seen(second)] == expected
    assert expected[0] != old


def test_a_state_saved_again_before_it_was_used_is_the_same() -> None:
    for make in (lambda: Loader(own_generator()), lambda: Loader(Stateful())):
        first = make()
        stream = iter(first)
        for _ in range(2):
            next(stream)
        state = first.state_dict()
        second = make()
        with pytest.warns(Notice) if state["own"] is None else nullcontext():
            second.load_state_dict(state)
            third = make()
            third.load_state_dict(second.state_dict())
        assert (second.epoch, second.step) == (0, 2)
        assert [str(batch) for batch in third] == [str(batch) for batch in stream]


class Shuffling:
    """A batch sampler of the user's, with a generator and an epoch; or one that shuffles by a module's generator."""

    def __init__(self, by: str) -> None:
        self.by, self.epochs = by, list[int]()
        self.generator = torch.Generator().manual_seed(3)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(range(23))
        if self.by == "generator":
            numbers = torch.randperm(23, generator=self.generator).tolist()
        elif self.by == "python":
            random.shuffle(numbers)
        else:
            np.random.shuffle(numbers)  # noqa: NPY002 - what users have
        yield from (numbers[i : i + 4] for i in range(0, 23, 4))


@pytest.mark.parametrize("by", ["generator", "python", "numpy"])
def test_batch_samplers_and_the_modules_generators_are_replayed(by: str) -> None:
    def loader() -> Loader:
        return Loader(DataLoader(DATA, batch_sampler=Shuffling(by)))

    first = loader()
    list(first)
    stream = iter(first)
    next(stream)
    state = first.state_dict()
    rest = seen(stream)
    second = loader()
    with pytest.warns(
        Notice, match="on the assumption that their order comes from Python's, numpy's and torch's"
    ):
        second.load_state_dict(state)
    before = random.getstate(), np.random.get_state()[1].copy()  # type: ignore[index] # noqa: NPY002
    assert seen(second) == rest
    assert second.batches.batch_sampler.epochs == [1]  # type: ignore[attr-defined]
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])  # type: ignore[index,arg-type] # noqa: NPY002


def test_after_a_break_the_next_for_is_the_next_pass() -> None:
    loader = Loader([torch.zeros(1)] * 3)
    for epoch in range(3):
        for _ in loader:
            assert (loader.epoch, loader.step) == (epoch, 1)
            break


def test_the_position_goes_with_it_to_a_device(device: torch.device) -> None:
    batches = [torch.tensor([i]) for i in range(5)]
    first = Loader(batches)
    list(islice(first, 2))
    second = Loader(batches)
    with pytest.warns(Notice):
        second.load_state_dict(first.state_dict())
    assert [int(batch) for batch in second.to_device(device)] == [2, 3, 4]


def test_making_one_begins_nothing() -> None:
    class Counting(list[Tensor]):
        begun = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.begun += 1
            return super().__iter__()

    batches = Counting([torch.zeros(1)])
    list(Loader(batches).to_device("cpu"))
    assert batches.begun == 1


class Flaky:
    """Fails once, at its third batch."""

    def __init__(self) -> None:
        self.failed = False

    def __iter__(self) -> Iterator[Tensor]:
        for i in range(5):
            if i == 2 and not self.failed:
                self.failed = True
                raise OSError("for once")
            yield torch.tensor([i])


def test_a_batch_that_failed_is_had_again() -> None:
    loader = Loader(Flaky())
    stream = iter(loader)
    assert [int(next(stream)), int(next(stream))] == [0, 1]
    with pytest.raises(OSError, match="for once"):
        next(stream)
    assert loader.step == 2
    assert [int(batch) for batch in stream] == [2, 3, 4]
    assert (loader.epoch, loader.step) == (1, 0)


def test_a_loader_that_has_fewer_batches_now_is_told() -> None:
    first = Loader([torch.zeros(1)] * 5)
    list(islice(first, 4))
    second = Loader([torch.zeros(1)] * 2)
    with pytest.warns(Notice):
        second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="expected list to give the 4 batches it had given, got 2"):
        list(second)


def test_batches_keep_their_shape_on_the_way_to_a_device(device: torch.device) -> None:
    batches = [{"a": torch.ones(2), "b": [torch.zeros(1), "text"]}, (torch.ones(1), None)]
    first, second = Loader(batches).to_device(device)
    assert first["a"].device.type == device.type
    assert first["b"][1] == "text"
    assert isinstance(second, tuple)
    assert second[1] is None


def test_an_iterator_that_runs_once_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"can be gone through again.* got generator\. Wrap a generator function"
    ):
        Loader(i for i in range(3))
    with pytest.raises(TypeError, match="got int"):
        Loader(3)  # type: ignore[arg-type]


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the state of a hs\.data\.Loader, version 1"):
        Loader(shuffled()).load_state_dict({"epoch": 0})
