"""On CUDA with deterministic kernels, a run that is interrupted and resumed ends bit for bit.

Deterministic cuBLAS needs an environment variable from before the process began. All cases
therefore run in one process of their own: this file as a program, which prints what differs.
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
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW host": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "Adam capturable": lambda params: torch.optim.Adam(params, lr=1e-2, capturable=True),
}
# The arguments of `train`.
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
# An epoch has 7 steps. The first ones are skipped; others are inside cycles, or end the epoch.
INTERRUPTED_STEPS = (1, 2, 3, 5, 7, 9, 12)


def make_precision(name: str) -> hs.Precision | str:
    if name == "fp32":
        return name
    # The first updates overflow at this scale, and it grows again after four.
    scale = hs.DynamicScale(init=2.0**17, interval=4)
    if name == "fp16":
        return hs.Precision("fp16", rounding="stochastic", scale=scale)
    return hs.Precision(name, scale=scale)


def make_model(optimizer: str, precision: str, accumulate: int) -> Model:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is what users have
    torch.manual_seed(0)  # seeds CUDA too
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(512, 3),
    ).cuda()
    schedule = None
    if optimizer != "SGD foreach":
        schedule = hs.schedules.linear(0.02, 60, warmup=6, start=0.002)
    return Model(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[optimizer](net.parameters()),
        make_precision(precision),
        ema=0.9,
        schedule=schedule,
        accumulate=accumulate,
        deterministic=True,
        metrics={"acc": hs.metrics.Accuracy()},
    )


def make_data(size: int, *, resident: bool) -> hs.data.Dataset:
    """Random images with augmentation, in batches of 4."""
    generator = torch.Generator().manual_seed(size)
    images = torch.randint(0, 256, (size, 8, 8, 1), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 3, (size,), generator=generator)
    transforms = [hs.data.PadCrop(8, 2), hs.data.Flip(), hs.data.Rescale(1 / 255), hs.data.ToCHW()]
    data = hs.data.Dataset({"x": images, "y": labels}, seed=3).shuffle().batch(4)
    data = data.map(transforms, "x")
    if resident:
        data = data.to_device("cuda")
    return data


class InterruptAndSnapshot(Callback):
    """Raises InterruptedError after a step, if one is given; else takes a snapshot at the end."""

    last = True

    def __init__(self, step: int | None) -> None:
        self.interrupt_step = -1 if step is None else step
        self.snapshot: dict[str, Any] = {}

    def next_stop(self, run: Run) -> int | None:
        return self.interrupt_step

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.interrupt_step:
            raise InterruptedError

    def end(self, run: Run) -> None:
        if run.error is None:
            self.snapshot = leaves_by_path(run.model.snapshot())


def leaves_by_path(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, lists and tuples, by paths such as ".rng.cuda.0"."""
    if not isinstance(tree, dict | list | tuple) or not tree:
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    leaves = {}
    for key, subtree in items:
        leaves |= leaves_by_path(subtree, f"{path}.{key}")
    return leaves


def same_bits(a: Any, b: Any) -> bool:
    """Whether two leaves are the same; NaN equals NaN, and 0 does not equal -0 in tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
            return False
        a_bytes = a.contiguous().flatten().view(torch.uint8)
        b_bytes = b.contiguous().flatten().view(torch.uint8)
        return torch.equal(a_bytes, b_bytes)
    if type(a) is not type(b):
        return False
    both_nan = a != a and b != b
    return bool(a == b or both_nan)


def train(
    folder: Path,
    interrupt_step: int | None = None,
    *,
    optimizer: str,
    precision: str = "O2",
    accumulate: int = 1,
    resident: bool = False,
    sink: int | None = None,
) -> dict[str, Any]:
    """Trains two epochs, resuming from the folder's last checkpoint; the run's last snapshot."""
    model = make_model(optimizer, precision, accumulate)
    interrupt = InterruptAndSnapshot(interrupt_step)
    model.fit(
        2,
        make_data(26, resident=resident),
        valid=make_data(10, resident=resident),
        valid_every_steps=3,
        sink=sink,
        resume="auto",
        callbacks=[History(), Checkpoint(folder), interrupt],
    )
    return interrupt.snapshot


def find_differences(case: dict[str, Any]) -> dict[str, list[str]]:
    """For every interrupted step: the paths that differ at the end of the resumed run."""
    differences = {}
    with tempfile.TemporaryDirectory() as root:
        expected = train(Path(root) / "uninterrupted", **case)
        assert ".rng.cuda.0" in expected
        for step in INTERRUPTED_STEPS:
            folder = Path(root) / str(step)
            with suppress(InterruptedError):
                train(folder, step, **case)
            assert checkpoint.listing(folder)[-1].name == checkpoint.name_of(step)
            resumed = train(folder, **case)

            only_in_one = sorted(expected.keys() ^ resumed.keys())
            changed = []
            for path in sorted(expected.keys() & resumed.keys()):
                if not same_bits(expected[path], resumed[path]):
                    changed.append(path)
            differences[str(step)] = only_in_one + changed
    return differences


@cache
def run_all_cases() -> dict[str, Any]:
    """This file as a program: the differences of every case, or the error that ended it."""
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    process = subprocess.run([sys.executable, __file__], capture_output=True, text=True, env=env)
    assert process.returncode == 0, process.stderr
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return results


@pytest.mark.parametrize("name", CASES)
def test_a_run_interrupted_at_any_step_is_resumed_bit_for_bit(name: str) -> None:
    no_differences: dict[str, list[str]] = {str(step): [] for step in INTERRUPTED_STEPS}
    assert run_all_cases()[name] == no_differences


def main() -> None:
    warnings.simplefilter("ignore", hs.Notice)  # the one about BatchNorm in cycles
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            results[name] = find_differences(case)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
