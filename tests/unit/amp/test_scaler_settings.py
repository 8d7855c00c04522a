"""Settings of a GradScaler: floor, cap, a fixed scale, growth, and what is refused."""

import copy
import math
from typing import Any

import pytest
import torch

from halfstep.amp import GradScaler
from tests.support.scaler_runs import (
    TorchScaler,
    assert_same,
    make_net_and_optimizer,
    make_scaler,
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
        ("init_scale", (0.0, 1e39, *NOT_POSITIVE), "(leave the default 2\\*\\*16|name the device)"),
        ("growth_factor", (1.0, 0.5, *NOT_POSITIVE), "pass growth_interval=0"),
        ("backoff_factor", (1.0, 0.0, 2.0, *NOT_POSITIVE), "pass growth_interval=0"),
        ("growth_interval", (1.5, 2000.0, *NOT_POSITIVE), "leave the default 2000"),
        ("floor", NOT_POSITIVE, "leave the default 2"),
        ("cap", (0.0, 2.0**-20, *(v for v in NOT_POSITIVE if v is not None)), "pass None"),
        ("max_skips", (0, 1.5, *NOT_POSITIVE), "leave the default 50"),
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
        ValueError, match=r"init_scale: .*do name the device: GradScaler\(device='cpu'\)"
    ):
        GradScaler("cpu")  # type: ignore[arg-type]
    GradScaler(device="cpu")
    GradScaler(device=torch.device("cpu"))
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


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is there")
def test_a_missing_device_is_refused_not_disabled() -> None:
    with pytest.raises(
        ValueError, match=r"device: .* has \(cpu\), received 'cuda', do leave device=None"
    ):
        GradScaler(device="cuda")
    assert GradScaler().scale_factor.device.type == "cpu"
    assert GradScaler(device="cuda", enabled=False).scale_factor == 1
