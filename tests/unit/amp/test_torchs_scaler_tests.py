"""The behaviours that torch tests of its GradScaler, for torch's class and for ours.

Each body runs with both; what it asserts of one it asserts of the other.
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from halfstep import amp

Scaler = torch.amp.GradScaler
CLASSES = {"torch": torch.amp.GradScaler, "halfstep": amp.GradScaler}
OPTIMIZERS = (SGD, Adam, AdamW)
FORMS: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"fused": True}, {"foreach": False})
Batch = tuple[Tensor, Tensor]
Run = Callable[..., None]


@pytest.fixture(params=CLASSES)
def make(request: pytest.FixtureRequest) -> type[Scaler]:
    scaler_class: type[Scaler] = CLASSES[request.param]
    return scaler_class


# scale


def test_scale_keeps_shapes_dtypes_and_nesting(make: type[Scaler]) -> None:
    scaler = make("cpu", init_scale=2.0)
    t = torch.full((1,), 4.0)
    assert scaler.scale(t).item() == 8.0
    assert scaler.scale(t.half()).dtype == torch.float16
    assert scaler.scale(torch.ones(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert scaler.scale(torch.ones(3, dtype=torch.float64)).dtype == torch.float64
    nested = (t, [t, (t,)])
    first, (second, (third,)) = scaler.scale(nested)  # type: ignore[call-overload]
    assert (first.item(), second.item(), third.item()) == (8.0, 8.0, 8.0)
    assert isinstance(scaler.scale([t]), list)
    assert isinstance(scaler.scale((t,)), tuple)
    assert [s.item() for s in scaler.scale(t for _ in range(3))] == [8.0] * 3
    for bad in (3.0, None, [t, 3.0]):
        with pytest.raises(ValueError, match="outputs must be a Tensor"):
            list(scaler.scale(bad))  # type: ignore[call-overload]


# unscale_


@pytest.mark.parametrize("bad", [None, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_unscale_divides_and_finds(
    make: type[Scaler], dtype: torch.dtype, bad: float | None
) -> None:
    scaler = make("cpu", init_scale=4.0)
    params = [nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(3)]
    opt = SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    for p in params[:2]:  # one of them has no gradient
        p.grad = torch.full_like(p, 8.0)
    if bad is not None:
        assert params[1].grad is not None
        params[1].grad[1] = bad
    scaler.unscale_(opt)
    found = scaler._found_inf_per_device(opt)
    assert [value.item() for value in found.values()] == [float(bad is not None)]
    assert params[0].grad is not None
    assert params[0].grad.tolist() == [2.0] * 3
    assert params[2].grad is None
    scaler.step(opt)
    assert params[0].tolist() == ([0.0] * 3 if bad is not None else [-2.0] * 3)


@pytest.mark.parametrize("bad", [None, math.inf])
@pytest.mark.parametrize("is_coalesced", [True, False])
def test_unscale_of_sparse_gradients(
    make: type[Scaler], is_coalesced: bool, bad: float | None
) -> None:
    scaler = make("cpu", init_scale=4.0)
    p = nn.Parameter(torch.zeros(4, 2))
    scaler.scale(torch.ones(()))
    indices = torch.tensor([[0, 3] if is_coalesced else [1, 1]])
    values = torch.full((2, 2), 8.0 if bad is None else bad)
    p.grad = torch.sparse_coo_tensor(indices, values, (4, 2), check_invariants=True)
    if is_coalesced:
        p.grad = p.grad.coalesce()
    opt = SGD([p], lr=1.0)
    scaler.unscale_(opt)
    assert [v.item() for v in scaler._found_inf_per_device(opt).values()] == [bad is not None]
    scaler.step(opt)
    total = 0.0 if bad is not None else -8.0
    assert p.sum().item() == total


def test_an_embedding_with_sparse_gradients_trains(make: type[Scaler]) -> None:
    torch.manual_seed(0)
    net = nn.Embedding(8, 4, sparse=True)
    opt = SGD(net.parameters(), lr=1.0)
    before = net.weight.detach().clone()
    scaler = make("cpu", init_scale=2.0**10)
    scaler.scale(net(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(opt)
    scaler.update()
    steps = (before - net.weight)[:, 0]
    torch.testing.assert_close(steps, torch.tensor([0.0, 2, 0, 1, 0, 0, 0, 0]))


def test_half_gradients_are_refused(make: type[Scaler]) -> None:
    scaler = make("cpu")
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(SGD([p], lr=1.0))


def test_each_misuse_is_an_error_of_the_same_class(make: type[Scaler]) -> None:
    p = nn.Parameter(torch.zeros(3))
    opt = SGD([p], lr=1.0)
    p.grad = torch.ones_like(p)
    scaler = make("cpu")
    for call in (lambda: scaler.unscale_(opt), lambda: scaler.step(opt), scaler.update):
        with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
            call()
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(opt, closure=lambda: 0.0)
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(opt)
    scaler.step(opt)
    with pytest.raises(RuntimeError, match="being called after step"):
        scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(opt)
    with pytest.raises(AssertionError):
        pickle.dumps(scaler)  # only between update() and the next scale()
    scaler.update()
    scaler.unscale_(opt)
    scaler.step(opt)


# update


def test_the_trajectory_of_scale_and_tracker(make: type[Scaler]) -> None:
    p = nn.Parameter(torch.zeros(1))
    opt = SGD([p], lr=0.0)
    scaler = make("cpu", init_scale=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
    seen = []
    for bad in (0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0):
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([math.nan if bad else 1.0])
        scaler.step(opt)
        scaler.update()
        seen.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [
        (16, 1), (16, 2), (64, 0), (16, 0), (16, 1), (16, 2), (4, 0), (4, 1), (4, 2), (16, 0),
        (16, 1),
    ]  # fmt: skip


def test_a_new_scale_as_number_and_tensor(make: type[Scaler]) -> None:
    scaler = make("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    scaler.update(8.0)
    assert scaler.get_scale() == 8.0
    scaler.update(torch.tensor(4.0))
    assert scaler.get_scale() == 4.0
    assert scaler._scale is not None
    kept = scaler._scale
    scaler.update(torch.tensor(16.0))
    assert scaler.get_scale() == 16.0
    assert scaler._scale is kept  # in place: a captured graph reads it


def test_the_scale_does_not_overflow(make: type[Scaler]) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 1)
    opt = Adam(net.parameters())
    scaler = make("cpu", growth_interval=1, growth_factor=2**4, init_scale=1e38)
    loss = (net(torch.randn(1, 5)) - 1e-30 * torch.randn(1, 1)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    assert math.isfinite(scaler.get_scale())


def test_getters_and_setters(make: type[Scaler]) -> None:
    scaler = make("cpu", 8.0, 3.0, 0.25, 7)
    assert scaler.get_scale() == 8.0
    assert scaler.get_growth_factor() == 3.0
    assert scaler.get_backoff_factor() == 0.25
    assert scaler.get_growth_interval() == 7
    assert scaler.is_enabled()
    scaler.set_growth_factor(5.0)
    scaler.set_backoff_factor(0.5)
    scaler.set_growth_interval(9)
    state = scaler.state_dict()
    assert (state["growth_factor"], state["backoff_factor"]) == (5.0, 0.5)
    assert state["growth_interval"] == 9


# State


@pytest.mark.parametrize("lazy", [True, False])
def test_the_state_of_another_scaler(make: type[Scaler], lazy: bool) -> None:
    first = make("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    second = make("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    second._init_growth_tracker = 7
    if not lazy:
        second.scale(torch.full((1,), 4.0))
    second.load_state_dict(first.state_dict())
    assert second.get_scale() == 3.0
    assert second.get_growth_factor() == 4.0
    assert second.get_backoff_factor() == 0.5
    assert second.get_growth_interval() == 2
    assert second._init_growth_tracker == 0
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        second.load_state_dict({})


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
@pytest.mark.parametrize("used", [True, False])
def test_copies_and_pickles(make: type[Scaler], used: bool, copier: Callable[[Any], Any]) -> None:
    scaler = make("cpu", init_scale=8.0, growth_interval=1)
    if used:
        p = nn.Parameter(torch.ones(1))
        scaler.scale(p.sum()).backward()
        scaler.step(SGD([p], lr=0.1))
        scaler.update()
    twin = copier(scaler)
    assert twin.state_dict() == scaler.state_dict()
    assert twin.scale(torch.ones(())).item() == (16.0 if used else 8.0)


def test_a_disabled_scaler(make: type[Scaler]) -> None:
    scaler = make("cpu", enabled=False)
    p = nn.Parameter(torch.ones(1))
    opt = SGD([p], lr=1.0)
    loss = p.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(opt)
    scaler.unscale_(opt)
    assert scaler.step(opt, closure=None) is None
    scaler.update()
    scaler.update(5.0)
    assert p.item() == 0.0
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert not scaler.is_enabled()


# Training


def make_case(optimizer: type[Optimizer], form: dict[str, bool]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return net, optimizer(net.parameters(), lr=1.0, **form)  # type: ignore[call-arg]


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator))
        for _ in range(4)
    ]


def plain(data: list[Batch], net: nn.Module, opt: Optimizer, skip: int) -> None:
    for i, (x, y) in enumerate(data):
        opt.zero_grad()
        F.mse_loss(net(x), y).backward()
        if i != skip:
            opt.step()


def plant(net: nn.Module) -> None:
    param = list(net.parameters())[1]
    assert param.grad is not None
    param.grad.fill_(math.inf)


def simple(scaler: Scaler, data: list[Batch], net: nn.Module, opt: Optimizer, skip: int) -> None:
    for i, (x, y) in enumerate(data):
        opt.zero_grad()
        with torch.autocast("cpu", enabled=False):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        if i == skip:
            plant(net)
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_equals_training_without_a_scaler(
    make: type[Scaler], optimizer: type[Optimizer], form: dict[str, bool]
) -> None:
    """Scales of two, so that all bits are the same; one update is skipped."""
    control, control_opt = make_case(optimizer, form)
    plain(batches(), control, control_opt, skip=2)
    net, opt = make_case(optimizer, form)
    scaler = make("cpu", init_scale=128.0, growth_factor=2.0, growth_interval=1)
    simple(scaler, batches(), net, opt, skip=2)
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    for a, b in zip(control.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def clipped(net: nn.Module, opt: Optimizer, scaler: Scaler | None, x: Tensor, y: Tensor) -> None:
    loss = F.mse_loss(net(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    scale = 1.0 if scaler is None else scaler.get_scale()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1 * scale)


def clipped_after_unscale(
    net: nn.Module, opt: Optimizer, scaler: Scaler | None, x: Tensor, y: Tensor
) -> None:
    loss = F.mse_loss(net(x), y)
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, error_if_nonfinite=False)


def penalised(net: nn.Module, opt: Optimizer, scaler: Scaler | None, x: Tensor, y: Tensor) -> None:
    """torch's gradient penalty: gradients of the scaled loss, divided by the scale by hand."""
    loss = F.mse_loss(net(x), y)
    scaled = loss if scaler is None else scaler.scale(loss)
    params = list(net.parameters())
    grads = torch.autograd.grad(scaled, params, create_graph=True)
    inverse = 1.0 if scaler is None else 1.0 / scaler.get_scale()
    norm = torch.stack([(g * inverse).square().sum() for g in grads]).sum().sqrt()
    loss = loss + norm
    (loss if scaler is None else scaler.scale(loss)).backward()


