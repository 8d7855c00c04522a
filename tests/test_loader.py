"""Other people's loaders: passes, resume by their own state or by replay, the same batches after either."""

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

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
    noise = torch.rand(3)  # the training between the batches draws too
    state, random = first.state_dict(), torch.get_rng_state()
    whole = head + seen(stream)
    after = seen(first) if make is not shuffled else None

    torch.manual_seed(99)
    second = Loader(make())
    if stop:
        with pytest.warns(Notice, match=f"DataLoader cannot seek: its first {stop} batches are fetched again"):
            second.load_state_dict(state)
    else:
        second.load_state_dict(state)
    torch.set_rng_state(random)  # as a checkpoint does
    resumed = head + seen(second)
    if stop:
        assert resumed == whole
        assert after is None or seen(second) == after
    assert second.epoch == (3 if stop and after else 2)
    assert noise.shape == (3,)


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
        sampler: DistributedSampler[Any] = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=True, seed=3)
        return Loader(DataLoader(DATA, batch_size=4, sampler=sampler))

    ours = loader()
    passes = [seen(ours), seen(ours)]
    assert passes[0] != passes[1]
    again = loader()
    again.load_state_dict({**ours.state_dict(), "epoch": 1, "step": 0})
    assert seen(again) == passes[1]


def test_sizes() -> None:
    assert Loader(shuffled()).size == 6
    assert Loader([1, 2]).size == 2
    assert Loader(Stateful()).size is None


def test_batches_keep_their_shape_on_the_way_to_a_device(device: torch.device) -> None:
    batches = [{"a": torch.ones(2), "b": [torch.zeros(1), "text"]}, (torch.ones(1), None)]
    first, second = Loader(batches).to_device(device)
    assert first["a"].device.type == device.type
    assert first["b"][1] == "text"
    assert isinstance(second, tuple)
    assert second[1] is None


def test_an_iterator_that_runs_once_is_refused() -> None:
    with pytest.raises(TypeError, match=r"can be gone through again.* got generator\. Wrap a generator function"):
        Loader(i for i in range(3))
    with pytest.raises(TypeError, match="got int"):
        Loader(3)  # type: ignore[arg-type]


def test_a_foreign_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected the state of a hs\.data\.Loader, version 1"):
        Loader(shuffled()).load_state_dict({"epoch": 0})
