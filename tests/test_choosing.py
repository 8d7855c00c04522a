"""compile="auto" in a fit: decided once, at a fixed step, by the pace; a resumed run does what the first decided."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import choosing
from halfstep.engine.choosing import AT, Compiling


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
def test_a_long_run_is_looked_at_once(seconds: float, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million steps of a millisecond are worth half a minute of compiling, a million of 50 us are not, nor 2,000."""
    m = model(seconds)
    monkeypatch.setattr(choosing, "LEAST", 100)
    m.fit(10**6 if on else 10, batches(300), callbacks=[stop_after(AT)])
    assert m.step.compiled.on is on
    assert ("it pays" in m.step.compiled.reason) is on


@pytest.mark.parametrize("options", [{"compile": False}, {"deterministic": True}])
def test_what_was_said_is_not_chosen(options: dict[str, object]) -> None:
    m = model(1e-3, **options)
    m.fit(10**6, batches(300), callbacks=[stop_after(AT)])
    assert not m.step.compiled.on


def test_a_short_run_is_not_looked_at() -> None:
    m = model()
    run = m.fit(1, batches(300))
    assert run.position == 300
    assert choosing.chooser(m.step, 300) == []


@pytest.mark.filterwarnings("ignore:list cannot seek")
def test_a_resumed_run_does_what_the_first_decided(tmp_path: Path) -> None:
    m = model(1e-3)
    save = hs.Checkpoint(tmp_path, every_steps=AT)
    m.fit(10**6, batches(300), callbacks=[save, stop_after(AT)])
    assert m.step.compiled.on
    again = model()  # at its own pace it would not
    again.fit(10**6, batches(300), callbacks=[hs.Checkpoint(tmp_path), stop_after(AT)], resume="auto")
    assert again.step.compiled.on
    assert Compiling(again.step, 10).state_dict() == {}
