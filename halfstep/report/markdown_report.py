"""The report for a pull request, in GitHub's Markdown.

Names are shown as code and other text is escaped, so that none of it can become markup.
"""

import re
from collections.abc import Mapping
from typing import Any

from halfstep.report import results_table, sentences
from halfstep.report.number_format import MISSING
from halfstep.report.report_data import Report, Row, parse_summary


def markdown(summary: Mapping[str, Any]) -> str:
    """A heading, the recommendation, the table, what failed, and the conditions."""
    report = parse_summary(summary)
    parts = [
        f"## {escape_markdown(report.title)}",
        _recommendation(report),
        _status_notes(report),
        _results_table(report),
        _failed_runs(report),
        _conditions(report),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escape_markdown(text: str) -> str:
    """Text in which nothing is markup: not bold, no link, no HTML, no mention of somebody."""
    text = re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", _on_one_line(text))
    return text.replace("&", "&amp;").replace("@", "@\N{ZERO WIDTH SPACE}")


def code_span(text: str) -> str:
    """The text as inline code."""
    text = _on_one_line(text)
    if not text:
        return MISSING
    fence = "`" * (_longest_backticks(text) + 1)
    padding = " " if text.startswith("`") or text.endswith("`") else ""
    span = f"{fence}{padding}{text}{padding}{fence}"
    return span.replace("|", "\\|")  # a bar would end the cell of a table, even inside code


def _code_block(text: str) -> str:
    fence = "`" * max(3, _longest_backticks(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_backticks(text: str) -> int:
    """The length of the longest run of backticks: a fence around the text must be longer."""
    return max((len(run) for run in re.findall("`+", text)), default=0)


def _on_one_line(text: str) -> str:
    """The text on one line, as the cell of a table must be. No-break spaces stay as they are."""
    return re.sub(r"[^\S\N{NO-BREAK SPACE}]+", " ", text).strip()


def _recommendation(report: Report) -> str:
    if report.alone:
        return ""
    heading = "**No recommendation.**"
    if report.recommended:
        heading = f"**Use {code_span(report.recommended)}.**"
    reason = escape_markdown(sentences.recommendation_reason(report))
    return f"{heading} {reason}".rstrip()


def _status_notes(report: Report) -> str:
    return "\n".join(f"> {escape_markdown(note)}" for note in sentences.status_notes(report))


def _results_table(report: Report) -> str:
    columns = results_table.visible_columns(report)
    headings = [results_table.first_heading(report)]
    alignments = ["---"]
    if not report.alone:
        headings.append("Verdict")
        alignments.append("---")
    for column in columns:
        headings.append(column.heading)
        alignments.append("---:")

    lines = [headings, alignments]
    for row in report.rows:
        cells = [_row_name(report, row)]
        if not report.alone:
            cells.append(escape_markdown(results_table.verdict_text(row)))
        cells += [column.format_cell(row) for column in columns]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _row_name(report: Report, row: Row) -> str:
    name = code_span(row.precision)
    return f"**{name}**" if row.precision == report.recommended else name


def _failed_runs(report: Report) -> str:
    lines = []
    for run in report.failed_runs():
        error = escape_markdown(run.error) or "no message"
        lines.append(f"- {code_span(run.precision)}, seed {run.seed}: {error}")
    if not lines:
        return ""
    return "\n".join(["**Failed runs**", "", *lines])


def _conditions(report: Report) -> str:
    """Setup, environment and command, folded away."""
    parts = []
    facts = [*sentences.setup_facts(report), *sentences.environment_facts(report)]
    if facts:
        lines = ["| | |", "|---|---|"]
        for label, value in facts:
            lines.append(f"| {escape_markdown(label)} | {escape_markdown(value)} |")
        parts.append("\n".join(lines))
    if report.command:
        parts.append(_code_block(report.command))
    if not parts:
        return ""
    inside = "\n\n".join(parts)
    return f"<details><summary>Conditions</summary>\n\n{inside}\n\n</details>"
