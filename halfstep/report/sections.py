"""The sections of the page, from top to bottom; each is "" where there is nothing to say."""

from html import escape

from halfstep.report import charts
from halfstep.report import charts__lanes as lanes
from halfstep.report import html as markup
from halfstep.report import text as numbers
from halfstep.report import text__facts as facts
from halfstep.report.charts__curves import Chart, chart
from halfstep.report.load__values import CHANCE, Report, Row, Run
from halfstep.report.sections__dtypes import dtype_map
from halfstep.report.sections__table import html_table

_MEMORY = {
    "device": "Allocated on the device",
    "process": "By which the process grew during the run",
}


def header(report: Report) -> str:
    """What this is, and which colours to show it in."""
    modes = "".join(
        f'<input type="radio" name="colours" id="colours-{name.lower()}"{" checked" if name == "Auto" else ""}>'
        f'<label for="colours-{name.lower()}">{name}</label>'
        for name in ("Auto", "Light", "Dark")
    )
    over = " · ".join(
        part
        for part in ("halfstep run" if report.alone else "halfstep compare", report.date)
        if part
    )
    line = facts.headline(report)
    return (
        f'<header><div class="top"><p class="over">{escape(over)}</p>'
        f'<fieldset class="colours"><legend>Colours</legend>{modes}</fieldset></div>'
        f"<h1>{markup.name(report.title)}</h1>"
        + (f'<p class="sub">{escape(line)}</p>' if line else "")
        + "</header>"
    )


def advice(report: Report) -> str:
    """The answer first, with the figures that it rests on."""
    wanted = report.rows[0].precision if report.alone and report.rows else report.recommended
    chosen = next((row for row in report.rows if row.precision == wanted), None)
    figures = _figures(report, chosen) if chosen is not None else []
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    made = ("" if report.alone else _answer(report)) + (f"<dl>{shown}</dl>" if shown else "")
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in facts.status(report))
    return (
        f'<section class="advice" aria-label="In short">{made}</section>' if made else ""
    ) + notes


def results(report: Report) -> str:
    if not report.rows:
        return markup.section("Results", '<p class="note">No run has finished yet.</p>')
    how = "" if report.alone else facts.reading(report)
    return markup.section(
        "Results", html_table(report), markup.small(how), lanes.differences(report)
    )


def training(report: Report, drawn: list[Chart]) -> str:
    figures = markup.two(*(chart(each) for each in drawn))
    return markup.section("Training", _legend(report), figures) if figures else ""


def cost(report: Report) -> str:
    memory = "; ".join(
        words for kind, words in _MEMORY.items() if kind in {run.memory_kind for run in report.runs}
    )
    rough = f" Differences below {CHANCE >> 20} MiB mean nothing." if report.grown else ""
    rings = (
        "Each run is a ring. "
        if any(len(report.of(row.precision)) > 1 for row in report.rows)
        else ""
    )
    about = f"{memory or 'At its highest'}{'; the bar is the median' if rings else ''}.{rough} Shorter is better."
    time = lanes.bars(report, "ms_per_step", "Time per step", f"{rings}Shorter is better.", _ms)
    space = lanes.bars(report, "peak_memory", "Peak memory", about, numbers.size)
    return markup.section("Cost", markup.two(time, space))


def scaling(report: Report, drawn: Chart | None) -> str:
    """Where the loss scale went, or where it stayed, and when steps were skipped."""
    lines = charts.scaled(report).lines
    last = max(
        (s for run in report.runs for s in run.curve.get("step", ()) if s is not None), default=1
    )
    figures = markup.stack(chart(drawn) if drawn else "", lanes.skips(report, last))
    if not lines and not figures:
        return ""
    stayed = (
        ""
        if drawn
        else "".join(f"{s.name}: {numbers.scale(s.values()[0])} at every step. " for s in lines)
    )
    without = ", ".join(
        row.precision for row in report.rows if row.index not in {s.index for s in lines}
    )
    said = stayed + (f"Without loss scaling: {without}." if without else "")
    return markup.section("Loss scale", figures, markup.small(said))


