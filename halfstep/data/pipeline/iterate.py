"""One pass over a plan, from any item on: on the host, in workers, or on a device."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from halfstep.data.pipeline.iterate__stream import moved, staged
from halfstep.data.pipeline.maps__parts import Batch
from halfstep.data.pipeline.plan import Key, Plan
from halfstep.data.pipeline.plan__position import Position
from halfstep.data.pipeline.residency import Placement

_AHEAD = 1 << 16  # tokens computed at a time; the position does not depend on it

Token = tuple[Tensor, Tensor, Key | None]


class _Feed(Sampler[Any]):
    """The tokens of the pass under way as the sampler of a DataLoader: lists, for a tensor would take a file handle."""

    def __init__(self) -> None:
        self.tokens: Iterator[Token] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return ((samples.tolist(), epochs.tolist(), key) for samples, epochs, key in self.tokens)


class Workers:
    """torch's DataLoader with its worker processes kept between passes; tokens are computed here, samples there.

    The loader must be freed by its last reference: in a cycle, the collector ends each worker by a time-out of 5 s.
    """

    def __init__(self, plan: Plan, count: int, ahead: int, pin: bool) -> None:
        self.plan, self.count, self.ahead, self.pin = plan, count, ahead, pin
        self.feed, self.busy = _Feed(), False
        self.loader: DataLoader[Any] = DataLoader(
            _Fetcher(plan), batch_size=None, sampler=self.feed, num_workers=count, prefetch_factor=ahead,
            persistent_workers=True, pin_memory=pin, collate_fn=_as_it_is,
        )  # fmt: skip

    def free(self) -> "Workers":
        """These, or others for one pass where an unfinished one still fetches here."""
        return Workers(self.plan, self.count, self.ahead, self.pin) if self.busy else self

    def batches(self, tokens: Iterator[Token]) -> Iterator[Batch]:
        self.busy, self.feed.tokens = True, tokens
        try:
            yield from self.loader
        except (
            Exception
        ) as error:  # its message holds the worker's traceback; torch's frames would make a cycle
            raise error.with_traceback(None) from None
        finally:
            self.busy, self.feed.tokens = False, iter(())


def _as_it_is(item: Any) -> Any:
    """torch's own way would make lists of tuples."""
    return item


class _Fetcher(TorchDataset[Any]):
    """A plan as the data set of a DataLoader whose indices are tokens."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.size

    def __getitem__(self, token: tuple[list[int], list[int], Key | None]) -> Batch:
        samples, epochs, key = token
        return self.plan.item(torch.tensor(samples), torch.tensor(epochs), key)


@dataclass
class Mark:
    """How far a pass is; what the data set remembers of it, so that a pass left early is freed at once."""

    plan: Plan
    epoch: int
    step: int
    over: bool = False  # somebody asked for more than there is

    @property
    def done(self) -> bool:
        return self.step >= self.plan.size

    @property
    def position(self) -> Position:
        here = Position(self.plan, self.epoch, self.step)
        return here.next() if self.over else here.settled()


class Pass:
    """One pass under way, from `mark` on: an iterator over its items. `mark.step` counts those delivered, not those
    fetched ahead. A fetch that failed is tried again by the next `next`."""

    def __init__(
        self,
        mark: Mark,
        placement: Placement,
        workers: Workers | None,
        form: Callable[[Batch], Any],
    ) -> None:
        self.mark, self._form = mark, form
        self._start = partial(_delivered, mark.plan, placement, workers, mark.epoch)
        self._items: Iterator[Batch] | None = None

    def __iter__(self) -> "Pass":
        return self

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._start(self.mark.step)
        try:
            item = next(self._items)
        except StopIteration:
            self.mark.over = True
            raise
        except BaseException:
            self._items = None
            raise
        self.mark.step += 1
        return self._form(item)

    def __length_hint__(self) -> int:
        return self.mark.plan.size - self.mark.step

    def state_dict(self) -> dict[str, Any]:
        """Where this pass stands, whatever others of the same data set do."""
        return self.mark.position.state()


def _delivered(
    plan: Plan, placement: Placement, workers: Workers | None, epoch: int, step: int
) -> Iterator[Batch]:
    """A generator, so that leaving the pass early closes what it opened: its thread, its hold on the workers."""
    tokens = _tokens(plan, epoch, step)
    batches = workers.free().batches(tokens) if workers else (plan.item(*token) for token in tokens)
    if (
        placement.kind == "stream"
    ):  # a thread only where it runs no code of the user's: generators are not its own
        batches = (staged if workers or plan.ours else moved)(batches, placement.device)
    with closing(batches):  # type: ignore[type-var]
        yield from batches


def _tokens(plan: Plan, epoch: int, step: int) -> Iterator[Token]:
    block = max(1, _AHEAD // (plan.batch or 1))
    for start in range(step, plan.size, block):
        tokens = plan.tokens(epoch, start, min(block, plan.size - start), plan.source.device)
        for i in range(len(tokens)):
            yield *tokens[i], tokens.keys[i] if tokens.keys else None
