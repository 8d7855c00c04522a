"""A module whose name ends in Norm, but which contains other layers too, is no norm."""

import torch
from torch import Tensor, nn

import halfstep as hs


class PreNorm(nn.Module):
    """The usual wrapper of a transformer's layers: a norm, then a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3)
        self.fn = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fn(self.norm(x))
        return out


def test_a_wrapper_named_like_a_norm_computes_its_other_layers_in_float16(
    device: torch.device,
) -> None:
    net = nn.Sequential(PreNorm()).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision="O2")
    x = torch.ones(4, 3, device=device)
    y = torch.zeros(4, dtype=torch.int64, device=device)
    step(x, y)
    modules = step.report().modules
    assert modules["0.norm"].weight == "float32"
    assert modules["0.fn"].weight == "float16"
