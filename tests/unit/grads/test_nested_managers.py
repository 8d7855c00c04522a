"""Managers inside managers: gradients of gradients, as MegEngine's own tests have them."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.grads import GradManager
from tests.support.grad_helpers import leaf


def numbers() -> Tensor:
    return torch.rand(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_a_second_gradient() -> None:
    x = numbers()
    gm = GradManager().attach([x])
    gm2 = GradManager().attach([x])
    with gm:
        with gm2:
            gm2.backward(x.cos())
        first = x.grad
        assert first is not None
        assert torch.equal(first, -x.detach().sin())
        gm.backward(first)
    assert torch.equal(first, -x.detach().sin())  # not changed in place
    # The second one is added to the first one.
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -x.detach().sin() - x.detach().cos(), rtol=0, atol=1e-15)
    assert not x.grad.requires_grad


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_gradients_of_any_order(depth: int) -> None:
    """d^n exp(2x) / dx^n = 2^n exp(2x), each from the one before."""
    x = leaf(0.5)
    managers = [GradManager().attach(x) for _ in range(depth)]
    for gm in managers:
        gm.record()
    value = (2 * x).exp()
    for gm in reversed(managers):  # the innermost first
        x.grad = None
        gm.backward(value)
        assert x.grad is not None
        value = x.grad
    assert value.item() == pytest.approx(2.0**depth * torch.e, rel=1e-6)
    assert not x.grad.requires_grad


def test_a_gradient_penalty_equals_torchs() -> None:
    def penalty(norm: Tensor) -> Tensor:
        return (norm - 1).square().mean()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    outer = GradManager().attach(net.parameters())
    with outer:
        images = x.clone()
        with GradManager().attach(images) as inner:
            inner.backward(net(images))
        assert images.grad is not None
        outer.backward(net(x).mean() + penalty(images.grad.norm(dim=1)))
    grads = [p.grad for p in net.parameters()]

    images = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(net(images).sum(), images, create_graph=True)
    loss = net(x).mean() + penalty(grad.norm(dim=1))
    # The last bias has no part in the penalty.
    expected = torch.autograd.grad(loss, list(net.parameters()), materialize_grads=True)
    for p_grad, reference in zip(grads, expected, strict=True):
        assert p_grad is not None
        assert not p_grad.requires_grad
        torch.testing.assert_close(p_grad, reference, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("target", "derivative"),
    [
        (torch.cos, lambda x: -x.sin()),
        (torch.sin, torch.cos),
        (lambda x: x * 2 + 1, lambda x: torch.full_like(x, 2.0)),
    ],
)
def test_forward_mode_by_two_reverse_passes(
    target: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor]
) -> None:
    """A seed gradient that is attached to the outer manager: d(dx)/d(dy) is the Jacobian."""
    x = numbers()
    with GradManager() as gm:
        with GradManager().attach([x]) as gm2:
            y = target(x)
            y_grad = torch.zeros_like(y)
            gm.attach(y_grad)
            gm2.backward(y, y_grad)
        assert x.grad is not None
        gm.backward(x.grad)
    torch.testing.assert_close(y_grad.grad, derivative(x.detach()), rtol=0, atol=1e-15)


def test_the_penalty_of_gradients_that_the_pass_adds_to() -> None:
    """The squares save gradients, which must not change while the pass goes through them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    params = list(net.parameters())
    with GradManager().attach(params) as outer:
        with GradManager().attach(params) as inner:
            inner.backward(net(x).square().mean())
        grads = [p.grad for p in params if p.grad is not None]
        outer.backward(torch.stack([grad.square().sum() for grad in grads]).sum())

    first = torch.autograd.grad(net(x).square().mean(), params, create_graph=True)
    second = torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), params)
    for param, a, b in zip(params, first, second, strict=True):
        torch.testing.assert_close(param.grad, (a + b).detach(), rtol=0, atol=1e-13)


def test_a_function_with_a_gradient_of_its_own() -> None:
    class Cosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.cos()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return -x.sin() * dy

    x = numbers()
    gm = GradManager().attach([x])
    with gm:
        with GradManager().attach([x]) as gm2:
            gm2.backward(Cosine.apply(x))
        assert x.grad is not None
        gm.backward(x.grad)
    torch.testing.assert_close(x.grad, -x.detach().sin() - x.detach().cos(), rtol=0, atol=1e-15)


