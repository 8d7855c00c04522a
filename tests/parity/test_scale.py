"""The loss scale goes where torch.amp.GradScaler takes it, overflow by overflow; so do weights, state and losses."""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfstep as hs
from tests.support.parity_cases import (
    DEVICE,
    batches_for,
    has_fused,
    in_groups,
    maker,
    net_for,
    overflow_at,
    run,
    same,
    same_records,
    same_state,
)
from tests.support.torch_loops import F16, F32, Loop, Make, Spec

STEPS = 210
# The very first update, runs of two, three and five, single ones, and the last.
PLANTED = [0, 1, 2, 9, 17, 18, 40, 77, 78, 79, 80, 81, 120, 150, 151, 183, 209]
WAYS = {
    "O1": ({"name": "O1", "kernels": "torch"}, Spec("autocast", F16, scaled=True)),
    "O2": ({"name": "O2", "kernels": "torch"}, Spec("copies", F16, scaled=True)),
    "fp32": ({"name": "fp32"}, Spec("none", F32, scaled=True)),
}
MAKERS: dict[str, Make] = {
    "SGD-foreach": maker("SGD", foreach=True),
    "SGD-loop": maker("SGD", foreach=False),
    "SGD-fused": maker("SGD", fused=True),
    "Adam": maker("Adam"),
    "AdamW-fused": maker("AdamW", fused=True),
    **({"Adagrad-fused": maker("Adagrad", fused=True)} if has_fused("Adagrad") else {}),
}
SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}


def zero_momentum(optimizer: optim.Optimizer) -> None:
    """torch's fused SGD leaves its buffers uninitialised when its first step overflows; zeros are what it needs."""
    if isinstance(optimizer, optim.SGD) and optimizer.defaults["fused"]:
        for group in optimizer.param_groups:
            optimizer.state.update(
                {p: {"momentum_buffer": torch.zeros_like(p)} for p in group["params"]}
            )


def divides_exactly(make: Make) -> bool:
    """Whether torch's optimizer moves alike on gradients of g and, told of the scale, on gradients of 1024 g."""
    torch.manual_seed(0)
    one, two = (nn.Parameter(torch.linspace(-1, 1, 64, device=DEVICE)) for _ in range(2))
    plain, scaled = make([one]), make([two])
    for optimizer in (plain, scaled):
        zero_momentum(optimizer)
    if not getattr(scaled, "_step_supports_amp_scaling", False):
        return True
    for _ in range(5):
        one.grad = torch.randn(64, device=DEVICE)
        two.grad = one.grad * 1024
        plain.step()
        scaled.grad_scale, scaled.found_inf = (
            torch.tensor(1024.0, device=DEVICE),
            torch.zeros((), device=DEVICE),
        )
        scaled.step()
    return torch.equal(one, two)


def pair(
    way: str, make: Make, torch_settings: dict[str, Any], **options: Any
) -> tuple[hs.TrainStep, Loop]:
    """A step and a plain loop from the same start, with the same scale settings; no floor, as torch has none."""
    net, (precision, spec) = net_for("SGD"), WAYS[way]
    loop = Loop(copy.deepcopy(net), make, spec, scaler=torch_settings, **options)
    zero_momentum(loop.optimizer)
    ours = {
        "init_scale": "init",
        "growth_interval": "interval",
        "growth_factor": "growth",
        "backoff_factor": "backoff",
    }
    scale = hs.DynamicScale(floor=0.0, **{ours[k]: v for k, v in torch_settings.items()})
    optimizer = make(list(net.parameters()))
    precise = hs.Precision(**precision, scale=scale)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precise, **options), loop


def agree(step: hs.TrainStep, loop: Loop, planted: list[int], steps: int = STEPS) -> list[float]:
    """Asserts equal records, weights, optimizer state and scaler state; returns the scales."""
    batches = overflow_at(batches_for(step.net, steps), planted)
    rows = loop.run(batches)
    same_records(run(step, batches), rows)
    same_state(step, loop)
    assert step.state.scale.item() == loop.scaler.get_scale()
    assert step.state.growth.item() == loop.scaler.state_dict()["_growth_tracker"]
    assert step.state.updates.item() == loop.updates
    assert step.state.skips.item() == sum(row.norm is not None and not row.updated for row in rows)
    return [row.scale for row in rows]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_trajectory_equals_grad_scaler(make: Make, way: str, clip_norm: float | None) -> None:
    scales = agree(*pair(way, make, SETTINGS, clip_norm=clip_norm), PLANTED)
    assert max(scales) > SETTINGS["init_scale"] > min(scales)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_trajectory_equals_grad_scaler_with_two_batches_per_update(
    make: Make, clip_norm: float | None
) -> None:
    """An overflow in either half of a cycle, or in both, drops the whole cycle; the tail is an update too."""
    planted = [0, 3, 8, 9, 30, 41, 42, 45, 100, 101, 102, 103, 150, 210]
    scales = agree(
        *pair("O2", make, SETTINGS, accumulate=2, clip_norm=clip_norm), planted, steps=211
    )
    assert max(scales) > SETTINGS["init_scale"] > min(scales)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_factors_that_are_no_powers_of_two_unscale_by_the_same_inverse(make: Make) -> None:
    settings = {
        "init_scale": 1000.0,
        "growth_interval": 2,
        "growth_factor": 1.7,
        "backoff_factor": 0.3,
    }
    agree(*pair("O2", make, settings, clip_norm=0.5), PLANTED)


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_driven_below_one_goes_on_falling_without_a_floor(way: str) -> None:
    scales = agree(
        *pair(way, maker("SGD"), {"init_scale": 4.0, "growth_interval": 100}),
        list(range(2, 30)),
        steps=60,
    )
    assert min(scales) == 4.0 * 2.0**-28


def test_growth_stops_at_the_largest_finite_scale() -> None:
    step, loop = pair("fp32", maker("SGD", lr=0.0), {"init_scale": 2.0**124, "growth_interval": 1})
    scales = agree(step, loop, [], steps=12)
    assert max(scales) < float("inf")


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_groups_with_rates_of_their_own_share_one_scale(name: str) -> None:
    agree(*pair("O2", in_groups(name, [0.1, 0.003]), SETTINGS, clip_norm=0.5), PLANTED)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_protocol_as_documented_scale_step_update(make: Make, way: str) -> None:
    """Without unscale_, where a fused optimizer divides by the scale itself: powers of two give the same bits."""
    step, loop = pair(way, make, SETTINGS)
    if not divides_exactly(make):
        pytest.skip(
            "this torch's fused kernel gives other bits when it divides by a power of two itself"
        )
    scaler = torch.amp.GradScaler(DEVICE, **SETTINGS)
    for x, y in overflow_at(batches_for(step.net, STEPS), PLANTED):
        used, loss = scaler.get_scale(), loop.loss(loop.forward(x), y)
        scaler.scale(loss).backward()
        loop._widen()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()
        record = step(x, y)
        assert same(record.loss, loss.detach())
        assert record.scale.item() == used
        for ours, theirs in zip(step.params, loop.params, strict=True):
            assert torch.equal(ours, theirs)
    same_state(step, loop)
