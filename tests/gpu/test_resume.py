"""On CUDA with deterministic kernels, a run that is broken off at any step and resumed ends bit for bit as a whole one.

Deterministic cuBLAS needs a setting from before the process began, so that all cases run in one process of their own:
this file as a program, which prints what differs.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import History
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model

pytestmark = pytest.mark.gpu

OPTIMIZERS = {
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW host": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "Adam capturable": lambda p: torch.optim.Adam(p, lr=1e-2, capturable=True),
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    "fp32": {"optimizer": "SGD fused", "precision": "fp32"},
    "O1": {"optimizer": "AdamW fused", "precision": "O1"},
    "fp16, stochastic": {"optimizer": "Adam capturable", "precision": "fp16"},
    "cycles": {"optimizer": "AdamW fused", "accumulate": 4},
    "cycles, host": {"optimizer": "AdamW host", "accumulate": 4},
    "data on the device": {"optimizer": "AdamW fused", "resident": True},
    "sink 7": {"optimizer": "SGD fused", "sink": 7, "resident": True},
}
STEPS = (1, 2, 3, 5, 7, 9, 12)  # skipped ones at first, inside cycles, the end of a pass of 7


def precision_of(name: str) -> hs.Precision | str:
    scale = hs.DynamicScale(init=2.0**17, interval=4)  # the first updates overflow, then it grows
    if name == "fp16":
        return hs.Precision("fp16", rounding="stochastic", scale=scale)
    return name if name == "fp32" else hs.Precision(name, scale=scale)


def build(optimizer: str, precision: str = "O2", accumulate: int = 1) -> Model:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the users' one
    torch.manual_seed(0)  # CUDA's too
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(512, 3),
    ).cuda()
    schedule = (
        None if optimizer == "SGD foreach" else hs.schedules.linear(0.02, 60, warmup=6, start=0.002)
    )
    return Model(
        net, nn.CrossEntropyLoss(), OPTIMIZERS[optimizer](net.parameters()), precision_of(precision), ema=0.9,
        schedule=schedule, accumulate=accumulate, deterministic=True, metrics={"acc": hs.metrics.Accuracy()},
    )  # fmt: skip


def data(size: int = 26, *, resident: bool = False) -> hs.data.Dataset:
    draw = torch.Generator().manual_seed(size)
    x = torch.randint(0, 256, (size, 8, 8, 1), dtype=torch.uint8, generator=draw)
    y = torch.randint(0, 3, (size,), generator=draw)
    chain = [hs.data.PadCrop(8, 2), hs.data.Flip(), hs.data.Rescale(1 / 255), hs.data.ToCHW()]
    made = hs.data.Dataset({"x": x, "y": y}, seed=3).shuffle().batch(4).map(chain, "x")
    return made.to_device("cuda") if resident else made


class Breaks(Callback):
    """Raises after a step; keeps the run's last snapshot."""

    last = True

    def __init__(self, at: int = -1) -> None:
        self.at, self.end_tree = at, {}

    def next_stop(self, run: Run) -> int | None:
        return self.at

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.at:
            raise InterruptedError

    def end(self, run: Run) -> None:
        self.end_tree = leaves(run.model.snapshot()) if run.error is None else {}


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list | tuple) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, inner in items for k, v in leaves(inner, f"{name}.{key}").items()}
    return {name: tree}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape and a.device == b.device
        return alike and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def fit(
    folder: Path, at: int = -1, *, resident: bool = False, sink: int | None = None, **made: Any
) -> dict[str, Any]:
    """Two epochs, or up to step `at`."""
    breaks, model = Breaks(at), build(**made)
    model.fit(
        2, data(resident=resident), valid=data(10, resident=resident), valid_every_steps=3, sink=sink, resume="auto",
        callbacks=[History(), Checkpoint(folder), breaks],
    )  # fmt: skip
    return breaks.end_tree


def differences(case: dict[str, Any]) -> dict[str, list[str]]:
    """What differs at the end of a run that was broken off, by the step where it was."""
    found = {}
    with tempfile.TemporaryDirectory() as root:
        whole = fit(Path(root) / "whole", **case)
        assert ".rng.cuda.0" in whole
        for at in STEPS:
            folder = Path(root) / str(at)
            with suppress(InterruptedError):
                fit(folder, at, **case)
            assert checkpoint.listing(folder)[-1].name == checkpoint.name_of(at)
            end = fit(folder, **case)
            changed = [n for n in whole.keys() & end.keys() if not same(whole[n], end[n])]
            found[str(at)] = sorted(whole.keys() ^ end.keys()) + sorted(changed)
    return found


@cache
def results() -> dict[str, Any]:
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_run_broken_off_at_any_step_goes_on_exactly(name: str) -> None:
    assert results()[name] == {str(at): [] for at in STEPS}


if __name__ == "__main__":
    warnings.simplefilter("ignore", hs.Notice)  # BatchNorm in cycles
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = differences(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))
