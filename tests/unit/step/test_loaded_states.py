"""States that are loaded by a second step, by another network, or saved at the wrong time."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.ones(4, 3, device=DEVICE)
Y = torch.zeros(4, dtype=torch.int64, device=DEVICE)


def make_step(*, momentum: float = 0.9, fused: bool | None = None, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum, fused=fused)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **options)


def optimizer_tensors(step: hs.TrainStep) -> list[Tensor]:
    tensors: list[Tensor] = []
    for state in step.optimizer.state.values():
        tensors += state.values()
    return tensors


def test_two_steps_that_load_one_state_do_not_share_it() -> None:
    source = make_step()
    source(X, Y)
    saved = source.state_dict()
    first = make_step()
    second = make_step()
    first.load_state_dict(saved)
    second.load_state_dict(saved)

    before = copy_tensors(optimizer_tensors(second))
    first(X, Y)
    assert before
    assert_equal_tensors(optimizer_tensors(second), before)


class ExtraLayers(nn.Module):
    """Two layers, and some that forward does not use."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)
        self.more = nn.ModuleList(nn.Linear(4, 4) for _ in range(extra))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


def make_step_with_extra_layers(extra: int) -> hs.TrainStep:
    net = ExtraLayers(extra).to(DEVICE)
    optimizer = torch.optim.SGD(net.first.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)


@pytest.mark.parametrize(
    ("extra", "extra_in_state"), [(0, 1), (1, 0)], ids=["more than it has", "less than it has"]
)
def test_a_state_of_another_network_is_refused_and_changes_nothing(
    extra: int, extra_in_state: int
) -> None:
    step = make_step_with_extra_layers(extra)
    other = make_step_with_extra_layers(extra_in_state)
    step(X, Y)
    before = copy_tensors(step.net.state_dict().values())
    message = r"more\.0\.weight: expected .* received .* Nothing was loaded"
    with pytest.raises(ValueError, match=message):
        step.load_state_dict(other.state_dict())
    assert_equal_tensors(step.net.state_dict().values(), before)


def test_a_loaded_rate_of_another_dtype_does_not_round_the_schedule() -> None:
    step = make_step(momentum=0.0, fused=True, lr=[0.1, 0.2, 0.2])
    step(X, Y)
    step.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.bfloat16, device=DEVICE)
    # Rates are float64 on the CPU and float32 on CUDA.
    expected = 0.2 if DEVICE == "cpu" else torch.tensor(0.2).item()
    assert step(X, Y).lr.item() == expected


def test_averaged_weights_are_not_saved_as_the_weights() -> None:
    step = make_step(ema=0.9)
    step(X, Y)
    with step.averaged(), pytest.raises(ValueError, match="leave the block"):
        step.state_dict()
