"""Layers that a forward makes or replaces: their parameters are in no optimizer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3
PRECISIONS = ("fp32", "O1+bf16", "O2+bf16", "bf16", "fp64")


class MadeInForward(nn.Module):
    """Makes its head in forward number `at`."""

    def __init__(self, at: int = 1) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.head: nn.Module = nn.Linear(6, 3)
        self.at = at
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == self.at:
            self.make()
        out: Tensor = self.head(self.body(x))
        return out

    def make(self) -> None:
        self.extra = nn.Linear(6, 6)
        self.head = nn.Sequential(self.extra, self.head)


class ReplacedInForward(MadeInForward):
    def make(self) -> None:
        self.head = nn.Linear(6, 3)


class FrozenInForward(MadeInForward):
    def make(self) -> None:
        super().make()
        self.extra.requires_grad_(False)


class BuffersInForward(MadeInForward):
    def make(self) -> None:
        self.register_buffer("table", torch.arange(3.0))


def make_step(net: nn.Module, precision: str, **options: Any) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("net_type", "names"), [(MadeInForward, r"head\.0\.weight"), (ReplacedInForward, "head.weight")]
)
def test_layers_made_in_forward_are_refused_before_the_next_update(
    net_type: type[MadeInForward], names: str, at: int, precision: str
) -> None:
    net = net_type(at)
    step = make_step(net, precision)
    for _ in range(at - 1):
        step(X, Y)

    def two_steps() -> None:
        """A replaced layer of as many parameters is seen one step later."""
        step(X, Y)
        step(X, Y)

    with pytest.raises(ValueError, match=f"{names}.*build the optimizer"):
        two_steps()
    assert int(step.state.updates) <= at

    # The advice: one forward first.
    net = net_type()
    net(X)
    step = make_step(net, precision)
    before = [p.detach().clone() for p in net.parameters()]
    step(X, Y)
    assert not any(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("net_type", [FrozenInForward, BuffersInForward])
def test_what_needs_no_training_may_be_made_in_forward(
    net_type: type[MadeInForward], precision: str, accumulate: int
) -> None:
    if net_type is FrozenInForward and precision != "fp32":
        pytest.skip("a new float32 layer meets other inputs, as in plain torch")
    net = net_type(at=2)
    step = make_step(net, precision, accumulate=accumulate, ema=0.9)
    for _ in range(8):
        step(X, Y)
    assert int(step.state.updates) == 8 // accumulate
    step.load_state_dict(step.state_dict())
