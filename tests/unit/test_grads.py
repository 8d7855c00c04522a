"""GradManager, GradOperation and gradients against plain torch.autograd, bit for bit; every error's advice works."""

import copy
import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from halfstep.grads import GradManager, GradManagerGroup, GradOperation, gradients


def make_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    net = make_net()
    return net, copy.deepcopy(net)


def grads_of(net: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in net.parameters()]


def all_equal(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def leaf(*values: float) -> Tensor:
    return torch.tensor(values, requires_grad=True)


# GradManager: the plain cases


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_backward_equals_torch(dtype: torch.dtype) -> None:
    ours, plain = (net.to(dtype) for net in twins())
    x = torch.randn(4, 5, dtype=dtype)
    gm = GradManager().attach(ours.parameters())
    with gm:
        gm.backward(ours(x).square().mean())
    plain(x).square().mean().backward()
    assert all_equal(grads_of(ours), grads_of(plain))
    assert {p.grad.dtype for p in ours.parameters() if p.grad is not None} == {dtype}


def test_record_and_release_by_hand_equal_the_context() -> None:
    ours, plain = twins()
    gm = GradManager().attach(ours.parameters())
    gm.record()
    assert gm.recording
    gm.backward(ours(torch.ones(2, 5)).sum())
    assert not gm.recording
    gm.release()  # harmless at rest
    plain(torch.ones(2, 5)).sum().backward()
    assert all_equal(grads_of(ours), grads_of(plain))


def test_gradients_accumulate_over_several_backwards() -> None:
    ours, plain = twins()
    gm = GradManager().attach(ours.parameters())
    for i in range(3):
        x = torch.randn(4, 5)
        with gm:
            gm.backward(ours(x).sum(), dy=0.5**i)
        plain(x).sum().backward(torch.tensor(0.5**i))
    assert all_equal(grads_of(ours), grads_of(plain))


def test_only_attached_tensors_that_y_depends_on_change() -> None:
    used = leaf(1.0)
    unused = leaf(2.0)
    stranger = leaf(3.0)
    unused.grad = kept = torch.tensor([7.0])
    fresh = leaf(4.0)
    gm = GradManager().attach([used, unused, fresh])
    with gm:
        gm.backward(used * stranger)
    assert used.grad is not None
    assert used.grad.item() == 3.0
    assert unused.grad is kept
    assert kept.item() == 7.0
    assert fresh.grad is None
    assert stranger.grad is None


def test_attach_makes_leaves_require_grad_and_freezing_later_is_respected() -> None:
    w = torch.ones(2)
    v = torch.ones(2)
    gm = GradManager().attach([w, v])
    assert w.requires_grad
    v.requires_grad_(False)
    with gm:
        gm.backward(w * v)
    assert w.grad is not None
    assert v.grad is None


def test_several_outputs_in_one_pass() -> None:
    w = leaf(1.0, 2.0)
    gm = GradManager().attach(w)
    trunk = w.exp()
    with gm:
        gm.backward([trunk.sum(), (trunk * 3).sum()], dy=[1.0, torch.tensor(2.0)])
    expected = leaf(1.0, 2.0)
    trunk = expected.exp()
    torch.autograd.backward(
        [trunk.sum(), (trunk * 3).sum()], [torch.tensor(1.0), torch.tensor(2.0)]
    )
    assert torch.equal(w.grad, expected.grad)


def test_one_number_serves_every_output() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with gm:
        gm.backward((w * 2, w * 3), dy=10)
    assert w.grad is not None
    assert w.grad.item() == 50.0


@pytest.mark.parametrize("dy", [8.0, 8, torch.tensor(8.0), torch.tensor(8.0, dtype=torch.float64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_scalar_dy_is_broadcast_and_cast(dy: Any, dtype: torch.dtype) -> None:
    w = torch.randn(3, 2, dtype=dtype)
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w.sin(), dy=dy)  # not a scalar: the seed takes y's shape
    expected = torch.autograd.grad(y := w.sin(), w, torch.full_like(y, 8.0))[0]
    assert torch.equal(w.grad, expected)


def test_full_dy_and_default_ones() -> None:
    w = leaf(1.0, 2.0, 3.0)
    dy = torch.tensor([1.0, 0.0, -2.0])
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w.square(), dy=dy)
    assert torch.equal(w.grad, 2 * w.detach() * dy)
    w.grad = None
    with gm:
        gm.backward(w.square())
    assert torch.equal(w.grad, 2 * w.detach())


def test_tensor_scale_that_overflows_y_gives_inf_for_the_scaler_to_see() -> None:
    w = torch.ones((), dtype=torch.float16)
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w * 1, dy=torch.tensor(65536.0))
    assert torch.isinf(w.grad)


def test_grad_never_aliases_the_scale() -> None:
    scale = torch.tensor(4.0)
    w = leaf(1.0).sum().detach()
    h = leaf(1.0).sum()
    gm = GradManager().attach([w, h], callbacks=lambda t, g: g)
    for y in (w, h):
        with gm:
            gm.backward(y, dy=scale)
    scale.mul_(100)
    assert w.grad.item() == h.grad.item() == 4.0


def test_a_forward_before_record_counts() -> None:
    w = leaf(2.0)
    gm = GradManager().attach(w)
    y = w * 3
    with gm:
        gm.backward(y)
    assert w.grad is not None
    assert w.grad.item() == 3.0


# attach


def test_attached_tensors_in_order_each_once() -> None:
    a = leaf(1.0)
    b = leaf(2.0)
    c = leaf(3.0)
    gm = GradManager()
    assert gm.attach([c, a]) is gm
    gm.attach(b).attach(a)
    assert [id(t) for t in gm.attached_tensors()] == [id(c), id(a), id(b)]


def test_attached_tensors_are_held_weakly() -> None:
    net = make_net()
    alive = leaf(1.0)
    gm = GradManager().attach(alive).attach(net.parameters(), callbacks=lambda t, g: g)
    with gm:
        gm.backward(net(torch.ones(1, 5)).sum() * alive)
    refs = [weakref.ref(p) for p in net.parameters()]
    del net
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4
    assert [id(t) for t in gm.attached_tensors()] == [id(alive)]
    with gm:
        gm.backward(alive * 2)


def test_attach_while_recording_takes_effect_at_once_for_intermediates_too() -> None:
    w = leaf(2.0)
    x = leaf(3.0)
    gm = GradManager().attach(w)
    with gm:
        h = w * x
        gm.attach([h, x])
        gm.backward(h.square())
    assert h.grad is not None
    assert [w.grad, x.grad, h.grad] == [
        torch.tensor([36.0]),
        torch.tensor([24.0]),
        torch.tensor([12.0]),
    ]


def test_intermediate_without_another_owner_lives_until_release() -> None:
    w = leaf(2.0)
    seen = []
    gm = GradManager().attach(w)

    def forward() -> Tensor:
        h = w + 1  # add saves nothing: only the manager keeps h
        gm.attach(h, callbacks=lambda t, g: seen.append((t.item(), g.item())) or g)
        return h + h

    with gm:
        gm.backward(forward())
    assert seen == [(3.0, 2.0)]
    gc.collect()
    assert len(gm.attached_tensors()) == 1


def test_callback_of_an_intermediate_changes_its_grad_but_not_its_ancestors() -> None:
    w = leaf(2.0)
    gm = GradManager().attach(w)
    for total in (600.0, 1200.0):  # the second pass adds
        w.grad = None
        with gm:
            if total == 600.0:
                h = w * 3
                gm.attach(h, callbacks=lambda t, g: g * 100)
            gm.backward(h.sum() * 6, retain_graph=True)
        assert w.grad is not None
        assert (w.grad.item(), h.grad.item()) == (18.0, total)


def test_intermediate_that_y_does_not_depend_on_keeps_its_grad() -> None:
    w = leaf(2.0)
    gm = GradManager()
    with gm:
        h = w * 3
        gm.attach([w, h], callbacks=lambda t, g: g)
        gm.backward(w * 5)
    assert h.grad is None
    assert w.grad is not None


# callbacks and hooks


def test_callbacks_chain_in_order_before_accumulation() -> None:
    w = leaf(1.0)
    w.grad = torch.tensor([1000.0])
    gm = GradManager().attach(w, callbacks=[lambda t, g: g + 1, lambda t, g: g * 10])
    gm.attach(w, callbacks=lambda t, g: g - t.detach())  # re-attaching concatenates
    with gm:
        gm.backward(w * 2)
    assert w.grad.item() == 1000 + (2 + 1) * 10 - 1


def test_a_callback_gets_the_tensor_itself_and_acts_in_this_pass_only() -> None:
    w = leaf(1.0)
    seen = []
    gm = GradManager().attach(w, callbacks=lambda t, g: seen.append(t) or g)
    with gm:
        gm.backward(w * 2)
    (w * 2).backward()
    assert len(seen) == 1
    assert seen[0] is w


def test_hooks_fire_once_per_backward_in_order() -> None:
    w = leaf(1.0)
    events = []
    w.register_post_accumulate_grad_hook(lambda t: events.append(("accumulated", t.grad.item())))
    gm = GradManager().attach(
        w, callbacks=lambda t, g: events.append(("callback", g.item())) or g + 1
    )
    w.register_hook(lambda g: events.append(("hook", g.item())) or g * 2)
    for _ in range(2):
        with gm:
            gm.backward(w * w)  # two uses, one gradient
    once = [("hook", 2.0), ("callback", 4.0)]
    assert events == [*once, ("accumulated", 5.0), *once, ("accumulated", 10.0)]


def test_distributed_data_parallel_reduces_each_backward() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        reduced = []

        def reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            reduced.append(bucket.index())
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * 2)
            return future

        net.register_comm_hook(None, reduce)
        gm = GradManager().attach(net.parameters())
        with gm:
            gm.backward(net(torch.ones(1, 3)).sum())
    finally:
        dist.destroy_process_group()
    assert reduced == [0]
    assert torch.equal(net.module.bias.grad, torch.tensor([2.0, 2.0]))


