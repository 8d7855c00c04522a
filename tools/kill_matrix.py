"""Kills runs with SIGKILL at random times, resumes them, and counts how they end.

python tools/kill_matrix.py --kills 300 [--seed 0] [--first 0 --last 40] [--results kills.jsonl]

Each run is a process of its own, forked from this one, which has imported torch and started no
thread. It is killed at a random time, resumed from its newest checkpoint, perhaps killed again, and
ends. Weights, optimizer, averages, random states, history, log and the names of the checkpoints are
then compared bit for bit with those of a run that nothing happened to.

The runs are all combinations of AXES, in an order that the seed decides. `--first` and `--last`
choose some of them, so that one table can be made in several calls that append to one file.
Exit code 1 if any run ended with other bits and no notice said so.
"""

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import halfstep as hs
from tests.support.data_kinds import Augmented, Stream, add_noise, loader, make_columns, plain
from tests.support.killed_run import seed_all
from tests.support.run_endings import differences, run_ending

AXES: dict[str, tuple[Any, ...]] = {
    "data": (
        "Dataset",
        "Dataset, workers(2)",
        "DataLoader",
        "DataLoader, 2 workers",
        "DataLoader, persistent workers",
        "DataLoader, streaming",
    ),
    "precision": ("fp32", "O2", "fp16+kahan"),
    "accumulate": (1, 4),
    "sink": (1, 13),
    "with": ("EMA", "dropout", "augmentation", "all three"),
}
EPOCHS = 3  # of seven batches
CHECKPOINT_STEPS = 2

OUTCOMES = ("equal", "announced, equal", "announced, different", "refused", "different")
FAILURES = ("different", "crashed", "hung")

# A notice that says that the run cannot be repeated, by fit at its start or when it is resumed.
DISCLAIMER = re.compile(r"no checkpoint holds|cannot repeat|cannot be repeated")
REFUSAL = re.compile(r"^(ValueError|TypeError|.*CheckpointError): ", re.MULTILINE)

