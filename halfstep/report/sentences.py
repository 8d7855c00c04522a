"""The words around the numbers, the same on the page and in Markdown."""

from typing import Any

from halfstep.report.report_data import Report, as_sequence, as_text
from halfstep.utils.text import plural

Fact = tuple[str, str]  # a name and its value

# Names of the settings, in the order in which they are shown.
SETTING_LABELS = {
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
    "ranks": "Ranks",
    "exact": "Exact",
    "logical": "Logical micro-batches",
    "build": "Builder",
    "sink": "Sink",
    "margin": "Margin",
}

ENVIRONMENT_LABELS = {
    "device": "Device",
    "torch": "torch",
    "python": "Python",
    "cuda": "CUDA",
    "threads": "Threads",
    "halfstep": "halfstep",
    "platform": "Platform",
}


def setup_facts(report: Report) -> list[Fact]:
    """The settings of the training, labelled and in order. An unknown one keeps its own name."""
    facts = []
    for name in dict.fromkeys((*SETTING_LABELS, *report.spec)):
        value = report.spec.get(name)
        if value is None or value == "" or (name == "ranks" and value == 1):
            continue
        text = _setting_text(value)
        label = SETTING_LABELS.get(name, name)
        if label == "Margin":
            text = f"{text} points"
        facts.append((label, text))
    return facts


def environment_facts(report: Report) -> list[Fact]:
    """Device and versions, labelled and in order."""
    facts = []
    for name in dict.fromkeys((*ENVIRONMENT_LABELS, *report.environment)):
        value = report.environment.get(name)
        if value:
            facts.append((ENVIRONMENT_LABELS.get(name, name), value))
    return facts


def kind_and_date(report: Report) -> str:
    """The line above the title: the command that trained, and the day."""
    command = "halfstep run" if report.alone else "halfstep compare"
    return f"{command} · {report.date}" if report.date else command


def headline(report: Report) -> str:
    """The line below the title: what was trained, how long, on what."""
    spec = report.spec
    names = [as_text(spec.get("net")), as_text(spec.get("data"))]
    net_on_data = " on ".join(name for name in names if name)
    parts = []
    if net_on_data not in report.title:
        parts.append(net_on_data)
    parts.append(as_text(spec.get("precision")))

    epochs = spec.get("epochs")
    if epochs is not None:
        parts.append(f"{epochs} epoch" if epochs == 1 else f"{epochs} epochs")
    if spec.get("batch") is not None:
        parts.append(f"batch {spec['batch']}")
    parts.append(as_text(spec.get("optimizer")))
    if spec.get("lr") is not None:
        parts.append(f"learning rate {_setting_text(spec['lr'])}")
    seeds = as_sequence(spec.get("seeds"))
    if seeds:
        parts.append(plural(len(seeds), "seed"))
    parts.append(report.environment.get("device", ""))
    return " · ".join(part for part in parts if part)


def status_notes(report: Report) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = []
    if report.planned_runs > len(report.runs):
        notes.append(
            f"Not finished: {len(report.runs)} of {report.planned_runs} runs so far. "
            "The same command goes on."
        )
    failed_count = len(report.failed_runs())
    if failed_count:
        verb = "is" if failed_count == 1 else "are"
        notes.append(
            f"{plural(failed_count, 'run')} failed and {verb} left out of the means; "
            "see Failed runs."
        )
    seeds = {run.seed for run in report.runs}
    if len(seeds) == 1 and not report.alone:
        notes.append(
            "One seed only: the luck of that seed cannot be told from the effect of a precision."
        )
    return notes


def how_to_read(report: Report) -> str:
    """The sentences below the table of results."""
    run_counts = {int(row["n"] or 0) for row in report.rows}
    if run_counts == {1}:
        means = "One run each."
    else:
        runs = "the runs of each"
        if len(run_counts) == 1:
            runs = f"{run_counts.pop()} runs each"
        means = f"Over {runs}; ± is the half-width of the 95 % interval over seeds."

    comparison = ""
    if len(report.rows) > 1:
        comparison = (
            "Difference and verdict are against the first row, paired by seed, in percentage "
            "points."
        )
    return f"{means} {comparison} Times leave out warm-up and evaluation."


def memory_note(report: Report) -> str:
    """What peak memory counts, and why low precision may take more of it; "" without figures."""
    rows = [row for row in report.rows if row["peak_memory"] is not None]
    if not rows:
        return ""
    counts = "Peak memory counts weights, gradients, optimizer state and activations together"
    if report.measures_process_memory:
        counts += ", and the memory that kernels and the allocator take in the process"
    larger = []
    for row in rows[1:]:
        ratio = report.ratio_to_first("peak_memory", row, rows[0])
        if ratio is not None and ratio > 1:
            larger.append(row.precision)
    why = (
        "O1, O2 and O3 keep the float32 weights and hold low copies beside them, and only the "
        "activations become smaller: in a small network or with small batches they may take more "
        "than fp32, with large activations less."
    )
    if report.measures_process_memory:
        why += " On a CPU without units for a half dtype, its products go through float32 copies."
    if larger:
        verb = "takes" if len(larger) == 1 else "take"
        return f"{counts}. {', '.join(larger)} {verb} more than {rows[0].precision} here. {why}"
    return f"{counts}. {why}" if len(rows) > 1 else f"{counts}."


def recommendation_reason(report: Report) -> str:
    """The reason as a sentence: with a full stop, and a capital unless a precision begins it."""
    reason = report.reason.strip()
    precisions = tuple(row.precision for row in report.rows if row.precision)
    if not reason.startswith(precisions):
        reason = reason[:1].upper() + reason[1:]
    if reason and reason[-1] not in ".!?":
        reason = f"{reason}."
    return reason


def _setting_text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return as_text(value)
