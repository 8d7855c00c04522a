"""halfstep.engine.memory is deprecated: its functions warn, and touch nothing."""

import pytest

from halfstep.engine.memory import kept, look


def test_both_functions_warn_and_say_that_nothing_is_kept() -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"kept\(\): halfstep no longer changes malloc"),
        kept() as memory,
    ):
        assert not memory.kept
    with pytest.warns(DeprecationWarning, match=r"look\(\): halfstep no longer changes malloc"):
        assert not look().kept
