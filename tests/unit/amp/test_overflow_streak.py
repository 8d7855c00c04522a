"""Too many skipped updates in a row: an error that names the gradients, or another dtype."""

import math
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from halfstep import amp
from halfstep.amp import OverflowStreak
from halfstep.grads import GradManager
from halfstep.utils.text import dtype_name
from tests.support.scaler_runs import (
    fill_grads,
    make_net_and_optimizer,
    make_scaler,
    run_torch_iteration,
    skip_once,
)


def test_a_streak_raises_and_names_scale_and_parameters() -> None:
    scaler = make_scaler(max_skips=3)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    named_optimizer = SGD(net.named_parameters(), lr=0.1)
    plain = Adam([nn.Parameter(torch.ones(5))])
    for update in range(3):
        scaler.scale(torch.ones(()))
        fill_grads(net, 1.0)
        net[1].bias.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
        plain.param_groups[0]["params"][0].grad = torch.full((5,), math.inf)
        for opt in (named_optimizer, plain):
            scaler.step(opt)
        if update < 2:
            scaler.update()
    with pytest.raises(OverflowStreak) as caught:
        scaler.update()
    message = str(caught.value)
    assert "3 or more skipped in a row; the scale is 8192" in message
    first_label = "optimizer 0 (SGD), group 0, parameter 3 '1.bias'"
    second_label = "optimizer 1 (Adam), group 0, parameter 0 of"
    assert f"{first_label}; {second_label}" in message
    assert "'0.weight'" not in message
    assert message.endswith("or go on in another dtype with on_skips='bf16' or on_skips='fp32'")
    assert isinstance(caught.value, FloatingPointError)
    assert (scaler.skipped, scaler.skips_in_a_row, scaler.get_scale()) == (3, 3, 2**13)
    with pytest.raises(OverflowStreak):  # it is raised again
        skip_once(scaler, net, named_optimizer)
    fill_grads(net, 1.0)
    scaler.scale(torch.ones(()))
    scaler.step(named_optimizer)
    scaler.update()  # a finite update ends the streak
    assert (scaler.skipped, scaler.skips_in_a_row) == (4, 0)


def test_a_streak_in_megengines_gear_names_the_tensors_whose_gradients_it_dropped() -> None:
    net, _ = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=1)
    gm = GradManager().attach(net.parameters())
    x = torch.ones(1, 6)
    overflowing = (net(x) * torch.tensor([math.inf, 1, 1])).sum()
    loss = overflowing - (net.weight @ x.T).sum() * 0
    message = r"tensor 1 of unscale\(\), shape \(3,\), do look for inf"
    with gm, pytest.raises(OverflowStreak, match=message):
        scaler.backward(gm, loss)


def test_a_streak_whose_gradients_were_cleared_or_are_many() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=1)
    scaler.scale(torch.ones(()))
    fill_grads(net)
    scaler.step(opt)
    opt.zero_grad()
    with pytest.raises(
        OverflowStreak, match=r"cleared before update\(\) \(call zero_grad\(\) after it\)"
    ):
        scaler.update()
    params = [nn.Parameter(torch.ones(1)) for _ in range(10)]
    for p in params:
        p.grad = torch.full((1,), math.nan)
    scaler.scale(torch.ones(()))
    scaler.step(SGD(params, lr=0.1))
    with pytest.raises(OverflowStreak, match=r"parameter 7 of shape \(1,\); 2 more, do"):
        scaler.update()


def test_a_finite_update_or_none_at_all_does_not_extend_a_streak() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=2)
    for step in range(2, 6):
        skip_once(scaler, net, opt)
        scaler.update()  # nothing checked: no update, no end of the streak either
        assert scaler.skips_in_a_row == 1
        run_torch_iteration(scaler, net, opt, step)
    assert scaler.skipped == 4


@pytest.mark.parametrize(("on_skips", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_streak_can_switch_autocast_to_another_dtype(on_skips: str, dtype: torch.dtype) -> None:
    """A loss of 1e6 overflows half and neither bfloat16 nor float32: training really goes on."""
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=3, on_skips=on_skips, floor=0.0)

    def step() -> torch.dtype:
        opt.zero_grad()
        with amp.autocast(device_type="cpu"):
            out = net(torch.full((1, 6), 1e6))
        scaler.scale(out.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        return out.dtype

    before = net.weight.detach().clone()
    assert [step(), step()] == [torch.float16] * 2
    with pytest.warns(
        UserWarning, match=rf"parameter 0 of shape .* goes on in {dtype_name(dtype)}"
    ) as caught:
        assert step() == torch.float16
    assert caught[0].filename == __file__
    assert torch.equal(net.weight, before)
    assert amp.low_prec_dtype == dtype_name(dtype)
    assert step() == dtype
    assert not torch.equal(net.weight, before)
    assert (scaler.get_scale(), scaler.skipped, scaler.skips_in_a_row) == (1, 3, 0)
    for _ in range(10):
        step()  # more than the growth interval: the scale stays at 1
    assert scaler.get_scale() == 1
    for _ in range(2):
        skip_once(scaler, net, opt)
    # It still checks, and there is no second fallback.
    with pytest.raises(OverflowStreak) as caught_error:
        skip_once(scaler, net, opt)
    assert "on_skips" not in str(caught_error.value)


def test_the_fallback_warns_at_the_users_line_in_megengines_gear_too() -> None:
    net, _ = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=1, on_skips="bf16")
    gm = GradManager().attach(net.parameters())
    amp.enabled = True
    with gm, pytest.warns(UserWarning, match="goes on in bfloat16") as caught:
        scaler.backward(gm, net(torch.full((1, 6), math.inf)).sum())
    assert caught[0].filename == __file__
    assert net(torch.ones(1, 6)).dtype == torch.bfloat16  # the switch follows


def test_loading_a_fallen_scaler_sets_the_dtype_of_autocast() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(max_skips=1, on_skips="bf16")
    with pytest.warns(UserWarning, match="goes on in bfloat16"):
        skip_once(scaler, net, opt)
    state = scaler.state_dict()
    pickled = pickle.dumps(scaler)
    amp.low_prec_dtype = "float16"
    loading_scaler = make_scaler()
    with pytest.warns(
        UserWarning, match="saved after a fallback; autocast.. goes on in bfloat16"
    ) as caught:
        loading_scaler.load_state_dict(state)
    assert caught[0].filename == __file__
    assert amp.low_prec_dtype == "bfloat16"
    loading_scaler.load_state_dict(state)  # nothing left to say
    amp.low_prec_dtype = "float16"
    assert pickle.loads(pickled).state_dict() == state
    assert amp.low_prec_dtype == "bfloat16"
