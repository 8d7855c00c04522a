"""The whole page: one file that fetches nothing, drawn here; its script only reads values out and copies."""

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from halfstep.report import charts
from halfstep.report import sections as parts
from halfstep.report.charts__curves import data
from halfstep.report.load__values import Report, parse


def page(summary: Mapping[str, Any]) -> str:
    """compare.json as HTML. Nothing in it can run but the page's own script, which is named by its hash."""
    report = parse(summary)
    curves, scale = charts.training(report), charts.scaling(report)
    body = [
        parts.header(report),
        "<main>",
        parts.advice(report),
        parts.results(report),
        parts.training(report, curves),
    ]
    body += [
        parts.cost(report),
        parts.scaling(report, scale),
        parts.dtypes(report),
        parts.runs(report),
    ]
    body += [parts.conditions(report), "</main>", _footer(report)]
    script, values = (
        _file("page.js"),
        {each.id: data(each) for each in [*curves, *([scale] if scale else [])]},
    )
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        _policy(script),
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">',
        f"<title>{escape(report.title)}</title>",
        f"<style>\n{_file('style.css')}{_toggles(report)}</style>\n</head>\n<body>",
        *(part for part in body if part),
        f'<script type="application/json" id="data">{embedded(values)}</script>',
        f"<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(lines)


def embedded(value: Any) -> str:
    """JSON that cannot end its script element: no bare <, >, & or line separators."""
    made = json.dumps(
        value, separators=(",", ":"), allow_nan=False
    )  # ASCII only: U+2028 is escaped already
    return made.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(script: str) -> str:
    """No requests at all; styles inline, the one script by its hash."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rules = [
        "default-src 'none'",
        f"script-src 'sha256-{digest}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
    ]
    rules += ["base-uri 'none'", "form-action 'none'"]
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'


def _toggles(report: Report) -> str:
    """A box of the legend that is not checked hides its precision in every chart."""
    return "".join(
        f"body:has(#show-{row.index}:not(:checked)) .k{row.index}{{display:none}}\n"
        for row in report.rows
    )


def _footer(report: Report) -> str:
    by = f"halfstep {report.environment.get('halfstep', '')}".strip()
    return (
        f"<footer><p>Written by {escape(by)}. This page is one file and loads nothing.</p></footer>"
    )


def _file(name: str) -> str:
    return files("halfstep.report").joinpath(name).read_text("utf-8")
