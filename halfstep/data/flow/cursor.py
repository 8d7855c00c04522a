"""One pass over a plan, from any item on: on the host, in workers, or on a device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from halfstep.data.flow.plan import Plan
from halfstep.data.flow.source import Batch
from halfstep.data.flow.stream import moved, staged

_CPU = torch.device("cpu")
_AHEAD = 1 << 16  # tokens computed at a time; the position does not depend on it

Token = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Placement:
    """Where batches come out and how they get there."""

    kind: str = "host"  # or "resident": gathered on the device, or "stream": copied there batch by batch
    device: torch.device = _CPU
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} on {self.device}" + (f": {self.reason}" if self.reason else "")


class _Feed(Sampler[Token]):
    """The tokens of the pass under way, as the sampler of a DataLoader."""

    def __init__(self) -> None:
        self.tokens: Iterator[Token] = iter(())

    def __iter__(self) -> Iterator[Token]:
        return self.tokens


class Workers:
    """torch's DataLoader with its worker processes kept between passes; tokens are computed here, samples there.

    The loader must be freed by its last reference: in a cycle, the collector ends each worker by a time-out of 5 s.
    """

    def __init__(self, plan: Plan, count: int, ahead: int, pin: bool) -> None:
        self.count, self.ahead, self.feed = count, ahead, _Feed()
        self.loader: DataLoader[Any] = DataLoader(
            _Fetcher(plan), batch_size=None, sampler=self.feed, num_workers=count, prefetch_factor=ahead,
            persistent_workers=True, pin_memory=pin,
        )  # fmt: skip

    def batches(self, tokens: Iterator[Token]) -> Iterator[Batch]:
        self.feed.tokens = tokens
        return _without_frames(iter(self.loader))


def _without_frames(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; a worker's error, whose message holds its traceback, leaves no cycle through torch's frames."""
    try:
        yield from batches
    except Exception as error:
        raise error.with_traceback(None) from None


class _Fetcher(TorchDataset[Any]):
    """A plan as the data set of a DataLoader whose indices are tokens."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return self.plan.size

    def __getitem__(self, token: Token) -> Batch:
        return self.plan.fetch(*token)


class Cursor:
    """Iterates over the batches of one pass as dicts; `step` counts those delivered, not those fetched ahead."""

    def __init__(self, plan: Plan, placement: Placement, epoch: int, step: int, workers: Workers | None = None) -> None:
        if epoch < 0 or not 0 <= step <= plan.size:
            raise ValueError(f"expected an epoch from 0 and a step of 0..{plan.size}, got epoch {epoch}, step {step}")
        self.plan, self.epoch, self.step = plan, epoch, step
        on = placement.device if placement.kind == "resident" else _CPU
        tokens = _tokens(plan, epoch, step, on)
        batches = workers.batches(tokens) if workers else (plan.fetch(*token) for token in tokens)
        if placement.kind == "stream":  # a thread only where it runs no code of the user's: generators are not its own
            move = staged if workers or plan.ours else moved
            batches = move(batches, placement.device)
        self._batches = batches

    def __iter__(self) -> "Cursor":
        return self

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self.step += 1
        return batch

    @property
    def done(self) -> bool:
        return self.step >= self.plan.size


def _tokens(plan: Plan, epoch: int, step: int, device: torch.device) -> Iterator[Token]:
    block = max(1, _AHEAD // (plan.batch or 1))
    for start in range(step, plan.size, block):
        tokens = plan.tokens(epoch, start, min(block, plan.size - start), device)
        yield from (tokens[i] for i in range(len(tokens)))
