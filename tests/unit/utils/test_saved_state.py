"""States of callbacks of the user: what a class begins with says little of what it becomes."""

from typing import Any

import pytest
import torch

from halfstep.utils.saved_state import SavedValue, same_kind


@pytest.mark.parametrize(
    ("now", "saved"),
    [
        (None, [1]),
        (False, "runs/best"),
        ("", 3),
        ([], {"loss": 1.0}),
        ([], torch.ones(2)),
        ({}, [1, 2]),
        (0, 0.5),
        (1.5, None),
        (torch.zeros(0), torch.ones(5, 5)),
        (torch.zeros(()), 3),
        ({"seen": 0, "old": 1}, {"seen": 9, "new": "x"}),
    ],
)
def test_what_a_run_may_have_become_is_taken(now: Any, saved: Any) -> None:
    same_kind(SavedValue({"value": saved}, "resume"), {"value": now})


@pytest.mark.parametrize(
    ("now", "saved"),
    [(3, "x"), ("word", 3), ([1], {"loss": 1.0}), ({"seen": 1}, [1]), (torch.ones(2), "x")],
)
def test_another_kind_is_refused_by_name(now: Any, saved: Any) -> None:
    with pytest.raises(ValueError, match=r"resume: value: expected .*, received "):
        same_kind(SavedValue({"value": saved}, "resume"), {"value": now})
