"""One pass over a plan, from any item on: on the host, in worker processes, or to a device."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from halfstep.data.pipeline.collate import Batch
from halfstep.data.pipeline.plan import Plan, SeedKey
from halfstep.data.pipeline.position import Position
from halfstep.data.pipeline.residency import Placement
from halfstep.data.pipeline.stream import copy_to_device, prefetch_to_device

# Sample numbers computed at a time. The position does not depend on it.
_SAMPLES_PER_BLOCK = 1 << 16

# Samples of one item, their passes, and the seed of the user's random code where it runs.
ItemIndices = tuple[Tensor, Tensor, SeedKey | None]


@dataclass
class PassPosition:
    """How far a pass is.

    A data set remembers this and not the pass itself, so that a pass left early is freed at once.
    """

    plan: Plan
    epoch: int
    step: int
    is_exhausted: bool = False  # an item was requested beyond the last one
    size: int = field(init=False)  # items in the pass

    def __post_init__(self) -> None:
        self.size = self.plan.size

    @property
    def is_done(self) -> bool:
        """Whether all items are delivered."""
        return self.step >= self.size

    @property
    def resume_position(self) -> Position:
        """Where a run that saves now goes on later."""
        position = Position(self.plan, self.epoch, self.step)
        if self.is_exhausted:
            return position.next_pass()
        return position.after_finished_pass()


@dataclass(frozen=True)
class WorkerSettings:
    """How many processes fetch, and how many batches each is ahead."""

    count: int
    ahead: int


class Workers:
    """torch's DataLoader with its worker processes kept between passes.

    The sample numbers of an item are computed in this process, its samples are fetched in the
    others. The loader must be freed by its last reference: in a reference cycle, the garbage
    collector ends each worker by a time-out of 5 s.
    """

    def __init__(self, plan: Plan, settings: WorkerSettings, pin_memory: bool) -> None:
        self.plan = plan
        self.settings = settings
        self.pin_memory = pin_memory
        self.sampler = _ItemSampler()
        self.busy = False
        self.loader: DataLoader[Any] = DataLoader(
            _PlanDataset(plan),
            batch_size=None,
            sampler=self.sampler,
            num_workers=settings.count,
            prefetch_factor=settings.ahead,
            persistent_workers=True,
            pin_memory=pin_memory,
            collate_fn=_return_unchanged,
            # torch draws a base seed for the workers from here. Nothing depends on it, as user code
            # is seeded for each item; drawn from the process's generator, it would move dropout.
            generator=torch.Generator(),
        )

    def available(self) -> "Workers":
        """These, or new ones for one pass while an unfinished pass still fetches in these."""
        if self.busy:
            return Workers(self.plan, self.settings, self.pin_memory)
        return self

    def fetch_all(self, indices: Iterator[ItemIndices]) -> Iterator[Batch]:
        """The items with these indices, in order."""
        self.busy = True
        self.sampler.indices = indices
        try:
            yield from self.loader
        except Exception as error:
            # Its message holds the worker's traceback; torch's frames would make a cycle.
            raise error.with_traceback(None) from None
        finally:
            self.busy = False
            self.sampler.indices = iter(())


class _ItemSampler(Sampler[Any]):
    """The indices of the pass under way, as the sampler of a DataLoader.

    They are lists, because each tensor that is sent to a worker takes a file handle.
    """

    def __init__(self) -> None:
        self.indices: Iterator[ItemIndices] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return (
            (samples.tolist(), epochs.tolist(), seed_key)
            for samples, epochs, seed_key in self.indices
        )


class _PlanDataset(TorchDataset[Any]):
    """A plan as the data set of a DataLoader, whose sampler is an `_ItemSampler`."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.size

    def __getitem__(self, indices: tuple[list[int], list[int], SeedKey | None]) -> Batch:
        samples, epochs, seed_key = indices
        return self.plan.item(torch.tensor(samples), torch.tensor(epochs), seed_key)


def _return_unchanged(item: Any) -> Any:
    """The collate function of the DataLoader. torch's own would make lists of tuples."""
    return item


class Pass:
    """One pass under way: an iterator over its items, from `position` on.

    `position.step` counts the items delivered, not those fetched ahead. A fetch that failed is
    tried again by the next `next`.
    """

    def __init__(
        self,
        position: PassPosition,
        placement: Placement,
        workers: Workers | None,
        format_item: Callable[[Batch], Any],
    ) -> None:
        self.position = position
        self._format_item = format_item
        self._deliver_from = partial(
            _deliver_items, position.plan, placement, workers, position.epoch
        )
        self._items: Iterator[Batch] | None = None

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._deliver_from(self.position.step)
        try:
            item = next(self._items)
        except StopIteration:
            self.position.is_exhausted = True
            raise
        except BaseException:
            self._items = None
            raise
        self.position.step += 1
        return self._format_item(item)

    def __length_hint__(self) -> int:
        return self.position.size - self.position.step

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, whatever others of the same data set do."""
        return self.position.resume_position.state_dict()


def _deliver_items(
    plan: Plan, placement: Placement, workers: Workers | None, epoch: int, step: int
) -> Iterator[Batch]:
    """The items of a pass from item `step` on, where the placement wants them.

    A generator, so that leaving the pass early closes what it opened: its thread, its use of the
    workers.
    """
    indices = _item_indices(plan, epoch, step)
    items: Iterator[Batch]
    if workers:
        items = workers.available().fetch_all(indices)
    else:
        items = (plan.item(*item) for item in indices)

    # A thread fetches ahead only where no code of the user's runs in it: random generators are
    # shared by all threads of a process.
    if placement.kind == "stream":
        if workers or plan.runs_no_user_code:
            items = prefetch_to_device(items, placement.device)
        else:
            items = copy_to_device(items, placement.device)
    with closing(items):  # type: ignore[type-var]
        yield from items


def _item_indices(plan: Plan, epoch: int, step: int) -> Iterator[ItemIndices]:
    """The indices of each item of a pass from item `step` on, computed in blocks."""
    block = max(1, _SAMPLES_PER_BLOCK // plan.samples_per_item)
    size = plan.size
    for start in range(step, size, block):
        count = min(block, size - start)
        indices = plan.sample_indices(epoch, start, count, plan.source.device)
        for i in range(len(indices)):
            samples, epochs = indices[i]
            seed_key = indices.seed_keys[i] if indices.seed_keys else None
            yield samples, epochs, seed_key