def test_a_raising_callback_releases_and_leaves_no_hook_behind() -> None:
    w = leaf(1.0)

    def fail(tensor: Tensor, grad: Tensor) -> Tensor:
        raise LookupError("from the callback")

    gm = GradManager().attach(w, callbacks=fail)
    with gm, pytest.raises(LookupError, match="from the callback"):
        gm.backward(w * 2)
    assert not gm.recording
    (w * 2).backward()
    assert w.grad is not None
    assert w.grad.item() == 2.0


def test_a_raising_callback_of_an_intermediate_keeps_its_grad() -> None:
    w = leaf(1.0)
    fail = []
    gm = GradManager()
    with gm:
        h = w * 2
        gm.attach(h, callbacks=lambda t, g: g if not fail else fail[0])
        gm.backward(h * 3, retain_graph=True)
    fail.append(None)
    with gm, pytest.raises(TypeError, match="return grad"):
        gm.backward(h * 3)
    assert h.grad.item() == 3.0


# recording


def test_an_exception_inside_the_context_releases_and_reaches_the_caller() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with pytest.raises(LookupError), gm:
        raise LookupError
    assert not gm.recording
    with gm:
        gm.backward(w * 2)
    assert w.grad is not None


def test_record_twice_is_refused_and_release_helps() -> None:
    gm = GradManager().attach(leaf(1.0))
    gm.record()
    with pytest.raises(
        RuntimeError, match=re.escape("received record() twice, do backward() or release() first")
    ):
        gm.record()
    gm.release()
    gm.record()


