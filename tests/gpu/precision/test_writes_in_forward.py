"""The look for weights that forward writes into waits only where waiting is allowed."""

import pytest
import torch
from torch import nn

import halfstep as hs
from tests.support.no_sync import no_sync

pytestmark = pytest.mark.gpu


class WritingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.weight.data.mul_(0.5)
        return self.layer(x)


def test_a_first_forward_under_watch_does_not_wait() -> None:
    """As in the last eager step before a capture, after the precision was switched."""
    net = nn.Linear(8, 8).cuda()
    evaluate = hs.EvalStep(net, nn.MSELoss(), precision="O2")
    x = torch.ones(4, 8, device="cuda")
    with no_sync():
        evaluate.predict(x)
    evaluate.predict(x)


def test_a_write_in_place_on_data_is_refused() -> None:
    evaluate = hs.EvalStep(WritingNet().cuda(), nn.MSELoss(), precision="O2")
    with pytest.raises(ValueError, match=r"layer\.weight"):
        evaluate.predict(torch.ones(4, 8, device="cuda"))
