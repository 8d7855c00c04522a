"""GradOperation and gradients() against plain torch.autograd; the advice of every error works."""

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.grads import GradManager, GradOperation, gradients
from tests.support.grad_helpers import all_equal, grads_of, leaf, make_net

# gradients


def test_gradients_equal_torch_with_zeros_for_the_unused_and_touch_no_grad() -> None:
    w = leaf(1.0, 2.0)
    v = leaf(3.0, 4.0)
    unused = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    values = gradients((w * v).exp(), [v, unused, w], dy=2)
    y = (w * v).exp()
    expected = torch.autograd.grad(y, [v, w], torch.full_like(y, 2.0))
    assert all_equal(values, [expected[0], torch.zeros(2, 3, dtype=torch.float64), expected[1]])
    assert not any(g.requires_grad for g in values)
    assert w.grad is v.grad is unused.grad is None


def test_gradients_keep_the_graph_when_asked() -> None:
    w = leaf(1.0)
    y = w.exp()
    assert torch.equal(gradients(y, w, retain_graph=True)[0], gradients(y, w)[0])


def test_gradients_refuse_the_frozen_and_the_empty() -> None:
    w = leaf(1.0)
    frozen = torch.ones(1)
    for bad, received in (([w, frozen], "a frozen one"), ([], "none")):
        with pytest.raises(ValueError, match=f"received {received}, do pass trainable ones only"):
            gradients(w * frozen, bad)
    assert gradients(w * frozen, [t for t in (w, frozen) if t.requires_grad])


# GradOperation


def weighted(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return (x * w).sin() * y + b


@pytest.mark.parametrize("sens", [None, 3.0, torch.tensor(3.0), torch.tensor([1.0, -2.0])], ids=str)
def test_four_forms_equal_torch(sens: Any) -> None:
    x = torch.randn(2)
    y = torch.randn(2)
    w = leaf(0.5, 0.7)
    b = leaf(1.0, 2.0)
    x_ = x.clone().requires_grad_()
    y_ = y.clone().requires_grad_()
    out = weighted(x_, y_, w, b)
    seed = torch.ones(2) if sens is None else torch.as_tensor(sens).expand(2)
    dx, dy, dw, db = torch.autograd.grad(out, (x_, y_, w, b), seed)
    args = (x, y) if sens is None else (x, y, sens)
    fn = functools.partial(weighted, w=w, b=b)
    op = functools.partial(GradOperation, sens_param=sens is not None)
    assert torch.equal(op()(fn)(*args), dx)
    assert all_equal(op(get_all=True)(fn)(*args), (dx, dy))
    assert torch.equal(op(get_by_list=True)(fn, [w])(*args), dw)
    assert all_equal(op(get_by_list=True)(fn, (b, w))(*args), (db, dw))
    inputs, weights = op(get_all=True, get_by_list=True)(fn, w)(*args)
    assert isinstance(inputs, tuple)
    assert isinstance(weights, tuple)
    assert all_equal((*inputs, *weights), (dx, dy, dw))
    assert w.grad is b.grad is None
    assert not x.requires_grad


def test_one_gradient_is_bare_and_several_are_a_tuple() -> None:
    net = make_net()
    x = torch.ones(1, 5)
    assert isinstance(GradOperation(get_all=True)(net)(x), Tensor)
    assert isinstance(GradOperation(get_by_list=True)(net, net[0].weight)(x), Tensor)
    assert isinstance(GradOperation(get_by_list=True)(net, net.parameters())(x), tuple)


def test_unused_and_integer_inputs_get_zeros() -> None:
    x = torch.randn(2, 3)
    unused = torch.randn(4)
    label = torch.tensor([0, 2])
    spare = torch.ones(2, 2, requires_grad=True)
    inputs, weights = GradOperation(True, True)(
        lambda x, u, label: F.cross_entropy(x, label), [spare]
    )(x, unused, label)
    assert inputs[0].abs().sum() > 0
    assert all_equal(
        (*inputs[1:], *weights),
        (torch.zeros(4), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 2)),
    )


def test_works_under_no_grad_and_can_be_called_again() -> None:
    grad = GradOperation()(torch.sin)
    x = torch.randn(3)
    with torch.no_grad():
        assert torch.equal(grad(x), x.cos())
        assert torch.equal(grad(x), x.cos())


def test_modules_work_and_a_generator_of_weights_lasts() -> None:
    net = make_net()
    x = torch.randn(4, 5)
    grad = GradOperation(get_by_list=True)(net, net.parameters())
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert all_equal(grad(x), expected)
    assert all_equal(grad(x), expected)


def call(
    op: GradOperation, *args: Any, fn: Callable[..., Any] = torch.sin, weights: Any = None
) -> Any:
    return op(fn, weights)(*args)