def dtypes(report: Report) -> str:
    how = "As seen in the first forward. One name: input, weight and output alike; otherwise input → weight → output."
    found = {
        row.precision: [run.choices for run in report.of(row.precision) if run.choices]
        for row in report.rows
    }
    choices = [markup.facts(name, each[0].items()) for name, each in found.items() if each]
    table = dtype_map(report)
    folded = markup.folded("Choices made for you", markup.two(*choices))
    return (
        markup.section("Dtypes", markup.small(how) if table else "", table, folded)
        if table or folded
        else ""
    )


def runs(report: Report) -> str:
    """What failed, in plain sight; every single run, folded away."""
    failed = "".join(
        f"<li><b>{markup.name(run.precision)}, seed {run.seed}</b> <span>{escape(run.error) or '–'}</span></li>"
        for run in facts.failures(report)
    )
    heads = ("Run", "Accuracy", "Loss", "ms/step", "Memory", "Skipped")
    table = (
        markup.table("Every run", heads, map(_run, report.runs), kind="results")
        if len(report.runs) > 1
        else ""
    )
    every = markup.folded(f"Every run ({len(report.runs)})", table)
    return (
        markup.section("Failed runs", f'<ul class="failed">{failed}</ul>' if failed else "") + every
    )


def conditions(report: Report) -> str:
    """What somebody needs to see the same numbers."""
    lists = (
        markup.facts("Setup", facts.setup(report)),
        markup.facts("Environment", facts.environment(report)),
    )
    command = (
        '<div class="command"><button type="button" data-copy hidden>Copy</button>'
        f'<pre tabindex="0" role="region" aria-label="Command"><code>{escape(report.command)}</code></pre></div>'
    )
    return markup.section("To repeat it", command if report.command else "", markup.two(*lists))


def _legend(report: Report) -> str:
    """Check boxes, so that lines can be hidden with a mouse, with a keyboard, and without any script."""
    if len(report.rows) < 2:
        return ""
    boxes = "".join(
        f'<label class="s{row.index % 8}"><input type="checkbox" id="show-{row.index}" data-show="{row.index}" checked>'
        f'<span class="stroke dash{row.index // 8 % 3}"></span>{markup.name(row.precision)}</label>'
        for row in report.rows
    )
    return f'<fieldset class="legend"><legend>Show</legend>{boxes}</fieldset>'


def _answer(report: Report) -> str:
    head = f"Use {markup.name(report.recommended)}" if report.recommended else "No recommendation"
    return f"<h2>{head}</h2><p>{escape(facts.reason(report))}</p>"


def _figures(report: Report, row: Row) -> list[tuple[str, str]]:
    """A precision's own figures when it is the first, else how it stands against the first."""
    first = report.rows[0]
    made = [("accuracy", numbers.spread(row["acc"], row["acc_interval"]))]
    if row is first:
        made += [("loss", numbers.fixed(row["loss"], 4)), ("per step", _ms(row["ms_per_step"]))]
        made += [
            ("peak memory", numbers.size(row["peak_memory"])),
            ("skipped steps", numbers.count(row["skipped"])),
        ]
        made += [("final loss scale", numbers.scale(row["final_scale"]))]
    else:
        speed = numbers.over(first["ms_per_step"], row["ms_per_step"])
        memory = report.share("peak_memory", row, first)
        made += [
            (
                "points against " + first.precision,
                numbers.points(row["difference"], row["difference_interval"]),
            )
        ]
        made += [(f"the speed of {first.precision}", numbers.ratio(speed))]
        made += [(f"the memory of {first.precision}", numbers.ratio(memory))]
    return [(name, value) for name, value in made if value != numbers.NONE]


def _run(run: Run) -> str:
    name = f"{markup.name(run.precision)}, seed {run.seed}{' (failed)' if run.failed else ''}"
    of = run.numbers.get
    cells = [
        numbers.percent(of("acc")),
        numbers.fixed(of("loss"), 4),
        numbers.short(of("ms_per_step")),
    ]
    return markup.row(
        name,
        map(markup.cell, [*cells, numbers.size(of("peak_memory")), numbers.count(of("skipped"))]),
    )


def _ms(value: float | None) -> str:
    return numbers.NONE if value is None else f"{numbers.short(value)} ms"
