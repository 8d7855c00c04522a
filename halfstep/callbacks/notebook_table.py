"""The progress of a run as a table in a notebook: a row for each epoch, and one that moves.

The table replaces itself in the cell's output. What is saved with the notebook is its last state,
as HTML and as plain lines.
"""

from html import escape
from typing import Any

from halfstep.callbacks.progress_displays import Number, Position, join_words

# Of a long run, the first and the last rows: the whole table is sent at every move.
FIRST_ROWS = 10
LAST_ROWS = 90

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"

# Columns behind those of losses and scores, in this order.
LAST_COLUMNS = ("lr", "scale", "skipped", "steps/s", "time")


class NotebookTable:
    """Drawn by IPython's display handles, which every front end of a kernel knows."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._rows: list[tuple[str, list[Number]]] = []
        self._notes: list[str] = []
        self._moving: tuple[str, Position, list[Number]] | None = None

    def move(self, head: str, position: Position, numbers: list[Number]) -> None:
        self._moving = (head, position, numbers)
        self._show()

    def keep(self, head: str, numbers: list[Number]) -> None:
        self._rows.append((head, numbers))
        self._moving = None

    def note(self, text: str) -> None:
        self._notes.append(text)
        self._show()

    def end(self) -> None:
        self._moving = None
        if self._handle is not None or self._rows:
            self._show()

    def abandon(self) -> None: ...

    def _show(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found,unused-ignore]

        content = {"text/html": self.as_html(), "text/plain": self.as_text()}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def as_text(self) -> str:
        """The same as lines, for the front ends and readers that show no HTML."""
        lines = [join_words(head, numbers) for head, numbers in self._shown_rows()]
        if self._moving is not None:
            head, position, numbers = self._moving
            lines.append(join_words(f"{head} {position}", numbers))
        return "\n".join([*lines, *self._notes])

    def as_html(self) -> str:
        """The table, without colours or a font of its own: dark themes stay dark."""
        columns = _columns([numbers for _, numbers in self._rows])
        lines = ["<table>"]
        if self._rows:
            titles = "".join(f'<th style="text-align:right">{escape(c)}</th>' for c in columns)
            lines.append(f'<thead><tr><th style="text-align:left"></th>{titles}</tr></thead>')
        lines.append("<tbody>")
        for head, numbers in self._shown_rows():
            texts = {number.name: number.text for number in numbers}
            cells = "".join(_cell(texts.get(column, "")) for column in columns)
            lines.append(f"<tr>{_head(head)}{cells}</tr>")
        if self._moving is not None:
            head, position, numbers = self._moving
            words = _moving_words(position, self._without_shown(numbers))
            bar = _bar(position)
            span = max(1, len(columns))
            lines.append(
                f'<tr>{_head(head)}<td colspan="{span}" style="text-align:left">{bar} {words}</td>'
                "</tr>"
            )
        lines.append("</tbody></table>")
        lines += [f"<div>{escape(note)}</div>" for note in self._notes]
        return "".join(lines)

    def _without_shown(self, numbers: list[Number]) -> list[Number]:
        """The numbers that the last row does not show already, as it does an evaluation's."""
        last_row = self._rows[-1][1] if self._rows else []
        shown = {(number.name, number.text) for number in last_row}
        return [number for number in numbers if (number.name, number.text) not in shown]

    def _shown_rows(self) -> list[tuple[str, list[Number]]]:
        hidden = len(self._rows) - FIRST_ROWS - LAST_ROWS
        if hidden <= 0:
            return self._rows
        more: tuple[str, list[Number]] = (f"… {hidden} more in run.history …", [])
        return [*self._rows[:FIRST_ROWS], more, *self._rows[-LAST_ROWS:]]


def _columns(rows: list[list[Number]]) -> list[str]:
    """The names in all rows: scores as they came first, then the settings and the pace."""
    names = dict.fromkeys(number.name for numbers in rows for number in numbers)
    scores = [name for name in names if name not in LAST_COLUMNS]
    return scores + [name for name in LAST_COLUMNS if name in names]


def _head(text: str) -> str:
    return f'<th style="text-align:left;white-space:nowrap">{escape(text)}</th>'


def _cell(text: str) -> str:
    return f'<td style="text-align:right;white-space:nowrap">{escape(text)}</td>'


def _moving_words(position: Position, numbers: list[Number]) -> str:
    """The position and the numbers, as HTML that breaks a line only between two of them."""
    texts = [str(position), *(number.words for number in numbers if number.words)]
    unbroken = [text.replace(" ", NO_BREAK_SPACE) for text in texts]
    return escape(f"{NO_BREAK_SPACE}· ".join(unbroken))


def _bar(position: Position) -> str:
    if position.total is None:
        return "<progress></progress>"
    return f'<progress value="{position.done}" max="{position.total}"></progress>'
