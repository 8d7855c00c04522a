"""GradScaler in MegEngine's protocol: both gears have torch's bits, and nothing unscales twice."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import amp
from halfstep.grads import GradManager
from tests.support.scaler_runs import (
    OVERFLOW_STEPS,
    Gan,
    assert_same,
    fill_grads,
    make_batch,
    make_net_and_optimizer,
    make_scaler,
    make_torch_scaler,
    plant_overflow,
    run_gear_step,
    run_torch_iteration,
    trained_values,
)


@pytest.mark.parametrize("optimizer", ["sgd momentum", "adam"])
def test_automatic_gear_equals_manual_gear_equals_torchs_protocol(optimizer: str) -> None:
    runs = []
    for gear in ("automatic", "manual", "torch"):
        net, opt = make_net_and_optimizer(optimizer)
        scaler = make_scaler()
        scales = []
        for step in range(60):
            if gear == "torch":
                x, y = make_batch(step)
                with amp.autocast(device_type="cpu"):
                    loss = F.mse_loss(net(x), y)
                scaler.scale(loss).backward()
                plant_overflow(net, step)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            else:
                run_gear_step(scaler, net, opt, step, gear)
            scales.append(scaler.get_scale())
        runs.append([scales, scaler.skipped, *trained_values(net, opt)])
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])
    assert runs[0][1] >= len(
        OVERFLOW_STEPS & set(range(60))
    )  # and half gradients overflow on their own


@pytest.mark.parametrize("bad", [False, True])
def test_accumulation_equals_torchs(bad: bool) -> None:
    def micro(net: nn.Linear, i: int) -> Tensor:
        x, y = make_batch(100 + i)
        loss = F.mse_loss(net(x), y)
        return loss * math.nan if bad and i == 1 else loss

    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    gm = GradManager().attach(net.parameters())
    for i in range(4):
        with gm:
            scaler.backward(gm, micro(net, i), unscale_grad=False)
    assert scaler.get_scale() == 2**16  # no update inside the cycle
    scaler.unscale(gm.attached_tensors())
    scaler.update()
    opt.step()
    their_net, their_optimizer = make_net_and_optimizer("adam")
    torch_scaler = make_torch_scaler()
    for i in range(4):
        torch_scaler.scale(micro(their_net, i)).backward()
    torch_scaler.step(their_optimizer)
    torch_scaler.update()
    ours = [scaler.get_scale(), *trained_values(net, opt)]
    theirs = [torch_scaler.get_scale(), *trained_values(their_net, their_optimizer)]
    assert_same(ours, theirs)
    assert scaler.skipped == bad


def test_unscale_takes_every_gradient_away_so_that_the_step_changes_nothing() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    run_gear_step(scaler, net, opt, 2, "automatic")
    before = copy.deepcopy(trained_values(net, opt))
    gm = GradManager().attach(net.parameters())
    with gm:
        gm.backward(net(torch.ones(1, 6)).sum(), dy=scaler.scale_factor)
    assert net.bias.grad is not None
    net.bias.grad[0] = math.inf
    assert scaler.unscale(gm.attached_tensors()) is scaler
    assert net.weight.grad is None
    assert net.bias.grad is None
    opt.step()
    assert_same(trained_values(net, opt), before)


def test_seeds_of_any_shape_and_number_are_scaled() -> None:
    def grads(backward: Callable[[GradManager, list[Tensor]], None]) -> list[Tensor]:
        net, _ = make_net_and_optimizer("adam")
        gm = GradManager().attach(net.parameters())
        with gm:
            out = net(torch.arange(12.0).reshape(2, 6))
            backward(gm, [out, out.double().sum(dim=1)])
        return [p.grad for p in net.parameters() if p.grad is not None]

    scaler = make_scaler()
    for dy in (
        None,
        0.5,
        [torch.full((2, 3), 3.0).half(), torch.tensor([1.0, 2.0], dtype=torch.float64)],
        [None, 2.0],
    ):

        def scaled_backward(gm: GradManager, ys: list[Tensor], dy: Any = dy) -> None:
            scaler.backward(gm, ys, dy)

        def plain_backward(gm: GradManager, ys: list[Tensor], dy: Any = dy) -> None:
            gm.backward(ys, dy)

        assert_same(grads(scaled_backward), grads(plain_backward))


def test_update_scale_is_a_choice_of_its_own() -> None:
    net, _ = make_net_and_optimizer("adam")
    scaler = make_scaler(growth_interval=1)
    gm = GradManager().attach(net.parameters())

    def run(**options: Any) -> float:
        with gm:
            scaler.backward(gm, net(torch.ones(1, 6)).sum(), **options)
        net.zero_grad()
        return scaler.get_scale() / 2**16

    assert run(update_scale=False) == 1
    assert run() == 2  # one update for both backward passes
    assert run(unscale_grad=False) == 2
    assert run(unscale_grad=False, update_scale=True) == 2  # nothing was checked, nothing moves
    with pytest.raises(
        ValueError,
        match="update_scale: expected True, False or 'if_unscale_grad', received 'never'",
    ):
        run(update_scale="never")


def test_update_with_a_new_scale_overrides_and_keeps_the_tracker() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    for step in (2, 3):
        run_torch_iteration(scaler, net, opt, step)
    skip = torch.tensor(math.nan)
    scaler.scale(net(torch.ones(1, 6)).sum() * skip).backward()
    scaler.step(opt)
    scaler.update(new_scale=8.0)
    assert scaler.get_scale() == 8
    assert scaler.state_dict()["_growth_tracker"] == 2
    assert scaler.skipped == 1
    for value in (4, torch.tensor(2.0), torch.ones(1)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)


def test_scale_factor_is_a_copy_and_can_be_set() -> None:
    scaler = make_scaler()
    factor = scaler.scale_factor
    scaler.scale_factor *= 2
    assert factor.shape == ()
    assert torch.equal(factor, torch.tensor(2.0**16))
    assert scaler.get_scale() == 2**17
    refused = [
        ("power of two", math.nan),
        ("power of two", -1.0),
        ("move floor", 2.0**-20),
        ("reshape", torch.ones(2)),
    ]
    for advice, value in refused:
        with pytest.raises(ValueError, match=f"scale: expected .*, received .*do .*{advice}"):
            scaler.scale_factor = value
    assert scaler.get_scale() == 2**17


def test_the_two_protocols_do_not_unscale_twice() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    gm = GradManager().attach(net.parameters())
    with gm:
        scaler.backward(gm, net(torch.ones(1, 6)).sum())
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(
            RuntimeError, match=r"do optimizer.step\(\) after them instead of scaler.step"
        ):
            call(opt)
    opt.step()
    opt.zero_grad(set_to_none=False)
    run_torch_iteration(scaler, net, opt, 2)  # torch's protocol next: scale() begins anew
    opt.zero_grad()
    scaler.scale(net(torch.ones(1, 6)).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(
        RuntimeError, match=r"do scaler.step\(optimizer\) after it instead of scaler.unscale"
    ):
        scaler.unscale(net.parameters())
    scaler.step(opt)
    scaler.update()


def test_unscale_before_any_scale_says_what_to_do() -> None:
    net, _ = make_net_and_optimizer("adam")
    scaler = make_scaler()
    fill_grads(net, 1.0)
    with pytest.raises(RuntimeError, match=r"do gm.backward\(loss, dy=scaler.scale_factor\) first"):
        scaler.unscale(net.parameters())
    with pytest.raises(ValueError, match="dy: expected one per y"):
        scaler.backward(GradManager(), [net(torch.ones(1, 6))], [1.0, 2.0])


def test_a_gan_in_megengines_gear_updates_once() -> None:
    gan = Gan(growth_interval=1)
    gms = {k: GradManager().attach(net.parameters()) for k, net in gan.nets.items()}
    for k, last in (("d", False), ("g", True)):
        with gms[k]:
            loss = gan.nets["d"](gan.nets["g"](torch.ones(4, 2))).mean()
            gan.scaler.backward(gms[k], loss * (math.inf if k == "d" else 1), update_scale=last)
        gan.opts[k].step()
    assert gan.scaler.get_scale() == 2**15
    state_sizes = [len(opt.state) for opt in gan.opts.values()]
    assert state_sizes == [0, 2]  # the generator's own gradients were finite
