"""The processes that train one network together, over torch.distributed.

Under torchrun (or whatever sets its variables: Kubernetes' PyTorchJob, a script under SLURM) each
process finds its rank in the environment. A process group that the program has made is used as it
is.
"""

import atexit
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.host_requests import HostRequests, Request
from halfstep.errors import Notice, RankLostError
from halfstep.utils.rank_environment import attempt_of_environment, started_by_torchrun

# torch 2.13 gave it another name.
_NAMES_OF_ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
_all_gather: Any = next((getattr(dist, n) for n in _NAMES_OF_ALL_GATHER if hasattr(dist, n)), None)

BROADCAST_ELEMENTS = 1 << 24  # of one dtype at a time: bounds the memory of a broadcast


class Ranks:
    """The processes of a job as one of them sees it: its own number, their count, collectives.

    Without a process group (one process alone) every collective returns what it was given.
    """

    def __init__(self, group: Any = None, host_group: Any = None) -> None:
        self.group = group
        self.host_group = host_group  # for values that the hosts know; never waits for a device
        self.index = 0
        self.count = 1
        if group is not None:
            self.index = dist.get_rank(group)
            self.count = dist.get_world_size(group)
        self.requests = HostRequests()

    def __str__(self) -> str:
        return f"rank {self.index} of {self.count}"

    # Collectives of tensors on the device.

    def all_reduce_(self, tensor: Tensor, what: str) -> None:
        """Sums a tensor over all ranks, in place."""
        if self.group is not None:
            with self.named_errors(what):
                dist.all_reduce(tensor, group=self.group)

    def start_all_reduce_(self, tensor: Tensor, what: str) -> Any:
        """The same, begun: returns a handle to wait on, or None where there is nothing to do."""
        if self.group is None:
            return None
        with self.named_errors(what):
            return dist.all_reduce(tensor, group=self.group, async_op=True)

    def all_gather(self, tensor: Tensor, what: str) -> Tensor:
        """The tensors of all ranks, of one shape and dtype, stacked in the order of the ranks."""
        if self.group is None:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty((self.count, *tensor.shape))
        with self.named_errors(what):
            _all_gather(gathered.view(-1), tensor.contiguous().view(-1), group=self.group)
        return gathered

    def exchange_chunks(self, chunks: Tensor, sizes: Sequence[int], what: str) -> Tensor:
        """Row i of `chunks` goes to rank i. Returns what the ranks sent here, one after another.

        `sizes` are the numbers of elements that come from each rank.
        """
        if self.group is None:
            return chunks.reshape(-1)
        received = chunks.new_empty(sum(sizes))
        sent_sizes = [chunks[0].numel()] * self.count
        with self.named_errors(what):
            dist.all_to_all_single(
                received, chunks.reshape(-1), list(sizes), sent_sizes, group=self.group
            )
        return received

    def broadcast_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Gives all ranks rank 0's values of these tensors, in place."""
        if self.group is None or self.count == 1:
            return
        for tensor in tensors:
            _broadcast_in_pieces(tensor, self, what)

    # Values of the host.

    def any_of(self, flags: Sequence[bool], what: str) -> list[bool]:
        """Each flag, set if it is set on any rank. Carries the hosts' requests along."""
        all_flags = self.own_flags(flags)
        if self.host_group is not None:
            values = torch.tensor(all_flags, dtype=torch.uint8)
            with self.named_errors(what):
                dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.host_group)
            all_flags = [value != 0 for value in values.tolist()]
        return self.agreed_flags(all_flags)

    def own_flags(self, flags: Sequence[bool]) -> list[bool]:
        """What this rank sends in an exchange of flags: its requests, then these flags."""
        return [*self.requests.to_exchange(), *flags]

    def agreed_flags(self, all_flags: list[bool]) -> list[bool]:
        """The flags behind the requests that came with them, which are noted."""
        self.requests.exchanged(all_flags[: len(Request)])
        return all_flags[len(Request) :]

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        """One small Python value of each rank, in the order of the ranks."""
        if self.host_group is None:
            return [value]
        values: list[Any] = [None] * self.count
        with self.named_errors(what):
            dist.all_gather_object(values, value, group=self.host_group)
        return values

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Rank 0's small Python value."""
        return self.gather_objects(value, what)[0]

    @contextmanager
    def named_errors(self, what: str) -> Iterator[None]:
        """An error inside a collective says which one it was, and that another rank is the cause.

        torch raises it where a rank has ended, hangs beyond the timeout, or called another
        collective.
        """
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(
                f"{self}: {what}: another rank did not take part. It has ended with an error of "
                "its own, hangs, or runs another program; look for its message. torch says: "
                f"{_first_line(error)}"
            ) from error


