"""The loss scale goes where torch.amp.GradScaler takes it, overflow by overflow.

Weights, optimizer state and losses are equal too.
"""

import copy
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfstep as hs
from tests.support.parity_cases import (
    DEVICE,
    assert_same_records,
    assert_same_state,
    batches_for,
    grouped_optimizer_maker,
    has_fused,
    is_same,
    net_for,
    optimizer_maker,
    overflow_at,
    run_batches,
)
from tests.support.torch_loops import F16, F32, CastSpec, MakeOptimizer, TorchLoop

STEPS = 210
# The very first update, runs of two, three and five, single ones, and the last.
OVERFLOW_STEPS = [0, 1, 2, 9, 17, 18, 40, 77, 78, 79, 80, 81, 120, 150, 151, 183, 209]
PRECISIONS = {
    "O1": ({"name": "O1", "kernels": "torch"}, CastSpec("autocast", F16, scaled=True)),
    "O2": ({"name": "O2", "kernels": "torch"}, CastSpec("copies", F16, scaled=True)),
    "fp32": ({"name": "fp32"}, CastSpec("none", F32, scaled=True)),
}
OPTIMIZER_MAKERS: dict[str, MakeOptimizer] = {
    "SGD-foreach": optimizer_maker("SGD", foreach=True),
    "SGD-loop": optimizer_maker("SGD", foreach=False),
    "SGD-fused": optimizer_maker("SGD", fused=True),
    "Adam": optimizer_maker("Adam"),
    "AdamW-fused": optimizer_maker("AdamW", fused=True),
}
if has_fused("Adagrad"):
    OPTIMIZER_MAKERS["Adagrad-fused"] = optimizer_maker("Adagrad", fused=True)
EVERY_OPTIMIZER = pytest.mark.parametrize(
    "make_optimizer", OPTIMIZER_MAKERS.values(), ids=OPTIMIZER_MAKERS
)

SCALER_SETTINGS = {"init_scale": 2.0**10, "growth_interval": 3}
# The settings of GradScaler, and what DynamicScale calls them.
SCALE_NAMES = {
    "init_scale": "init",
    "growth_interval": "interval",
    "growth_factor": "growth",
    "backoff_factor": "backoff",
}


def zero_momentum(optimizer: optim.Optimizer) -> None:
    """Gives a fused SGD momentum buffers of zeros.

    torch leaves them uninitialised when the first step of a fused SGD overflows.
    """
    if isinstance(optimizer, optim.SGD) and optimizer.defaults["fused"]:
        for group in optimizer.param_groups:
            for param in group["params"]:
                optimizer.state[param] = {"momentum_buffer": torch.zeros_like(param)}


def divides_exactly(make_optimizer: MakeOptimizer) -> bool:
    """Whether torch moves a parameter alike by gradients g, and by 1024 g at scale 1024."""
    torch.manual_seed(0)
    plain_param = nn.Parameter(torch.linspace(-1, 1, 64, device=DEVICE))
    scaled_param = nn.Parameter(torch.linspace(-1, 1, 64, device=DEVICE))
    plain = make_optimizer([plain_param])
    scaled = make_optimizer([scaled_param])
    zero_momentum(plain)
    zero_momentum(scaled)
    if not getattr(scaled, "_step_supports_amp_scaling", False):
        return True
    for _ in range(5):
        plain_param.grad = torch.randn(64, device=DEVICE)
        scaled_param.grad = plain_param.grad * 1024
        plain.step()
        scaled.grad_scale = torch.tensor(1024.0, device=DEVICE)
        scaled.found_inf = torch.zeros((), device=DEVICE)
        scaled.step()
    return torch.equal(plain_param, scaled_param)


def build_pair(
    precision_name: str,
    make_optimizer: MakeOptimizer,
    scaler_settings: dict[str, Any],
    **options: Any,
) -> tuple[hs.TrainStep, TorchLoop]:
    """Returns a step and a plain loop from the same start, with the same scale settings.

    The step's scale has no floor, as torch has none.
    """
    net = net_for("SGD")
    precision_settings, spec = PRECISIONS[precision_name]
    loop = TorchLoop(copy.deepcopy(net), make_optimizer, spec, scaler=scaler_settings, **options)
    zero_momentum(loop.optimizer)

    scale_settings = {SCALE_NAMES[name]: value for name, value in scaler_settings.items()}
    scale = hs.DynamicScale(floor=0.0, **scale_settings)
    precision = hs.Precision(**precision_settings, scale=scale)
    optimizer = make_optimizer(list(net.parameters()))
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)
    return step, loop


