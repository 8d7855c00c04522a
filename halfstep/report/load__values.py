"""What a report shows, as frozen values, from JSON that may hold nulls, strings for numbers, or less than expected."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHANCE = 20 * 2**20  # bytes by which a process grows more or less with the state of its allocator


@dataclass(frozen=True)
class Run:
    """One training: a precision, a seed, and how it went. Numbers are finite or None."""

    precision: str
    seed: int
    failed: bool
    error: str
    epochs: tuple[dict[str, float | None], ...]
    curve: dict[str, tuple[float | None, ...]]
    skipped_steps: tuple[int, ...]
    dtypes: tuple[dict[str, str], ...]
    choices: dict[str, str]
    memory_kind: str
    numbers: dict[str, float | None]


@dataclass(frozen=True)
class Row:
    """One precision over its seeds; `index` is its place, which is its colour."""

    index: int
    precision: str
    verdict: str
    kind: str
    numbers: dict[str, float | None]

    def __getitem__(self, name: str) -> float | None:
        return self.numbers.get(name)


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    title: str
    command: str
    date: str
    environment: dict[str, str]
    spec: dict[str, Any]
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    recommended: str | None
    reason: str
    alone: bool
    """One run's page: nothing to compare with."""

    def of(self, precision: str) -> list[Run]:
        """The runs that finished; where none did, the failed ones: what they reached is worth seeing."""
        runs = [run for run in self.runs if run.precision == precision]
        return [run for run in runs if not run.failed] or runs

    @property
    def grown(self) -> bool:
        """Memory is the growth of a process here, not what an allocator counted."""
        return any(run.memory_kind == "process" for run in self.runs)

    def share(self, name: str, row: Row, first: Row) -> float | None:
        """A row's number by the first one's; None where the two differ by less than chance does."""
        a, b = row[name], first[name]
        if a is None or not b or (name == "peak_memory" and self.grown and abs(a - b) < CHANCE):
            return None
        return a / b

    @property
    def margin(self) -> float | None:
        return number(self.spec.get("margin"))

    @property
    def planned(self) -> int:
        """Runs asked for; 0 where the file does not say."""
        return len(items(self.spec.get("precisions"))) * len(items(self.spec.get("seeds")))


def parse(summary: Mapping[str, Any]) -> Report:
    """The contents of compare.json; refuses another format, forgives what is missing."""
    if not isinstance(summary, Mapping) or summary.get("halfstep_compare") != 1:
        came = (
            summary.get("halfstep_compare")
            if isinstance(summary, Mapping)
            else type(summary).__name__
        )
        raise ValueError(
            f'report: expected a summary with "halfstep_compare": 1, got {came!r}. Name the folder that '
            "`halfstep compare --out` wrote; one of a later version needs that version of halfstep."
        )
    runs = tuple(_run(each) for each in items(summary.get("runs")) if isinstance(each, Mapping))
    advice = fields(summary.get("recommendation"))
    return Report(
        title=text(summary.get("title")) or "Comparison of precisions",
        command=text(summary.get("command")),
        date=text(summary.get("date")),
        environment={
            key: text(value)
            for key, value in fields(summary.get("environment")).items()
            if text(value)
        },
        spec=fields(summary.get("spec")),
        runs=runs,
        rows=_rows(summary.get("rows"), runs),
        recommended=text(advice.get("precision")) or None,
        reason=text(advice.get("reason")),
        alone=bool(summary.get("alone")),
    )


def number(value: Any) -> float | None:
    """A finite number, or None; "NaN" and "Infinity" as JSONLLog writes them are None too."""
    if value is None or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """As text that UTF-8 can hold: JSON may carry half of a surrogate pair."""
    return "" if value is None else str(value).encode("utf-8", "replace").decode()


def items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def fields(value: Any) -> dict[str, Any]:
    return {text(key): each for key, each in value.items()} if isinstance(value, Mapping) else {}


def _run(found: Mapping[str, Any]) -> Run:
    curve = {
        name: tuple(number(v) for v in items(each))
        for name, each in fields(found.get("curve")).items()
    }
    count = len(curve.get("step", ()))
    return Run(
        precision=text(found.get("precision")),
        seed=int(number(found.get("seed")) or 0),
        failed=found.get("status") == "failed",
        error=text(found.get("error")),
        epochs=tuple(
            {name: number(v) for name, v in fields(e).items()} for e in items(found.get("epochs"))
        ),
        curve={name: each for name, each in curve.items() if len(each) == count},
        skipped_steps=tuple(
            int(s) for each in items(found.get("skipped_steps")) if (s := number(each)) is not None
        ),
        dtypes=tuple(
            {k: text(v) for k, v in fields(each).items()} for each in items(found.get("dtypes"))
        ),
        choices={key: text(value) for key, value in fields(found.get("choices")).items()},
        memory_kind=text(found.get("memory_kind")),
        numbers={name: number(value) for name, value in found.items()},
    )


def _rows(found: Any, runs: tuple[Run, ...]) -> tuple[Row, ...]:
    """A row per precision, in the file's order; a precision that has runs and no row gets one without numbers."""
    known = [each for each in items(found) if isinstance(each, Mapping)]
    named = {text(each.get("precision")) for each in known}
    missing = dict.fromkeys(run.precision for run in runs if run.precision not in named)
    return tuple(
        Row(
            index=i,
            precision=text(each.get("precision")),
            verdict=text(each.get("verdict")),
            kind=text(each.get("verdict_kind")) or "unknown",
            numbers={name: number(value) for name, value in each.items()},
        )
        for i, each in enumerate([*known, *({"precision": name} for name in missing)])
    )