def test_backward_without_record_is_refused_and_the_context_helps() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    with pytest.raises(RuntimeError, match=re.escape("do call it inside `with gm:`")):
        gm.backward(w * 2)
    with gm:
        gm.backward(w * 2)
        with pytest.raises(RuntimeError, match="at rest"):  # backward released it, as in MegEngine
            gm.backward(w * 2)


# errors of attach and backward


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (make_net(), "Linear"),
        (nn.Linear(1, 1), "Linear"),
        (make_net().named_parameters(), "tuple"),
        (torch.arange(3), "torch.int64"),
        ([torch.ones(1), torch.ones(1, dtype=torch.complex64)], "torch.complex64"),
        (3.0, "float"),
        (None, "NoneType"),
    ],
)
def test_attach_takes_float_tensors_only_and_changes_nothing_on_error(bad: Any, named: str) -> None:
    gm = GradManager()
    with pytest.raises(
        TypeError,
        match=re.escape(f"received {named}, do pass float tensors such as net.parameters()"),
    ):
        gm.attach(bad)
    assert gm.attached_tensors() == []
    net = make_net()
    assert all_equal(gm.attach(net.parameters()).attached_tensors(), net.parameters())


def test_attach_checks_callbacks() -> None:
    w = torch.ones(1)
    with pytest.raises(
        TypeError, match=re.escape("received int, do pass cb(tensor, grad) -> grad")
    ):
        GradManager().attach(w, callbacks=[3])
    assert not w.requires_grad


