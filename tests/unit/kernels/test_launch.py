"""Kernels that cannot be launched: what is tried, and what is said."""

import pytest

from halfstep.errors import Notice
from halfstep.kernels.launch import run_or_fall_back


def test_a_kernel_that_ran_before_and_fails_now_is_an_error() -> None:
    works = {"key": True}

    def fails() -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_or_fall_back(works, "key", fails, "instead", "same")
    assert works == {"key": True}


def test_two_threads_whose_first_compilations_both_fail() -> None:
    """The other one has noted its failure by the time that this one fails: neither raises."""
    works: dict[str, bool] = {}

    def fails() -> None:
        works["key"] = False
        raise OSError("no space left")

    with pytest.warns(Notice, match="instead: Triton failed .no space left.*same"):
        assert not run_or_fall_back(works, "key", fails, "instead", "same")
