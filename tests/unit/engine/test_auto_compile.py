"""compile="auto" in a fit.

It is decided once, at a fixed step, by the time that steps take, and not in a run that must be
resumed exactly.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import auto_compile
from halfstep.engine.auto_compile import TIMING_ENDS_AT

# With these many epochs of 300 steps compiling pays, if a step takes a millisecond.
MANY_EPOCHS = 10**6
ONE_MS = 1e-3


class SlowNet(nn.Module):
    """A network whose forward takes some time, until it is compiled."""

    def __init__(self, forward_s: float) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)
        self.forward_s = forward_s

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(self.forward_s)
        out: Tensor = self.inner(x)
        return out


def make_model(forward_s: float = 0.0, **options: Any) -> hs.Model:
    torch.manual_seed(0)
    net = SlowNet(forward_s)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return hs.Model(net, nn.MSELoss(), optimizer, **options)


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        x = torch.randn(4, 4, generator=generator)
        y = torch.randn(4, 2, generator=generator)
        batches.append((x, y))
    return batches


def stop_after(steps: int) -> hs.Callback:
    def stop(run: Any) -> None:
        if run.position >= steps:
            run.stop("enough")

    return hs.Lambda(visit=stop)


@pytest.mark.parametrize(
    ("forward_s", "epochs", "compiled"), [(0.0, 10, False), (ONE_MS, MANY_EPOCHS, True)]
)
def test_a_run_is_compiled_if_the_time_saved_pays_for_it(
    forward_s: float, epochs: int, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many steps of a millisecond pay for half a minute of compiling, 3,000 fast ones do not."""
    model = make_model(forward_s, capture=False)
    monkeypatch.setattr(auto_compile, "MIN_STEPS", 100)
    model.fit(epochs, make_batches(300), callbacks=[stop_after(TIMING_ENDS_AT)])
    assert model.step.compiled.on is compiled
    assert ("it pays" in model.step.compiled.reason) is compiled


@pytest.mark.parametrize("options", [{"compile": False}, {"deterministic": True}])
def test_a_setting_against_compiling_is_respected(options: dict[str, Any]) -> None:
    model = make_model(ONE_MS, **options)
    model.fit(MANY_EPOCHS, make_batches(300), callbacks=[stop_after(TIMING_ENDS_AT)])
    assert not model.step.compiled.on


def test_a_short_run_is_not_timed() -> None:
    model = make_model()
    run = model.fit(1, make_batches(300))
    assert run.position == 300
    assert auto_compile.auto_compile_callbacks(model.step, 300) == []


def test_a_captured_step_is_compiled_only_at_the_end_of_an_epoch() -> None:
    model = make_model(ONE_MS)
    model.fit(MANY_EPOCHS, make_batches(300), callbacks=[stop_after(TIMING_ENDS_AT + 1)])
    assert not model.step.compiled.on

    model = make_model(ONE_MS)
    model.fit(MANY_EPOCHS, make_batches(300), callbacks=[stop_after(300)])
    assert model.step.compiled.on
    assert "it pays" in model.step.compiled.reason


def test_a_run_with_checkpoints_is_compiled_only_on_request(tmp_path: Path) -> None:
    """Without compiling it resumes bit for bit."""
    model = make_model(ONE_MS)
    callbacks = [hs.Checkpoint(tmp_path), stop_after(300)]
    model.fit(MANY_EPOCHS, make_batches(300), callbacks=callbacks)
    assert not model.step.compiled.on
    assert "goes on bit for bit" in str(model.report())


@pytest.mark.filterwarnings("ignore:list cannot seek")
def test_resuming_a_compiled_run_warns_that_it_is_not_exact(tmp_path: Path) -> None:
    make_model(compile=True).fit(1, make_batches(3), callbacks=[hs.Checkpoint(tmp_path)])
    model = make_model(compile=True)
    with pytest.warns(hs.Notice, match="goes on to rounding, not bit for bit"):
        model.fit(2, make_batches(3), callbacks=[hs.Checkpoint(tmp_path)], resume="auto")
