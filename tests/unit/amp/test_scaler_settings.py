"""Settings of a GradScaler: floor, cap, a fixed scale, growth, and what is refused."""

import copy
import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

import halfstep as hs
from halfstep.amp import GradScaler
from tests.support.scaler_runs import (
    TorchScaler,
    assert_same,
    make_net_and_optimizer,
    make_scaler,
    make_torch_scaler,
    run_torch_iteration,
    skip_once,
    trained_values,
)


def test_floor_and_cap_hold_after_each_update() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(init_scale=4.0, floor=1.0, cap=8.0, growth_interval=1)
    scales = []
    for _ in range(4):
        skip_once(scaler, net, opt)
        scales.append(scaler.get_scale())
    for step in range(2, 8):
        run_torch_iteration(scaler, net, opt, step)
        scales.append(scaler.get_scale())
    assert scales == [2, 1, 1, 1, 2, 4, 8, 8, 8, 8]


def test_the_default_floor_is_the_smallest_normal_half_and_zero_is_none() -> None:
    for floor, last in ((None, 2.0**-14), (0.0, 2.0**-24)):
        net, opt = make_net_and_optimizer("adam")
        settings = {} if floor is None else {"floor": floor}
        scaler = make_scaler(**settings)
        for _ in range(40):
            skip_once(scaler, net, opt)
        assert scaler.get_scale() == last
    assert torch.finfo(torch.float16).smallest_normal == 2.0**-14


def test_a_fixed_scale_never_moves_but_still_skips() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(init_scale=128.0, growth_interval=0)
    run_torch_iteration(scaler, net, opt, 2)
    before = copy.deepcopy(trained_values(net, opt))
    skip_once(scaler, net, opt)
    assert_same(trained_values(net, opt), before)
    assert scaler.get_scale() == 128
    assert (scaler.skipped, scaler.skips_in_a_row) == (1, 1)
    run_torch_iteration(scaler, net, opt, 3)
    assert (scaler.skipped, scaler.skips_in_a_row) == (1, 0)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("tracker", [4, 5, 6, 1000])
def test_a_tracker_at_or_beyond_the_interval_grows_at_the_next_finite_update(
    tracker: int, used: bool
) -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    if used:
        run_torch_iteration(scaler, net, opt, 2)
    scaler.load_state_dict(
        {**TorchScaler("cpu", growth_interval=5).state_dict(), "_growth_tracker": tracker}
    )
    run_torch_iteration(scaler, net, opt, 3)
    assert scaler.get_scale() == 2**17


def test_a_shortened_interval_grows_at_the_next_finite_update() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler(growth_interval=2000)
    for step in range(2, 9):
        run_torch_iteration(scaler, net, opt, step)
    scaler.set_growth_interval(3)
    run_torch_iteration(scaler, net, opt, 9)
    assert scaler.get_scale() == 2**17


# What is refused at construction


NOT_POSITIVE = (math.nan, math.inf, -math.inf, -1.0, "2", None, True)


@pytest.mark.parametrize(
    ("field", "values", "advice"),
    [
        (
            "init_scale",
            (0.0, 1e39, *NOT_POSITIVE),
            "(leave the default|put the device first)",
        ),
        ("growth_factor", (1.0, 0.5, *NOT_POSITIVE), "pass growth_interval=0"),
        ("backoff_factor", (1.0, 0.0, 2.0, *NOT_POSITIVE), "pass growth_interval=0"),
        ("growth_interval", (1.5, 2000.0, *NOT_POSITIVE), "leave the default 2000"),
        ("floor", NOT_POSITIVE, "leave the default 2"),
        ("cap", (0.0, 2.0**-20, *(v for v in NOT_POSITIVE if v is not None)), "pass None"),
        (
            "max_skips",
            (0, 1.5, *(v for v in NOT_POSITIVE if v is not None)),
            "leave the default 50",
        ),
        ("skip", ("both", None), "choose 'each'"),
        ("on_skips", ("fp16", None), "choose 'raise'"),
    ],
)
def test_settings_are_refused_at_construction(
    field: str, values: tuple[Any, ...], advice: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}: expected .*, received .*, do {advice}"):
            make_scaler(**{field: value})