def test_a_callback_must_return_the_gradient() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w, callbacks=lambda t, g: None)
    with gm, pytest.raises(TypeError, match="received NoneType, do end with `return grad`"):
        gm.backward(w * 2)


def test_nothing_attached_or_alive_is_refused() -> None:
    w = leaf(1.0)
    gm = GradManager().attach([torch.ones(1)])
    with gm, pytest.raises(RuntimeError, match="received none alive and trainable"):
        gm.backward(w * 2)
    assert not gm.recording


def test_y_without_history_is_refused_and_the_advice_works() -> None:
    w = torch.ones(1)
    y = w * 2
    gm = GradManager().attach(w)
    with torch.no_grad():
        z = w * 2
    for bad in (y, z, (w * 2).detach(), [w * 2, y]):
        with gm, pytest.raises(ValueError, match="do run the forward after attach"):
            gm.backward(bad)
        assert not gm.recording
    with gm:
        gm.backward(w * 2)


def test_y_must_be_float_tensors() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w)
    for bad in (None, 3.0, torch.tensor(3), [w * 2, "loss"]):
        with gm, pytest.raises(TypeError, match="do pass the loss or a list of losses"):
            gm.backward(bad)
    with gm, pytest.raises(ValueError, match="received none"):
        gm.backward([])
    with gm:
        gm.backward([w * 2, w * 3])


def test_dy_is_checked_and_the_advice_works() -> None:
    w = torch.ones(2, 3)
    gm = GradManager().attach(w)
    with (
        gm,
        pytest.raises(
            ValueError,
            match=re.escape("shape [2, 3] or 0-dim, received [3], do reshape or expand it"),
        ),
    ):
        gm.backward(w * 2, dy=torch.ones(3))
    with gm, pytest.raises(ValueError, match="one dy for each of 2 y, received 1"):
        gm.backward([w * 2, w * 3], dy=[1.0])
    with gm, pytest.raises(TypeError, match=re.escape("received str, do pass torch.ones_like(y)")):
        gm.backward(w * 2, dy="1")
    with (
        gm,
        pytest.raises(
            ValueError, match=re.escape("on cpu, received one on meta, do dy.to(y.device)")
        ),
    ):
        gm.backward(w * 2, dy=torch.ones((), device="meta"))
    assert w.grad is None
    with gm:
        gm.backward(w * 2, dy=torch.ones(3).expand(2, 3))


