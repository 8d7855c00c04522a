"""Small networks and leaves whose gradients are compared with plain torch.autograd."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    net = make_net()
    return net, copy.deepcopy(net)


def grads_of(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def all_equal(first: Any, second: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)
