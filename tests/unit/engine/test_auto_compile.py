"""compile="auto" in a fit: decided once, at a fixed step, by the pace, and not in a run that is to go on exactly."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import auto_compile as choosing
from halfstep.engine.auto_compile import TIMING_ENDS_AT


class Slow(nn.Module):
    """A network that takes its time, so that compiling would pay."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(4, 2), seconds

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            time.sleep(self.seconds)
        out: Tensor = self.inner(x)
        return out


def model(seconds: float = 0.0, **options: object) -> hs.Model:
    torch.manual_seed(0)
    net = Slow(seconds)
    return hs.Model(net, nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.01), **options)  # type: ignore[arg-type]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 4, generator=g), torch.randn(4, 2, generator=g)) for _ in range(count)]


def stop_after(steps: int) -> hs.Callback:
    return hs.Lambda(visit=lambda run: run.stop("enough") if run.position >= steps else None)


@pytest.mark.parametrize(("seconds", "on"), [(0.0, False), (1e-3, True)])
def test_a_long_run_is_looked_at_once(
    seconds: float, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million steps of a millisecond are worth half a minute of compiling, a million of 50 us are not, nor 2,000."""
    m = model(seconds, capture=False)
    monkeypatch.setattr(choosing, "MIN_STEPS", 100)
    m.fit(10**6 if on else 10, batches(300), callbacks=[stop_after(TIMING_ENDS_AT)])
    assert m.step.compiled.on is on
    assert ("it pays" in m.step.compiled.reason) is on


@pytest.mark.parametrize("options", [{"compile": False}, {"deterministic": True}])
def test_what_was_said_is_not_chosen(options: dict[str, object]) -> None:
    m = model(1e-3, **options)
    m.fit(10**6, batches(300), callbacks=[stop_after(TIMING_ENDS_AT)])
    assert not m.step.compiled.on


def test_a_short_run_is_not_looked_at() -> None:
    m = model()
    run = m.fit(1, batches(300))
    assert run.position == 300
    assert choosing.auto_compile_callbacks(m.step, 300) == []


def test_a_program_of_the_whole_step_begins_with_a_pass() -> None:
    m = model(1e-3)
    m.fit(10**6, batches(300), callbacks=[stop_after(TIMING_ENDS_AT + 1)])
    assert not m.step.compiled.on
    m = model(1e-3)
    m.fit(10**6, batches(300), callbacks=[stop_after(300)])
    assert m.step.compiled.on
    assert "it pays" in m.step.compiled.reason


def test_a_run_that_is_saved_is_compiled_only_when_that_is_said(tmp_path: Path) -> None:
    """It goes on bit for bit otherwise."""
    m = model(1e-3)
    m.fit(10**6, batches(300), callbacks=[hs.Checkpoint(tmp_path), stop_after(300)])
    assert not m.step.compiled.on
    assert "goes on bit for bit" in str(m.report())


@pytest.mark.filterwarnings("ignore:list cannot seek")
def test_going_on_with_a_compiled_run_says_that_it_is_not_exact(tmp_path: Path) -> None:
    m = model(compile=True)
    m.fit(1, batches(3), callbacks=[hs.Checkpoint(tmp_path)])
    with pytest.warns(hs.Notice, match="goes on to rounding, not bit for bit"):
        model(compile=True).fit(2, batches(3), callbacks=[hs.Checkpoint(tmp_path)], resume="auto")
