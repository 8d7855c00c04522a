"""Other people's loaders: passes, and the same batches after a resume.

A loader is resumed by its own state, or by a replay.
"""

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
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from halfstep.data import Loader
from halfstep.errors import CheckpointError, Notice

DATA = TensorDataset(torch.arange(23), torch.arange(23) * 2)


def shuffled_globally(workers: int = 0) -> DataLoader[Any]:
    """Decided by torch's own random state, as most users' loaders are."""
    return DataLoader(DATA, batch_size=4, shuffle=True, num_workers=workers)


def shuffled_by_own_generator() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    return DataLoader(DATA, batch_size=4, shuffle=True, generator=generator)


def shuffled_by_own_sampler() -> DataLoader[Any]:
    sampler = RandomSampler(DATA, generator=torch.Generator().manual_seed(6))
    return DataLoader(DATA, batch_size=4, sampler=sampler)


class Stateful:
    """A loader that can seek, with the protocol of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.position = 0
        self.delivered: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < 6:
            self.position += 1
            self.delivered.append(self.position)
            yield torch.tensor([self.position])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def as_lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


@pytest.mark.parametrize(
    "make_loader", [shuffled_globally, shuffled_by_own_generator, shuffled_by_own_sampler]
)
@pytest.mark.parametrize("stop", [0, 1, 5, 6])
def test_a_loader_that_cannot_seek_is_replayed_to_the_same_batches(
    make_loader: Any, stop: int
) -> None:
    torch.manual_seed(1)
    first = Loader(make_loader())
    list(first)  # a full pass before, so that generators have moved
    stream = iter(first)
    before_save = as_lists(islice(stream, stop))
    torch.rand(3)  # the training between the batches draws too
    state = first.state_dict()
    torch_state = torch.get_rng_state()
    full_pass = before_save + as_lists(stream)
    next_pass = as_lists(first) if make_loader is not shuffled_globally else None

    torch.manual_seed(99)
    second = Loader(make_loader())
    notice = pytest.warns(
        Notice, match=f"DataLoader cannot seek: its first {stop} batches are fetched again"
    )
    with notice if stop else nullcontext():
        second.load_state_dict(state)
    torch.set_rng_state(torch_state)  # as a checkpoint does
    assert before_save + as_lists(second) == full_pass
    assert next_pass is None or as_lists(second) == next_pass
    assert second.epoch == (3 if next_pass else 2)


def test_a_replay_leaves_torchs_random_state_alone() -> None:
    first = Loader(shuffled_globally())
    next(iter(first))
    second = Loader(shuffled_globally())
    with pytest.warns(Notice):
        second.load_state_dict(first.state_dict())
    before = torch.get_rng_state()
    next(iter(second))
    assert torch.equal(before, torch.get_rng_state())


def test_workers_replay_too() -> None:
    first = Loader(shuffled_globally(workers=1))
    stream = iter(first)
    before_save = as_lists(islice(stream, 2))
    state = first.state_dict()
    after_save = as_lists(stream)
    second = Loader(shuffled_globally(workers=1))
    with pytest.warns(Notice):
        second.load_state_dict(state)
    assert as_lists(second) == after_save
    assert len(before_save) == 2


def test_a_loader_with_a_state_of_its_own_seeks() -> None:
    first = Loader(Stateful())
    before_save = [int(batch) for batch in islice(iter(first), 4)]
    other = Stateful()
    second = Loader(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is replayed, so nothing is announced
        second.load_state_dict(first.state_dict())
    assert before_save + [int(batch) for batch in second] == [1, 2, 3, 4, 5, 6]
    assert other.delivered == [5, 6]


def test_the_epoch_of_distributed_samplers_is_set() -> None:
    def loader() -> Loader:
        sampler: DistributedSampler[Any] = DistributedSampler(
            DATA, num_replicas=2, rank=1, shuffle=True, seed=3
        )
        return Loader(DataLoader(DATA, batch_size=4, sampler=sampler))

    first = loader()
    passes = [as_lists(first), as_lists(first)]
    assert passes[0] != passes[1]
    second = loader()
    second.load_state_dict({**first.state_dict(), "epoch": 1, "step": 0})
    assert as_lists(second) == passes[1]


def test_sizes() -> None:
    assert Loader(shuffled_globally()).size == len(Loader(shuffled_globally())) == 6
    assert Loader([1, 2]).size == 2
    assert Loader(Stateful()).size is None
    with pytest.raises(TypeError, match="Stateful does not know how many batches it has"):
        len(Loader(Stateful()))


@pytest.mark.parametrize(
    "make_loader", [shuffled_globally, shuffled_by_own_generator, shuffled_by_own_sampler]
)
def test_between_passes_the_random_states_are_saved_and_set(make_loader: Any) -> None:
    """Only the loader's own state goes from one run to the other."""
    torch.manual_seed(1)
    first = Loader(make_loader())
    first_pass = as_lists(first)
    state = first.state_dict()
    expected = [as_lists(first), as_lists(first)]
    torch.manual_seed(1)
    second = Loader(make_loader())
    second.load_state_dict(state)
    assert (second.epoch, second.step) == (1, 0)
    assert [as_lists(second), as_lists(second)] == expected
    assert expected[0] != first_pass


