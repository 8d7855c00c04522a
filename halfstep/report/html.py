"""The few pieces of HTML that every section uses. All text comes in through here or through `escape`."""

from collections.abc import Iterable
from html import escape


def name(words: str) -> str:
    """A name of the user's: text, and its direction of writing ends with it."""
    return f"<bdi>{escape(words)}</bdi>"


def key(index: int) -> str:
    """The colour of a precision."""
    return f'<span class="key s{index % 8}"></span>'


def table(label: str, heads: Iterable[str], rows: Iterable[str], *, kind: str) -> str:
    """A table in a box of its own, which scrolls (by keyboard too) when it is wider than the screen."""
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(label)}"><table class="{kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def row(first: str, cells: Iterable[str], *, chosen: bool = False) -> str:
    """A row of ready HTML; the first cell names it."""
    mark = ' class="chosen"' if chosen else ""
    return f'<tr{mark}><th scope="row">{first}</th>{"".join(cells)}</tr>'


def cell(words: str, kind: str = "") -> str:
    return f'<td class="{kind}">{escape(words)}</td>' if kind else f"<td>{escape(words)}</td>"


def facts(title: str, found: Iterable[tuple[str, str]]) -> str:
    """Names and values under a heading; "" without any."""
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{name(value)}</dd>" for key, value in found)
    return f'<div class="facts"><h3>{name(title)}</h3><dl>{rows}</dl></div>' if rows else ""


def section(title: str, *inside: str) -> str:
    """A section; "" where there is nothing inside."""
    made = "".join(inside)
    return f"<section><h2>{escape(title)}</h2>{made}</section>" if made else ""


def folded(title: str, inside: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{inside}</details>" if inside else ""


def two(*inside: str) -> str:
    """Side by side where there is room."""
    made = "".join(inside)
    return f'<div class="two">{made}</div>' if made else ""


def stack(*inside: str) -> str:
    """One below the other, at full width."""
    made = "".join(inside)
    return f'<div class="stack">{made}</div>' if made else ""


def small(words: str) -> str:
    return f'<p class="small">{escape(words)}</p>' if words else ""