def find_ranks(device: torch.device) -> Ranks | None:
    """The ranks of this job; None where this process was started alone.

    Joins the process group of torchrun, unless the program has made one.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not started_by_torchrun():
            return None
        _join(device)
    world = dist.group.WORLD
    ranks = Ranks(world, _host_group_of(world))
    _check_devices(ranks, device)
    return ranks


def _join(device: torch.device) -> None:
    """Joins torchrun's process group: NCCL for CUDA, gloo for a CPU."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    backend = "nccl" if device.type == "cuda" else "gloo"
    arguments: dict[str, Any] = {}
    if device.type == "cuda":
        arguments["device_id"] = device
    # torchrun's store outlives the ranks that it starts again: what those of the last attempt wrote
    # into it would be read as the addresses of these.
    store, rank, count = next(rendezvous("env://"))
    own_store = PrefixStore(f"attempt-{attempt_of_environment()}", store)
    dist.init_process_group(backend, store=own_store, rank=rank, world_size=count, **arguments)
    atexit.register(_leave)
    if rank > 0:
        # Rank 0 says it already.
        warnings.filterwarnings("ignore", category=Notice)
    if count > 1:
        sys.excepthook = _excepthook_of(rank)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _excepthook_of(rank: int) -> Any:
    """Prints a traceback behind the number of the rank, in one write: ranks print side by side."""

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        lines = [f"[rank {rank}] {line}" for line in text.splitlines()]
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()

    return excepthook


# The group of hosts beside the last world that was seen: making one is a collective of its own.
_HOST_GROUPS: list[tuple[Any, Any]] = []


def _host_group_of(world: Any) -> Any:
    """A group over gloo with the ranks of `world`: `world` itself where it is gloo's."""
    if dist.get_backend(world) == "gloo":
        return world
    for known_world, host_group in _HOST_GROUPS:
        if known_world is world:
            return host_group
    host_group = dist.new_group(backend="gloo")
    _HOST_GROUPS[:] = [(world, host_group)]
    return host_group


def _check_devices(ranks: Ranks, device: torch.device) -> None:
    """Refuses two NCCL ranks on one GPU, and ranks on devices of different kinds."""
    place = (os.uname().nodename, str(device))
    places = ranks.gather_objects(place, "the devices of the ranks")
    kinds = sorted({name.split(":")[0] for _, name in places})
    if len(kinds) > 1:
        raise ValueError(
            f"expected the network on one kind of device on all ranks, found {', '.join(kinds)}; "
            "move it with device='auto', or with net.to(…), before the step is built"
        )
    uses_nccl = ranks.group is not None and dist.get_backend(ranks.group) == "nccl"
    sharing = [i for i, other in enumerate(places) if other == place]
    if uses_nccl and len(sharing) > 1:
        raise ValueError(
            f"ranks {', '.join(map(str, sharing))} are all on {device} of {place[0]}: expected one "
            "GPU for each. Give Model(device='auto'), or move the network to "
            "cuda:LOCAL_RANK before the step is built"
        )


def _broadcast_in_pieces(tensor: Tensor, ranks: Ranks, what: str) -> None:
    """Broadcasts the values of one tensor, complex ones as real numbers."""
    values = tensor.detach()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.contiguous().view(-1)
    for start in range(0, flat.numel(), BROADCAST_ELEMENTS):
        piece = flat[start : start + BROADCAST_ELEMENTS]
        with ranks.named_errors(what):
            dist.broadcast(piece, group_src=0, group=ranks.group)
    with torch.no_grad():
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view(values.shape))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
