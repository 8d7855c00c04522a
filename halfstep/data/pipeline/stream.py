"""Batches from the host to a device while the device computes.

Copies go through pinned memory; on CUDA a thread fetches and copies two batches ahead, on a stream
of its own.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Full, Queue
from typing import Any

import torch
from torch import Tensor

# Batches on their way: one is copied while the next is fetched.
_QUEUE_LENGTH = 2

# How soon the thread notices that the pass was left.
_PUT_TIMEOUT_S = 0.1


def prefetch_to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`; on CUDA a thread fetches and copies them ahead."""
    if device.type == "cuda":
        return _prefetch_in_thread(batches, device)
    return copy_to_device(batches, device)


def copy_to_device(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """The same batches on `device`, each fetched when it is requested.

    The copy overlaps with what the device computes.
    """
    try:
        for batch in batches:
            yield _batch_to_device(batch, device)
    finally:
        _close_iterator(batches)


def _prefetch_in_thread(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    queue: Queue[Any] = Queue(_QUEUE_LENGTH)
    stop = threading.Event()
    thread = threading.Thread(
        target=_fill_queue,
        args=(batches, device, queue, stop),
        daemon=True,
        name="halfstep-stream",
    )
    thread.start()
    try:
        while True:
            batch, copied = queue.get()
            # Without an event it is the end: an error of the thread's, or None.
            if copied is None:
                if isinstance(batch, BaseException):
                    raise batch
                return
            # The device waits for the copy, not the host. The memory belongs to the thread's
            # stream, so its allocator has to know that this stream uses it too.
            stream = torch.cuda.current_stream(device)
            stream.wait_event(copied)
            _map_tensors(batch, lambda tensor: tensor.record_stream(stream))  # noqa: B023 - at once
            yield batch
    finally:
        stop.set()
        thread.join()
        _close_iterator(batches)  # not before the thread has left it


def _fill_queue(
    batches: Iterator[Any], device: torch.device, queue: "Queue[Any]", stop: threading.Event
) -> None:
    """Puts (batch on the device, event of its copy) into the queue; at the end (error, None)."""
    error: BaseException | None = None
    try:
        copy_stream = torch.cuda.Stream(device)
        for batch in batches:
            with torch.cuda.stream(copy_stream):
                device_batch = _batch_to_device(batch, device)
            copied = torch.cuda.Event()
            copied.record(copy_stream)
            if not _put_unless_stopped(queue, (device_batch, copied), stop):
                return
    except BaseException as caught:  # raised again in the user's thread, where it can be seen
        error = caught
    _put_unless_stopped(queue, (error, None), stop)


def _put_unless_stopped(queue: "Queue[Any]", item: Any, stop: threading.Event) -> bool:
    """Waits for space in the queue. False if the pass was left meanwhile."""
    while not stop.is_set():
        try:
            queue.put(item, timeout=_PUT_TIMEOUT_S)
            return True
        except Full:
            continue
    return False


def _close_iterator(batches: Iterator[Any]) -> None:
    close = getattr(batches, "close", None)
    if close:
        close()


def _batch_to_device(batch: Any, device: torch.device) -> Any:
    def copy_tensor(tensor: Tensor) -> Tensor:
        # torch's allocator of pinned memory keeps the block until the copy is done.
        if device.type == "cuda" and not tensor.is_cuda and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return _map_tensors(batch, copy_tensor)


def _map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """The batch with the function applied to every tensor, in dicts, lists and tuples at any depth.

    Named tuples keep their type; anything else is returned as it is.
    """
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _map_tensors(part, function) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_tensors(part, function) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_map_tensors(part, function) for part in batch)
    return batch
