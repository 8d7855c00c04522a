"""What a report shows, as frozen values.

They are read from JSON that may hold nulls, text in place of numbers, or less than expected; so
every field is checked here, and the rest of the package need not ask again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.utils.text import printable

# The memory of a process is known to about 20 MiB: it also depends on the state of its allocator.
PROCESS_MEMORY_NOISE = 20 * 2**20  # bytes


@dataclass(frozen=True)
class Run:
    """One training: a precision, a seed, and how it went. Numbers are finite or None."""

    precision: str
    seed: int
    failed: bool
    error: str
    epochs: tuple[dict[str, float | None], ...]
    curve: dict[str, tuple[float | None, ...]]  # columns of equal length; "step" is the x axis
    skipped_steps: tuple[int, ...]
    dtypes: tuple[dict[str, str], ...]  # one entry for each module
    choices: dict[str, str]
    memory_kind: str
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Row:
    """One precision, averaged over its seeds. `index` is its position, which sets its colour."""

    index: int
    precision: str
    verdict: str
    kind: str
    numbers: dict[str, float | None]

    def __getitem__(self, name: str) -> float | None:
        return self.numbers.get(name)


@dataclass(frozen=True)
class Report:
    """Everything that the page and the Markdown show."""

    title: str
    command: str
    date: str
    environment: dict[str, str]
    spec: dict[str, Any]
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    recommended: str | None
    reason: str
    requested_runs: int | None  # None: every precision with every seed
    alone: bool  # the report of a single run: there is nothing to compare it with

    def runs_of(self, precision: str) -> list[Run]:
        """The finished runs of a precision. If there are none, the failed ones."""
        runs = [run for run in self.runs if run.precision == precision]
        finished = [run for run in runs if not run.failed]
        return finished or runs

    def failed_runs(self) -> list[Run]:
        return [run for run in self.runs if run.failed]

    @property
    def measures_process_memory(self) -> bool:
        """True when memory is the growth of a process, not what an allocator counted."""
        return any(run.memory_kind == "process" for run in self.runs)

    def ratio_to_first(self, name: str, row: Row, first: Row) -> float | None:
        """A row's number divided by the first row's; None where the difference may be noise."""
        value = row[name]
        base = first[name]
        if value is None or not base:
            return None
        is_noisy = name == "peak_memory" and self.measures_process_memory
        if is_noisy and abs(value - base) < PROCESS_MEMORY_NOISE:
            return None
        return value / base

    @property
    def margin(self) -> float | None:
        """By how many percentage points an accuracy may differ and still count as the same."""
        return finite_or_none(self.spec.get("margin"))

    @property
    def planned_runs(self) -> int:
        """How many runs the command asked for; 0 where the file does not say."""
        if self.requested_runs is not None:
            return self.requested_runs
        precisions = as_sequence(self.spec.get("precisions"))
        seeds = as_sequence(self.spec.get("seeds"))
        return len(precisions) * len(seeds)


def parse_summary(summary: Mapping[str, Any]) -> Report:
    """The contents of compare.json. Another format is an error; a missing field is not."""
    if not isinstance(summary, Mapping):
        raise _unknown_format(type(summary).__name__)
    if summary.get("halfstep_compare") != 1:
        raise _unknown_format(summary.get("halfstep_compare"))

    runs = tuple(_parse_run(run) for run in _mappings(summary.get("runs")))
    recommendation = as_fields(summary.get("recommendation"))
    environment = as_texts(summary.get("environment"))
    return Report(
        title=as_text(summary.get("title")) or "Comparison of precisions",
        command=as_text(summary.get("command")),
        date=as_text(summary.get("date")),
        environment={name: text for name, text in environment.items() if text},
        spec=as_fields(summary.get("spec")),
        runs=runs,
        rows=_parse_rows(summary.get("rows"), runs),
        recommended=as_text(recommendation.get("precision")) or None,
        reason=as_text(recommendation.get("reason")),
        requested_runs=_whole_number(summary.get("planned_runs")),
        alone=bool(summary.get("alone")),
    )


def finite_or_none(value: Any) -> float | None:
    """The value as a finite number, or None. JSONLLog writes "NaN" and "Infinity": also None."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _whole_number(value: Any) -> int | None:
    number = finite_or_none(value)
    return None if number is None else int(number)


def as_text(value: Any, *, lines: bool = False) -> str:
    """The value as text that a page can show: JSON may contain half of a surrogate pair."""
    if value is None:
        return ""
    return printable(value, lines=lines)


def as_sequence(value: Any) -> Sequence[Any]:
    """The value if it is a list, else an empty one."""
    return value if isinstance(value, list | tuple) else ()


def as_fields(value: Any) -> dict[str, Any]:
    """The value if it is an object of JSON, else an empty one."""
    if not isinstance(value, Mapping):
        return {}
    return {as_text(name): item for name, item in value.items()}


def as_texts(value: Any) -> dict[str, str]:
    """An object of JSON with all its values as text."""
    return {name: as_text(item) for name, item in as_fields(value).items()}


def as_numbers(value: Any) -> dict[str, float | None]:
    """An object of JSON with all its values as finite numbers or None."""
    return {name: finite_or_none(item) for name, item in as_fields(value).items()}


def _parse_run(run: Mapping[str, Any]) -> Run:
    # A column that is shorter or longer than the steps cannot be drawn over them.
    columns: dict[str, tuple[float | None, ...]] = {}
    for name, column in as_fields(run.get("curve")).items():
        columns[name] = tuple(finite_or_none(value) for value in as_sequence(column))
    step_count = len(columns.get("step", ()))
    curve = {name: column for name, column in columns.items() if len(column) == step_count}

    skipped_steps = [finite_or_none(step) for step in as_sequence(run.get("skipped_steps"))]
    return Run(
        precision=as_text(run.get("precision")),
        seed=int(finite_or_none(run.get("seed")) or 0),
        failed=run.get("status") == "failed",
        error=as_text(run.get("error"), lines=True),
        epochs=tuple(as_numbers(epoch) for epoch in as_sequence(run.get("epochs"))),
        curve=curve,
        skipped_steps=tuple(int(step) for step in skipped_steps if step is not None),
        dtypes=tuple(as_texts(module) for module in as_sequence(run.get("dtypes"))),
        choices=as_texts(run.get("choices")),
        memory_kind=as_text(run.get("memory_kind")),
        numbers=as_numbers(run),
    )


def _parse_rows(rows: Any, runs: Iterable[Run]) -> tuple[Row, ...]:
    """One row for each precision, in the file's order, then those that only have runs."""
    parsed = _mappings(rows)
    precisions = {as_text(row.get("precision")) for row in parsed}
    for run in runs:
        if run.precision not in precisions:
            precisions.add(run.precision)
            parsed.append({"precision": run.precision})
    return tuple(_parse_row(index, row) for index, row in enumerate(parsed))


def _parse_row(index: int, row: Mapping[str, Any]) -> Row:
    return Row(
        index=index,
        precision=as_text(row.get("precision")),
        verdict=as_text(row.get("verdict")),
        kind=as_text(row.get("verdict_kind")) or "unknown",
        numbers=as_numbers(row),
    )


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects in a list of JSON; anything else in it is left out."""
    return [item for item in as_sequence(value) if isinstance(item, Mapping)]


def _unknown_format(received: object) -> ValueError:
    return ValueError(
        f'report: expected a summary with "halfstep_compare": 1, got {received!r}. Name the folder '
        "that `halfstep compare --out` wrote; one of a later version needs that version of "
        "halfstep."
    )
