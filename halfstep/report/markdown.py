"""The report for a pull request: GitHub's Markdown, names as code, so that none of them can become markup."""

import re
from collections.abc import Mapping
from typing import Any

from halfstep.report import sections__table as table
from halfstep.report import text__facts as facts
from halfstep.report.load__values import Report, parse


def markdown(summary: Mapping[str, Any]) -> str:
    """A heading, the recommendation, the table, what failed, and the conditions."""
    report = parse(summary)
    parts = [
        f"## {plain(report.title)}",
        _advice(report),
        _notes(report),
        _table(report),
        _failed(report),
    ]
    parts += [_conditions(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(words: str) -> str:
    """Text in which nothing is markup: not bold, not a link, not HTML, not a mention of somebody."""
    words = re.sub(r"([\\`*_\[\]<>#|~$])", r"\\\1", _line(words))
    return words.replace("&", "&amp;").replace("@", "@\N{ZERO WIDTH SPACE}")


def code(words: str) -> str:
    """A code span: a fence longer than any inside; a bar ends a table's cell even in code, so it is escaped."""
    words = _line(words)
    fence = "`" * (max([len(run) for run in re.findall("`+", words)], default=0) + 1)
    air = " " if words.startswith("`") or words.endswith("`") else ""
    return f"{fence}{air}{words}{air}{fence}".replace("|", "\\|") if words else "–"


def _line(words: str) -> str:
    """On one line, as a cell must be; a space that does not break stays one."""
    return re.sub(r"[^\S\N{NO-BREAK SPACE}]+", " ", words).strip()


def _advice(report: Report) -> str:
    if report.alone:
        return ""
    head = (
        f"**Use {code(report.recommended)}.**" if report.recommended else "**No recommendation.**"
    )
    return f"{head} {plain(facts.reason(report))}".rstrip()


def _notes(report: Report) -> str:
    return "\n".join(f"> {plain(note)}" for note in facts.status(report))


def _table(report: Report) -> str:
    shown = table.columns(report)
    judged = [] if report.alone else ["Verdict"]
    head = [table.first(report), *judged, *(c.head for c in shown)]
    lines = [head, ["---", *(["---"] if judged else []), *("---:" for _ in shown)]]
    for row in report.rows:
        name = (
            f"**{code(row.precision)}**"
            if row.precision == report.recommended
            else code(row.precision)
        )
        lines.append(
            [name, *([plain(table.verdict(row))] if judged else []), *(c.cell(row) for c in shown)]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _failed(report: Report) -> str:
    found = facts.failures(report)
    lines = [
        f"- {code(run.precision)}, seed {run.seed}: {plain(run.error) or 'no message'}"
        for run in found
    ]
    return "\n".join(["**Failed runs**", "", *lines]) if lines else ""


def _conditions(report: Report) -> str:
    found = [*facts.setup(report), *facts.environment(report)]
    lines = [f"| {plain(name)} | {plain(value)} |" for name, value in found]
    made = "\n".join(["| | |", "|---|---|", *lines]) if lines else ""
    block = _block(report.command) if report.command else ""
    inside = "\n\n".join(part for part in (made, block) if part)
    return f"<details><summary>Conditions</summary>\n\n{inside}\n\n</details>" if inside else ""


def _block(command: str) -> str:
    fence = "`" * max(3, max([len(run) for run in re.findall("`+", command)], default=0) + 1)
    return f"{fence}\n{command}\n{fence}"