HUNG_AFTER_S = 120.0
ATTEMPTS = 30  # to hit a run before it ends


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix."""

    data: str
    precision: str
    accumulate: int
    sink: int
    extra: str

    def has(self, extra: str) -> bool:
        """Whether the run uses EMA, dropout or augmentation."""
        return self.extra in (extra, "all three")

    def as_row(self) -> dict[str, Any]:
        values = asdict(self)
        values["with"] = values.pop("extra")
        return values


@dataclass(frozen=True)
class Result:
    """How one combination ended after its kills."""

    combination: dict[str, Any]
    kills: int
    runs_missed: int
    """Runs that ended before the signal came; they were compared too."""
    outcome: str
    details: str = ""


# The run


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def make_data(kind: str, *, augment: bool) -> Any:
    if kind.startswith("Dataset"):
        data = plain().shuffle()
        if augment:
            data = data.map(add_noise, "x")
        data = data.batch(4)
        return data.workers(2) if "workers" in kind else data
    if "streaming" in kind:
        return loader(Stream(augment=augment))
    rows = Augmented() if augment else torch.utils.data.TensorDataset(*make_columns())
    options: dict[str, Any] = {}
    if "workers" in kind:
        options = {"num_workers": 2, "persistent_workers": "persistent" in kind}
    return loader(rows, shuffle=True, **options)


def make_model(combination: Combination) -> hs.Model:
    seed_all(0)
    net = Net(0.4 if combination.has("dropout") else 0.0)
    precision: Any = combination.precision
    if precision == "O2":
        # The first updates overflow, then the scale grows.
        precision = hs.Precision("O2", scale=hs.DynamicScale(init=2.0**18, interval=3))
    with warnings.catch_warnings(action="ignore"):  # BatchNorm under accumulate
        return hs.Model(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            precision,
            metrics={"acc": hs.metrics.Accuracy()},
            accumulate=combination.accumulate,
            ema=0.9 if combination.has("EMA") else None,
            schedule=hs.schedules.linear(0.05, 60, warmup=3, start=0.005),
        )


def valid_data() -> Any:
    x, y = make_columns(seed=2, size=10)
    return hs.data.Dataset({"x": x, "y": y}).batch(4)


def train(folder: Path, combination: Combination) -> None:
    """Goes on from the newest checkpoint in the folder, or begins."""
    model = make_model(combination)
    data = make_data(combination.data, augment=combination.has("augmentation"))
    model.fit(
        EPOCHS,
        data,
        valid=valid_data(),
        valid_every_steps=5,
        sink=combination.sink,
        callbacks=[
            hs.History(),
            hs.JSONLLog(folder / "log.jsonl", overwrite=True),
            hs.Checkpoint(folder / "run", every_steps=CHECKPOINT_STEPS, keep=2, best="acc"),
        ],
        progress=False,
        resume="auto",
    )


# Its process


def warm_up() -> None:
    """What every run would do first. No backward: autograd does not survive a fork."""
    torch.set_num_threads(1)
    for precision in AXES["precision"]:
        combination = Combination("Dataset", precision, 1, 1, "dropout")
        make_model(combination).evaluate(valid_data())


def start_run(folder: Path, combination: Combination) -> int:
    """The process of a run, in a group of its own with its workers."""
    folder.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        with open(folder / "stderr", "a") as stderr:
            os.dup2(stderr.fileno(), 2)
        train(folder, combination)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit code; None if the process still runs after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def kill(pid: int) -> int:
    """Kills the run, then its workers, which would notice after some seconds by themselves."""
    os.kill(pid, signal.SIGKILL)
    code = wait(pid, HUNG_AFTER_S)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    assert code is not None
    return code


# One combination


class Matrix:
    """Runs combinations, and knows how undisturbed ones end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._endings: dict[Combination, dict[str, Any]] = {}
        self._seconds: dict[Combination, float] = {}

    def measure(
        self, combination: Combination, kills: int, draw: random.Random, on_kill: Callable[[], None]
    ) -> Result:
        """The outcome after so many kills, spread over one run or several."""
        killed = 0
        missed = 0
        outcomes: list[tuple[str, str]] = []
        for attempt in range(ATTEMPTS):
            if killed == kills:
                break
            folder = self.folder / f"run-{attempt}"
            shutil.rmtree(folder, ignore_errors=True)
            # Half of the runs that are to be killed again are killed after a resume.
            in_this_run = draw.randint(1, kills - killed)
            code: int | None = -signal.SIGKILL
            for _ in range(in_this_run):
                _, seconds = self._undisturbed(combination)
                pid = start_run(folder, combination)
                code = wait(pid, draw.uniform(0, seconds))
                if code is None:
                    code = kill(pid)
                if code != -signal.SIGKILL:
                    break
                killed += 1
                on_kill()
            missed += code == 0
            if code == -signal.SIGKILL:
                pid = start_run(folder, combination)
                code = wait(pid, HUNG_AFTER_S)
                if code is None:
                    kill(pid)
            outcomes.append(self._judge(folder, combination, code))
        assert killed == kills, f"{combination}: {killed} of {kills} kills came in time"
        order = ("hung", "crashed", *reversed(OUTCOMES))
        outcome, details = min(outcomes, key=lambda pair: order.index(pair[0]))
        return Result(combination.as_row(), killed, missed, outcome, details)

    def _judge(self, folder: Path, combination: Combination, code: int | None) -> tuple[str, str]:
        notices = (folder / "stderr").read_text()
        if code is None:
            return "hung", notices[-1000:]
        if code != 0:
            last_line = notices.strip().splitlines()[-1]
            return "refused" if REFUSAL.search(last_line) else "crashed", notices[-1000:]
        names = differences(run_ending(folder), self._undisturbed(combination)[0])
        disclaimer = DISCLAIMER.search(notices)
        if disclaimer is not None:
            return "announced, different" if names else "announced, equal", disclaimer[0]
        if names:
            return "different", ", ".join(names[:8])
        return "equal", ""

    def _undisturbed(self, combination: Combination) -> tuple[dict[str, Any], float]:
        """The ending of a run that nothing happens to, and how long it took."""
        if combination not in self._endings:
            folder = self.folder / "undisturbed"
            shutil.rmtree(folder, ignore_errors=True)
            start = time.monotonic()
            code = wait(start_run(folder, combination), HUNG_AFTER_S)
            seconds = time.monotonic() - start
            assert code == 0, (folder / "stderr").read_text()[-3000:]
            self._endings[combination] = run_ending(folder)
            self._seconds[combination] = seconds
        return self._endings[combination], self._seconds[combination]


