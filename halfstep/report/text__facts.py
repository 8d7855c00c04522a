"""The words around the numbers, the same on the page and in Markdown."""

from typing import Any

from halfstep.report import text as numbers
from halfstep.report.load__values import Report, Run, items, text

_SETUP = {
    "net": "Network",
    "data": "Data",
    "samples": "Training samples",
    "test_samples": "Test samples",
    "epochs": "Epochs",
    "batch": "Batch",
    "optimizer": "Optimizer",
    "lr": "Learning rate",
    "schedule": "Schedule",
    "precision": "Precision",
    "precisions": "Precisions",
    "seeds": "Seeds",
    "seed": "Seed",
    "accumulate": "Batches to an update",
    "clip_norm": "Largest norm",
    "ema": "Decay of the average",
    "build": "Builder",
    "sink": "Sink",
    "margin": "Margin",
}
_WHERE = {
    "device": "Device",
    "torch": "torch",
    "python": "Python",
    "cuda": "CUDA",
    "threads": "Threads",
}
_WHERE |= {"halfstep": "halfstep", "platform": "Platform"}


def setup(report: Report) -> list[tuple[str, str]]:
    """What was trained, named and in order; a field that is not known keeps its own name."""
    spec = {
        name: report.spec[name]
        for name in (*_SETUP, *report.spec)
        if report.spec.get(name) not in (None, "")
    }
    facts = [(_SETUP.get(name, name), _value(value)) for name, value in spec.items()]
    return [(name, f"{value} points" if name == "Margin" else value) for name, value in facts]


def environment(report: Report) -> list[tuple[str, str]]:
    names = dict.fromkeys((*_WHERE, *report.environment))
    return [
        (_WHERE.get(name, name), report.environment[name])
        for name in names
        if report.environment.get(name)
    ]


def headline(report: Report) -> str:
    """One line under the title: what was trained, how long, on what."""
    spec = report.spec
    what = " on ".join(part for part in (text(spec.get("net")), text(spec.get("data"))) if part)
    parts = ["" if what in report.title else what, text(spec.get("precision"))]
    if (epochs := spec.get("epochs")) is not None:
        parts.append(f"{epochs} epoch{'s' if epochs != 1 else ''}")
    parts += [f"batch {spec['batch']}" if spec.get("batch") is not None else ""]
    parts += [
        text(spec.get("optimizer")),
        f"learning rate {_value(spec['lr'])}" if spec.get("lr") is not None else "",
    ]
    parts += [
        numbers.plural(len(items(spec.get("seeds"))), "seed") if items(spec.get("seeds")) else ""
    ]
    return " · ".join(part for part in [*parts, report.environment.get("device", "")] if part)


def status(report: Report) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    if report.planned > len(report.runs):
        notes.append(
            f"Not finished: {len(report.runs)} of {report.planned} runs so far. The same command goes on."
        )
    if found := failures(report):
        verb = "is" if len(found) == 1 else "are"
        notes.append(
            f"{numbers.plural(len(found), 'run')} failed and {verb} left out of the means; see Failed runs."
        )
    if not report.alone and len({run.seed for run in report.runs}) == 1:
        notes.append(
            "One seed only: the luck of that seed cannot be told from the effect of a precision."
        )
    return notes


def reading(report: Report) -> str:
    """How to read the table."""
    counts = {int(row["n"] or 0) for row in report.rows}
    if counts == {1}:
        means = "One run each."
    else:
        each = f"{counts.pop()} runs each" if len(counts) == 1 else "the runs of each"
        means = f"Over {each}; ± is the half-width of the 95 % interval over seeds."
    against = (
        "Difference and verdict are against the first row, paired by seed, in percentage points."
    )
    return (
        f"{means} {against if len(report.rows) > 1 else ''} Times leave out warm-up and evaluation."
    )


def reason(report: Report) -> str:
    """The recommendation's reason as a sentence; one that begins with a precision's name keeps its small letter."""
    words = report.reason.strip()
    named = words.startswith(tuple(row.precision for row in report.rows if row.precision))
    words = words if named else words[:1].upper() + words[1:]
    return words if not words or words[-1] in ".!?" else f"{words}."


def failures(report: Report) -> list[Run]:
    return [run for run in report.runs if run.failed]


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(text(each) for each in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else text(value)
