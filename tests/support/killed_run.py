"""A small run that uses everything that decides a step, in a process that can be killed anywhere.

As a program it reads orders, one JSON object a line, and forks a child for each: torch and halfstep
are imported once.
"""

import atexit
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import History
from halfstep.callbacks.logs import JSONLLog
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model
from halfstep.storage.store_access import RetryPolicy

if __name__ == "__main__":  # the path of a program is that of its own folder
    sys.path.append(str(Path(__file__).parents[2]))

from tests.support.faulty_store import use_faulty_store

STORE_URL = "faulty://bucket/run"
QUICK_RETRIES = RetryPolicy(tries=12, first_delay_s=0.001, max_delay_s=0.05)

SIZE = 26  # 7 batches of 4, the last one of 2
SYSTEM_CALLS = (
    "open",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.listdir",
    "os.scandir",
    "shutil.rmtree",
)


class Net(nn.Module):
    """Convolution, BatchNorm, dropout. `on_moment` is called at each moment of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(64, 3)
        self.on_moment: Any = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        self.on_moment("step" if self.training else "evaluation")
        noise = 0.0
        if self.training:
            # From the global generators, which users' own code draws from.
            noise = 0.1 * (random.gauss() + np.random.randn())  # noqa: NPY002
        h = torch.relu(self.norm(self.conv(x)) + noise)
        self.on_moment("forward")
        out: Tensor = self.last(self.drop(nn.functional.max_pool2d(h, 2)).flatten(1))
        if out.requires_grad:
            out.register_hook(lambda grad: self.on_moment("backward"))
        return out


def seed_all(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def make_images(size: int = SIZE, seed: int = 1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (size, 8, 8, 1), dtype=torch.uint8, generator=draw)
    return {"x": x, "y": torch.randint(0, 3, (size,), generator=draw)}


@cache
def train_data(size: int = SIZE, batch: int = 4, pad: int = 2) -> hs.data.Dataset:
    chain = [hs.data.PadCrop(8, pad), hs.data.Flip(), hs.data.Rescale(1 / 255), hs.data.ToCHW()]
    return hs.data.Dataset(make_images(size), seed=3).shuffle().batch(batch).map(chain, "x")


@cache
def valid_data() -> hs.data.Dataset:
    return (
        hs.data.Dataset(make_images(10, seed=2))
        .batch(4)
        .map([hs.data.Rescale(1 / 255), hs.data.ToCHW()], "x")
    )


def build_model(
    optimizer: str = "adamw",
    precision: str = "O2",
    accumulate: int = 1,
    *,
    init: float = 2.0**17,
    **options: Any,
) -> Model:
    seed_all(0)
    net = Net()
    makers = {
        "adamw": lambda: torch.optim.AdamW(net.parameters(), lr=0.01),
        "sgd": lambda: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    }
    # The first two updates overflow, then the scale grows with every fourth.
    scale = hs.DynamicScale(init=init, interval=4)
    chosen = hs.Precision(precision, scale=scale) if precision in ("O1", "O2") else precision
    settings = {
        "ema": 0.9,
        "schedule": hs.schedules.linear(0.02, 60, warmup=6, start=0.002),
        **options,
    }
    with warnings.catch_warnings(action="ignore"):  # BatchNorm under accumulate
        return Model(
            net,
            nn.CrossEntropyLoss(),
            makers[optimizer](),
            chosen,
            metrics={"acc": hs.metrics.Accuracy()},
            accumulate=accumulate,
            **settings,
        )


class SignalAtMoment(Callback):
    """Sends this very process a signal at the n-th occurrence of a moment, from a step on.

    Moments: "step" and "forward", "backward" inside the step after it, "update", "row",
    "evaluation", "visit" after the checkpoint's, and "system", a call of the system that Python
    reports before it is made.
    """

    last = True

    def __init__(
        self,
        moment: str = "",
        step: int = -1,
        n: int = 1,
        send: int = signal.SIGKILL,
        *,
        pause: float = 0,
    ) -> None:
        self.moment = moment
        self.at_step = step
        self.times_left = n
        self.send = send
        self.pause = pause
        self.run: Run | None = None

    def begin(self, run: Run) -> None:
        self.run = run
        run.model.net.on_moment = self.reach
        run.model.optimizer.register_step_post_hook(lambda *_: self.reach("update"))
        if self.moment == "system":
            sys.addaudithook(
                lambda event, _: self.reach("system") if event in SYSTEM_CALLS else None
            )
            fsync = os.fsync

            def reach_and_fsync(descriptor: int) -> None:
                self.reach("system")
                fsync(descriptor)

            os.fsync = reach_and_fsync  # Python reports no fsync

    def step(self, run: Run, row: Row) -> None:
        self.reach("row", row.global_step)

    def visit(self, run: Run) -> None:
        self.reach("visit")

    def reach(self, moment: str, step: int | None = None) -> None:
        assert self.run is not None
        if self.pause and moment in ("step", "evaluation"):
            time.sleep(self.pause)
        if step is None:
            step = self.run.position
        if moment == self.moment and step >= self.at_step:
            self.times_left -= 1
            if self.times_left == 0:
                os.kill(os.getpid(), self.send)


def train(
    folder: str | Path,
    *,
    death: Any = (),
    every_steps: int | None = 1,
    keep: int = 2,
    epochs: int = 2,
    sink: int | None = None,
    steps_per_epoch: int | None = None,
    accumulate: int = 1,
    optimizer: str = "adamw",
    pause: float = 0,
    store: dict[str, Any] | None = None,
) -> Run:
    """The run: 14 steps, or 15 as three epochs of five.

    Evaluations at every third step and at each epoch's end. `pause` makes every batch slow. With
    `store`, the settings of a faulty store, or the URL of another one and the environment that it
    needs, checkpoints and log go there, by way of `folder`.
    """
    folder = Path(folder)
    out: str | Path = folder / "run"
    log_path = folder / "log.jsonl"
    if store is not None:
        out = store.get("url", STORE_URL)
        os.environ.update({"HALFSTEP_OUT": str(folder), **store.get("environment", {})})
        if out == STORE_URL:
            use_faulty_store(store)
    saver = Checkpoint(out, every_steps=every_steps, keep=keep, best="acc")
    if saver.store is not None:
        saver.store.retries = QUICK_RETRIES
        log_path = saver.folder / "log.jsonl"
    callbacks = [
        History(),
        JSONLLog(log_path, overwrite=True),
        saver,
        SignalAtMoment(*death, pause=pause),
    ]
    return build_model(optimizer, accumulate=accumulate).fit(
        epochs,
        train_data(),
        valid=valid_data(),
        valid_every_steps=3,
        callbacks=callbacks,
        sink=sink,
        steps_per_epoch=steps_per_epoch,
        resume="auto",
    )


# the process that forks


def run_child(order: dict[str, Any]) -> int:
    """The exit code of the run, as a shell would see it."""
    with open(Path(order["folder"]) / "stderr", "a") as stderr:
        os.dup2(stderr.fileno(), 2)
    try:
        train(order["folder"], death=order["death"], **order["case"])
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def warm_up() -> None:
    """What every child would do first. No backward: autograd does not survive a fork."""
    model = build_model()
    train_data()
    model.evaluate(valid_data())
    for p in model.net.parameters():
        p.grad = torch.zeros_like(p)
    model.optimizer.step()
    gc.freeze()


def serve() -> None:
    torch.set_num_threads(1)
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(run_child(order))
        for signal_number in order["send"]:
            time.sleep(order["delay"])
            os.kill(pid, signal_number)
        sent = time.monotonic()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, time.monotonic() - sent]), flush=True)


class ForkServer:
    """Runs, each in a process of its own that has everything imported."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # CUDA does not survive a fork
        )
        self.seconds = 0.0
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"
        atexit.register(self.stop)

    def __call__(
        self, folder: Path, death: Any = (), delay: float = 0, send: Any = (), **case: Any
    ) -> int:
        """The exit code of a run in `folder`; minus the signal's number if a signal ended it.

        Signals to `send` come from outside, each after `delay` seconds. `self.seconds` is how long
        the run lived after the last of them.
        """
        assert self.process.stdin
        assert self.process.stdout
        folder.mkdir(parents=True, exist_ok=True)
        order = {"folder": str(folder), "death": death, "delay": delay, "send": send, "case": case}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code, self.seconds = json.loads(self.process.stdout.readline())
        return int(code)

    def stop(self) -> None:
        self.process.communicate()


@cache
def fork_server() -> ForkServer:
    """One for all tests: importing torch takes seconds."""
    return ForkServer()


if __name__ == "__main__":
    serve()
