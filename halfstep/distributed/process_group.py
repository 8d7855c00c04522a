"""The processes that train one network together, over torch.distributed.

Under torchrun (or whatever sets its variables: Kubernetes' PyTorchJob, a script under SLURM) each
process finds its rank in the environment. A process group that the program has made is used as it
is.
"""

import atexit
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from halfstep.distributed.host_requests import HostRequests, Request
from halfstep.distributed.joining import store_of_attempt
from halfstep.distributed.rank_progress import RankProgress
from halfstep.errors import Notice, RankLostError
from halfstep.utils.rank_environment import is_one_of_several

# torch 2.13 gave it another name.
_NAMES_OF_ALL_GATHER = ("all_gather_single", "all_gather_into_tensor")
_all_gather: Any = next((getattr(dist, n) for n in _NAMES_OF_ALL_GATHER if hasattr(dist, n)), None)

# How long a rank waits for the others, in a collective and at the start. Rank 0 may be saving a
# large checkpoint meanwhile. A program that wants another calls init_process_group(timeout=…).
RANK_TIMEOUT = timedelta(minutes=10)
NCCL_MARGIN = timedelta(minutes=2)

BROADCAST_ELEMENTS = 1 << 24  # of one dtype at a time: bounds the memory of a broadcast


class Ranks:
    """The processes of a job as one of them sees it: its own number, their count, collectives.

    Without a process group (one process alone) every collective returns what it was given.
    """

    def __init__(
        self, group: Any = None, host_group: Any = None, progress: RankProgress | None = None
    ) -> None:
        self.group = group
        self.progress = RankProgress() if progress is None else progress
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

    def start_all_reduce_(self, tensor: Tensor, what: str) -> Any:
        """Begins to sum a tensor over all ranks, in place. Returns what to wait on, or None."""
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
    def all_or_none(self, what: str) -> Iterator[None]:
        """All ranks leave the block, or all raise: each its own error, or that of another rank."""
        error: Exception | None = None
        try:
            yield
        except RankLostError:
            raise
        except Exception as caught:
            error = caught
        own = None if error is None else f"{type(error).__name__}: {error}"
        texts = self.gather_objects(own, what)
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise RankLostError(f"{self}: {what} failed on rank {rank}: {text}")

    @contextmanager
    def named_errors(self, what: str) -> Iterator[None]:
        """An error inside a collective says which one it was, and that another rank is the cause.

        torch raises it where a rank has ended, hangs beyond the timeout, or called another
        collective.
        """
        self.progress.enter(what)
        try:
            yield
        except RuntimeError as error:
            missing = self.progress.describe_missing()
            if not missing:
                missing = "it has ended with an error of its own, hangs, or runs another program"
            raise RankLostError(
                f"{self}: {what}, step {self.progress.step}: another rank did not take part: "
                f"{missing}. Look for its message. torch says: {_first_line(error)}"
            ) from error
        self.progress.leave()


def find_ranks(device: torch.device) -> Ranks | None:
    """The ranks of this job; None where this process was started alone.

    Joins the process group of torchrun, unless the program has made one.
    """
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        if not is_one_of_several():
            return None
        _join(device)
    world = dist.group.WORLD
    ranks = Ranks(world, _host_group_of(world), _progress_in(world))
    _check_devices(ranks, device)
    return ranks


class TorchrunJob(NamedTuple):
    """What torchrun's variables say about the job."""

    name: str  # the same for all its attempts
    restart: int  # how often the group was started again on this host
    ranks: int


def job_of_environment() -> TorchrunJob | None:
    """The job of torchrun that this process is part of; None for a process started alone."""
    if not is_one_of_several():
        return None
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":  # nobody gave torchrun one
        name = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return TorchrunJob(name, int(restart), int(os.environ["WORLD_SIZE"]))


def _join(device: torch.device) -> None:
    """Joins torchrun's process group: NCCL for CUDA, gloo for a CPU."""
    from torch.distributed.rendezvous import rendezvous

    backend = "nccl" if device.type == "cuda" else "gloo"
    arguments: dict[str, Any] = {}
    if device.type == "cuda":
        arguments["device_id"] = device
    # NCCL ends a process that waits too long without a word, so the hosts' group comes first.
    timeout = RANK_TIMEOUT + NCCL_MARGIN if backend == "nccl" else RANK_TIMEOUT
    store, rank, count = next(rendezvous("env://", timeout=RANK_TIMEOUT))
    dist.init_process_group(
        backend,
        store=store_of_attempt(store, rank, count, RANK_TIMEOUT),
        rank=rank,
        world_size=count,
        timeout=timeout,
        **arguments,
    )
    if backend == "nccl":
        host_group = dist.new_group(backend="gloo", timeout=RANK_TIMEOUT)
        _HOST_GROUPS[:] = [(dist.group.WORLD, host_group)]
    atexit.register(_leave)
    if rank > 0:
        # Rank 0 says it already.
        warnings.filterwarnings("ignore", category=Notice)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# The progress of this process in the last world that was seen.
_PROGRESS: list[tuple[Any, RankProgress]] = []


def _progress_in(world: Any) -> RankProgress:
    """Where this rank is, published in the store of the group, from a clone for its thread."""
    for known_world, progress in _PROGRESS:
        if known_world is world:
            return progress
    store = None
    if dist.get_world_size() > 1:
        group_store = dist.distributed_c10d._get_default_store()
        store = group_store.clone() if hasattr(group_store, "clone") else None
    progress = RankProgress(dist.get_rank(), dist.get_world_size(), store)
    if not _PROGRESS:
        atexit.register(_end_progress)  # runs before _leave, which was registered earlier
        if store is not None:
            sys.excepthook = _publish_error_before(sys.excepthook)
    for _, earlier in _PROGRESS:
        earlier.close()
    _PROGRESS[:] = [(world, progress)]
    return progress


def _publish_error_before(print_error: Any) -> Any:
    """An excepthook that lets the other ranks know the error, then prints it as before."""

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        for _, progress in _PROGRESS:
            progress.end(f"{kind.__name__}: {_first_line(error)}")
        print_error(kind, error, trace)

    return excepthook


def _end_progress() -> None:
    for _, progress in _PROGRESS:
        progress.end("its program is over")
        progress.close()


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