def accumulated(
    net: nn.Module, opt: Optimizer, scaler: Scaler | None, x: Tensor, y: Tensor
) -> None:
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.mse_loss(net(part_x), part_y) / 2
        (loss if scaler is None else scaler.scale(loss)).backward()


@pytest.mark.parametrize("backward", [clipped, clipped_after_unscale, penalised, accumulated])
def test_clipping_penalty_and_accumulation(make: type[Scaler], backward: Run) -> None:
    trained = []
    for scaler in (None, make("cpu", init_scale=128.0, growth_interval=1)):
        net, opt = make_case(SGD, {})
        for i, (x, y) in enumerate(batches()):
            opt.zero_grad()
            backward(net, opt, scaler, x, y)
            if i == 1 and scaler is not None:
                if backward is clipped_after_unscale:
                    # Found at unscale_(): what is planted later is not seen, as in torch.
                    found = next(iter(scaler._found_inf_per_device(opt).values()))
                    found.fill_(1.0)
                else:
                    plant(net)
            if scaler is not None:
                scaler.step(opt)
                scaler.update()
            elif i != 1:
                opt.step()
        trained.append([p.detach() for p in net.parameters()])
    assert scaler is not None
    assert scaler.get_scale() == 128.0 * 2.0**3 * 0.5
    for a, b in zip(*trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bad", "changed"), [(None, (True, True)), (0, (False, True))])
def test_two_networks_two_optimizers(
    make: type[Scaler], bad: int | None, changed: tuple[bool, bool]
) -> None:
    cases = [make_case(SGD, {}), make_case(Adam, {})]
    scaler = make("cpu", init_scale=128.0, growth_interval=1)
    before = [net[0].weight.detach().clone() for net, _ in cases]  # type: ignore[index, union-attr]
    (x, y), *_ = batches()
    outs = [net(x) for net, _ in cases]
    loss0 = F.mse_loss(0.6 * outs[0] + 0.4 * outs[1], y)
    loss1 = F.mse_loss(0.4 * outs[0] - 0.6 * outs[1], y)
    scaler.scale(loss0).backward(retain_graph=True)
    scaler.scale(loss1).backward()
    if bad is not None:
        plant(cases[bad][0])
    scaler.unscale_(cases[0][1])
    for _, opt in cases:
        scaler.step(opt)
    scaler.update()
    after = [net[0].weight for net, _ in cases]  # type: ignore[index]
    assert tuple(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == changed
    assert scaler.get_scale() == (256.0 if bad is None else 64.0)


@pytest.mark.parametrize(
    ("optimizer", "form"),
    list(product(OPTIMIZERS, FORMS)),
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_what_becomes_of_gradients_that_are_broken_after_unscale(
    make: type[Scaler], optimizer: type[Optimizer], form: dict[str, bool]
) -> None:
    """They are applied: unscale_() has looked already."""
    net, opt = make_case(optimizer, form)
    scaler = make("cpu", init_scale=128.0)
    for x, y in batches():
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.half):
            loss = F.mse_loss(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        for j, p in enumerate(net.parameters()):
            assert p.grad is not None
            p.grad.copy_(torch.tensor(math.inf if j % 2 else math.nan))
        scaler.step(opt)
        scaler.update()
    assert all((p.isnan() | p.isinf()).any() for p in net.parameters())


def test_an_optimizer_that_takes_the_scaler_itself(make: type[Scaler]) -> None:
    class TakesScaler(Optimizer):
        def __init__(self, params: Iterator[nn.Parameter]) -> None:
            super().__init__(params, {"lr": 1.0})
            self._step_supports_amp_scaling = True
            self.seen: Any = None

        def step(self, *, grad_scaler: Scaler) -> None:  # type: ignore[override]
            self.seen = grad_scaler

    class TakesFlags(Optimizer):
        def __init__(self, params: Iterator[nn.Parameter]) -> None:
            super().__init__(params, {"lr": 1.0})
            self._step_supports_amp_scaling = True
            self.flags: Any = None

        def step(self) -> None:  # type: ignore[override]
            self.flags = (self.grad_scale, self.found_inf)  # type: ignore[attr-defined]

    net = nn.Linear(4, 1)
    first = TakesScaler(net.parameters())
    second = TakesFlags(net.parameters())
    scaler = make("cpu", init_scale=2.0)
    scaler.scale(net(torch.ones(4, 4)).mean()).backward()
    with pytest.warns(FutureWarning):
        scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert first.seen is scaler
    scale, found_inf = second.flags
    assert (scale.item(), found_inf.item()) == (2.0, 0.0)


def test_the_step_returns_what_the_optimizer_returns(make: type[Scaler]) -> None:
    class Returns(SGD):
        def step(self, closure: Any = None, *, extra: int = 0) -> Any:
            super().step(closure)
            return 7 + extra

    p = nn.Parameter(torch.ones(1))
    opt = Returns([p], lr=1.0)
    scaler = make("cpu")
    for value, expected in ((1.0, 10), (math.nan, None)):
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([value])
        assert scaler.step(opt, extra=3) == expected
        scaler.update()


def test_a_scheduler_beside_a_skipped_step_does_not_warn_of_order(make: type[Scaler]) -> None:
    p = nn.Parameter(torch.ones(1))
    opt = SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    scaler = make("cpu")
    scaler.scale(p.sum()).backward()
    scaler.step(opt)
    scaler.update()
    scheduler.step()
    assert opt.param_groups[0]["lr"] == 0.5