def test_a_state_saved_again_before_it_was_used_is_the_same() -> None:
    for make_loader in (lambda: Loader(shuffled_by_own_generator()), lambda: Loader(Stateful())):
        first = make_loader()
        stream = iter(first)
        for _ in range(2):
            next(stream)
        state = first.state_dict()
        second = make_loader()
        with pytest.warns(Notice) if state["own"] is None else nullcontext():
            second.load_state_dict(state)
            third = make_loader()
            third.load_state_dict(second.state_dict())
        assert (second.epoch, second.step) == (0, 2)
        assert [str(batch) for batch in third] == [str(batch) for batch in stream]


class ShufflingBatchSampler:
    """A batch sampler of the user's, with an epoch.

    It shuffles by a generator of its own, or by that of Python's or numpy's module.
    """

    def __init__(self, by: str) -> None:
        self.by = by
        self.epochs: list[int] = []
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
        return Loader(DataLoader(DATA, batch_sampler=ShufflingBatchSampler(by)))

    first = loader()
    list(first)
    stream = iter(first)
    next(stream)
    state = first.state_dict()
    after_save = as_lists(stream)
    second = loader()
    with pytest.warns(
        Notice, match="on the assumption that their order comes from Python's, numpy's and torch's"
    ):
        second.load_state_dict(state)
    python_state = random.getstate()
    numpy_state = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    assert as_lists(second) == after_save
    assert second.batches.batch_sampler.epochs == [1]  # type: ignore[attr-defined]
    assert random.getstate() == python_state
    state_after = np.random.get_state(legacy=False)["state"]  # noqa: NPY002
    assert np.array_equal(state_after["key"], numpy_state["key"])


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


def test_making_a_loader_begins_no_pass() -> None:
    class CountingList(list[Tensor]):
        pass_count = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.pass_count += 1
            return super().__iter__()

    batches = CountingList([torch.zeros(1)])
    list(Loader(batches).to_device("cpu"))
    assert batches.pass_count == 1


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


def test_a_batch_that_failed_is_fetched_again() -> None:
    loader = Loader(Flaky())
    stream = iter(loader)
    assert [int(next(stream)), int(next(stream))] == [0, 1]
    with pytest.raises(OSError, match="for once"):
        next(stream)
    assert loader.step == 2
    assert [int(batch) for batch in stream] == [2, 3, 4]
    assert (loader.epoch, loader.step) == (1, 0)


def test_a_loader_that_has_fewer_batches_than_before_is_refused() -> None:
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
        Loader(shuffled_globally()).load_state_dict({"epoch": 0})


