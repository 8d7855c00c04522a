"""SIGTERM into a captured run: a checkpoint within 5 seconds at any length of sink, and an exact resume from it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

RUN = """
import sys, torch
from pathlib import Path
from torch import nn
import halfstep as hs
folder, sink, epochs, stop = Path(sys.argv[1]), int(sys.argv[2]) or None, int(sys.argv[3]), sys.argv[4] == "live"
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).cuda()
g = torch.Generator().manual_seed(1)
x, y = torch.randn(40_000, 32, generator=g), torch.randint(0, 4, (40_000,), generator=g)
data = hs.data.Dataset((x, y), seed=3).shuffle().batch(8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, "O2", accumulate=3, deterministic=True, capture=True)
told = hs.Lambda(visit=lambda run: (folder / "going").touch() if run.global_step > 500 else None)
model.fit(epochs, data, callbacks=[hs.Checkpoint(folder / "run", every_epochs=1), told], sink=sink, resume="auto")
torch.save([p.detach().cpu() for p in net.parameters()], folder / "end.pt")
"""


def started(folder: Path, sink: int, epochs: int) -> subprocess.Popen[str]:
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(sink), str(epochs), "live"], env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[3],
    )  # fmt: skip


@pytest.mark.parametrize("sink", [0, 7, 1000, 100_000])
def test_sigterm_saves_within_five_seconds_and_the_resume_is_exact(
    sink: int, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    reference = started(whole, sink, 3)
    run = started(cut, sink, 3)
    deadline = time.monotonic() + 60
    while (
        not any((cut / "run").glob("step*")) and run.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.01)
    asked = time.monotonic()
    run.send_signal(signal.SIGTERM)
    output, _ = run.communicate(timeout=30)
    took = time.monotonic() - asked
    assert run.returncode == 143, output
    assert took < 5
    again = started(cut, sink, 3)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    output, _ = reference.communicate(timeout=60)
    assert reference.returncode == 0, output
    a, b = (torch.load(folder / "end.pt") for folder in (whole, cut))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
