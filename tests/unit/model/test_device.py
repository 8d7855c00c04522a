"""`Model(device=…)`: where network, loss and optimizer state go, and what is refused.

Real moves to a GPU are in tests/gpu/test_model_device.py; here the CPU and torch's meta device.
"""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.errors import Notice
from halfstep.model import device as device_module
from halfstep.model.device import move_optimizer_state, resolve_device, shared_tensors
from tests.support.equal_tensors import assert_equal_tensors

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "cpu:0"])
def test_a_network_that_is_there_already_stays_as_it_is(device: Any) -> None:
    net, optimizer = make_parts()
    before = [id(p) for p in net.parameters()]
    with warnings.catch_warnings(action="ignore"):  # on a machine with a GPU it is said to be idle
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, device=device)
    assert [id(p) for p in net.parameters()] == before
    assert model.step.device == torch.device("cpu")


def test_auto_is_cuda_where_there_is_one_and_else_the_cpu() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="every device here exists there")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda"), "gpu", "mps", 3.5])
def test_a_device_that_does_not_exist_is_refused_with_those_that_do(device: Any) -> None:
    net, optimizer = make_parts()
    with pytest.raises(ValueError, match=r"there is no '.*' here, only 'cpu'; write hs.Model"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device=device)


def test_a_step_that_was_built_stays_where_it_is() -> None:
    net, optimizer = make_parts()
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer)
    assert hs.Model(net, nn.CrossEntropyLoss(), step=step, device="cpu").step is step


def test_nothing_is_said_where_no_faster_device_is() -> None:
    if torch.cuda.is_available():
        pytest.skip("here is one")
    net, optimizer = make_parts()
    with warnings.catch_warnings(action="error"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer)


def test_an_idle_gpu_is_announced_at_the_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    net, optimizer = make_parts()
    with pytest.warns(Notice, match="a CUDA device lies idle") as notices:
        hs.Model(net, nn.CrossEntropyLoss(), optimizer)
    assert [notice.filename for notice in notices] == [__file__]
    with warnings.catch_warnings(action="error"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cpu")
        hs.Model(net, nn.CrossEntropyLoss())


def test_a_move_that_replaces_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch does between some kinds of device, and everywhere where a program asks for it."""
    monkeypatch.setattr(device_module, "resolve_device", lambda device: torch.device("meta"))
    net, optimizer = make_parts()
    with pytest.raises(ValueError, match=r"on meta the network has new parameters, which the opt"):
        hs.Model(net, nn.CrossEntropyLoss(), optimizer, device="cuda")


def test_a_network_of_shapes_only_is_refused_before_it_is_moved() -> None:
    net = nn.Linear(4, 3, device="meta")
    with pytest.raises(ValueError, match=r"on the meta device.*net.to_empty"):
        hs.Model(net, nn.CrossEntropyLoss(), device="cpu")


# Weights that share memory.


def test_one_parameter_under_two_names_is_no_obstacle() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    assert shared_tensors(net) == []
    block = nn.BatchNorm1d(4)
    assert shared_tensors(nn.Sequential(block, nn.Sequential(block))) == []
    assert shared_tensors(nn.LSTM(4, 4, num_layers=2)) == []
    assert shared_tensors(nn.LazyLinear(4)) == []


def test_weights_that_are_views_of_each_other_are_named() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data
    assert shared_tensors(net) == ["0.weight", "1.weight"]

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].bias.data = net[0].weight.data[2]
    assert shared_tensors(net) == ["0.weight", "1.bias"]

    # The names stand in the order of the network, also where the shorter one comes first in memory.
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    net[1].weight.data = net[0].weight.data[:3]
    assert shared_tensors(net) == ["0.weight", "1.weight"]

    # Two rows of one matrix: none of the two shares memory with the other.
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].bias.data = net[0].weight.data[0]
    net[2].bias.data = net[0].weight.data[2]
    assert shared_tensors(net) == ["0.weight", "1.bias", "2.bias"]

    parts = torch.zeros(8)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].bias.data, net[1].bias.data = parts[:4], parts[4:]
    assert shared_tensors(net) == []


def test_one_buffer_in_two_modules_is_named() -> None:
    """torch moves it once for each module, so that it is two afterwards."""
    net = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    net[1].running_mean = net[0].running_mean
    assert shared_tensors(net) == ["0.running_mean", "1.running_mean"]


# The optimizer's state.


@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_state_of_an_optimizer_moves_to_its_parameters(amsgrad: bool) -> None:
    net, _ = make_parts()
    optimizer = torch.optim.Adam(net.parameters(), amsgrad=amsgrad)
    net(X).sum().backward()
    optimizer.step()
    before = {p: dict(state) for p, state in optimizer.state.items()}
    move_optimizer_state(optimizer)
    for p, state in optimizer.state.items():
        assert_equal_tensors(state.values(), before[p].values())


def test_the_state_follows_a_parameter_to_another_device() -> None:
    on_meta = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.Adam([on_meta])
    optimizer.state[on_meta] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.ones(3, dtype=torch.float64),
        "history": [torch.ones(3), 5],
    }
    move_optimizer_state(optimizer)
    state = optimizer.state[on_meta]
    assert state["step"].device.type == "cpu"  # torch reads it on the host
    assert state["exp_avg"].is_meta
    assert state["exp_avg"].dtype == torch.float64
    assert state["history"][0].is_meta
    assert state["history"][1] == 5

    optimizer.param_groups[0]["capturable"] = True
    move_optimizer_state(optimizer)
    assert optimizer.state[on_meta]["step"].is_meta
