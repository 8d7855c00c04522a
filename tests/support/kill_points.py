"""Forks a child that is killed with SIGKILL right before or after its n-th call of the system."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

# The C functions of Python that write, make, move or remove something on a disk, by name.
DISK_CALLS = frozenset(
    {
        "open",
        "write",
        "writelines",
        "tofile",
        "flush",
        "truncate",
        "ftruncate",
        "fsync",
        "sync",
        "rename",
        "replace",
        "mkdir",
        "rmdir",
        "unlink",
        "remove",
        "fchmod",
        "close",
        "__exit__",
        "scandir",
        "listdir",
    }
)
# Objects of these modules may have methods of the same names that touch no disk.
DISK_MODULES = frozenset({"posix", "io", "_io", "builtins"})
IN_MEMORY = ("str", "bytes", "dict", "list", "set", "BytesIO", "StringIO")


def is_disk_call(function: Any) -> bool:
    if function.__name__ not in DISK_CALLS:
        return False
    owner = getattr(function, "__self__", None)
    if type(owner).__name__ in IN_MEMORY:
        return False
    module = getattr(function, "__module__", None) or type(owner).__module__
    return module in DISK_MODULES or function.__name__ == "tofile"


def run_killed(
    action: Callable[[], Any], at_call: int, events: tuple[str, ...] = ("c_call",)
) -> int | None:
    """Runs the action in a child that dies before its `at_call`-th call of the disk, from 1.

    With events=("c_call", "c_return") the end of each call counts too. None if it was killed; else,
    when there were fewer, how many there were.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        code = 1
        try:
            calls = 0

            def count(frame: Any, event: str, function: Any) -> None:
                nonlocal calls
                if event in events and is_disk_call(function):
                    calls += 1
                    if calls == at_call:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(count)
            try:
                action()
            finally:
                sys.setprofile(None)
            os.write(writer, str(calls).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)

    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        calls_text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGKILL:
        return None
    assert status == 0, f"the child ended with {status}"
    return int(calls_text)
