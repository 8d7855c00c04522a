"""SIGINT and SIGTERM asked for, not suffered: the first is noted, the second ends the process at once."""

import signal
import threading
from types import FrameType
from typing import Any

_HEARD = (signal.SIGINT, signal.SIGTERM)
QUIET = False  # the command line says itself how to go on


class Signals:
    """Inside, the first signal sets `caught`; the handlers that were there before come back with it and at the end."""

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():  # only there may handlers be set
            heard = [
                each for each in _HEARD if signal.getsignal(each) is not signal.SIG_IGN
            ]  # nohup: still ignored
            self._before = {each: signal.signal(each, self._note) for each in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.caught = signal.Signals(number)
        self.__exit__()  # a second one acts as it would have without us

    def raise_again(self) -> None:
        """What the process was asked to do, now that all is safe: KeyboardInterrupt, or exit with 128 + number."""
        if self.caught is signal.SIGINT:
            raise KeyboardInterrupt
        if self.caught is not None:
            raise SystemExit(128 + self.caught)