def test_the_advice_in_refusals_works() -> None:
    with pytest.raises(
        ValueError,
        match=r"init_scale: .*do put the device first: GradScaler\('cuda', init_scale\), or name",
    ):
        GradScaler(init_scale="cpu")
    GradScaler("cpu", 2.0**10)
    GradScaler(2.0**10, device="cpu")
    with pytest.raises(
        ValueError, match=r"init_scale: expected between floor=6.*, do move floor or cap"
    ):
        make_scaler(init_scale=2.0**-20)
    make_scaler(init_scale=2.0**-20, floor=0.0)
    with pytest.raises(ValueError, match=r"and cap=8, received 16\.0, do move floor or cap"):
        make_scaler(init_scale=16.0, cap=8)
    make_scaler(init_scale=16.0, cap=16)
    with pytest.raises(ValueError, match="growth_interval: expected an int"):
        make_scaler().set_growth_interval(-1)
    make_scaler().set_growth_interval(np.int64(4))
    assert make_scaler(init_scale=np.float32(4.0), growth_factor=np.float32(3)).get_scale() == 4


# The device


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_the_device_may_come_first_as_in_torch(device: str | torch.device) -> None:
    in_our_order = GradScaler(2.0**10, 3.0, 0.25, 7, True, device=device)
    in_torchs_order = GradScaler(device, 2.0**10, 3.0, 0.25, 7, True)
    by_keyword = GradScaler(device=device, growth_factor=3.0, init_scale=2.0**10)
    for scaler in (in_our_order, in_torchs_order, by_keyword):
        assert scaler.get_scale() == 2.0**10
        assert scaler.get_growth_factor() == 3.0
        assert scaler.scale(torch.ones(())).item() == 2.0**10
    assert in_torchs_order.state_dict() == in_our_order.state_dict()
    assert not GradScaler(device, 1.0, 2.0, 0.5, 7, False).is_enabled()
    with pytest.raises(TypeError, match="device: expected it once, received 'cpu' and 'cuda'"):
        GradScaler("cpu", device="cuda")


def test_help_shows_the_arguments() -> None:
    names = list(inspect.signature(GradScaler).parameters)
    assert names[:6] == [
        "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled", "device",
    ]  # fmt: skip


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is there")
@pytest.mark.parametrize("by_position", [True, False])
def test_without_cuda_a_scaler_for_it_is_disabled_with_a_warning_as_torchs(
    by_position: bool,
) -> None:
    with pytest.warns(UserWarning, match="CUDA is not available.  Disabling"):
        theirs = TorchScaler("cuda")
    with pytest.warns(hs.Notice, match=r"expected CUDA.*disabled, as torch's is") as notices:
        ours = GradScaler("cuda") if by_position else GradScaler(device="cuda")
    assert notices[0].filename == __file__
    net, opt = make_net_and_optimizer("adam")
    for scaler in (theirs, ours):
        assert not scaler.is_enabled()
        run_torch_iteration(scaler, net, opt, 2)
        assert scaler.get_scale() == 1
    assert GradScaler().is_enabled()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is there")
def test_another_missing_device_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"device: .* has \(cpu\), received 'xpu', do leave device=None"
    ):
        GradScaler("xpu")
    assert GradScaler().scale_factor.device.type == "cpu"
    assert GradScaler(device="cuda", enabled=False).scale_factor == 1


def test_a_disabled_scaler_does_not_look_at_the_rest_as_torchs() -> None:
    TorchScaler("cpu", growth_factor=0.5, enabled=False)
    assert not GradScaler("cpu", growth_factor=0.5, init_scale=-1.0, enabled=False).is_enabled()


def test_without_floor_and_limit_the_scaler_is_torchs() -> None:
    """60 skips in a row: the scale goes where torch's goes, and nothing is raised."""
    net, opt = make_net_and_optimizer("adam")
    theirs = make_torch_scaler(init_scale=2.0**16)
    ours = make_scaler(init_scale=2.0**16, floor=0, max_skips=None)
    for _ in range(60):
        for scaler in (theirs, ours):
            skip_once(scaler, net, opt)
        assert ours.get_scale() == theirs.get_scale()
    assert ours.get_scale() == 2.0**-44
    assert ours.skips_in_a_row == 60
    fresh = make_scaler()
    fresh.load_state_dict(ours.state_dict())
    assert fresh.settings == ours.settings
