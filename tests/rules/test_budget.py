"""What halfstep may cost: stack frames between fit and forward, and the time to import it."""

import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import Callback
from halfstep.model import Model

REPOSITORY = Path(hs.__file__).parent.parent

# Frames between the user's call and `forward`, without these two. Bare torch has 2 (both of
# nn.Module), Lightning 29.
FRAME_LIMITS = {"fp32": 8, "O1": 10, "O2": 10, "O3": 10, "fp16": 10}
FIT_FRAME_LIMIT = 11  # one more than a step in O2: the call in any form

# The time to import halfstep, which imports torch, over the time to import torch alone.
IMPORT_RATIO_LIMIT = 1.2

HEAVY_PACKAGES = {
    "rich",
    "typer",
    "click",
    "transformers",
    "fsspec",
    "torchmetrics",
    "torchvision",
    "pandas",
    "PIL",
}


class FrameCounter(nn.Module):
    """Counts the frames between forward and the test that called it, at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.frame_counts: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        count = 0
        for frame in inspect.stack()[1:]:
            if frame.function.startswith("test_"):
                break
            count += 1
        self.frame_counts.append(count)
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("precision", FRAME_LIMITS)
def test_few_frames_lie_between_a_step_and_forward(precision: str, device: torch.device) -> None:
    net = FrameCounter().to(device)
    net(torch.randn(2, 4, device=device))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision)
    for _ in range(3):
        step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))

    bare, first, *later = net.frame_counts
    assert bare == 2
    # The first step may have one more: it records dtypes for report().
    assert first <= FRAME_LIMITS[precision] + 1
    assert max(later) <= FRAME_LIMITS[precision]


@pytest.mark.parametrize("precision", FRAME_LIMITS)
def test_few_frames_lie_between_fit_and_forward(precision: str, device: torch.device) -> None:
    """Callbacks add none: they are called beside the step, not around it."""
    net = FrameCounter().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # A captured step would call forward only to capture it.
    model = Model(net, nn.MSELoss(), optimizer, precision, capture=False)
    data = hs.data.Dataset((torch.randn(8, 4), torch.zeros(8, 3))).batch(2)
    model.fit(1, data, callbacks=[Callback()])
    _, *later = net.frame_counts
    assert max(later) <= FIT_FRAME_LIMIT


IMPORT_PROGRAM = """
import json, sys, time
start = time.perf_counter()
import torch
torch_end = time.perf_counter()
modules_before = set(sys.modules)
import halfstep
end = time.perf_counter()
added = sorted(set(sys.modules) - modules_before)
print(json.dumps({"ratio": (end - start) / (torch_end - start), "added": added}))
"""


class ImportResult(NamedTuple):
    ratio: float  # time to import torch and halfstep over that of torch alone
    added: list[str]  # modules that halfstep's import adds


def import_in_new_process() -> ImportResult:
    process = subprocess.run(
        [sys.executable, "-c", IMPORT_PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=REPOSITORY,
    )
    return ImportResult(**json.loads(process.stdout))


def test_importing_halfstep_takes_at_most_a_fifth_longer_than_torch() -> None:
    # A busy machine is not a failure: the median of three, three times at most.
    medians: list[float] = []
    for _ in range(3):
        ratios = [import_in_new_process().ratio for _ in range(3)]
        medians.append(statistics.median(ratios))
        if medians[-1] <= IMPORT_RATIO_LIMIT:
            return
    pytest.fail(f"import halfstep / import torch: medians {medians}, limit {IMPORT_RATIO_LIMIT}")


def test_importing_halfstep_loads_no_heavy_package() -> None:
    packages = {module.partition(".")[0] for module in import_in_new_process().added}
    assert packages & HEAVY_PACKAGES == set()
    assert "halfstep" in packages
