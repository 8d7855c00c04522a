"""Recording a CUDA graph without a wait, and leaving the process whole when that fails."""

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch.torch_version import TorchVersion


def shares(version: str) -> bool:
    """Whether this torch leaves cuBLAS its memory when a graph is dropped; 2.12.0a0 of a container does not."""
    return TorchVersion(version) < "2.12.dev0"


SHARED = shares(torch.__version__)
"""Whether all graphs are recorded on one stream: cuBLAS keeps 64 MiB for each that it has seen. From 2.12 on, torch
frees that memory with any graph recorded there, while others may still use it (pytorch issue 193402)."""
POOL = 32  # streams that torch has for a device and a priority, and gives out in turn
_LOST: dict[torch.device, int] = {}
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}  # that all share
_TAKEN: set[int] = set()  # by graphs that live
_TAKING = Lock()


class CaptureStream:
    """The stream that graphs are recorded on which go together. It is free again when the last of them is gone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with _TAKING:
            if not SHARED:
                self.stream = _untaken(device)
                _TAKEN.add(self.stream.cuda_stream)
                weakref.finalize(self, _TAKEN.discard, self.stream.cuda_stream).atexit = False
            elif device in _STREAMS:
                self.stream = _STREAMS[device]
            else:
                self.stream = _STREAMS[device] = _drawn(device)


def _untaken(device: torch.device) -> torch.cuda.Stream:
    """One that no other lane has; with more lanes than streams, any."""
    for _ in range(POOL):
        stream = _drawn(device)
        if stream.cuda_stream not in _TAKEN:
            break
    return stream


def _drawn(device: torch.device) -> torch.cuda.Stream:
    """Of another priority than the streams that batches are copied on: a capture would record their copies."""
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph, lane: CaptureStream, pool: Any = None
) -> Iterator[None]:
    """What is launched inside goes into `graph`. Only this thread is watched: another may be copying batches."""
    device = lane.device
    main, side = torch.cuda.current_stream(device), lane.stream
    graph.lane = lane  # type: ignore[attr-defined]  # as long as there is the one, there is the other
    side.wait_stream(main)
    collecting, watching = gc.isenabled(), torch.cuda.get_sync_debug_mode()
    gc.disable()  # a tensor that is collected now would be freed inside the capture
    set_sync_debug_mode("error")  # a wait is refused before CUDA sees it and spoils the capture
    try:
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
                graph.capture_end()
            except BaseException:
                _abandon(graph, device)
                raise
    finally:
        set_sync_debug_mode(watching)
        if collecting:
            gc.enable()
        main.wait_stream(side)


def _abandon(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Ends a capture that failed. One that was spoiled cannot be ended, and would leave the random numbers captured."""
    try:
        graph.capture_end()
    except RuntimeError:
        _LOST[device] = rng_generation(device) + 1
        mine = torch.cuda.default_generators[device.index or 0]
        fresh = torch.Generator(device)
        fresh.set_state(mine.get_state())
        mine.graphsafe_set_state(fresh.graphsafe_get_state())


def rng_generation(device: torch.device) -> int:
    """How often the device's random numbers had to be freed: graphs from before draw from a generator of the past."""
    return _LOST.get(device, 0)


def set_sync_debug_mode(mode: int | str) -> None:
    """What happens when the host waits for the device, without torch's remark that this is a prototype."""
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(mode)
