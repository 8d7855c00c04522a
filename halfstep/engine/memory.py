"""On a CPU a step's memory stays with the process: glibc would give it back and fault it in again, step after step.

Freed gradients and activations gather at the top of the heap. Beyond its trim threshold glibc returns them to the
kernel, and the next step touches the same pages for the first time again: 8 to 235 faults a step for the seed MLP, from
process to process, and up to 8,600 for ResNet-18. `kept()` raises that threshold for the length of a run.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

LIMIT = 1 << 30  # bytes; mallopt takes an int
_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD in malloc.h
_CEILING = (
    32 << 20
) - PAGESIZE  # the largest chunk whose release moves glibc's thresholds, to its size and twice that
_TRIES = (
    32  # blocks of 32 MiB, never touched: more than 1 GiB of holes in the heap is not looked behind
)
_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
)

_lock = threading.Lock()
_users = 0


@dataclass(frozen=True)
class Memory:
    """Whether freed memory is kept during a run, and why or why not, in words."""

    kept: bool
    reason: str


@contextmanager
def kept() -> Iterator[Memory]:
    """Inside, up to 1 GiB of what is freed stays with the process; never more than it has used at its peak.

    Blocks and threads may nest and overlap: the first raises the thresholds, the last puts them back and returns what
    is free. "Back" is 32 MiB for a block of its own and 64 MiB for the free top of the heap, where glibc's own
    adjustment ends; it cannot be lowered from there, or be switched on again. Elsewhere than under glibc's malloc, or
    where somebody has set its thresholds, nothing is touched. No result depends on it.
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
        return _judge() if _users == 0 else _yes()


def _enter() -> Memory:
    global _users
    with _lock:
        memory = _judge() if _users == 0 else _yes()
        if memory.kept:
            if _users == 0:
                _set(LIMIT, LIMIT)
            _users += 1
        return memory


def _leave() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _set(_CEILING, 2 * _CEILING)
            _libc().malloc_trim(0)


def _set(mmap: int, trim: int) -> None:
    libc = _libc()
    libc.mallopt(_TRIM, trim)
    libc.mallopt(
        _MMAP, mmap
    )  # some versions refuse more than 32 MiB: larger blocks then come and go as before


def _judge() -> Memory:
    """Leaves alone what is not glibc's own, or was set by somebody."""
    if _version() is None:
        return Memory(False, "the C library is not glibc: its malloc is left as it is")
    if not _own_malloc():
        return Memory(
            False, "another malloc stands before glibc's (LD_PRELOAD?): it is left as it is"
        )
    given = [name for name in _VARIABLES if name in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        given.append("GLIBC_TUNABLES")
    if given:
        return Memory(False, f"{', '.join(given)} set: malloc is left as the environment wants it")
    if not _adjusts():
        return Memory(
            False, "the program has set malloc's thresholds itself: they are left as they are"
        )
    return _yes()


def _yes() -> Memory:
    return Memory(
        True,
        f"glibc {_version()}: a run keeps up to {LIMIT >> 20} MiB of freed memory, for its next step",
    )


def _adjusts() -> bool:
    """Whether glibc chooses its thresholds; afterwards they are where its choice ends.

    The release of a mapped chunk of 32 MiB moves them there, unless a mallopt has fixed them: then the next of that
    size is mapped again, or a larger one is not. So what to go back to is known, and is glibc's own.
    """
    libc = _libc()
    held: list[int] = []
    try:
        while not held or not _mapped(held[-1]):  # the first ones may fill holes in the heap
            if len(held) == _TRIES or not (block := libc.malloc(_request(_CEILING + PAGESIZE))):
                return False  # fixed above: even this is taken from the heap
            held.append(block)
        return not (_maps(_CEILING) and _maps(_CEILING))  # else fixed below
    finally:
        for block in held:
            libc.free(block)


def _maps(chunk: int) -> bool:
    """Whether glibc maps a chunk of this size on its own; it is released again."""
    libc = _libc()
    block = libc.malloc(_request(chunk))
    try:
        return not block or _mapped(block)
    finally:
        libc.free(block)


def _request(chunk: int) -> int:
    """Half a page short: a mapped chunk is whole pages, one of the heap ends within 40 bytes."""
    return chunk - PAGESIZE // 2


def _mapped(block: int) -> bool:
    usable = int(_libc().malloc_usable_size(block))
    return usable % PAGESIZE == PAGESIZE - 16  # pages less the header


def _version() -> str | None:
    try:
        version = ctypes.CDLL(None).gnu_get_libc_version
    except (OSError, AttributeError, TypeError):  # no such symbol; Windows has no CDLL(None)
        return None
    version.restype = ctypes.c_char_p
    return str(version().decode())


def _own_malloc() -> bool:
    """Whether the process calls the malloc of libc.so.6: a preloaded or linked one would come first."""
    try:
        used, own = ctypes.CDLL(None).malloc, ctypes.CDLL("libc.so.6").malloc
    except (OSError, AttributeError):
        return False
    return ctypes.cast(used, ctypes.c_void_p).value == ctypes.cast(own, ctypes.c_void_p).value


def _libc() -> Any:
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.malloc_usable_size.argtypes, libc.malloc_usable_size.restype = (
        [ctypes.c_void_p],
        ctypes.c_size_t,
    )
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.mallopt.argtypes, libc.malloc_trim.argtypes = (
        [ctypes.c_int, ctypes.c_int],
        [ctypes.c_size_t],
    )
    return libc
