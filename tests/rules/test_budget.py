"""What halfstep may cost: frames between fit and forward, and the time to import it."""

import inspect
import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import Callback
from halfstep.model import Model

ROOT = Path(hs.__file__).parent
# Frames between the user's call and `forward`, both left out: bare torch has 2 (two of nn.Module), Lightning 29.
FRAMES = {"fp32": 8, "O1": 10, "O2": 10, "O3": 10, "fp16": 10}


class Deep(nn.Module):
    """Writes down how many frames lie between forward and the test that called the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.between = nn.Linear(4, 3), []

    def forward(self, x: Tensor) -> Tensor:
        names = [frame.function for frame in inspect.stack()[1:]]
        self.between.append(next(i for i, name in enumerate(names) if name.startswith("test_")))
        out: Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("precision", FRAMES)
def test_few_frames_lie_between_the_users_call_and_forward(
    precision: str, device: torch.device
) -> None:
    net = Deep().to(device)
    net(torch.randn(2, 4, device=device))
    step = hs.TrainStep(
        net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision=precision
    )
    for _ in range(3):
        step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
    bare, _, *later = (
        net.between
    )  # the first step may have one more: it writes down dtypes for report()
    assert bare == 2
    assert max(later) <= FRAMES[precision]
    assert max(net.between) <= FRAMES[precision] + 1


@pytest.mark.parametrize("precision", FRAMES)
def test_few_frames_lie_between_fit_and_forward(precision: str, device: torch.device) -> None:
    """At most 10, callbacks or not: they are called beside the step, not around it."""
    net = Deep().to(device)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    model = Model(
        net, nn.MSELoss(), sgd, precision, capture=False
    )  # captured, forward runs only to be captured
    data = hs.data.Dataset((torch.randn(8, 4), torch.zeros(8, 3))).batch(2)
    model.fit(1, data, callbacks=[Callback()])
    _, *later = net.between
    assert max(later) <= 10


IMPORT = """
import json, sys, time
start = time.perf_counter(); import torch
middle = time.perf_counter(); before = set(sys.modules); import halfstep
end = time.perf_counter()
print(json.dumps([(end - start) / (middle - start), sorted(set(sys.modules) - before)]))
"""


def imported() -> tuple[float, list[str]]:
    """A fresh process: the time to import halfstep over that of torch alone, and the modules it added."""
    run = subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=ROOT.parent,
    )
    ratio, added = json.loads(run.stdout)
    return ratio, added


def test_importing_halfstep_takes_at_most_a_fifth_longer_than_torch() -> None:
    ratios: list[float] = []
    for _ in range(3):  # a busy machine is not a failure: the median of three, three times at most
        ratios = [imported()[0] for _ in range(3)]
        if statistics.median(ratios) <= 1.2:
            return
    pytest.fail(f"import halfstep / import torch: {ratios}, three medians above 1.2")


def test_importing_halfstep_loads_nothing_heavy() -> None:
    added = {name.partition(".")[0] for name in imported()[1]}
    assert (
        added
        & {
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
        == set()
    )
    assert "halfstep" in added