def make_order(kills: int, seed: int) -> list[tuple[Combination, int]]:
    """Combinations with their number of kills: each one in turn, until there are enough."""
    combinations = [Combination(*values) for values in itertools.product(*AXES.values())]
    random.Random(seed).shuffle(combinations)
    counts = Counter(itertools.islice(itertools.cycle(combinations), kills))
    return list(counts.items())


# The table


def read_results(path: Path) -> list[Result]:
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def count_kills(results: Sequence[Result]) -> tuple[list[str], list[list[list[str]]]]:
    """The heads of the table's columns, and its rows in sections: one for each axis, and all."""
    outcomes = [*OUTCOMES, *(name for name in FAILURES[1:] if _has(results, name))]

    def row(label: str, chosen: Sequence[Result]) -> list[str]:
        counts: Counter[str] = Counter()
        for result in chosen:
            counts[result.outcome] += result.kills
        return [label, str(counts.total()), *(str(counts[name] or "-") for name in outcomes)]

    sections = []
    for axis, values in AXES.items():
        rows = []
        for value in values:
            label = value if isinstance(value, str) else f"{axis} {value}"
            chosen = [result for result in results if result.combination[axis] == value]
            rows.append(row(label, chosen))
        sections.append(rows)
    return ["kills", *outcomes], [*sections, [row("all", results)]]


def make_table(results: Sequence[Result]) -> Table:
    """Kills by outcome, for each value of each axis; and all of them."""
    heads, sections = count_kills(results)
    combinations = len({json.dumps(result.combination) for result in results})
    kills = sum(result.kills for result in results)
    table = Table(title=f"{kills} kills in {combinations} combinations")
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def make_markdown(results: Sequence[Result]) -> str:
    """The same table for a page of the documentation."""
    heads, sections = count_kills(results)
    lines = [f"| | {' | '.join(heads)} |", f"|---{'|---:' * len(heads)}|"]
    lines += [f"| {' | '.join(row)} |" for rows in sections for row in rows]
    return "\n".join(lines)


def list_apart(results: Sequence[Result]) -> Iterator[str]:
    """The combinations that were refused or announced, or failed, each with its reason."""
    for outcome in (*OUTCOMES[1:], *FAILURES[1:]):
        chosen = [result for result in results if result.outcome == outcome]
        groups = Counter((r.combination["data"], r.combination["with"], r.details) for r in chosen)
        for (data, extra, details), count in sorted(groups.items()):
            yield f"{outcome}: {data}, with {extra}: {count} combinations ({details})"


def _has(results: Sequence[Result], outcome: str) -> bool:
    return any(result.outcome == outcome for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first combination of the order")
    parser.add_argument("--last", type=int, help="the combination after the last one")
    parser.add_argument("--data", help="only combinations whose data has this name")
    parser.add_argument("--minutes", type=float, default=1e9, help="begins no combination later")
    parser.add_argument("--results", type=Path, help="a JSONL file to go on with")
    parser.add_argument("--markdown", action="store_true", help="the table for a page")
    arguments = parser.parse_args()

    order = make_order(arguments.kills, arguments.seed)[arguments.first : arguments.last]
    if arguments.data:
        order = [entry for entry in order if entry[0].data == arguments.data]
    results: list[Result] = []
    if arguments.results and arguments.results.exists():
        results = read_results(arguments.results)
    done = [result.combination for result in results]
    order = [entry for entry in order if entry[0].as_row() not in done]

    console = Console(width=None if sys.stdout.isatty() else 110)
    warm_up()
    end = time.monotonic() + 60 * arguments.minutes
    # No thread that draws: a process with threads may not fork.
    with (
        tempfile.TemporaryDirectory(prefix="halfstep-kills-") as folder,
        Progress(console=console, auto_refresh=False) as progress,
    ):
        matrix = Matrix(Path(folder))
        task = progress.add_task("kills", total=sum(kills for _, kills in order))

        def advance() -> None:
            progress.advance(task)
            progress.refresh()

        for combination, kills in order:
            if time.monotonic() > end:
                break
            draw = random.Random(f"{arguments.seed} {combination}")
            result = matrix.measure(combination, kills, draw, advance)
            results.append(result)
            if arguments.results:
                with open(arguments.results, "a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")

    if arguments.markdown:
        print(make_markdown(results))
    else:
        console.print(make_table(results))
    for line in list_apart(results):
        console.print(line, markup=False, highlight=False)
    return int(any(result.outcome in FAILURES for result in results))


if __name__ == "__main__":
    sys.exit(main())
