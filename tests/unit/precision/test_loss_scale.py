"""Loss scales: their settings, and how the state moves after each update."""

import math

import pytest
import torch
from torch import Tensor

import halfstep as hs
from halfstep.precision.loss_scale import ScaleState, inverse_scale

F32 = torch.float32

BROKEN = [
    ({"init": 0.0}, "init"),
    ({"init": math.inf}, "init"),
    ({"growth": 1.0}, "growth"),
    ({"backoff": 1.0}, "backoff"),
    ({"backoff": 0.0}, "backoff"),
    ({"interval": 0}, "FixedScale"),
    ({"floor": 2.0**17}, "floor"),
    ({"floor": -1.0}, "floor"),
    ({"cap": 1.0}, "cap"),
    ({"max_skips": 0}, "max_skips"),
    ({"on_skips": "stop"}, "'raise'"),
]


@pytest.mark.parametrize(("setting", "words"), BROKEN)
def test_a_scale_that_could_not_work_is_refused(setting: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hs.DynamicScale(**setting)  # type: ignore[arg-type]


def make_state(scale: float, growth: int, device: torch.device) -> ScaleState:
    return ScaleState(
        torch.tensor(scale, device=device), torch.tensor(growth, dtype=torch.int32, device=device)
    )


def overflow_flag(overflow: bool, device: torch.device) -> Tensor:
    return torch.tensor(float(overflow), device=device)


MAX = torch.finfo(F32).max
# Case: setting, (scale, growth), overflow, expected (scale, growth).
TRANSITIONS = {
    "counts a finite update": ({"interval": 3}, (8.0, 0), False, (8.0, 1)),
    "grows at the interval": ({"interval": 3}, (8.0, 2), False, (16.0, 0)),
    "grows by its factor": ({"interval": 1, "growth": 3.0}, (8.0, 0), False, (24.0, 0)),
    "backs off and starts counting again": ({"interval": 3}, (8.0, 2), True, (4.0, 0)),
    "backs off by its factor": ({"backoff": 0.125}, (8.0, 5), True, (1.0, 0)),
    "stops at the floor": ({"init": 8.0, "floor": 3.0}, (4.0, 0), True, (3.0, 0)),
    "stays at the floor": ({"init": 8.0, "floor": 3.0}, (3.0, 0), True, (3.0, 0)),
    "stops at the cap": ({"init": 8.0, "interval": 1, "cap": 12.0}, (8.0, 0), False, (12.0, 0)),
    "stays at the cap": ({"init": 8.0, "interval": 1, "cap": 12.0}, (12.0, 0), False, (12.0, 0)),
    "grows from a tracker above the interval": ({"interval": 3}, (8.0, 99), False, (16.0, 0)),
    "backs off from a tracker above the interval": ({"interval": 3}, (8.0, 99), True, (4.0, 0)),
    "stays finite": ({"interval": 1}, (MAX, 0), False, (MAX, 0)),
}


@pytest.mark.parametrize("case", TRANSITIONS)
def test_the_next_state_of_a_dynamic_scale(case: str, device: torch.device) -> None:
    setting, before, overflow, after = TRANSITIONS[case]
    scale = hs.DynamicScale(**setting)  # type: ignore[arg-type]
    old = make_state(*before, device)
    new = scale.next(old, overflow_flag(overflow, device))
    assert (new.scale.item(), new.growth.item()) == after
    assert (new.scale.dtype, new.growth.dtype) == (F32, torch.int32)
    assert (old.scale.item(), old.growth.item()) == before  # pure: the input is left as it was


def test_dynamic_scale_follows_torchs_scaler_through_a_random_history(device: torch.device) -> None:
    history = torch.rand(300, generator=torch.Generator().manual_seed(7)) < 0.1
    theirs = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4)
    p = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([p], lr=0.0)
    ours = hs.DynamicScale(init=2.0**10, interval=4, floor=0.0)
    now = ours.start(device)
    for overflow in history.tolist():
        p.grad = theirs.scale(torch.full((1,), math.inf if overflow else 1.0, device=device))
        theirs.step(optimizer)
        theirs.update()
        now = ours.next(now, overflow_flag(overflow, device))
        assert now.scale.item() == theirs.get_scale()
    assert 2 <= history.sum() <= 60  # both directions were really taken


@pytest.mark.parametrize("scale", [hs.FixedScale(value=128.0), hs.NoScale()], ids=repr)
def test_a_fixed_scale_never_moves(scale: hs.FixedScale | hs.NoScale, device: torch.device) -> None:
    start = scale.start(device)
    assert start.scale.item() == (128.0 if isinstance(scale, hs.FixedScale) else 1.0)
    for overflow in (True, False, True):
        assert torch.equal(scale.next(start, overflow_flag(overflow, device)).scale, start.scale)


def test_inverse_is_torchs_inv_scale() -> None:
    """The float64 reciprocal, rounded once to float32."""
    scales = torch.tensor([3.0, 65536.0, 1e-3, 12345.678])
    assert torch.equal(inverse_scale(scales), (1 / scales.double()).float())


@pytest.mark.parametrize("scale", [hs.DynamicScale(), hs.FixedScale(value=2.0)], ids=repr)
def test_a_scale_is_active_and_none_is_not(scale: hs.DynamicScale | hs.FixedScale) -> None:
    assert scale.is_active
    assert not hs.NoScale().is_active
    assert "is_active" not in vars(scale)  # it is no setting, and not saved


def test_only_a_scale_that_moves_has_constants_for_a_kernel() -> None:
    settings = {"growth": 3.0, "backoff": 0.25, "interval": 7, "floor": 0.5, "cap": 2.0**20}
    scale = hs.DynamicScale(**settings)  # type: ignore[arg-type]
    assert scale.kernel_constants() == tuple(settings.values())
    assert hs.FixedScale(value=2.0).kernel_constants() is None
    assert hs.NoScale().kernel_constants() is None
