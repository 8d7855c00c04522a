"""Batches from the host to a device while the device computes: pinned memory, a side stream, two batches ahead."""

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Full, Queue
from typing import Any

import torch
from torch import Tensor

_DEPTH = 2  # batches on their way: one is copied while the next is fetched
_PATIENCE_S = 0.1


def staged(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`. On CUDA a thread fetches and copies ahead; the stream waits, not the host."""
    return _ahead(batches, device) if device.type == "cuda" else moved(batches, device)


def moved(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`, each fetched when it is asked for; its copy overlaps with what the device does."""
    try:
        for batch in batches:
            yield _moved(batch, device)
    finally:
        _close(batches)


def _ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    queue: Queue[Any] = Queue(_DEPTH)
    stop = threading.Event()
    thread = threading.Thread(
        target=_produce, args=(batches, device, queue, stop), daemon=True, name="halfstep-stream"
    )
    thread.start()
    try:
        while True:
            batch, event = queue.get()
            if event is None:
                if isinstance(batch, BaseException):
                    raise batch
                return
            stream = torch.cuda.current_stream(device)
            stream.wait_event(event)
            _each(batch, lambda part: part.record_stream(stream))  # noqa: B023 - called at once; the side stream owns it
            yield batch
    finally:
        stop.set()
        thread.join()
        _close(batches)  # not before the thread has left it


def _produce(
    batches: Iterator[Any], device: torch.device, queue: "Queue[Any]", stop: threading.Event
) -> None:
    end: BaseException | None = None
    try:
        side = torch.cuda.Stream(device)
        for batch in batches:
            with torch.cuda.stream(side):
                moved = _moved(batch, device)
            event = torch.cuda.Event()
            event.record(side)
            if not _put(queue, (moved, event), stop):
                return
    except BaseException as error:  # the user's thread raises it, where it can be seen
        end = error
    _put(queue, (end, None), stop)


def _put(queue: "Queue[Any]", item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            queue.put(item, timeout=_PATIENCE_S)
            return True
        except Full:
            continue
    return False


def _close(batches: Iterator[Any]) -> None:
    close = getattr(batches, "close", None)
    if close:
        close()


def _moved(batch: Any, device: torch.device) -> Any:
    def move(part: Tensor) -> Tensor:
        # torch's pinned allocator keeps the block until the copy is done
        pinned = (
            part.pin_memory()
            if device.type == "cuda" and not part.is_cuda and not part.is_pinned()
            else part
        )
        return pinned.to(device, non_blocking=True)

    return _each(batch, move)


def _each(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """The batch with every tensor changed, in dicts, lists and (named) tuples however deep."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {name: _each(part, change) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each(part, change) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_each(part, change) for part in batch)
    return batch
