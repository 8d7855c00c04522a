"""Where each rank is: published about once a second, and read when a collective fails.

A rank that hangs says nothing itself, and torch only knows that something did not come in time. So
a small thread of each rank writes its step and its collective into the store of the process group,
also while the program sleeps or computes. Whoever loses a collective reads what the others wrote.
"""

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from halfstep.utils.text import list_some

PUBLISH_EVERY_S = 1.0
HEAR_WITHIN_S = 2.5  # a process that publishes nothing for so long has ended, or is stopped
READ_AGAIN_AFTER_S = 0.1
MAX_RANKS_NAMED = 8

LOST_ANOTHER = "RankLostError"  # how a rank ends that is not the cause


class RankProgress:
    """The step and the collective of this rank; of the others what they have published.

    `store` is one of torch's; None for a process alone, which publishes nothing.
    """

    def __init__(self, rank: int = 0, count: int = 1, store: Any = None) -> None:
        self.rank = rank
        self.count = count
        self.step = 0  # the last step that has begun
        self._collective: str | None = None  # the one that this rank is in
        self._entered = 0  # collectives so far: the same number on all ranks at the same place
        self._since = time.monotonic()
        self._ended: str | None = None  # how the program ended
        self._beat = 0
        self._store = store
        self._lock = threading.Lock()  # one thread of this process at a time uses the store
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._publish()
            self._thread = threading.Thread(
                target=self._publish_often, name="halfstep-rank-progress", daemon=True
            )
            self._thread.start()

    def enter(self, collective: str) -> None:
        """This rank waits in a collective from here on."""
        self._collective = collective
        self._entered += 1
        self._since = time.monotonic()

    def leave(self) -> None:
        """The collective is over."""
        self._collective = None
        self._since = time.monotonic()

    def end(self, how: str) -> None:
        """This rank's program is over. The first to say how it ended is right."""
        if self._ended is None:
            self._ended = how
            self._publish()

    def close(self) -> None:
        """Publishes nothing more. Before the interpreter ends: the thread uses torch."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * PUBLISH_EVERY_S)
            self._thread = None

    def describe_missing(self) -> str:
        """Which ranks did not come to the collective that this rank is in; "" if nobody knows."""
        if self._store is None:
            return ""
        self._publish()
        first = self._read_others()
        records = first
        deadline = time.monotonic() + HEAR_WITHIN_S
        while time.monotonic() < deadline and _silent_ranks(first, records):
            time.sleep(READ_AGAIN_AFTER_S)
            records = self._read_others()

        silent = _silent_ranks(first, records)
        causes: list[str] = []
        others_lost: list[str] = []
        for rank in range(self.count):
            if rank == self.rank:
                continue
            record = records.get(rank)
            if record is None:
                causes.append(f"rank {rank} has never said where it is")
            elif record["ended"] is not None:
                line = f"rank {rank} has ended ({record['ended']}), {_place_of(record)}"
                is_cause = not record["ended"].startswith(LOST_ANOTHER)
                (causes if is_cause else others_lost).append(line)
            elif rank in silent:
                age_s = max(time.time() - record["time"], 0.0)
                causes.append(
                    f"rank {rank} has been silent for {age_s:.0f} s: its process has ended or is "
                    f"stopped, {_place_of(record)}"
                )
            elif record["entered"] < self._entered:
                causes.append(
                    f"rank {rank} runs but did not come, {_place_of(record)} "
                    f"for {record['for_s']:.0f} s"
                )
        return list_some(causes or others_lost, MAX_RANKS_NAMED)

    def _publish_often(self) -> None:
        while not self._stop.wait(PUBLISH_EVERY_S):
            self._publish()

    def _publish(self) -> None:
        if self._store is None:
            return
        with self._lock:
            self._beat += 1
            record = {
                "beat": self._beat,
                "time": time.time(),
                "step": self.step,
                "collective": self._collective,
                "entered": self._entered,
                "for_s": time.monotonic() - self._since,
                "ended": self._ended,
            }
            with suppress(RuntimeError):  # the store is gone with its host
                self._store.set(_key(self.rank), json.dumps(record))

    def _read_others(self) -> dict[int, dict[str, Any]]:
        records = {}
        with self._lock, suppress(RuntimeError):
            for rank in range(self.count):
                if rank != self.rank and self._store.check([_key(rank)]):
                    records[rank] = json.loads(self._store.get(_key(rank)))
        return records


def _silent_ranks(first: Mapping[int, Any], now: Mapping[int, Any]) -> list[int]:
    """The ranks that have published nothing new since the first look, and not that they ended."""
    return [
        rank
        for rank, record in now.items()
        if rank in first and record["beat"] == first[rank]["beat"] and record["ended"] is None
    ]


def _place_of(record: Mapping[str, Any]) -> str:
    if record["collective"] is None:
        return f"last seen at step {record['step']}, outside of any collective"
    return f"last seen at step {record['step']} in {record['collective']!r}"


def _key(rank: int) -> str:
    return f"halfstep/progress/{rank}"
