"""Short runs of a GradScaler in torch's protocol and in MegEngine's, with planted overflows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from halfstep import amp
from halfstep.amp import GradScaler
from halfstep.grads import GradManager

TorchScaler = torch.amp.GradScaler
Params = Iterable[Tensor]
OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "fused adam": lambda p: Adam(p, lr=0.01, fused=True),
}
OVERFLOW_STEPS = {
    0,
    1,
    30,
    31,
    32,
    99,
    150,
    219,
}  # the first and the last step, single ones and a run
NONFINITE_VALUES = (math.inf, -math.inf, math.nan)


def make_scaler(**kwargs: Any) -> GradScaler:
    return GradScaler(**{"device": "cpu", "growth_interval": 5, **kwargs})


def make_torch_scaler(**kwargs: Any) -> TorchScaler:
    return TorchScaler("cpu", **{"growth_interval": 5, **kwargs})


def make_net_and_optimizer(optimizer: str) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    return net, OPTIMIZERS[optimizer](net.parameters())


def make_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def plant_overflow(net: nn.Linear, step: int) -> None:
    if step in OVERFLOW_STEPS:
        assert net.weight.grad is not None
        net.weight.grad[step % 3, 0] = NONFINITE_VALUES[step % 3]


def run_torch_iteration(
    scaler: TorchScaler, net: nn.Linear, optimizer: Optimizer, step: int, clip: bool = False
) -> None:
    """One iteration of torch's protocol."""
    optimizer.zero_grad()
    x, y = make_batch(step)
    scaler.scale(F.mse_loss(net(x), y)).backward()
    plant_overflow(net, step)
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def train_and_record(
    scaler: TorchScaler, optimizer: str, steps: Iterable[int] = range(220), **options: bool
) -> list[Any]:
    """The scale after each step, then everything that was trained."""
    net, opt = make_net_and_optimizer(optimizer)
    scales: list[Any] = []
    for step in steps:
        run_torch_iteration(scaler, net, opt, step, **options)
        scales.append(scaler.get_scale())
    return [scales, *trained_values(net, opt)]


def trained_values(net: nn.Module, optimizer: Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"]
    return [*net.state_dict().values(), *(v for slot in state.values() for v in slot.values())]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def fill_grads(net: nn.Module, value: float = math.nan) -> None:
    for p in net.parameters():
        p.grad = torch.full_like(p, value)


def skip_once(scaler: TorchScaler, net: nn.Module, optimizer: Optimizer) -> None:
    scaler.scale(torch.ones(()))
    fill_grads(net)
    scaler.step(optimizer)
    scaler.update()


def run_gear_step(scaler: GradScaler, net: nn.Linear, opt: Optimizer, step: int, gear: str) -> None:
    gm = GradManager().attach(net.parameters(), lambda t, g: add_planted_overflow(t, g, net, step))
    x, y = make_batch(step)
    with amp.autocast(device_type="cpu"), gm:
        loss = F.mse_loss(net(x), y)
        if gear == "automatic":
            scaler.backward(gm, loss)
        else:
            gm.backward(loss, dy=scaler.scale_factor)
    if gear == "manual":
        scaler.unscale(gm.attached_tensors())
        scaler.update()
    opt.step()
    opt.zero_grad()


def add_planted_overflow(tensor: Tensor, grad: Tensor, net: nn.Linear, step: int) -> Tensor:
    """The planted overflow as a callback of the manager."""
    return grad + math.inf if step in OVERFLOW_STEPS and tensor is net.weight else grad


class Gan:
    """Two networks, two optimizers, one scaler; `bad` names those whose gradients overflow."""

    def __init__(self, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.nets = {"d": nn.Linear(3, 1), "g": nn.Linear(2, 3)}
        self.opts = {k: Adam(net.named_parameters(), lr=0.01) for k, net in self.nets.items()}
        self.scaler = make_scaler(**kwargs)

    def backward(self, bad: str = "") -> None:
        fake = self.nets["g"](torch.ones(4, 2))
        self.scaler.scale(self.nets["d"](fake).mean()).backward()
        for key in bad:
            fill_grads(self.nets[key])

    def weights(self) -> dict[str, Tensor]:
        return {k: net.weight.detach().clone() for k, net in self.nets.items()}

    def changed_nets(self, before: dict[str, Tensor]) -> str:
        return "".join(k for k, w in self.weights().items() if not torch.equal(w, before[k]))
