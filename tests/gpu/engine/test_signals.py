"""SIGTERM into a captured run: a checkpoint within 5 seconds, and an exact resume from it.

With any number of steps between two visits.
"""

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
folder = Path(sys.argv[1])
sink = int(sys.argv[2]) or None
epochs = int(sys.argv[3])
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).cuda()
generator = torch.Generator().manual_seed(1)
x = torch.randn(40_000, 32, generator=generator)
y = torch.randint(0, 4, (40_000,), generator=generator)
data = hs.data.Dataset((x, y), seed=3).shuffle().batch(8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
model = hs.Model(
    net,
    nn.CrossEntropyLoss(),
    optimizer,
    "O2",
    accumulate=3,
    deterministic=True,
    capture=True,
)
save = hs.Checkpoint(folder / "run", every_epochs=1)
model.fit(epochs, data, callbacks=[save], sink=sink, resume="auto")
torch.save([p.detach().cpu() for p in net.parameters()], folder / "end.pt")
"""


def start_run(folder: Path, sink: int, epochs: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder), str(sink), str(epochs)],
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parents[3],
    )


@pytest.mark.parametrize("sink", [0, 7, 1000, 100_000])
def test_sigterm_saves_within_five_seconds_and_the_resume_is_exact(
    sink: int, tmp_path: Path
) -> None:
    full_folder = tmp_path / "full"
    stopped_folder = tmp_path / "stopped"
    full_folder.mkdir()
    stopped_folder.mkdir()
    full_run = start_run(full_folder, sink, 3)
    stopped_run = start_run(stopped_folder, sink, 3)

    # Stop it after its first checkpoint.
    deadline = time.monotonic() + 60
    while not any((stopped_folder / "run").glob("step*")):
        if stopped_run.poll() is not None or time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    signal_sent = time.monotonic()
    stopped_run.send_signal(signal.SIGTERM)
    output, _ = stopped_run.communicate(timeout=30)
    seconds = time.monotonic() - signal_sent
    assert stopped_run.returncode == 143, output
    assert seconds < 5

    # Resume it.
    resumed_run = start_run(stopped_folder, sink, 3)
    output, _ = resumed_run.communicate(timeout=60)
    assert resumed_run.returncode == 0, output
    output, _ = full_run.communicate(timeout=60)
    assert full_run.returncode == 0, output
    expected = torch.load(full_folder / "end.pt")
    weights = torch.load(stopped_folder / "end.pt")
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
