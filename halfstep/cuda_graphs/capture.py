"""CUDA graphs: recorded once, replayed often, kept by key. A failed recording leaves no trace.

What it buys: five epochs of the benchmark MLP in fp32 take 0.50 s from graphs, and 6.25 s where the
host launches every kernel (H200, docs/internals/speed.md). Switched off by `Model(capture=False)`,
and for a loop of your own over a TrainStep by `decide="host"`.

`capture_into` records one graph. `GraphCache` keeps the graphs of one step or evaluation; on a CPU,
where there are no graphs, it can keep compiled programs instead.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch.torch_version import TorchVersion

from halfstep.errors import Notice

# Graphs of one cache, and kinds of batches that it counts. What comes beyond runs eagerly.
MAX_GRAPHS = 64

# Compiled programs of one cache: compiling one takes as long as thousands of small steps.
MAX_PROGRAMS = 6

# Batches of a kind before a program is compiled for it, for the same reason.
BATCHES_BEFORE_COMPILE = 20

# Streams that torch has for each device and priority. It gives them out in turn.
STREAMS_PER_PRIORITY = 32

# Makes a program of a function. Calling the program runs it, and returns what is wrong with it.
BodyCompiler: TypeAlias = Callable[[Callable[[], Any]], Callable[[], object]]


def can_share_stream(version: str) -> bool:
    """Whether this version of torch leaves cuBLAS its memory when a graph is dropped.

    cuBLAS keeps 64 MiB for each stream that it has seen, so one stream for all graphs saves memory.
    From 2.12 on (the 2.12.0a0 of NVIDIA's containers too), torch frees that memory together with
    any graph recorded on the stream, while others may still use it (pytorch issue 193402).
    """
    return TorchVersion(version) < "2.12.dev0"


SHARES_STREAM = can_share_stream(torch.__version__)

_shared_streams: dict[torch.device, torch.cuda.Stream] = {}  # where all graphs share one
_streams_in_use: set[int] = set()  # where they do not: handles of streams whose graphs still exist
_streams_lock = Lock()

_rng_generations: dict[torch.device, int] = {}


class CaptureStream:
    """The stream on which graphs that are dropped together are recorded.

    Each graph holds its CaptureStream. The stream is free again when the last of them is gone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with _streams_lock:
            if SHARES_STREAM:
                if device not in _shared_streams:
                    _shared_streams[device] = _next_stream(device)
                self.stream = _shared_streams[device]
            else:
                self.stream = _unused_stream(device)
                handle = self.stream.cuda_stream
                _streams_in_use.add(handle)
                weakref.finalize(self, _streams_in_use.discard, handle).atexit = False


def _unused_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream on which no other graphs were recorded. If all are in use, any stream."""
    for _ in range(STREAMS_PER_PRIORITY):
        stream = _next_stream(device)
        if stream.cuda_stream not in _streams_in_use:
            break
    return stream


def _next_stream(device: torch.device) -> torch.cuda.Stream:
    """The next stream of high priority.

    Batches are copied on streams of normal priority. On one of those, a capture would record the
    copies too.
    """
    return torch.cuda.Stream(device, priority=-1)


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph, capture_stream: CaptureStream, pool: Any = None
) -> Iterator[None]:
    """Inside, what this thread launches is recorded into `graph` instead of being run.

    An operation that waits for the device raises an error. Other threads go on copying batches.
    """
    device = capture_stream.device
    main_stream = torch.cuda.current_stream(device)
    side_stream = capture_stream.stream
    side_stream.wait_stream(main_stream)

    # The stream may not go to other graphs as long as this one exists.
    graph.capture_stream = capture_stream  # type: ignore[attr-defined]

    # A tensor that is garbage collected now would be freed inside the capture.
    gc_was_enabled = gc.isenabled()
    gc.disable()

    # With this setting torch refuses a wait before CUDA sees it: CUDA would invalidate the capture.
    sync_debug_mode = torch.cuda.get_sync_debug_mode()
    set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side_stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                yield
                graph.capture_end()
            except BaseException:
                _end_failed_capture(graph, device)
                raise
    finally:
        set_sync_debug_mode(sync_debug_mode)
        if gc_was_enabled:
            gc.enable()
        main_stream.wait_stream(side_stream)


def _end_failed_capture(graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
    """Ends a capture in which an error was raised.

    CUDA does not end a capture that it has invalidated. The device's random generator would then
    count as captured for ever, so it gets a new state with the same numbers.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _rng_generations[device] = rng_generation(device) + 1
        generator = torch.cuda.default_generators[device.index or 0]
        replacement = torch.Generator(device)
        replacement.set_state(generator.get_state())
        generator.graphsafe_set_state(replacement.graphsafe_get_state())


def rng_generation(device: torch.device) -> int:
    """How often the state of the device's random generator had to be replaced.

    A graph from before the last time still draws from the old state: drop it.
    """
    return _rng_generations.get(device, 0)


def set_sync_debug_mode(mode: int | str) -> None:
    """Sets what torch does when the host waits for the device: nothing, "warn" or "error".

    Without torch's warning that this is a prototype.
    """
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(mode)


@dataclass
class CapturedGraph:
    """A graph, and what its function returned: tensors that each replay fills again."""

    replay: Callable[[], object]  # returns what is wrong with the graph, or nothing
    result: Any


class GraphCache:
    """Graphs by key. They share one memory pool, as two of them never run at the same time.

    `direct`: a replay calls the function again, on any device, as a test of what a graph would do.
    `compile_body`: makes a program of a function; on a CPU, it takes the place of a graph.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        direct: bool = False,
        compile_body: BodyCompiler | None = None,
    ) -> None:
        self.device = device
        self.direct = direct
        self.compile_body = compile_body
        self.captures = 0  # in all, those that were dropped too
        self._can_capture = direct or device.type == "cuda" or compile_body is not None
        self._stopped = False
        self._has_warned = False
        self._graphs: dict[Hashable, CapturedGraph] = {}
        self._memory_pool: Any = None
        self._capture_stream: CaptureStream | None = None

        # Graphs whose capture failed. If they were freed, torch would free memory of the others.
        self._failed_graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def usable(self) -> bool:
        """Whether anything can be captured."""
        return self._can_capture and not self._stopped

    @property
    def is_full(self) -> bool:
        """Whether there are as many compiled programs as there may be. Graphs are not counted."""
        return self.compile_body is not None and len(self._graphs) >= MAX_PROGRAMS

    def has_capacity(self, kinds: int) -> bool:
        """Whether another kind of batch may be captured beside `kinds` of them. If not, warns once.

        Give MAX_GRAPHS for a batch that can never be captured.
        """
        if kinds < MAX_GRAPHS:
            return True
        if not self._has_warned:
            self._has_warned = True
            message = (
                f"sink: batches in more than {MAX_GRAPHS} kinds, "
                "or with values of unknown types, run eagerly"
            )
            warnings.warn(message, Notice, stacklevel=3)
        return False

    def stop(self) -> None:
        """Captures nothing from now on: a capture has failed."""
        self._stopped = True

    def clear(self) -> None:
        """Drops all graphs and their memory: something they had baked in has changed."""
        self._graphs.clear()
        self._failed_graphs.clear()
        self._memory_pool = None
        self._capture_stream = None

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable) -> CapturedGraph | None:
        """The graph with this key."""
        return self._graphs.get(key)

    def capture(self, key: Hashable, body: Callable[[], Any]) -> CapturedGraph:
        """Records what `body` launches, without running it. Raises what `body` raises."""
        if self.direct:
            captured = _replayed_by_calling(body)
        elif self.compile_body is not None:
            captured = CapturedGraph(replay=self.compile_body(body), result=None)
        else:
            captured = self._capture_on_device(body)
        self.captures += 1
        self._graphs[key] = captured
        return captured

    def _capture_on_device(self, body: Callable[[], Any]) -> CapturedGraph:
        graph = torch.cuda.CUDAGraph()
        if self._memory_pool is None or self._capture_stream is None:
            # The graphs get memory of their own. What eager steps used is not needed beside it.
            torch.cuda.empty_cache()
            self._memory_pool = torch.cuda.graph_pool_handle()
            self._capture_stream = CaptureStream(self.device)
        try:
            with capture_into(graph, self._capture_stream, self._memory_pool):
                result = body()
        except BaseException:
            if self._graphs:
                self._failed_graphs.append(graph)
            else:
                # torch does not accept a pool again after its last graph is gone.
                self._memory_pool = None
                self._capture_stream = None
            raise
        return CapturedGraph(replay=graph.replay, result=result)


def _replayed_by_calling(body: Callable[[], Any]) -> CapturedGraph:
    """A stand-in for a graph: each replay calls `body` and stores its result."""

    def call_body() -> None:
        captured.result = body()

    captured = CapturedGraph(replay=call_body, result=None)
    return captured
