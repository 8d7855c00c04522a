"""A host that may not wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfstep.cuda_graphs.capture import sync_mode


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, an operation that waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    sync_mode("error")
    try:
        yield
    finally:
        sync_mode(before)
