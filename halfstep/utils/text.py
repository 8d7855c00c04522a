"""Pieces of messages that many places need."""

import unicodedata
from collections.abc import Sequence

# What a terminal acts on or hides: control characters, marks of direction and other formats, lone
# surrogates, separators of lines and paragraphs.
UNPRINTABLE_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")
# Formats that only shape the letters beside them, in Persian, in Hindi, in emoji.
HARMLESS_FORMATS = "\u200b\u200c\u200d"


def write_line(problem: str, line: str) -> str:
    """The message of an error: what is wrong, and the line to write instead."""
    return f"{problem}; write {line}"


def list_some(names: Sequence[str], limit: int) -> str:
    """The first names, and how many there are beyond them: "a, b, c and 4 more"."""
    shown = ", ".join(names[:limit])
    if len(names) <= limit:
        return shown
    return f"{shown} and {len(names) - limit} more"


def plural(count: int, noun: str) -> str:
    """The number with its noun: "1 step", "3 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_bytes(count: float) -> str:
    """Four digits and the unit: "44.86 MiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def dtype_name(dtype: object) -> str:
    """A torch dtype without its prefix: "float16"."""
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank; its class where there is none."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__


def printable(text: object, *, lines: bool = False) -> str:
    """The text for a terminal or a message: what is not printed is escaped as Python writes it.

    Names of files, classes and tensors may hold sequences that a terminal obeys. With `lines`,
    ends of lines and tabs stay, for messages of several lines.

    >>> printable("cat\\x1b[2J")
    'cat\\\\x1b[2J'
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(_printable_character(character, lines=lines) for character in text)


def _printable_character(character: str, *, lines: bool) -> str:
    if character.isprintable() or character in HARMLESS_FORMATS:
        return character
    if lines and character in "\n\t":
        return character
    if unicodedata.category(character) not in UNPRINTABLE_CATEGORIES:
        return character  # kinds of spaces, letters newer than this Python
    return character.encode("unicode_escape").decode("ascii")
