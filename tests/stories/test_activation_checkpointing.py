"""Activation checkpointing in every precision: what backward computes anew is what forward computed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ["fp32", "O1", "O2", "O3", "fp16", "bf16", "O1+bf16", "O2+bf16"]


class Net(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.again = nn.Linear(6, 8), nn.Linear(8, 3), again
        self.block = nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Tensor:
        h: Any = self.first(x)
        h = checkpoint(self.block, h, use_reentrant=False) if self.again else self.block(h)
        out: Tensor = self.last(h)
        return out


def trained(precision: Any, *, again: bool, accumulate: int) -> list[Tensor]:
    net = Net(again=again).to(DEVICE)
    made = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=accumulate
    )
    torch.manual_seed(2)
    for _ in range(4):
        x, y = torch.randn(8, 6, generator=made), torch.randint(0, 3, (8,), generator=made)
        step(x.to(DEVICE), y.to(DEVICE))
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_checkpointed_block_gives_the_bits_of_a_kept_one(
    name: str, kernels: Any, accumulate: int
) -> None:
    base, _, dtype = name.partition("+")
    precision = hs.Precision(base, kernels=kernels, **({"dtype": "bfloat16"} if dtype else {}))
    kept, again = (trained(precision, again=each, accumulate=accumulate) for each in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_kept_modules_are_computed_anew_as_they_were() -> None:
    precision = hs.Precision("O2", keep={"block": "fp32"})
    kept, again = (trained(precision, again=each, accumulate=1) for each in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_after_backward_no_copy_of_the_forward_is_held() -> None:
    net = Net(again=False).to(DEVICE)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision="O2"
    )
    step(torch.randn(8, 6, device=DEVICE), torch.zeros(8, dtype=torch.int64, device=DEVICE))
    assert (
        step.applied._forward_copies == ()
    )  # their graph would keep gradients on the stream of this step
    assert all(p.dtype == torch.float32 for p in net.parameters())
