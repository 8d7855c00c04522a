"""Mistakes in the value of an option, told as elsewhere: what was expected, and what came."""

from typing import Any

import typer
from typer.core import TyperCommand

# by the kinds that typer's own checks tell apart
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
}


class Command(TyperCommand):
    """A command whose parse errors name the value too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _said(error)
            raise


def _said(error: typer.BadParameter) -> str:
    """typer's own words where it named the value itself, as it did before 0.21 and does for choices."""
    found: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if not found:
        return error.message
    kind, came = found[0].get("type"), found[0].get("input")
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {came!r}"
    return error.message.removeprefix("Value error, ")
