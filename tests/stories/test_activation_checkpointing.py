"""Activation checkpointing in every precision: backward recomputes what forward computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ["fp32", "O1", "O2", "O3", "fp16", "bf16", "O1+bf16", "O2+bf16"]


class Net(nn.Module):
    """A block with dropout between two layers; with `checkpointed`, backward recomputes it."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)
        self.block = nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = self.first(x)
        if self.checkpointed:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        out: Tensor = self.last(hidden)
        return out


def train(precision: hs.Precision, *, checkpointed: bool, accumulate: int) -> list[Tensor]:
    """The weights after four steps."""
    net = Net(checkpointed=checkpointed).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=accumulate
    )
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    for _ in range(4):
        x = torch.randn(8, 6, generator=generator)
        y = torch.randint(0, 3, (8,), generator=generator)
        step(x.to(DEVICE), y.to(DEVICE))
    return copy_tensors(net.parameters())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_checkpointed_block_gives_the_same_bits(name: str, kernels: Any, accumulate: int) -> None:
    level, _, dtype = name.partition("+")
    if dtype == "bf16":
        precision = hs.Precision(level, kernels=kernels, dtype="bfloat16")
    else:
        precision = hs.Precision(level, kernels=kernels)
    expected = train(precision, checkpointed=False, accumulate=accumulate)
    weights = train(precision, checkpointed=True, accumulate=accumulate)
    assert_equal_tensors(weights, expected)


def test_a_checkpointed_block_in_another_precision_gives_the_same_bits() -> None:
    precision = hs.Precision("O2", keep={"block": "fp32"})
    expected = train(precision, checkpointed=False, accumulate=1)
    weights = train(precision, checkpointed=True, accumulate=1)
    assert_equal_tensors(weights, expected)


def test_after_backward_no_low_copy_of_the_forward_remains() -> None:
    """Its autograd graph would keep gradients on the stream of this step."""
    net = Net(checkpointed=False).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2")
    step(torch.randn(8, 6, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE))
    assert step.applied._forward_copies == ()
    assert all(p.dtype == torch.float32 for p in net.parameters())
