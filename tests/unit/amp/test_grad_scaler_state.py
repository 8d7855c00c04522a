"""The state of a GradScaler: every field survives, and torch's scaler can load it."""

import copy
import pickle
from typing import Any

import pytest
import torch

from halfstep.amp import GradScaler
from tests.support.scaler_runs import (
    assert_same,
    make_net_and_optimizer,
    make_scaler,
    make_torch_scaler,
    run_torch_iteration,
    skip_once,
    trained_values,
)

TORCH_STATE = {
    "scale": 512.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 11,
    "_growth_tracker": 3,
}
SETTINGS = {"floor": 0.5, "cap": 2.0**20, "skip": "all", "max_skips": 7, "on_skips": "bf16"}
PERTURBED = TORCH_STATE | SETTINGS | {"skipped": 5, "skips_in_a_row": 2, "fallen": True}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("field", PERTURBED)
def test_every_field_survives_the_round_trip(field: str, used: bool) -> None:
    state = make_scaler().state_dict()
    scaler = make_scaler()
    assert {*state, *state["halfstep"]} - {"halfstep"} == set(PERTURBED)
    if used:
        skip_once(scaler, *make_net_and_optimizer("adam"))
    owner = state if field in state else state["halfstep"]
    assert owner[field] != PERTURBED[field]
    owner[field] = PERTURBED[field]
    scaler.load_state_dict(copy.deepcopy(state))
    assert scaler.state_dict() == state
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    assert copy.deepcopy(scaler).state_dict() == state


@pytest.mark.parametrize("stop", [0, 1, 2, 31, 33, 60])
def test_stop_and_resume_also_right_after_a_skip(stop: int) -> None:
    uninterrupted = []
    resumed = []
    for runs, stops in ((uninterrupted, ()), (resumed, (stop,))):
        net, opt = make_net_and_optimizer("adam")
        scaler = make_scaler(max_skips=4)
        for step in range(61):
            if step in stops:
                fresh = GradScaler(device="cpu")
                fresh.load_state_dict(scaler.state_dict())
                scaler = fresh
            run_torch_iteration(scaler, net, opt, step)
            runs.append(scaler.state_dict())
        runs += trained_values(net, opt)
    assert_same(uninterrupted, resumed)


def test_states_are_interchangeable_with_torchs_both_ways() -> None:
    runs = []
    changes: list[Any] = [
        (make_scaler, make_torch_scaler),
        (make_torch_scaler, make_scaler),
        (make_torch_scaler, make_torch_scaler),
    ]
    for first, second in changes:
        net, opt = make_net_and_optimizer("adam")
        scaler = first()
        scales = []
        for step in range(70):
            if step == 33:  # right after three skips
                fresh = second(init_scale=2.0, growth_interval=9)
                fresh.load_state_dict(scaler.state_dict())
                scaler = fresh
            run_torch_iteration(scaler, net, opt, step)
            scales.append(scaler.get_scale())
        runs.append([scales, *trained_values(net, opt)])
    assert_same(runs[0], runs[2])
    assert_same(runs[1], runs[2])


def test_a_state_of_torchs_keeps_the_settings_and_begins_the_counts() -> None:
    scaler = make_scaler(cap=2.0**20, max_skips=9)
    skip_once(scaler, *make_net_and_optimizer("adam"))
    scaler.load_state_dict(make_torch_scaler().state_dict())
    unused_scaler = make_scaler(cap=2.0**20, max_skips=9)
    assert scaler.state_dict()["halfstep"] == unused_scaler.state_dict()["halfstep"]
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict({})
    bad_state = {**make_torch_scaler().state_dict(), "halfstep": {"max_skips": 0}}
    with pytest.raises(ValueError, match="max_skips: expected an int of at least 1"):
        scaler.load_state_dict(bad_state)


@pytest.mark.parametrize(
    "scale",
    [
        float("nan"),
        float("inf"),
        torch.tensor(float("nan")),
        torch.tensor(1j),
        torch.ones(2),
        torch.ones((), device="meta"),
        "8",
    ],
    ids=str,
)
def test_a_scale_that_nothing_can_be_trained_with_is_refused(scale: Any) -> None:
    scaler = make_scaler()
    state = scaler.state_dict()
    with pytest.raises(ValueError, match=r"load_state_dict: scale: expected .*Nothing was loaded"):
        scaler.load_state_dict({**state, "scale": scale})
    assert scaler.state_dict() == state


def test_a_saved_tensor_becomes_a_number() -> None:
    """MegEngine saves its scale so. A tensor of one element has no place in torch's own code."""
    scaler = make_scaler()
    scaler.load_state_dict({**scaler.state_dict(), "scale": torch.tensor([8.0])})
    assert scaler.state_dict()["scale"] == 8.0
    assert scaler.scale(torch.ones(())).item() == 8.0