# What a manager sees


def test_managers_of_a_group_do_not_see_each_other() -> None:
    x = numbers()
    gm = GradManager().attach([x])
    gm2 = GradManager().attach([x])
    with gm | gm2:
        y = x.cos()
        gm2.backward(y)
        assert x.grad is not None
        assert not x.grad.requires_grad
        with pytest.raises(ValueError, match="expected y with history"):
            gm.backward(x.grad)
    assert torch.equal(x.grad, -x.detach().sin())


def test_an_inner_manager_does_not_see_an_outer_one() -> None:
    x = numbers()
    gm = GradManager().attach([x])
    gm2 = GradManager().attach([x])
    with gm2, gm:
        gm2.backward(x.cos())
        assert x.grad is not None
        assert not x.grad.requires_grad
        with pytest.raises(ValueError, match="expected y with history"):
            gm.backward(x.grad)


@pytest.mark.parametrize("inner_first", [True, False])
def test_nested_managers_share_one_graph(inner_first: bool) -> None:
    w = leaf(3.0)
    outer = GradManager().attach(w)
    inner = GradManager().attach(w)
    with outer, inner:
        y = w.square()
        for gm in (inner, outer) if inner_first else (outer, inner):
            gm.backward(y)
    assert w.grad is not None
    assert w.grad.item() == 12.0


def test_another_thread_sees_nothing() -> None:
    w = leaf(3.0)
    v = leaf(3.0)
    other = GradManager().attach(v)

    def run() -> None:
        with other:
            other.backward(v.square())

    with GradManager().attach(w):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert v.grad is not None
    assert not v.grad.requires_grad


def test_a_recording_that_was_forgotten_ends_with_its_manager() -> None:
    w = leaf(3.0)
    GradManager().attach(w).record()
    gc.collect()
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w.square())
    assert w.grad is not None
    assert not w.grad.requires_grad


def test_after_the_outer_recording_nothing_holds_the_graph() -> None:
    w = leaf(3.0)
    with GradManager() as outer:
        h = w * 2
        ref = weakref.ref(h)
        with GradManager().attach(w) as inner:
            inner.backward(h.square())
        del h
        assert w.grad is not None
        assert w.grad.requires_grad
        assert ref() is None or outer.recording
    assert not w.grad.requires_grad
    gc.collect()
    assert ref() is None


def test_an_error_in_the_outer_block_leaves_no_history() -> None:
    w = leaf(3.0)

    def fail_in_the_block() -> None:
        with GradManager():
            with GradManager().attach(w) as inner:
                inner.backward(w.square())
            raise LookupError

    with pytest.raises(LookupError):
        fail_in_the_block()
    assert w.grad is not None
    assert not w.grad.requires_grad
    with GradManager().attach(w) as gm:
        gm.backward(w.square())
    assert w.grad.item() == 12.0


def test_training_in_an_inner_manager_has_the_bits_of_torch_and_no_warning() -> None:
    """A generator and a critic, one inside the other's block, each with steps of its own."""
    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    twin = nn.Linear(4, 1)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(8, 4)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    their_opt = torch.optim.SGD(twin.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with GradManager().attach(leaf(1.0)):
            for _ in range(3):
                with GradManager().attach(net.parameters()) as gm:
                    gm.backward(F.softplus(net(x)).mean())
                opt.step()
                opt.zero_grad()
    for _ in range(3):
        F.softplus(twin(x)).mean().backward()
        their_opt.step()
        their_opt.zero_grad()
    assert torch.equal(net.weight, twin.weight)


def test_callbacks_see_gradients_that_can_be_differentiated() -> None:
    x = leaf(2.0)
    outer = GradManager().attach(x)
    with outer:
        with GradManager().attach(x, callbacks=lambda t, g: g * g) as inner:
            inner.backward(x**3)
        assert x.grad is not None
        first = x.grad
        x.grad = None
        outer.backward(first)
    # (3x²)² = 9x⁴, its derivative 36x³.
    assert first.item() == 144.0
    assert x.grad.item() == 288.0
