"""What the commands print: columns, bars, scores, JSON. Plain text, the same in a pipe."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from halfstep.cli.options import is_typed
from halfstep.utils.files import to_json
from halfstep.utils.text import printable

# Options that `command_line` may leave out and that are followed by a value of their own.
OPTIONS_WITH_VALUE = ("--resume",)

BAR_WIDTH = 24  # characters of a full bar

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def echo(text: object = "", *, err: bool = False, nl: bool = True, file: Any = None) -> None:
    """Prints a text in which nothing can act on the terminal. The only way that commands print."""
    typer.echo(printable(text, lines=True), err=err, nl=nl, file=file)


def note_usual_net(ctx: typer.Context) -> None:
    """Says which network is trained, where data was requested and a network was not."""
    if is_typed(ctx, "data") and not is_typed(ctx, "net") and ctx.params["build"] is None:
        net = ctx.params["net"]
        echo(f"note: net: the usual network, {net}. --net resnet18 chooses another", err=True)


def align_columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Rows of cells as lines. The first `left` columns are aligned left, the others right."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.ljust(width) if i < left else cell.rjust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def draw_bar(fraction: float) -> str:
    """A bar of this fraction of the full width, at least one mark long.

    The marks are ASCII where the encoding of standard output has no block character.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    mark = "█" if "utf" in encoding.lower() else "#"
    return mark * max(1, round(fraction * BAR_WIDTH))


def format_scores(scores: Mapping[str, Any]) -> str:
    """The floats among the scores, accuracies as percentages: "loss 0.4321  acc 85.20 %"."""
    texts = []
    for name, value in scores.items():
        if not isinstance(value, float):
            continue
        is_accuracy = name.removeprefix("valid_").startswith("acc")
        number = f"{100 * value:.2f} %" if is_accuracy else f"{value:.4f}"
        texts.append(f"{printable(name)} {number}")
    return "  ".join(texts)


def command_line(*, without: Sequence[str] = (), add: str = "") -> str:
    """The command as it was typed, to be shown or repeated.

    `without`: options to leave out, with their values. `add`: a text to put at the end.
    """
    words = []
    is_value_of_left_out = False
    for word in sys.argv[1:]:
        if is_value_of_left_out:
            is_value_of_left_out = False
            continue
        option, equals, _ = word.partition("=")
        if option not in without:
            words.append(word)
        elif option in OPTIONS_WITH_VALUE and not equals:
            is_value_of_left_out = True
    line = shlex.join(["halfstep", *words])
    return f"{line} {add}" if add else line


def exit_code(stop: BaseException) -> int:
    """The exit code of a run that a signal ended: that of SystemExit, 130 for an interrupt."""
    if not isinstance(stop, SystemExit):
        return EXIT_INTERRUPTED
    return stop.code if isinstance(stop.code, int) else 1


def print_json(value: Any) -> None:
    """Prints strict JSON on standard output, with null for NaN and infinity."""
    echo(to_json(value).replace("\x7f", "\\u007f"))  # all others are escaped by JSON itself
