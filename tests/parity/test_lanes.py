"""Batches in lanes, in one process: a batch that fails, a stop in the middle of a cycle."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs


class Checked(nn.Linear):
    """Has a buffer that forward changes, and refuses negative inputs."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if bool((x < 0).any()):
            raise ArithmeticError("negative inputs")
        return super().forward(x)


def make_step(accumulate: int = 1, exact: Any = "bits") -> hs.TrainStep:
    torch.manual_seed(0)
    net = Checked()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    return hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, accumulate=accumulate, exact=exact, logical=6
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(13, 3, generator=generator), torch.arange(13) % 2


def bad_batch() -> tuple[Tensor, Tensor]:
    x, y = batch(0)
    x[7] = -1.0  # in the third lane: two have run by then
    return x, y


def test_a_batch_that_fails_leaves_no_trace() -> None:
    step = make_step()
    step(*batch(1))
    with pytest.raises(ArithmeticError):
        step(*bad_batch())
    step(*batch(2))
    expected = make_step()
    expected(*batch(1))
    expected(*batch(2))
    assert int(step.state_fingerprint()) == int(expected.state_fingerprint())


def test_a_cycle_with_a_batch_that_fails_is_dropped() -> None:
    step = make_step(accumulate=2)
    step(*batch(1))
    with pytest.raises(ArithmeticError):
        step(*bad_batch())
    with pytest.warns(hs.Notice, match="the 1 batches of the open update cycle are dropped"):
        step(*batch(2))
    step(*batch(3))
    expected = make_step(accumulate=2)
    expected(*batch(2))
    expected(*batch(3))
    for name, value in expected.net.state_dict().items():
        assert torch.equal(step.net.state_dict()[name], value), name


def test_an_open_cycle_of_whole_batches_is_not_divided() -> None:
    whole = make_step(accumulate=2, exact=None)
    whole(*batch(1))
    with pytest.raises(ValueError, match="1 batches of the saved update cycle are open, summed by"):
        make_step(accumulate=2).load_state_dict(whole.state_dict())


class StopAt(hs.Callback):
    exact = True  # a visit at every step

    def __init__(self, step: int) -> None:
        self.step = step

    def visit(self, run: hs.Run) -> None:
        if run.position == self.step:
            run.stop("as asked")


def fit(folder: Path, *, stop_at: int = 0, **options: Any) -> hs.Run:
    step = make_step()
    model = hs.Model(
        step.net, nn.CrossEntropyLoss(), step.optimizer, accumulate=3, exact="bits", logical=6
    )
    callbacks = [hs.Checkpoint(folder), StopAt(stop_at)]
    data = [batch(i) for i in range(8)]
    return model.fit(1, data, callbacks=callbacks, progress=False, **options)


def test_a_stop_waits_for_the_end_of_the_cycle_and_is_saved(tmp_path: Path) -> None:
    run = fit(tmp_path, stop_at=4)
    assert run.position == 6
    assert run.stopped == "as asked"
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000000006"]


def test_what_cannot_be_saved_at_the_end_is_said(tmp_path: Path) -> None:
    with pytest.warns(hs.Notice, match="step-000000004 was not saved, as its update cycle is open"):
        fit(tmp_path, steps_per_epoch=4)