def test_errors_of_grad_operation_and_their_advice() -> None:
    net = make_net()
    x = torch.ones(2, 5)
    by_list = GradOperation(get_by_list=True)
    sens = GradOperation(sens_param=True)
    with pytest.raises(
        TypeError,
        match=re.escape("a bool for get_all, received Sequential, do GradOperation()(fn)"),
    ):
        GradOperation(net)
    for none in (None, []):
        with pytest.raises(
            ValueError, match=re.escape("received 0, do pass list(net.parameters())")
        ):
            call(by_list, x, fn=net, weights=none)
    assert call(by_list, x, fn=net, weights=list(net.parameters()))
    with pytest.raises(ValueError, match="received 4, do set get_by_list=True"):
        call(GradOperation(), x, fn=net, weights=net.parameters())
    with pytest.raises(
        TypeError,
        match=re.escape("received Linear, do pass float tensors such as net.parameters()"),
    ):
        call(by_list, x, fn=net, weights=net)
    with pytest.raises(
        TypeError, match="expected 1 arguments or more, received none, do pass the inputs"
    ):
        call(GradOperation())
    for args, received in (
        ((), "none"),
        ((x,), "1 ending in Tensor"),
        ((x, None), "2 ending in NoneType"),
    ):
        with pytest.raises(
            TypeError, match=f"received {received}, do pass the inputs, then the sens"
        ):
            call(sens, *args)
    assert torch.equal(call(sens, x, 2.0), 2 * x.cos())


def test_errors_of_the_function_and_their_advice() -> None:
    x = torch.ones(2)
    with pytest.raises(
        TypeError, match=re.escape("received tuple, do select it: lambda *xs: fn(*xs)[0]")
    ):
        call(GradOperation(), x, fn=lambda x: (x, x))
    assert torch.equal(
        call(GradOperation(), x, fn=lambda *xs: (lambda x: (x * 2, x))(*xs)[0]), 2 * x
    )
    with pytest.raises(ValueError, match="expected y with history"):
        call(GradOperation(), x, fn=torch.no_grad()(torch.sin))
    with pytest.raises(ValueError, match="received none, do pass trainable ones only"):
        call(GradOperation(), torch.arange(2))
    with pytest.raises(
        TypeError, match=re.escape("received str, do bind it: functools.partial(fn, name=value)")
    ):
        call(GradOperation(get_all=True), x, "sum", fn=lambda x, reduction: x.sum())
    assert torch.equal(
        call(GradOperation(), x, fn=functools.partial(torch.sum, dim=0)), torch.ones(2)
    )
    with pytest.raises(ValueError, match=re.escape("shape [2] or 0-dim, received [3]")):
        call(GradOperation(sens_param=True), x, torch.ones(3))


def test_frozen_weights_are_refused_not_replaced_by_zeros() -> None:
    net = make_net()
    net[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="received a frozen one, do pass trainable ones only"):
        call(GradOperation(get_by_list=True), torch.ones(1, 5), fn=net, weights=net.parameters())
    trainable = [p for p in net.parameters() if p.requires_grad]
    by_list = GradOperation(get_by_list=True)
    grads = call(by_list, torch.ones(1, 5), fn=net, weights=trainable)
    assert len(grads) == 3


# the seeds' programs


class LeNet5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, bias=False)
        self.conv2 = nn.Conv2d(6, 16, 5, bias=False)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class WithLossCell(nn.Module):
    def __init__(self, network: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.network = network
        self.reduction = reduction

    def forward(self, data: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.network(data), label, reduction=self.reduction)


class TrainOneStepCell(nn.Module):
    """The custom cell of seed 002: loss, sens, gradient by parameter list, optimizer."""

    def __init__(
        self, network: nn.Module, optimizer: torch.optim.Optimizer, sens: float = 1.0
    ) -> None:
        super().__init__()
        self.network = network
        self.optimizer = optimizer
        self.sens = sens
        self.weights = tuple(network.parameters())
        self.grad = GradOperation(get_by_list=True, sens_param=True)

    def forward(self, data: Tensor, label: Tensor) -> Tensor:
        loss = self.network(data, label)
        sens = torch.full_like(loss, self.sens)
        grads = self.grad(self.network, self.weights)(data, label, sens)
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("reduction", ["mean", "none"])  # a loss of shape () and of shape (32,)
def test_the_one_step_cell_of_seed_002_equals_a_plain_loop(reduction: str) -> None:
    net = LeNet5()
    plain = copy.deepcopy(net)
    cell = WithLossCell(net, reduction)
    step = TrainOneStepCell(
        cell, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9), sens=2.0
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        data = torch.randn(32, 1, 32, 32)
        label = torch.randint(10, (32,))
        optimizer.zero_grad()
        loss = F.cross_entropy(plain(data), label, reduction=reduction)
        loss.backward(torch.full_like(loss, 2.0))
        optimizer.step()
        assert torch.equal(step(data, label), loss)
    assert all_equal(net.parameters(), plain.parameters())


def test_loss_of_shape_32_takes_a_sens_of_ones() -> None:
    net = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    cell = WithLossCell(net, "none")
    data = torch.randn(32, 64, 7, 7)
    label = torch.randint(10, (32,))
    assert cell(data, label).shape == (32,)
    ones = GradOperation(get_by_list=True, sens_param=True)(cell, net.parameters())(
        data, label, torch.ones(32)
    )
    default = GradOperation(get_by_list=True)(cell, net.parameters())(data, label)
    loss = cell(data, label)
    expected = torch.autograd.grad(loss, list(net.parameters()), torch.ones_like(loss))
    assert all_equal(ones, expected)
    assert all_equal(default, expected)
    gm = GradManager().attach(net.parameters())
    with gm:
        gm.backward(cell(data, label))
    assert all_equal(grads_of(net), expected)
