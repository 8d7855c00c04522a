"""A host that may not wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from halfstep.cuda_graphs.capture import set_sync_debug_mode


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, an operation that waits for the device is an error."""
    before = torch.cuda.get_sync_debug_mode()
    set_sync_debug_mode("error")
    try:
        yield
    finally:
        set_sync_debug_mode(before)
