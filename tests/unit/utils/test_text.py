"""Pieces of messages."""

import pytest

from halfstep.utils.text import first_line


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("no such kernel", "no such kernel"),
        ("C++ compile error\n\nCommand:\ng++ -O3", "C++ compile error"),
        ("\n  \n  begins with blank lines  \nsecond", "begins with blank lines"),
        ("", "ValueError"),
        (" \n ", "ValueError"),
    ],
)
def test_the_first_line_of_an_error_is_the_first_that_is_not_blank(
    message: str, expected: str
) -> None:
    assert first_line(ValueError(message)) == expected