def assert_same_trajectory(
    step: hs.TrainStep, loop: TorchLoop, overflow_steps: list[int], steps: int = STEPS
) -> list[float]:
    """Asserts equal records, weights, optimizer state and scaler state; returns the scales."""
    batches = overflow_at(batches_for(step.net, steps), overflow_steps)
    expected_records = loop.run(batches)
    assert_same_records(run_batches(step, batches), expected_records)
    assert_same_state(step, loop)
    assert step.state.scale.item() == loop.scaler.get_scale()
    assert step.state.growth.item() == loop.scaler.state_dict()["_growth_tracker"]
    assert step.state.updates.item() == loop.updates
    skips = sum(record.norm is not None and not record.updated for record in expected_records)
    assert step.state.skips.item() == skips
    return [record.scale for record in expected_records]


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("precision", PRECISIONS)
@EVERY_OPTIMIZER
def test_trajectory_equals_grad_scaler(
    make_optimizer: MakeOptimizer, precision: str, clip_norm: float | None
) -> None:
    step, loop = build_pair(precision, make_optimizer, SCALER_SETTINGS, clip_norm=clip_norm)
    scales = assert_same_trajectory(step, loop, OVERFLOW_STEPS)
    assert max(scales) > SCALER_SETTINGS["init_scale"] > min(scales)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@EVERY_OPTIMIZER
def test_trajectory_equals_grad_scaler_with_two_batches_per_update(
    make_optimizer: MakeOptimizer, clip_norm: float | None
) -> None:
    """An overflow in either half of a cycle, or in both, drops the cycle; the tail updates too."""
    overflow_steps = [0, 3, 8, 9, 30, 41, 42, 45, 100, 101, 102, 103, 150, 210]
    step, loop = build_pair(
        "O2", make_optimizer, SCALER_SETTINGS, accumulate=2, clip_norm=clip_norm
    )
    scales = assert_same_trajectory(step, loop, overflow_steps, steps=211)
    assert max(scales) > SCALER_SETTINGS["init_scale"] > min(scales)


@EVERY_OPTIMIZER
def test_factors_that_are_no_powers_of_two_unscale_by_the_same_inverse(
    make_optimizer: MakeOptimizer,
) -> None:
    settings = {
        "init_scale": 1000.0,
        "growth_interval": 2,
        "growth_factor": 1.7,
        "backoff_factor": 0.3,
    }
    step, loop = build_pair("O2", make_optimizer, settings, clip_norm=0.5)
    assert_same_trajectory(step, loop, OVERFLOW_STEPS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_scale_driven_below_one_goes_on_falling_without_a_floor(precision: str) -> None:
    settings = {"init_scale": 4.0, "growth_interval": 100}
    step, loop = build_pair(precision, optimizer_maker("SGD"), settings)
    scales = assert_same_trajectory(step, loop, list(range(2, 30)), steps=60)
    assert min(scales) == 4.0 * 2.0**-28


def test_growth_stops_at_the_largest_finite_scale() -> None:
    settings = {"init_scale": 2.0**124, "growth_interval": 1}
    step, loop = build_pair("fp32", optimizer_maker("SGD", lr=0.0), settings)
    scales = assert_same_trajectory(step, loop, [], steps=12)
    assert max(scales) < float("inf")


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_groups_with_rates_of_their_own_share_one_scale(name: str) -> None:
    make_optimizer = grouped_optimizer_maker(name, [0.1, 0.003])
    step, loop = build_pair("O2", make_optimizer, SCALER_SETTINGS, clip_norm=0.5)
    assert_same_trajectory(step, loop, OVERFLOW_STEPS)


@pytest.mark.parametrize("precision", PRECISIONS)
@EVERY_OPTIMIZER
def test_the_protocol_as_documented_scale_step_update_gives_the_same_bits(
    make_optimizer: MakeOptimizer, precision: str
) -> None:
    """Without unscale_, where a fused optimizer divides by the scale itself, a power of two."""
    step, loop = build_pair(precision, make_optimizer, SCALER_SETTINGS)
    if not divides_exactly(make_optimizer):
        pytest.skip(
            "this torch's fused kernel gives other bits when it divides by a power of two itself"
        )
    scaler = torch.amp.GradScaler(DEVICE, **SCALER_SETTINGS)
    for x, y in overflow_at(batches_for(step.net, STEPS), OVERFLOW_STEPS):
        scale_used = scaler.get_scale()
        loss = loop.loss(loop.forward(x), y)
        scaler.scale(loss).backward()
        loop.add_wide_grads()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

        record = step(x, y)
        assert is_same(record.loss, loss.detach())
        assert record.scale.item() == scale_used
        for actual, expected in zip(step.params, loop.params, strict=True):
            assert torch.equal(actual, expected)
    assert_same_state(step, loop)
