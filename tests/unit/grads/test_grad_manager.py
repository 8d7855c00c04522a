"""GradManager against plain torch.autograd, bit for bit; the advice of every error works."""

import gc
import re
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep as hs
from halfstep.grads import GradManager, GradManagerGroup, GradOperation, gradients
from tests.support.grad_helpers import all_equal, grads_of, leaf, make_net, twins

# GradManager: the plain cases


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_backward_equals_torch(dtype: torch.dtype) -> None:
    net, plain = (net.to(dtype) for net in twins())
    x = torch.randn(4, 5, dtype=dtype)
    gm = GradManager().attach(net.parameters())
    with gm:
        gm.backward(net(x).square().mean())
    plain(x).square().mean().backward()
    assert all_equal(grads_of(net), grads_of(plain))
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {dtype}


def test_record_and_release_by_hand_equal_the_context() -> None:
    net, plain = twins()
    gm = GradManager().attach(net.parameters())
    gm.record()
    assert gm.recording
    gm.backward(net(torch.ones(2, 5)).sum())
    assert not gm.recording
    gm.release()  # harmless at rest
    plain(torch.ones(2, 5)).sum().backward()
    assert all_equal(grads_of(net), grads_of(plain))


def test_gradients_accumulate_over_several_backwards() -> None:
    net, plain = twins()
    gm = GradManager().attach(net.parameters())
    for i in range(3):
        x = torch.randn(4, 5)
        with gm:
            gm.backward(net(x).sum(), dy=0.5**i)
        plain(x).sum().backward(torch.tensor(0.5**i))
    assert all_equal(grads_of(net), grads_of(plain))


def test_only_attached_tensors_that_y_depends_on_change() -> None:
    used = leaf(1.0)
    unused = leaf(2.0)
    stranger = leaf(3.0)
    earlier_grad = torch.tensor([7.0])
    unused.grad = earlier_grad
    fresh = leaf(4.0)
    gm = GradManager().attach([used, unused, fresh])
    with gm:
        gm.backward(used * stranger)
    assert used.grad is not None
    assert used.grad.item() == 3.0
    assert unused.grad is earlier_grad
    assert earlier_grad.item() == 7.0
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
    y = w.sin()
    expected = torch.autograd.grad(y, w, torch.full_like(y, 8.0))[0]
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


def test_attached_tensors_are_referenced_weakly() -> None:
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
    calls = []
    gm = GradManager().attach(w)

    def forward() -> Tensor:
        h = w + 1  # add saves nothing: only the manager keeps h
        gm.attach(h, callbacks=lambda t, g: calls.append((t.item(), g.item())) or g)
        return h + h

    with gm:
        gm.backward(forward())
    assert calls == [(3.0, 2.0)]
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
    calls = []
    gm = GradManager().attach(w, callbacks=lambda t, g: calls.append(t) or g)
    with gm:
        gm.backward(w * 2)
    (w * 2).backward()
    assert len(calls) == 1
    assert calls[0] is w


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
    fail.append(3)
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
    ("bad", "received"),
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
def test_attach_takes_float_tensors_only_and_changes_nothing_on_error(
    bad: Any, received: str
) -> None:
    gm = GradManager()
    with pytest.raises(
        TypeError,
        match=re.escape(f"received {received}, do pass float tensors such as net.parameters()"),
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


def test_a_callback_must_return_a_tensor_or_none() -> None:
    w = leaf(1.0)
    gm = GradManager().attach(w, callbacks=lambda t, g: 3)
    with gm, pytest.raises(TypeError, match="received int, do end with `return grad`"):
        gm.backward(w * 2)


@pytest.mark.parametrize("earlier", [None, 7.0])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_a_callback_that_returns_none_drops_the_gradient_and_says_so(
    is_leaf: bool, earlier: float | None
) -> None:
    """MegEngine's way: the tensor receives nothing, those before and beside it receive theirs."""
    w = leaf(1.0)
    v = leaf(2.0)
    gm = GradManager().attach([w, v])
    with gm:
        tensor = w if is_leaf else w * 1
        gm.attach(tensor, callbacks=[lambda t, g: None, lambda t, g: g * 100])
        tensor.retain_grad()
        if earlier is not None:
            tensor.grad = torch.tensor([earlier])
        with pytest.warns(hs.Notice, match="returned None.*do end with `return grad`"):
            gm.backward(tensor * v)
    assert v.grad is not None
    assert v.grad.item() == 1.0
    if not is_leaf:
        assert w.grad is not None
        assert w.grad.item() == 2.0
    assert (tensor.grad is None) if earlier is None else (tensor.grad.item() == earlier)


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


def test_groups_join_and_contain_each_manager_once() -> None:
    a = GradManager()
    b = GradManager()
    c = GradManager()
    for group in (a | b | c, a | (b | c), (a | b) | (b | c), (a | b) | GradManagerGroup(a, c)):
        assert group.managers == (a, b, c)
    with pytest.raises(TypeError, match="unsupported operand"):
        a | 3


def test_group_records_all_or_none() -> None:
    w = leaf(1.0)
    v = leaf(1.0)
    gm1 = GradManager().attach(w)
    gm2 = GradManager().attach(v)
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
    net, plain = twins()
    x = torch.randn(4, 5)
    label = torch.tensor([0, 1, 2, 0])
    gm = GradManager().attach(net.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16), gm:
        gm.backward(F.cross_entropy(net(x), label))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(plain(x), label)
    loss.backward()
    assert all_equal(grads_of(net), grads_of(plain))
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


@pytest.mark.parametrize("scale", [1.0, 2.0**4, 2.0**16])
def test_the_manual_gear_of_seed_004_equals_a_plain_step(scale: float) -> None:
    net, plain = twins()
    factor = torch.tensor(scale)
    gm = GradManager().attach(net.parameters())
    x = torch.randn(4, 5)
    label = torch.tensor([0, 1, 2, 0])
    with gm:
        gm.backward(F.cross_entropy(net(x), label), dy=factor)
    for tensor in gm.attached_tensors():
        assert tensor.grad is not None
        tensor.grad.mul_(1 / factor)  # a power of two: exact
    F.cross_entropy(plain(x), label).backward()
    assert all_equal(grads_of(net), grads_of(plain))


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
