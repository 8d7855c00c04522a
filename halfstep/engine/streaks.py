"""Warns about training that goes on and learns nothing: skipped updates in a row, losses of NaN.

It reads the rows that the host gets anyway, those of eager and of captured steps alike.
"""

import math
import warnings

from halfstep.engine.run import Row
from halfstep.errors import Notice
from halfstep.step.overflow import LONG_STREAK
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import plural

# So many good updates after a streak that a new one is told again.
RECOVERED_AFTER = 50


class StreakWatch:
    """Follows the rows of a run; `warn` says once for each streak what has gone on too long."""

    def __init__(self) -> None:
        self._has_updated = False
        self._all_skips = 0
        self._first_skip = 0
        self._skips = 0
        self._first_nonfinite = 0
        self._nonfinite_loss = 0.0
        self._good_updates = 0
        self._has_warned_skips = False
        self._has_warned_loss = False
        self._is_quiet = True  # nothing is open: a good row changes nothing
        self._nonfinite_parts: set[str] = set()  # those that were met
        self._part_texts: list[str] = []  # to be said at the next visit

    def take(self, row: Row) -> None:
        """One step. The batches of an open cycle move nothing, and say nothing yet."""
        self._has_updated = self._has_updated or row.updated
        is_lost = row.updated and not math.isfinite(row.cycle_loss)
        if self._is_quiet and not is_lost and not row.skipped:
            return
        self._is_quiet = False
        if row.skipped:
            if self._skips == 0:
                self._first_skip = row.global_step
            self._skips += 1
            self._all_skips += 1
            self._good_updates = 0
        elif is_lost:
            if self._first_nonfinite == 0:
                self._first_nonfinite = row.global_step
                self._nonfinite_loss = row.cycle_loss
            self._skips = 0
            self._good_updates = 0
        elif row.updated:
            self._skips = 0
            self._first_nonfinite = 0
            self._good_updates += 1
            if self._good_updates >= RECOVERED_AFTER:
                self._has_warned_skips = False
                self._has_warned_loss = False
                self._good_updates = 0
                self._is_quiet = True

    def take_part(self, row: Row, name: str, value: float) -> None:
        """A part of the loss that is inf or NaN in a step that was not skipped: said once each."""
        if name in self._nonfinite_parts:
            return
        self._nonfinite_parts.add(name)
        if math.isfinite(row.loss):
            self._part_texts.append(
                f"{name!r}, returned with the loss, is {value} at step {row.global_step}, and so "
                "is its mean in the history; the loss itself is finite"
            )

    def warn(self) -> None:
        """At a visit: the notices that are due."""
        texts = self._part_texts
        self._part_texts = []
        for text in texts:
            _warn(text)
        if self._skips >= LONG_STREAK and not self._has_warned_skips:
            self._has_warned_skips = True
            _warn(
                f"{self._skips} updates in a row were skipped since step {self._first_skip}, "
                "because gradients were inf or NaN: the weights have not moved since, and the "
                "mean loss of the history leaves these steps out. If a learning rate was too "
                "high, lower it and go on from a checkpoint from before that step. "
                "docs/guide/nan.md says how to find the cause"
            )
        if self._first_nonfinite and not self._has_warned_loss:
            self._has_warned_loss = True
            _warn(
                f"the loss is {self._nonfinite_loss} at step {self._first_nonfinite}, and the "
                "update was made: the weights may be lost. Look for log(0), 0/0 or a learning "
                "rate that diverged, and go on from a checkpoint from before that step. "
                "docs/guide/nan.md says how to find the cause"
            )

    def warn_at_end(self) -> None:
        """At the end of a fit: says where it has made no update at all, and nobody has yet."""
        if self._has_updated or not self._all_skips or self._has_warned_skips:
            return
        _warn(
            f"no update was made: {plural(self._all_skips, 'update')} of this fit, all that there "
            "were, had gradients of inf or NaN and were skipped. The weights are what they were "
            "before. Look for NaN in the data first, "
            "torch.isfinite(x).all(); where there is none, the loss scale may need more steps to "
            "come down. docs/guide/nan.md says how to find the cause"
        )


def _warn(text: str) -> None:
    warnings.warn(text, Notice, stacklevel=user_stacklevel())
