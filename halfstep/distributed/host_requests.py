"""What the host of any rank asks for, so that all ranks do it at the same step.

A signal comes to one process and not to the others, and clocks differ. If one rank stopped alone,
the others would wait for it in their next collective. So a rank only asks; the answer, which is the
same on all of them, comes with the next exchange.
"""

from enum import IntEnum


class Request(IntEnum):
    """The position of each request in an exchange."""

    VISIT = 0  # the host wants to read results
    STOP = 1  # a signal came
    TIME_OVER = 2  # the time limit of a run


class HostRequests:
    """Requests of this rank, and those that all ranks have agreed on."""

    def __init__(self) -> None:
        self._pending = [False] * len(Request)
        self._agreed = [False] * len(Request)

    def clear(self) -> None:
        """A run begins: what was asked for in an earlier one is done with."""
        self._pending = [False] * len(Request)
        self._agreed = [False] * len(Request)

    def ask(self, request: Request) -> None:
        """All ranks will learn of it at the next exchange."""
        self._pending[request] = True

    def is_agreed(self, request: Request) -> bool:
        """Whether some rank has asked for it, as of the last exchange."""
        return self._agreed[request]

    def take(self, request: Request) -> bool:
        """The same, and the request is done with: all ranks take it at the same place."""
        is_agreed = self._agreed[request]
        self._agreed[request] = False
        return is_agreed

    def to_exchange(self) -> list[bool]:
        """What this rank asks for; the next exchange begins from nothing."""
        pending = self._pending
        self._pending = [False] * len(Request)
        return pending

    def exchanged(self, agreed: list[bool]) -> None:
        """Notes what came back: one flag for each request, set if any rank asked."""
        self._agreed = [a or b for a, b in zip(self._agreed, agreed, strict=True)]
