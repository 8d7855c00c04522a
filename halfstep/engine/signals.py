"""SIGINT and SIGTERM during a run: the first is noted, the second ends the process at once."""

import signal
import threading
from types import FrameType
from typing import Any

HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
OTHER_RANK = "a signal to another rank"  # why a run was stopped that got no signal itself
QUIET = False  # set by the command line, which says itself how to continue


class Signals:
    """Inside, the first signal sets `caught`.

    The handlers that were there before return with that signal, and at the end.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        # Python allows handlers in the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in HANDLED_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup: it stays ignored
                self._previous_handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self.__exit__()  # a second signal acts as it would have without us

    def raise_caught(self) -> None:
        """Does what the signal asked for: KeyboardInterrupt, or exit with 128 + its number."""
        if self.caught is signal.SIGINT:
            raise KeyboardInterrupt
        if self.caught is not None:
            raise SystemExit(128 + self.caught)
