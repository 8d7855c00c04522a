"""A run with checkpoints on several ranks, which is disturbed in many ways and started again.

As a program under torchrun: `rank_runs.py FOLDER [OPTIONS AS JSON]`. In FOLDER it leaves the
checkpoints of `run/`, `log.csv`, the samples that each rank computed, and a file for each process.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.callbacks.history import History
from halfstep.callbacks.logs import CSVLog
from halfstep.engine import Callback, Run
from tests.support.rank_jobs import ROOT
from tests.support.run_endings import run_ending

SAMPLES = 52  # four batches of 12, and one of 4: fewer than there are logical micro-batches
BATCH = 12
STEPS_PER_EPOCH = 5
VALID_EVERY_STEPS = 4


class Net(nn.Module):
    """Dropout, and a note of every sample that was trained on. Column 0 is the sample's number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 3)
        self.on_forward: Any = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_forward(x)
        out: Tensor = self.last(self.drop(torch.relu(self.first(x[:, 1:]))))
        return out


def make_rows(size: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.arange(size, dtype=torch.float32)
    x = torch.cat([numbers[:, None], torch.randn(size, 5, generator=generator)], dim=1)
    return {"x": x, "y": torch.randint(0, 3, (size,), generator=generator)}


def build_model(**options: Any) -> hs.Model:
    hs.seed_everything(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    # The first two updates overflow, then the scale grows with every fourth.
    scale = hs.DynamicScale(init=2.0**17, interval=4)
    return hs.Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        hs.Precision("O2", scale=scale),
        metrics={"acc": hs.metrics.Accuracy()},
        schedule=hs.schedules.linear(0.02, 400, warmup=6, start=0.002),
        **{"ema": 0.9, "exact": "bits", "clip_norm": 1.0, **options},
    )


class Disturbance(Callback):
    """Something happens to one rank, in its first attempt, at a moment of a step."""

    last = True

    def __init__(
        self, what: str = "", moment: str = "step", at: int = 0, ranks: Any = (1,), attempt: int = 0
    ) -> None:
        self.what = what
        self.moment = moment
        self.at_step = at
        is_this_attempt = attempt_number() == attempt
        self.is_on = bool(what) and rank_number() in ranks and is_this_attempt

    def forward(self, run: Run, x: Tensor) -> None:
        is_training = run.model.net.training
        self.reach("step" if is_training else "evaluation", run.position)

    def visit(self, run: Run) -> None:
        self.reach("visit", run.position)

    def reach(self, moment: str, step: int) -> None:
        if not self.is_on or moment != self.moment or step < self.at_step:
            return
        self.is_on = False
        if self.what == "raise":
            raise LookupError("a mistake of the user's own")
        if self.what == "exit":
            sys.exit(7)
        if self.what == "sleep":
            time.sleep(3600)
        os.kill(os.getpid(), getattr(signal, self.what))


class Witness(Callback):
    """Notes which samples this rank trains on, in which step, and that the process is there."""

    def __init__(self, folder: Path, disturbance: Disturbance, pause: float) -> None:
        self.folder = folder
        self.disturbance = disturbance
        self.pause = pause
        self.file: Any = None

    def begin(self, run: Run) -> None:
        name = f"{attempt_number()}-{rank_number()}"
        self.file = open(self.folder / f"samples-{name}.csv", "a", buffering=1)  # noqa: SIM115
        run.model.net.on_forward = lambda x: self.note(run, x)
        pids = self.folder / "pids"
        pids.mkdir(exist_ok=True)
        (pids / name).write_text(str(os.getpid()))

    def end(self, run: Run) -> None:
        self.file.close()

    def note(self, run: Run, x: Tensor) -> None:
        if run.model.net.training:
            numbers = [int(number) for number in x[:, 0]]
            self.file.write(json.dumps([run.position + 1, numbers]) + "\n")
            time.sleep(self.pause)
        self.disturbance.forward(run, x)


def attempt_number() -> int:
    first = int(os.environ.get("FIRST_ATTEMPT", "0"))
    return first + int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def rank_number() -> int:
    return int(os.environ.get("RANK", "0"))


def train(
    folder: Path,
    *,
    disturb: dict[str, Any] | None = None,
    epochs: int = 2,
    every_steps: int | None = 1,
    pause: float = 0.0,
    checkpoint_folder: str | Path | None = None,
    model_options: dict[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    **fit_options: Any,
) -> Run:
    disturbance = Disturbance(**(disturb or {}))
    checkpoints = folder / "run" if checkpoint_folder is None else checkpoint_folder
    all_callbacks = [
        History(),
        CSVLog(folder / "log.csv", overwrite=True),
        hs.Checkpoint(checkpoints, every_steps=every_steps, keep=2, best="acc"),
        Witness(folder, disturbance, pause),
        disturbance,
        *callbacks,
    ]
    data = hs.data.Dataset(make_rows(SAMPLES, seed=1), seed=3).shuffle().batch(BATCH)
    valid = hs.data.Dataset(make_rows(20, seed=2)).batch(8)
    return build_model(**(model_options or {})).fit(
        epochs,
        data,
        valid=valid,
        valid_every_steps=VALID_EVERY_STEPS,
        callbacks=all_callbacks,
        progress=False,
        resume="auto",
        **fit_options,
    )


# What a test sees of it.


def launch(
    folder: Path,
    ranks: int,
    *,
    restarts: int = 0,
    first_attempt: int = 0,
    program: str | Path = __file__,
    launcher: tuple[str, ...] = ("--standalone",),
    **options: Any,
) -> subprocess.Popen[str]:
    """Starts the run by torchrun; its output goes to files in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", *launcher),
        *("--nproc-per-node", str(ranks), "--max-restarts", str(restarts)),
        *(str(program), str(folder), json.dumps(options)),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "FIRST_ATTEMPT": str(first_attempt),
    }
    with open(folder / "stderr", "a") as stderr:
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=stderr, text=True, env=environment, cwd=ROOT
        )


def run_to_end(folder: Path, ranks: int, *, timeout: float = 240, **options: Any) -> int:
    """The exit code of torchrun."""
    process = launch(folder, ranks, **options)
    try:
        return process.wait(timeout)
    finally:
        process.kill()
        process.wait()


def errors_of(folder: Path) -> str:
    return (folder / "stderr").read_text()


def ending(folder: Path) -> dict[str, Any]:
    """All that a run leaves, the bytes of its log included."""
    return run_ending(folder, log="log.csv")


def undisturbed(folder: Path, **options: Any) -> dict[str, Any]:
    """The ending of the run in this one process."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hs.Notice)  # one thread
        train(folder, **options)
    return ending(folder)


def sample_counts(folder: Path) -> dict[int, Counter[int]]:
    """By epoch: how often each sample was trained on in the steps that count.

    A step that was done again after a restart counts as its last attempt did it.
    """
    by_step: dict[int, tuple[int, list[int]]] = {}
    for path in sorted(folder.glob("samples-*.csv")):
        attempt = int(path.name.removeprefix("samples-").split("-")[0])
        for line in path.read_text().splitlines():
            if not line.endswith("]]"):  # cut by a kill
                continue
            step, numbers = json.loads(line)
            last_attempt, known = by_step.get(step, (-1, []))
            if attempt > last_attempt:
                by_step[step] = (attempt, list(numbers))
            elif attempt == last_attempt:
                by_step[step] = (attempt, known + numbers)
    counts: dict[int, Counter[int]] = {}
    for step, (_, numbers) in by_step.items():
        counts.setdefault((step - 1) // STEPS_PER_EPOCH, Counter()).update(numbers)
    return counts


def train_through(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Several runs in one job, because starting processes takes seconds.

    Each is stopped by a signal, which fit turns into an exit, and is then resumed to its end. What
    stopped it, and where, goes to a file of each rank.
    """
    for name, options in cases.items():
        case_folder = folder / name
        case_folder.mkdir(exist_ok=True)
        end = EndWitness()
        try:
            train(case_folder, callbacks=(end,), **options)
            code: Any = 0
        except SystemExit as error:
            code = error.code
        except KeyboardInterrupt:
            code = "KeyboardInterrupt"
        ended = {"code": code, "step": end.position, "reason": end.reason}
        (case_folder / f"ended-{rank_number()}.json").write_text(json.dumps(ended))
        train(case_folder, **{**options, "disturb": None})


class EndWitness(Callback):
    """Where a run ended, and why it says that it did."""

    position = -1
    reason: str | None = None

    def end(self, run: Run) -> None:
        self.position = run.position
        self.reason = run.stopped


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    if "cases" in options:
        train_through(folder, options["cases"])
        return
    group_timeout_s = options.pop("group_timeout_s", None)
    if group_timeout_s is not None:  # the program makes the process group, as users do
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=group_timeout_s))
    if options.pop("own_folders", False):  # as on hosts that share no storage
        own_folder = folder / f"host-{rank_number()}"
        own_folder.mkdir(exist_ok=True)
        os.chdir(own_folder)
    train(folder, **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"))