def test_number_too_large_for_y_is_refused_and_a_float32_loss_helps() -> None:
    w = torch.ones(8, dtype=torch.float16)
    gm = GradManager().attach(w)
    with (
        gm,
        pytest.raises(
            ValueError, match=r"<= 65504 for torch\.float16, received 65536, do compute the loss in"
        ),
    ):
        gm.backward((w * 2).mean(), dy=2.0**16)
    with gm:
        gm.backward((w * 2).float().mean(), dy=2.0**16)
    assert torch.equal(w.grad, torch.full_like(w, 2.0**14))


# groups


def test_group_backward_is_one_pass_for_all() -> None:
    (a, plain_a), (b, plain_b) = (twins() for _ in range(2))
    passes: list[int] = []
    gm1 = GradManager().attach(a.parameters())
    gm2 = GradManager().attach(b.parameters())
    x = torch.randn(4, 5)
    with gm1 | gm2 as group:
        assert gm1.recording
        assert gm2.recording
        trunk = a(x) * b(x)
        trunk.register_hook(lambda g: passes.append(1))
        group.backward(trunk.square().sum(), dy=0.5)
    assert passes == [1]
    assert not gm1.recording
    assert not gm2.recording
    (plain_a(x) * plain_b(x)).square().sum().backward(torch.tensor(0.5))
    assert all_equal(grads_of(a) + grads_of(b), grads_of(plain_a) + grads_of(plain_b))


def test_members_of_a_recording_group_run_backward_on_one_graph() -> None:
    w = leaf(2.0)
    v = leaf(3.0)
    gm1 = GradManager().attach(w)
    gm2 = GradManager().attach(v)
    with gm1 | gm2:
        y = (w * v).exp()
        gm1.backward(y)
        gm2.backward(y)
    expected = torch.autograd.grad((w * v).exp(), (w, v))
    assert all_equal((w.grad, v.grad), expected)
    with pytest.raises(RuntimeError, match="second time"), gm1:  # the last member freed the graph
        gm1.backward(y)


def test_a_tensor_in_two_managers_gets_one_gradient_through_both_chains() -> None:
    w = leaf(1.0)
    v = leaf(1.0)
    gm1 = GradManager().attach([v, w], callbacks=lambda t, g: g + 1)
    gm2 = GradManager().attach(w, callbacks=lambda t, g: g * 10)
    with gm1 | gm2 as group:
        group.backward(w * 2)
    assert w.grad is not None
    assert w.grad.item() == 30.0
    assert [id(t) for t in group.attached_tensors()] == [id(v), id(w)]


def test_groups_join_and_hold_each_manager_once() -> None:
    a = GradManager()
    b = GradManager()
    c = GradManager()
    for group in (a | b | c, a | (b | c), (a | b) | (b | c), (a | b) | GradManagerGroup(a, c)):
        assert group.managers == (a, b, c)
    with pytest.raises(TypeError, match="unsupported operand"):
        a | 3


def test_group_records_all_or_none() -> None:
    gm1 = GradManager().attach(w := leaf(1.0))
    gm2 = GradManager().attach(v := leaf(1.0))
    gm2.record()
    with pytest.raises(RuntimeError, match="record\\(\\) twice"):
        (gm1 | gm2).record()
    assert not gm1.recording
    gm2.release()
    with gm1 | gm2 as group:
        gm1.release()
        with pytest.raises(RuntimeError, match="at rest"):
            group.backward(w * v)
        assert not gm2.recording


def test_exception_inside_a_group_releases_all() -> None:
    gm1 = GradManager()
    gm2 = GradManager()
    with pytest.raises(LookupError), gm1 | gm2:
        raise LookupError
    assert not gm1.recording
    assert not gm2.recording


# autocast


