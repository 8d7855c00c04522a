"""On a CPU, memory that a step frees stays with the process, for the next step.

Freed gradients and activations gather at the top of the heap. Beyond its trim threshold glibc
returns them to the kernel, and the next step touches the same pages for the first time again: 8 to
235 page faults a step for the seed MLP, from process to process, and up to 8,600 for ResNet-18.
`kept()` raises that threshold for the length of a run.

What it buys: 2 faults a step in place of 26 for a torch loop over the seed MLP. Its time was 1.08
(0.88 to 1.37) of that without kept(): no gain is shown there (docs/guide/cpu.md). To switch it off:
MALLOC_TRIM_THRESHOLD_=131072 in the environment.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from mmap import PAGESIZE
from typing import Any

MIB = 1 << 20

# Bytes of freed memory that a run keeps at most. mallopt takes a C int.
LIMIT = 1 << 30

# Parameters of mallopt, from malloc.h.
M_TRIM_THRESHOLD = -1  # bytes at the free top of the heap that are not returned to the kernel
M_MMAP_THRESHOLD = -3  # bytes; a larger block is mapped on its own, outside of the heap

# glibc raises its thresholds when a mapped chunk is freed: M_MMAP_THRESHOLD to the chunk's size,
# M_TRIM_THRESHOLD to twice that. This is the largest chunk that does so, in bytes.
LARGEST_ADJUSTING_CHUNK = 32 * MIB - PAGESIZE

# Blocks of 32 MiB that are asked for, never touched, until one does not fill a hole in the heap.
# So holes of up to 1 GiB are looked behind.
MAX_PROBES = 32

# With one of these set, the user has decided how malloc works.
MALLOC_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
)

_lock = threading.Lock()
_users = 0  # blocks of kept() that are open, in all threads


@dataclass(frozen=True)
class Memory:
    """Whether freed memory is kept during a run, and why or why not, in words."""

    kept: bool
    reason: str


@contextmanager
def kept() -> Iterator[Memory]:
    """Inside, up to 1 GiB of freed memory stays with the process, never more than its peak.

    Blocks and threads may nest and overlap: the first raises the thresholds, the last sets them
    back and returns what is free. "Back" is where glibc's own adjustment ends: 32 MiB for a block
    that is mapped on its own, 64 MiB for the free top of the heap. glibc never lowers them from
    there, and what mallopt has switched off, it cannot switch on again. Where malloc is not
    glibc's, or somebody has set its thresholds, nothing is touched. No result depends on it.
    """
    memory = _enter()
    try:
        yield memory
    finally:
        if memory.kept:
            _leave()


def look() -> Memory:
    """What kept() would do in this process."""
    with _lock:
        return _decide()


def _enter() -> Memory:
    global _users
    with _lock:
        memory = _decide()
        if memory.kept:
            if _users == 0:
                _set_thresholds(mmap_bytes=LIMIT, trim_bytes=LIMIT)
            _users += 1
        return memory


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _set_thresholds(
                mmap_bytes=LARGEST_ADJUSTING_CHUNK, trim_bytes=2 * LARGEST_ADJUSTING_CHUNK
            )
            _libc().malloc_trim(0)


def _set_thresholds(*, mmap_bytes: int, trim_bytes: int) -> None:
    libc = _libc()
    libc.mallopt(M_TRIM_THRESHOLD, trim_bytes)
    # Some versions refuse more than 32 MiB here. Larger blocks then come and go as before.
    libc.mallopt(M_MMAP_THRESHOLD, mmap_bytes)


def _decide() -> Memory:
    """Whether to keep memory: not where malloc is not glibc's own, or somebody has set it."""
    # Inside kept() the thresholds are our own, and probing them would say that somebody set them.
    if _users == 0:
        obstacle = _find_obstacle()
        if obstacle:
            return Memory(False, obstacle)
    return Memory(
        True,
        f"glibc {_glibc_version()}: a run keeps up to {LIMIT // MIB} MiB of freed memory, "
        "for its next step",
    )


def _find_obstacle() -> str:
    """Why malloc is left as it is, in words; "" if nothing speaks against raising its thresholds."""
    if _glibc_version() is None:
        return "the C library is not glibc: its malloc is left as it is"
    if not _uses_glibc_malloc():
        return "another malloc stands before glibc's (LD_PRELOAD?): it is left as it is"

    variables = [name for name in MALLOC_VARIABLES if name in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        variables.append("GLIBC_TUNABLES")
    if variables:
        return f"{', '.join(variables)} set: malloc is left as the environment wants it"

    if not _adjusts_thresholds():
        return "the program has set malloc's thresholds itself: they are left as they are"
    return ""


def _adjusts_thresholds() -> bool:
    """Whether glibc adjusts its thresholds; afterwards they are where its adjustment ends.

    Freeing a mapped chunk of 32 MiB moves them there, unless mallopt has fixed them. If it has,
    the next chunk of that size is mapped again (fixed below), or a larger one is not mapped (fixed
    above). So the values to go back to after a run are known, and they are glibc's own.
    """
    libc = _libc()
    blocks: list[int] = []
    try:
        # The first blocks may fill holes in the heap; one behind them must be mapped.
        for _ in range(MAX_PROBES):
            block = libc.malloc(_request_bytes(LARGEST_ADJUSTING_CHUNK + PAGESIZE))
            if not block:
                return False
            blocks.append(block)
            if _is_mapped(block):
                break
        else:
            return False  # fixed above: even this is taken from the heap

        # Freeing the first moves the thresholds, so that the second comes from the heap.
        is_fixed_below = _maps_chunk(LARGEST_ADJUSTING_CHUNK) and _maps_chunk(
            LARGEST_ADJUSTING_CHUNK
        )
        return not is_fixed_below
    finally:
        for block in blocks:
            libc.free(block)


def _maps_chunk(chunk_bytes: int) -> bool:
    """Whether glibc maps a chunk of this size on its own. The chunk is freed again."""
    libc = _libc()
    block = libc.malloc(_request_bytes(chunk_bytes))
    try:
        return not block or _is_mapped(block)
    finally:
        libc.free(block)


def _request_bytes(chunk_bytes: int) -> int:
    """What to ask malloc for, so that it makes a chunk of this size.

    Half a page less: a mapped chunk is rounded up to whole pages, one of the heap by 40 bytes at
    most. That is how _is_mapped tells them apart.
    """
    return chunk_bytes - PAGESIZE // 2


def _is_mapped(block: int) -> bool:
    """Whether a block is mapped on its own: whole pages, less a header of 16 bytes."""
    usable_bytes = int(_libc().malloc_usable_size(block))
    return usable_bytes % PAGESIZE == PAGESIZE - 16


def _glibc_version() -> str | None:
    """The version of glibc, such as "2.36"; None with another C library."""
    try:
        version = ctypes.CDLL(None).gnu_get_libc_version
    except (OSError, AttributeError, TypeError):  # no such symbol; Windows has no CDLL(None)
        return None
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _uses_glibc_malloc() -> bool:
    """Whether the process calls the malloc of libc.so.6: a preloaded or linked one comes first."""
    try:
        process_malloc = ctypes.CDLL(None).malloc
        glibc_malloc = ctypes.CDLL("libc.so.6").malloc
    except (OSError, AttributeError):
        return False
    return _function_address(process_malloc) == _function_address(glibc_malloc)


def _function_address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


@cache
def _libc() -> Any:
    """glibc, with the types of the functions that are called here."""
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
    libc.malloc_usable_size.restype = ctypes.c_size_t
    libc.free.argtypes = [ctypes.c_void_p]
    libc.free.restype = None
    libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc
