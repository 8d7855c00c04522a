"""Options in the words of a command, as they were typed: read, replaced, left out."""

import shlex
from collections.abc import Sequence


def without_options(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without these options, which have no values."""
    return [word for word in words if word not in options]


def option_value(words: Sequence[str], option: str) -> str | None:
    """The last value of an option, from `--out X` or `--out=X`; None where it was not typed."""
    value = None
    for i, word in enumerate(words):
        name, equals, text = word.partition("=")
        if name == option and equals:
            value = text
        elif word == option and i + 1 < len(words):
            value = words[i + 1]
    return value


def replace_option(words: Sequence[str], option: str, value: str) -> list[str]:
    """The words with this value of an option at the end, in place of all others."""
    result: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word == option:
            is_value = True
        elif not word.startswith(f"{option}="):
            result.append(word)
    return [*result, option, value]


def command_for_all(
    command: str, precisions: Sequence[str], seeds: Sequence[int], usual_precisions: Sequence[str]
) -> str:
    """The command of a comparison that was added to, with all its precisions and seeds.

    Repeated in an empty folder it trains everything that the table shows. Another program's command
    stays as it is.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    if words[:2] != ["halfstep", "compare"]:
        return command
    typed = option_value(words, "--precisions")
    names = list(usual_precisions) if typed is None else [name.strip() for name in typed.split(",")]
    if names != list(precisions):
        words = replace_option(words, "--precisions", ",".join(precisions))
    seeds_text = format_seeds(seeds)
    if (option_value(words, "--seeds") or "3") != seeds_text:
        words = replace_option(words, "--seeds", seeds_text)
    return shlex.join(words)


def format_seeds(seeds: Sequence[int]) -> str:
    """Seeds as `--seeds` takes them: "3" for 0, 1 and 2; "4,7"; "4," for that one alone."""
    if list(seeds) == list(range(len(seeds))):
        return str(len(seeds))
    listed = ",".join(map(str, seeds))
    return listed if len(seeds) > 1 else f"{listed},"