# What a resumed pass needs beside the states of the process.


class DrawsInWorkers(Dataset[Any]):
    """Each sample with what its worker draws."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Any:
        return torch.tensor(i), torch.rand(())


def persistent_loader() -> DataLoader[Any]:
    return DataLoader(
        DrawsInWorkers(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
    )


def numbers_of(batches: Any) -> list[Any]:
    return [batch[0].tolist() for batch in batches]


@pytest.mark.parametrize("stop", [0, 2])
def test_persistent_workers_give_the_same_samples_and_leave_the_same_random_state(
    stop: int,
) -> None:
    """In the second pass too, which torch begins without a new base seed."""
    torch.manual_seed(1)
    first = Loader(persistent_loader())
    numbers_of(first)
    stream = iter(first)
    numbers_of(islice(stream, stop))
    state = first.state_dict()
    torch_state = torch.get_rng_state()
    expected = [numbers_of(stream), numbers_of(first)]
    end = torch.get_rng_state()

    torch.manual_seed(99)
    second = Loader(persistent_loader())
    with pytest.warns(Notice) if stop else nullcontext():
        second.load_state_dict(state)
    torch.set_rng_state(torch_state)
    assert [numbers_of(second), numbers_of(second)] == expected
    assert torch.equal(torch.get_rng_state(), end)


def test_persistent_workers_that_run_already_are_ended_where_the_saved_pass_had_none() -> None:
    torch.manual_seed(1)
    first = Loader(persistent_loader())
    stream = iter(first)
    next(stream)
    state = first.state_dict()
    torch_state = torch.get_rng_state()
    expected = as_lists(stream)
    batches = persistent_loader()
    list(batches)
    second = Loader(batches)
    with pytest.warns(Notice):
        second.load_state_dict(state)
    torch.set_rng_state(torch_state)
    assert as_lists(second) == expected


@pytest.mark.parametrize("stop", [0, 2])
def test_another_number_of_workers_is_announced(stop: int) -> None:
    first = Loader(shuffled_globally(workers=1))
    numbers_of(islice(iter(first), stop))
    second = Loader(shuffled_globally())
    replay = pytest.warns(Notice, match="cannot seek") if stop else nullcontext()
    with replay, pytest.warns(Notice, match="had num_workers=1 and has 0: what is drawn at random"):
        second.load_state_dict(first.state_dict())


def test_a_shared_generator_goes_on_where_it_stood() -> None:
    """Something else has drawn from the loader's generator within the pass."""

    def loader() -> tuple[Loader, torch.Generator]:
        batches = shuffled_by_own_generator()
        assert isinstance(batches.generator, torch.Generator)
        return Loader(batches), batches.generator

    first, generator = loader()
    stream = iter(first)
    next(stream)
    torch.rand(3, generator=generator)
    state = first.state_dict()
    expected = [as_lists(stream), as_lists(first)]
    second, _ = loader()
    with pytest.warns(Notice):
        second.load_state_dict(state)
    assert [as_lists(second), as_lists(second)] == expected


def test_a_batch_that_was_fetched_and_not_used_does_not_count() -> None:
    for make_batches in (shuffled_by_own_generator, Stateful):
        first = Loader(make_batches())
        stream = iter(first)
        fetched = [next(stream) for _ in range(3)]
        state = first.state_dict(step=2)
        assert (state["step"], state["own"]) == (2, None)
        second = Loader(make_batches())
        with pytest.warns(Notice):
            second.load_state_dict(state)
        assert str(next(iter(second))) == str(fetched[2])


def test_a_state_that_cannot_go_back_is_not_saved() -> None:
    first = Loader(Stateful())
    next(iter(first))
    second = Loader(Stateful())
    second.load_state_dict(first.state_dict())
    stream = iter(second)
    next(stream)
    with pytest.raises(CheckpointError, match="has delivered 2 batches of this pass, of which 1"):
        second.state_dict(step=1)