def island(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return (x @ w).square().sum()


def test_backward_inside_autocast_keeps_the_dtypes_of_the_forward() -> None:
    x = torch.randn(8, 8)
    w = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(island(x, w), w)[0]
    gm = GradManager().attach(w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with gm:
            gm.backward(island(x, w))
        lower = torch.autograd.grad(island(x, w), w)[0]
        values = gradients(island(x, w), w)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(w.grad, expected)
    assert torch.equal(values[0], expected)
    assert not torch.equal(lower, expected)  # what torch does inside autocast


def test_backward_inside_autocast_equals_backward_outside() -> None:
    ours, plain = twins()
    x = torch.randn(4, 5)
    label = torch.tensor([0, 1, 2, 0])
    gm = GradManager().attach(ours.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16), gm:
        gm.backward(F.cross_entropy(ours(x), label))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(plain(x), label)
    loss.backward()
    assert all_equal(grads_of(ours), grads_of(plain))
    loss_fn = GradOperation(get_by_list=True)(
        lambda x: F.cross_entropy(plain(x), label), plain.parameters()
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all_equal(loss_fn(x), grads_of(plain))


def test_other_device_types_pass() -> None:
    w = torch.ones(2, device="meta")
    gm = GradManager().attach(w)
    with gm:
        gm.backward(w * 2, dy=torch.tensor(4.0))  # a 0-dim tensor in host memory fits any device
    assert w.grad is not None
    assert w.grad.is_meta


# gradients


def test_gradients_equal_torch_with_zeros_for_the_unused_and_touch_no_grad() -> None:
    w = leaf(1.0, 2.0)
    v = leaf(3.0, 4.0)
    unused = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    found = gradients((w * v).exp(), [v, unused, w], dy=2)
    expected = torch.autograd.grad(y := (w * v).exp(), [v, w], torch.full_like(y, 2.0))
    assert all_equal(found, [expected[0], torch.zeros(2, 3, dtype=torch.float64), expected[1]])
    assert not any(g.requires_grad for g in found)
    assert w.grad is v.grad is unused.grad is None


def test_gradients_keep_the_graph_when_asked() -> None:
    w = leaf(1.0)
    y = w.exp()
    assert torch.equal(gradients(y, w, retain_graph=True)[0], gradients(y, w)[0])


def test_gradients_refuse_the_frozen_and_the_empty() -> None:
    w = leaf(1.0)
    frozen = torch.ones(1)
    for bad, named in (([w, frozen], "a frozen one"), ([], "none")):
        with pytest.raises(ValueError, match=f"received {named}, do pass trainable ones only"):
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
    for args, named in (
        ((), "none"),
        ((x,), "1 ending in Tensor"),
        ((x, None), "2 ending in NoneType"),
    ):
        with pytest.raises(TypeError, match=f"received {named}, do pass the inputs, then the sens"):
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
    assert (
        len(call(GradOperation(get_by_list=True), torch.ones(1, 5), fn=net, weights=trainable)) == 3
    )


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


@pytest.mark.parametrize("scale", [1.0, 2.0**4, 2.0**16])
def test_the_manual_gear_of_seed_004_equals_a_plain_step(scale: float) -> None:
    ours, plain = twins()
    factor = torch.tensor(scale)
    gm = GradManager().attach(ours.parameters())
    x = torch.randn(4, 5)
    label = torch.tensor([0, 1, 2, 0])
    with gm:
        gm.backward(F.cross_entropy(ours(x), label), dy=factor)
    for tensor in gm.attached_tensors():
        assert tensor.grad is not None
        tensor.grad.mul_(1 / factor)  # a power of two: exact
    F.cross_entropy(plain(x), label).backward()
    assert all_equal(grads_of(ours), grads_of(plain))


@pytest.mark.gpu
def test_no_host_sync_on_cuda() -> None:
    net = make_net().cuda()
    gm = GradManager().attach(net.parameters(), callbacks=lambda t, g: g * 2)
    x = torch.ones(4, 5, device="cuda")
    scale = torch.tensor(16.0, device="cuda")
    grad = GradOperation(get_all=True, get_by_list=True, sens_param=True)(net, net.parameters())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for dy in (None, 2.0, scale, torch.tensor(16.0)):
            with gm:
                gm.backward(net(x).sum(), dy=dy)
        grad(x, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
